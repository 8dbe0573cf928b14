"""Gradients of attention on the CPU: the compiled kernel against fp64 and torch's own, where it is taken, and where it must not be."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.casting.test_attention import (
    CausalSelfAttention,
    Checkpointed,
    Reentrant,
    check_gives_the_same,
    gradients,
    prepared,
)
from tests.step.step_models import Dtypes
from tests.tolerance import distance
from tests.torch_versions import traces_regions
from torch import Tensor, nn

from mezzo.casting import AttentionMode
from mezzo.errors import OperandError
from mezzo.kernels import attention as own_attention
from mezzo.kernels import registry, takes_attention
from mezzo.kernels.ops.attention import cpu

BF16 = torch.bfloat16
PRODUCTS = 0 if registry.choose("attention", torch.device("cpu"), BF16).backend != "cpu" else cpu.products()
needs_products = pytest.mark.skipif(PRODUCTS == 0, reason="the processor multiplies no bf16, or no compiler")


@pytest.fixture(params=[1, 2], ids=["pairs", "tiles"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """What multiplies in the kernel that runs: pairs of bf16, and tiles where the processor has them."""
    if request.param > PRODUCTS:
        pytest.skip("the processor has none")
    monkeypatch.setattr(cpu, "products", lambda: request.param)
    return int(request.param)


def rows(batch: int, heads: int, tokens: int, width: int) -> Tensor:
    """As a model lays them out: the heads of a token side by side."""
    return torch.randn(batch, tokens, heads, width).to(BF16).transpose(1, 2)


def exact(inputs: list[Tensor], grad: Tensor, mask: Tensor | None, **options: Any) -> list[Tensor]:
    wide = [one.detach().double().requires_grad_() for one in inputs]
    mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*wide, mask, enable_gqa=True, **options)  # type: ignore[misc,call-arg,arg-type]
    return list(torch.autograd.grad(out, wide, grad.double()))


def found(
    inputs: list[Tensor], grad: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> list[Tensor]:
    given = [one.detach().requires_grad_() for one in inputs]
    return list(torch.autograd.grad(own_attention(*given, mask, is_causal, scale), given, grad))


MASKS: dict[str, Callable[[int, int, int, int], Tensor | None]] = {
    "none": lambda b, h, t, s: None,
    "bool": lambda b, h, t, s: torch.rand(b, 1, t, s) > 0.3,
    "padding": lambda b, h, t, s: (torch.arange(s) < max(1, s - 5)).expand(b, 1, 1, s),
    "fp32": lambda b, h, t, s: torch.randn(1, h, t, s),
    "bf16 of two dimensions": lambda b, h, t, s: torch.randn(t, s).to(BF16),
    "one for each query": lambda b, h, t, s: torch.randn(b, 1, t, 1),
}
SHAPES = [
    (2, 4, 4, 128, 128, 64), (3, 4, 2, 17, 23, 64), (1, 2, 1, 200, 77, 48), (1, 3, 3, 65, 130, 128), (1, 1, 1, 300, 300, 80),
    (2, 6, 2, 1, 70, 32), (1, 2, 2, 70, 1, 3),
]  # fmt: skip


@needs_products
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mask", [*MASKS, "causal"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_gradients_are_no_farther_from_fp64_than_those_of_torchs_kernel(
    shape: tuple[int, ...], mask: str, scale: float | None, products: int
) -> None:
    b, h, g, t, s, d = shape
    inputs, grad = [rows(b, h, t, d), rows(b, g, s, d), rows(b, g, s, d)], rows(b, h, t, d)
    given = MASKS.get(mask, MASKS["none"])(b, h, t, s)
    want = exact(inputs, grad, given, is_causal=mask == "causal", scale=scale)
    ours = found(inputs, grad, given, mask == "causal", scale)
    lows = [one.detach().requires_grad_() for one in inputs]
    if given is not None and given.is_floating_point():
        given = given.to(BF16) if given.dtype is BF16 else given
    with torch.autocast("cpu", enabled=False):
        low = F.scaled_dot_product_attention(  # type: ignore[call-arg]
            *lows, given if given is None or given.dtype is not torch.float32 else given.to(BF16),  # type: ignore[misc,arg-type]
            is_causal=mask == "causal", scale=scale, enable_gqa=True,
        )  # fmt: skip
    theirs = torch.autograd.grad(low, lows, grad)
    for own, their, true in zip(ours, theirs, want, strict=True):
        noise = 1e-4 * float(true.norm()) + (
            1e-2 if s == 1 else 1e-6
        )  # of one key the gradients of query and key are 0
        assert distance(own, true) <= 1.02 * distance(their, true) + noise


@needs_products
def test_a_query_that_sees_no_key_has_no_gradient(products: int) -> None:
    inputs, grad, mask = (
        [rows(1, 2, 20, 32) for _ in range(3)],
        rows(1, 2, 20, 32),
        torch.ones(20, 20, dtype=torch.bool),
    )
    mask[3] = False
    ours = found(inputs, grad, mask, False, None)
    assert not ours[0][:, :, 3].any()
    assert all(one.isfinite().all() for one in ours)


@needs_products
def test_threads_change_no_bit(monkeypatch: pytest.MonkeyPatch, products: int) -> None:
    inputs, grad = [rows(2, 3, 90, 64) for _ in range(3)], rows(2, 3, 90, 64)
    once = found(inputs, grad, None, True, None)
    for threads in (1, 4, 50):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert all(map(torch.equal, once, found(inputs, grad, None, True, None)))


@needs_products
@pytest.mark.parametrize("layout", ["contiguous", "one block", "columns of the gradient", "expanded"])
def test_however_operands_lie_the_gradients_are_the_same(layout: str, products: int) -> None:
    inputs, grad = [rows(2, 3, 33, 32) for _ in range(3)], rows(2, 3, 33, 32)
    if layout == "expanded":
        inputs[1] = inputs[1][:, :1].expand(-1, 3, -1, -1)
    others = {
        "contiguous": lambda x: x.contiguous(),
        "one block": lambda x: torch.cat([x, x, x], -1)[..., 32:64],
        "columns of the gradient": lambda x: x,
        "expanded": lambda x: x.contiguous(),
    }[layout]
    for one, other in zip(
        found(inputs, grad, None, True, None),
        found([others(x) for x in inputs], others(grad), None, True, None),
        strict=True,
    ):
        assert torch.equal(one, other)


@needs_products
@pytest.mark.parametrize(("where", "value"), list(itertools.product(["query", "gradient"], [torch.inf, torch.nan])))
def test_inf_and_nan_arrive_where_they_belong(where: str, value: float, products: int) -> None:
    inputs, grad = [rows(1, 2, 40, 32) for _ in range(3)], rows(1, 2, 40, 32)
    (grad if where == "gradient" else inputs[0])[0, 1, 5, 3] = value
    dq, dk, dv = found(inputs, grad, None, False, None)
    assert all(one[0, 0].isfinite().all() for one in (dq, dk, dv))
    assert not dq[0, 1, 5].isfinite().any()
    assert not dk[0, 1].isfinite().all()
    assert dq[0, 1, 6].isfinite().all()


@needs_products
def test_a_second_derivative_is_that_of_the_formula() -> None:
    inputs = [rows(1, 2, 12, 16).requires_grad_() for _ in range(3)]
    wide = [one.detach().double().requires_grad_() for one in inputs]

    def penalty(out: Tensor, given: list[Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(out.square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum((one.square().sum() for one in first), torch.zeros(())), given)

    got = penalty(own_attention(*inputs, None, True, None), inputs)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        want = penalty(F.scaled_dot_product_attention(*wide, is_causal=True), wide)  # type: ignore[misc,arg-type]
    for one, true in zip(got, want, strict=True):
        assert distance(one, true) <= 0.02 * float(true.norm())


REFUSED: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "three dimensions": lambda x: {"query": x[0], "key": x[0], "value": x[0]},
    "wide heads": lambda x: dict.fromkeys(("query", "key", "value"), x.repeat(1, 1, 1, 5)),
    "other values": lambda x: {"value": x[..., :8]},
    "another batch": lambda x: {"key": x[:1], "value": x[:1]},
    "heads that are not said to be shared": lambda x: {"key": x[:, :2], "value": x[:, :2]},
    "heads that do not divide": lambda x: {"key": x[:, :3], "value": x[:, :3], "enable_gqa": True},
    "columns side by side": lambda x: {"query": x.transpose(-1, -2).contiguous().transpose(-1, -2)},
    "no keys": lambda x: {"key": x[:, :, :0], "value": x[:, :, :0]},
    "a mask that learns": lambda x: {"mask": torch.zeros(64, 64, requires_grad=True)},
    "a mask of another size": lambda x: {"mask": torch.zeros(64, 63)},
    "a mask of three dimensions": lambda x: {"mask": torch.zeros(4, 64, 64)},
    "a mask on its side": lambda x: {"mask": torch.zeros(64, 64).t()},
    "a mask in fp64": lambda x: {"mask": torch.zeros(64, 64, dtype=torch.float64)},
    "a mask beside is_causal": lambda x: {"mask": torch.zeros(64, 64), "is_causal": True},
}


@needs_products
@pytest.mark.parametrize("name", REFUSED)
def test_what_it_is_not_for_is_left_to_torch(name: str) -> None:
    x = rows(2, 4, 64, 32)
    good = {"query": x, "key": x, "value": x, "mask": None, "is_causal": False, "enable_gqa": False}
    assert takes_attention(**good)
    assert not takes_attention(**{**good, **REFUSED[name](x)})


@needs_products
def test_pairs_are_taken_for_short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "products", lambda: 1)
    taken = [takes_attention(*[rows(1, 1, n, 32)] * 3, None, False, False) for n in (256, 257)]
    assert taken == [True, False]


class BackwardKernels(Dtypes):
    OPS = ("_scaled_dot_product_flash_attention_for_cpu_backward",)


@needs_products
def test_who_watches_ops_sees_torchs() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, seen = rows(2, 4, 64, 32).requires_grad_(), []
    out = own_attention(x, x, x, None, True, None)
    with FlopCounterMode(display=False):
        seen.append(takes_attention(x, x, x, None, True, False))
        with BackwardKernels() as kernels:
            out.sum().backward()  # type: ignore[no-untyped-call]
    torch.func.vmap(lambda row: seen.append(takes_attention(row, row, row, None, True, False)) or row)(x[None])
    assert not any(seen)
    assert [dtype for _, dtype in kernels.seen] == [BF16]


@needs_products
def test_batched_gradients_are_those_of_one_after_the_other() -> None:
    x, grads = rows(2, 4, 64, 32).requires_grad_(), torch.stack([rows(2, 4, 64, 32) for _ in range(3)])
    out = own_attention(x, x, x, None, True, None)
    (found,) = torch.autograd.grad(out, x, grads, is_grads_batched=True, retain_graph=True)
    for one, grad in zip(found, grads, strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(out, x, grad, retain_graph=True)[0], rtol=0.02, atol=0.02)


@needs_products
def test_without_a_compiled_kernel_it_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.kernels.ops.attention.compiled", lambda op: None)
    assert not takes_attention(*[rows(2, 4, 64, 32)] * 3, None, True, False)


@needs_products
def test_hooks_that_give_back_something_else_are_refused_before_anything_is_read() -> None:
    x = rows(2, 4, 64, 32).requires_grad_()
    for wrong in (lambda t: t[:1], lambda t: t.double(), lambda t: t.to("meta")):
        with torch.autograd.graph.saved_tensors_hooks(wrong, lambda t: t):
            loss = own_attention(x, x, x, None, True, None).sum()
        with pytest.raises(OperandError, match="gradients of attention cannot be computed: its"):
            loss.backward()  # type: ignore[no-untyped-call]


class Calls:
    """Counts the gradients that the kernel computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.backward = 0, cpu.backward
        monkeypatch.setattr(cpu, "backward", self)

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self.backward(*args)


