"""fp32 values carried along a forward are those of the fp32 program, and say what 16 bit lost and what arithmetic did."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.trace.events import event
from torch import Tensor, nn

import mezzo.diagnose as diagnose
from mezzo.trace.ops import Call, op_facts, results
from mezzo.trace.reference_path import Fp64Reference, MadeBy, ReferencePath, vanishing_constant
from mezzo.trace.wide_values import run_in_fp32, run_wide

aten = torch.ops.aten
SITE = event().site


def half(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float16)


def ran(func: Any, *args: Any) -> Call:
    """Run an op, as a trace sees it."""
    facts = op_facts(func)
    call = Call(func, facts, args, {})
    call.returned = func(*args)
    call.out = results(facts, args, {}, call.returned)
    return call


def seen(path: ReferencePath, func: Any, *args: Any) -> Call:
    call = ran(func, *args)
    path.see(call, SITE)
    return call


def test_values_are_those_of_fp32_and_views_have_them() -> None:
    path, x = ReferencePath(), half(60000.0, 1.0)
    doubled = seen(path, aten.mul.Tensor, x, half(2.0)).out[0]
    quarter = seen(path, aten.mul.Tensor, doubled, half(0.25)).out[0]
    assert doubled[0] == math.inf and quarter[0] == math.inf
    assert path.get(doubled).tolist() == [120000.0, 2.0] and path.get(quarter[:1]).tolist() == [30000.0]
    assert path.get(half(1.0)) is None


@pytest.mark.parametrize("factor", [half(1e-4), 1e-9])
def test_a_zero_that_16_bit_made_is_followed_and_a_constant_is_named(factor: Any) -> None:
    path, x = ReferencePath(), half(1e-4, 0.0)
    lost = seen(path, aten.mul.Tensor if isinstance(factor, Tensor) else aten.mul.Scalar, x, factor).out[0]
    flush = path.behind([lost])
    assert lost.tolist() == [0.0, 0.0] and flush is not None and not flush.is_cancellation
    assert flush.share == 0.5 and flush.wide_amax == pytest.approx(1e-4 * float(factor), rel=1e-3)
    assert flush.constant == (None if isinstance(factor, Tensor) else factor)
    assert path.behind([seen(path, aten.neg.default, lost).out[0]]) is flush
    assert path.behind([seen(path, aten.add.Tensor, half(1.0), half(1.0)).out[0]]) is None


@pytest.mark.parametrize(("argument", "is_precision"), [(half(1e-4), True), (half(0.0), False)])
def test_an_op_that_failed_is_judged_on_fp32_values(argument: Tensor, is_precision: bool) -> None:
    path = ReferencePath()
    lost = seen(path, aten.mul.Tensor, argument, half(1e-4)).out[0]
    call = ran(aten.log.default, lost)
    wide, flush = path.judge(call, path.see(call, SITE))
    assert call.out[0].item() == -math.inf
    assert (wide is not None and wide.is_finite) is is_precision and (flush is not None) is is_precision
    if is_precision:
        assert wide.amax == pytest.approx(-math.log(1e-8), rel=1e-4)


def test_operands_that_rounding_made_equal_cancel() -> None:
    path, one = ReferencePath(), half(1.0)
    rounded = seen(path, aten.add.Tensor, one, half(1e-4)).out[0]
    flush = path.behind([seen(path, aten.sub.Tensor, rounded, one).out[0]])
    assert flush is not None and flush.is_cancellation and flush.made_by == (SITE,)


def test_memory_that_is_written_over_holds_what_was_written() -> None:
    path, x = ReferencePath(), half(60000.0)
    doubled = seen(path, aten.mul.Tensor, x, half(2.0)).out[0]
    seen(path, aten.copy_.default, doubled, half(3.0))
    assert path.get(doubled) is None or path.get(doubled).tolist() == [3.0]


def test_a_step_ends_with_what_was_made_once_and_forgets_what_is_written_in_each() -> None:
    path, buffer = ReferencePath(), half(60000.0)
    made = seen(path, aten.mul.Tensor, half(60000.0), half(2.0)).out[0]
    seen(path, aten.mul_.Tensor, buffer, half(2.0))
    assert path.get(made).tolist() == path.get(buffer).tolist() == [120000.0]
    path.end_step()
    assert path.get(made).tolist() == [120000.0] and path.get(buffer) is None


@pytest.mark.parametrize(
    ("dtype", "number", "found"),
    [
        (torch.float16, 1e-9, 1e-9),
        (torch.float16, 4e-8, None),
        (torch.bfloat16, 1e-9, None),
        (torch.float16, 0.0, None),
    ],
)
def test_a_constant_that_rounds_to_zero(dtype: torch.dtype, number: float, found: float | None) -> None:
    assert vanishing_constant(ran(aten.add.Scalar, torch.ones(1, dtype=dtype), number), dtype) == found


def test_what_is_drawn_is_not_drawn_again_but_for_a_mask_that_is_known() -> None:
    x = half(*[1.0] * 64)
    dropped = ran(aten.native_dropout.default, x, 0.5, True)
    [wide] = run_in_fp32(dropped, {id(dropped.args[0]): torch.full((64,), 1e5)}) or [torch.empty(0)]
    assert torch.equal(wide == 0, dropped.returned[0] == 0) and set(wide.tolist()) <= {0.0, 2e5}
    assert run_wide(ran(aten.bernoulli.default, x * 0.5), {}, torch.float32) is None


@pytest.mark.parametrize(("func", "said"), [(aten.rsqrt.default, "0 instead of 0.00248"), (aten.tanh.default, "")])
def test_an_infinity_that_disappears_is_judged_by_what_it_would_have_been(func: Any, said: str) -> None:
    reference, overflow = Fp64Reference(), ran(aten.exp.default, half(12.0))
    reference.start(overflow)
    assert overflow.out[0].item() == math.inf
    assert reference.carry(ran(func, overflow.out[0])) == said
    assert reference.is_too_large(ran(aten.mm.default, overflow.out[0].view(1, 1), half(1.0).view(1, 1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(3))
def test_a_mask_of_the_lowest_fp32_number_is_healthy(dtype: torch.dtype, seed: int) -> None:
    """It is -inf in 16 bit, which masks as well; the gradients of scores, almost 0 at first, are what rounding leaves of them."""
    torch.manual_seed(seed)
    embedding, inward, outward = nn.Embedding(99, 32), nn.Linear(32, 96), nn.Linear(32, 99)
    model = nn.ModuleList([embedding, inward, outward])
    for p in model.parameters():
        nn.init.normal_(p, std=0.02)
    ids, mask = torch.randint(3, 90, (2, 12)), torch.ones(2, 1, 1, 12)
    mask[1, ..., 9:] = 0
    with diagnose.trace(model) as t:
        with torch.autocast("cpu", dtype):
            q, k, v = inward(embedding(ids)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            bias = (1 - mask) * torch.finfo(torch.float32).min
            seen_by_all = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            logits = outward(seen_by_all.transpose(1, 2).flatten(2))
        (F.cross_entropy(logits.float().flatten(0, 1), ids.flatten()) * 1024).backward()
    assert t.report.findings == ()


def test_numbers_beside_a_mask_are_not_judged_by_what_rounding_leaves_of_their_sums() -> None:
    """Biases and scores cancel; the lowest number of fp32 beside them is -inf in 16 bit."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 64, 8).unbind()
    bias = torch.rand(4, 64, 64).masked_fill(torch.ones(64, 64).triu(1).bool(), torch.finfo(torch.float32).min)
    weight = torch.eye(8).requires_grad_()
    with diagnose.trace(None) as t, torch.autocast("cpu", torch.bfloat16):
        shares = ((q @ weight) @ k.mT + bias.bfloat16()).softmax(-1)
        (shares @ v).float().square().mean().backward()
    assert t.report.findings == ()