@needs_products
@pytest.mark.parametrize("kind", [CausalSelfAttention, Checkpointed, Reentrant])
def test_a_prepared_model_takes_it_inside_a_checkpoint_too(
    kind: type[CausalSelfAttention], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch)
    check_gives_the_same(kind(), torch.randn(16, 50, 32))
    assert calls.count == 2


@traces_regions
@needs_products
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("model", "count"),
    [
        (CausalSelfAttention(), 2),
        (CausalSelfAttention(attn_mask=torch.ones(50, 50, dtype=torch.bool).tril()), 2),
        (Checkpointed(), 1),  # the compiler follows a checkpoint without the modes around it
    ],
    ids=["causal", "mask", "checkpoint"],
)
def test_a_compiled_model_takes_it_too(
    model: CausalSelfAttention, count: int, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, x = Calls(monkeypatch), torch.randn(16, 50, 32)
    plain, part = prepared(copy.deepcopy(model)), prepared(copy.deepcopy(model))
    want, got = plain(x), torch.compile(part, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(got, want, rtol=2**-8, atol=2**-8)
    for one, other in zip(gradients(got, part), gradients(want, plain), strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-8 * float(other.abs().max()))
    assert calls.count == count


@needs_products
def test_an_exported_model_has_torchs_own() -> None:
    part = prepared(CausalSelfAttention())
    exported = torch.export.export(part, (torch.randn(16, 50, 32),))
    assert not [node for node in exported.graph.nodes if "mezzo" in str(node.target)]


@needs_products
def test_a_reentrant_checkpoint_around_the_model_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = prepared(CausalSelfAttention()), torch.randn(16, 50, 32, requires_grad=True)
    want = gradients(model(x), model)
    model.zero_grad()
    calls = Calls(monkeypatch)
    out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True)
    assert torch.equal(out, model(x))
    assert all(map(torch.equal, want, gradients(out, model)))
    assert calls.count == 1


@needs_products
def test_what_waits_for_backward_is_in_16_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Tensor] = []
    q = rows(2, 4, 64, 32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        own_attention(q, q, q, None, True, None)
    assert sorted(one.nbytes for one in saved) == [2 * 4 * 64 * 4, *[2 * 4 * 64 * 32 * 2] * 4]


@needs_products
def test_an_input_that_is_written_before_backward_is_an_error() -> None:
    q = rows(2, 4, 64, 32).requires_grad_()
    k = q * 1
    loss = own_attention(q, k, q, None, True, None).sum()
    with torch.no_grad():
        k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


@needs_products
def test_fp16_and_a_region_without_rules_leave_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, x = Calls(monkeypatch), torch.randn(16, 50, 32)
    for policy in ("fp16", "bf16, modules=none", "fp32"):
        model: nn.Module = prepared(CausalSelfAttention(), policy)
        gradients(model(x), model)
    q = rows(2, 4, 64, 32).requires_grad_()
    with AttentionMode():  # outside torch's autocast
        F.scaled_dot_product_attention(q, q, q).sum().backward()  # type: ignore[no-untyped-call]
    assert calls.count == 0


@traces_regions
@needs_products
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_compiled_model_whose_sizes_vary_takes_it_with_a_mask_too(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    calls, mask = Calls(monkeypatch), torch.ones(50, 50, dtype=torch.bool).tril()
    for model, tokens in [
        (CausalSelfAttention(), 60),
        (CausalSelfAttention(), 40),
        (CausalSelfAttention(attn_mask=mask), 50),
    ]:
        part = prepared(model)
        gradients(torch.compile(part, backend="aot_eager", fullgraph=True)(torch.randn(16, tokens, 32)), part)
    assert calls.count == 3