@pytest.mark.parametrize(("depth", "uses"), [(16, 2), (3000, 1)])
def test_makers_of_a_loop_that_rounds_nothing_are_walked_once_each(depth: int, uses: int) -> None:
    exact, sites = torch.ones(4, dtype=torch.bool), [replace(SITE, step=i) for i in range(depth)]
    last = MadeBy(sites[0])
    for site in sites[1:]:
        last = MadeBy(site, exact, (last,) * uses)
    assert last.sites(exact) == sites


def test_a_loop_that_computes_a_value_from_itself_is_traced_to_its_end() -> None:
    model, x = nn.Linear(4, 4), torch.linspace(2.9, 3.1, 4).half()
    with diagnose.trace(model) as t:
        for _ in range(24):
            x = x - 0.01 * (x - 3)
        (model(x.float()) * (x - 3).float()).square().mean().backward()
    assert t.report.record.backwards == 1


def by_hand(z: Tensor) -> Tensor:
    """A sigmoid whose exp overflows in fp16 from -11 down: 0 is left, where fp32 has up to 1e-5."""
    return 1 / (1 + torch.exp(-z))


LEFT = {
    "a gate": (lambda z, p, h: (p * h).square().mean(), False),
    "shares": (lambda z, p, h: (p / p.sum() * h).sum(), False),
    "its complement": (lambda z, p, h: ((1 - p).log() * h).mean(), False),
    "an entropy": (lambda z, p, h: (p * (p + 1e-4).log() * h).mean(), False),
    "in place": (lambda z, p, h: (p.clone().mul_(2).clamp_(max=1) * h).mean(), False),
    "written over": (lambda z, p, h: (p.copy_(z.sigmoid()) * h).mean(), False),
    "a logarithm": (lambda z, p, h: (p.log() * h).mean(), True),
    "a quotient": (lambda z, p, h: (1 / p * h).mean(), True),
    "the smallest": (lambda z, p, h: (p.amin(0) * h).mean(), True),
    "rows alone": (lambda z, p, h: (p / p.amax(-1, keepdim=True).clamp(min=1e-7) * h).mean(), True),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_an_overflow_left_is_a_fault_where_it_counts(name: str) -> None:
    torch.manual_seed(0)
    use, is_faulty = LEFT[name]
    layer, x = nn.Linear(4, 4), torch.randn(16, 4)
    z = torch.linspace(-14, 6, 16)[:, None].expand(16, 4).half()
    with diagnose.trace() as t:
        use(z, by_hand(z), layer(x).half()).float().backward()
    assert [f.op for f in t.report.faults][:1] == ["exp"] * is_faulty
