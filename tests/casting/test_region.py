"""The region: state, nesting, re-entry, decorators, devices and misuse (SPEC A1-A10, A14)."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mezzo
from mezzo import Policy, Rule
from mezzo.casting import autocast
from mezzo.errors import ForbiddenOpError, PolicyError, RegionError
from mezzo.policy import OpRules
from mezzo.policy.why import why_engine

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MEZZO = Policy(compute=BF16, ops="mezzo")
ENGINES = {"dispatcher": {"dtype": BF16}, "mode": {"policy": MEZZO}}


def state() -> tuple[object, ...]:
    modes = torch.overrides._get_current_function_mode_stack()
    return (
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled(), len(modes),
    )  # fmt: skip


def product() -> torch.dtype:
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.fixture(params=ENGINES)
def region(request: pytest.FixtureRequest) -> autocast:
    made = autocast("cpu", **ENGINES[request.param])
    assert made.engine == request.param
    return made


def test_state_is_restored_also_after_an_exception(region: autocast) -> None:
    before = state()
    with region:
        assert product() is BF16
    assert state() == before
    with pytest.raises(ZeroDivisionError), region:
        1 / 0  # noqa: B018  # raised on purpose
    assert state() == before


def test_defaults_are_torchs() -> None:
    with autocast("cpu"):
        assert torch.get_autocast_dtype("cpu") is BF16
    with autocast():
        assert product() is BF16
    with autocast("cpu", dtype=FP16), autocast("cpu"):
        assert product() is FP16


def test_the_same_instance_nests_in_itself(region: autocast) -> None:
    before = state()
    with region, region, region:
        assert product() is BF16
    assert state() == before


def test_a_recursive_decorated_function_restores_state(region: autocast) -> None:
    @region
    def down(n: int) -> torch.dtype:
        return product() if n == 0 else down(n - 1)

    before = state()
    assert down(5) is BF16
    assert state() == before and down.__name__ == "down"


def test_a_decorated_function_that_raises_restores_state(region: autocast) -> None:
    @region
    def fails() -> None:
        raise KeyError("x")

    before = state()
    with pytest.raises(KeyError):
        fails()
    assert state() == before


def test_it_decorates_forward() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        @autocast("cpu", dtype=BF16)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    assert Net()(torch.ones(2, 4)).dtype is BF16


def test_a_disabled_region_inside_gives_control(region: autocast) -> None:
    with region:
        with autocast("cpu", enabled=False):
            assert product() is FP32
            with region:
                assert product() is BF16
        assert product() is BF16


def test_a_plain_torch_region_inside_is_obeyed(region: autocast) -> None:
    with region:
        with torch.autocast("cpu", enabled=False):
            assert product() is FP32
        with torch.autocast("cpu", dtype=FP16):
            assert product() is FP16
        assert product() is BF16


def test_an_inner_region_has_its_own_rules() -> None:
    x = torch.ones(2, 2, dtype=BF16)
    with autocast("cpu", policy=MEZZO):
        assert x.mean().dtype is FP32
        with autocast("cpu", dtype=BF16):
            assert x.mean().dtype is BF16
        with autocast("cpu", policy=Policy(compute=BF16, ops=OpRules(edits=(("mean", Rule.LOW),)))):
            assert torch.ones(2, 2).mean().dtype is BF16
        assert x.mean().dtype is FP32


def test_several_threads_share_one_instance(region: autocast) -> None:
    seen: dict[int, set[torch.dtype]] = {}
    barrier = threading.Barrier(4)

    def work(k: int) -> None:
        barrier.wait()
        seen[k] = set()
        for _ in range(50):
            with region:
                seen[k].add(product())
        seen[k].add(product())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert all(dtypes == {BF16, FP32} for dtypes in seen.values())


def test_leaving_out_of_order_is_loud() -> None:
    first, second = autocast("cpu", dtype=BF16), autocast("cpu", dtype=FP16)
    first.__enter__()
    second.__enter__()
    with pytest.raises(RegionError, match="another order"):
        first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    with pytest.raises(RegionError, match="has not entered"):
        first.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("cdua",), "Did you mean 'cuda'?"),
        (("cpu", torch.int8), "a region casts to fp16 or bf16, not int8"),
    ],
)
def test_a_request_that_cannot_be_honoured_raises(arguments: tuple[object, ...], sentence: str) -> None:
    with pytest.raises(RegionError, match=sentence.replace("?", r"\?")):
        autocast(*arguments)  # type: ignore[arg-type]  # wrong on purpose


def test_a_device_that_is_absent_may_be_switched_off() -> None:
    with autocast("cuda", enabled=False):
        assert product() is FP32


def test_misuse_of_the_keyword_arguments() -> None:
    with pytest.raises(RegionError, match="Did you mean 'persistent'"):
        autocast("cpu", cache="persist")  # type: ignore[arg-type]
    with pytest.raises(RegionError, match=r"has rules for modules \(\*\.norm\*\).*mezzo\.prepare"):
        autocast("cpu", policy="bf16, *.norm*=fp32")
    with pytest.raises(RegionError, match="decorates a function, not a int"):
        autocast("cpu")(3)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="softmax"):
        autocast("cpu", policy="bf16, op:sotfmax=fp32")


def test_a_policy_in_fp32_casts_nothing() -> None:
    with autocast("cpu", policy=Policy()):
        assert product() is FP32


def test_every_rule_on_cpu_tensors() -> None:
    edits = (
        ("tanh", Rule.LOW), ("sigmoid", Rule.FP32), ("lerp", Rule.PROMOTE), ("matmul", Rule.AS_IS),
        ("erf", Rule.FORBID), ("softmax", Rule.FP32_LOW_OUT),
    )  # fmt: skip
    x, low = torch.rand(3, 3), torch.rand(3, 3).to(BF16)
    with autocast("cpu", policy=Policy(compute=BF16, ops=OpRules(edits=edits))):
        assert x.tanh().dtype is BF16 and torch.tanh(x).dtype is BF16
        assert low.sigmoid().dtype is FP32
        assert torch.lerp(x, low, 0.5).dtype is FP32
        assert (x @ x).dtype is FP32
        assert torch.equal(F.softmax(x, -1), torch.softmax(x, -1)) and x.softmax(-1).dtype is BF16
        with pytest.raises(ForbiddenOpError, match="erf is forbidden here"):
            x.erf()
        assert torch.equal(x.softmax(-1), torch.autocast("cpu", enabled=False)(torch.softmax)(x, -1).to(BF16))


def test_what_is_never_cast() -> None:
    policy = Policy(compute=BF16, ops=OpRules(edits=(("add", Rule.LOW), ("mul", Rule.LOW))))
    out, x = torch.zeros(2, 2), torch.ones(2, 2)
    with autocast("cpu", policy=policy):
        assert (x.double() @ x.double()).dtype is torch.float64
        assert torch.add(torch.ones(2, dtype=torch.int64), 1).dtype is torch.int64
        assert torch.mul(x.to(torch.complex64), x.to(torch.complex64)).dtype is torch.complex64
        assert torch.matmul(x, x, out=out).dtype is FP32
        assert x.clone().add_(x).dtype is FP32
        assert torch.add(x, x).dtype is BF16


def test_binary_cross_entropy_names_the_logits_variant() -> None:
    p = torch.full((2,), 0.5)
    with autocast("cpu", policy=MEZZO), pytest.raises(ForbiddenOpError, match="binary_cross_entropy_with_logits"):
        F.binary_cross_entropy(p, p)
    with autocast("cpu", dtype=FP16):
        assert F.binary_cross_entropy(p.half(), p.half()).dtype is FP32


def test_repaired_ops_of_the_mezzo_table() -> None:
    x = torch.randn(64, 8).to(FP16) * 300
    with autocast("cpu", policy=MEZZO.replace(compute=FP16)):
        assert x.square().mean().isfinite() and x.var().isfinite()
        assert torch.cov(x.T).dtype is FP32 and torch.linalg.pinv(x[:8]).dtype is FP32
        assert F.layer_norm(x, (8,)).dtype is FP16 and x.sum().dtype is FP32


def test_why_engine_names_what_differs() -> None:
    assert why_engine(Policy(), "cpu").engine == "dispatcher"
    same = Policy(ops=OpRules(edits=(("matmul", Rule.LOW),)))
    assert why_engine(same, "cpu").engine == "dispatcher"
    other = why_engine(Policy(ops=OpRules(edits=(("tanh", Rule.FP32),))), "cpu")
    assert str(other) == "mode: 1 ops have another rule than torch's on cpu: tanh"
    assert why_engine(Policy(ops="mezzo"), "cuda").engine == "mode"
    assert "beyond the region" in why_engine(Policy(), "cpu", "persistent").reason


def test_public_names() -> None:
    assert mezzo.autocast is autocast


def test_copies_and_pickles_are_regions_of_the_same_kind(region: autocast) -> None:
    for again in (copy.deepcopy(region), pickle.loads(pickle.dumps(region))):
        assert again.engine == region.engine
        with region, again:
            assert product() is BF16
    with pytest.raises(RegionError, match="belongs to this process"):
        pickle.dumps(autocast.current())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # forward_ad scripts its decompositions
@pytest.mark.parametrize("cache", ["region", "persistent"])
def test_functional_transforms_and_odd_layouts_under_the_mode(cache: str) -> None:
    linear, x = nn.Linear(4, 4), torch.randn(5, 2, 4)
    weights = dict(linear.named_parameters())

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(linear, weights, (x,)).float().square().sum()

    with autocast("cpu", policy=MEZZO, cache=cache):  # type: ignore[arg-type]
        per_sample = torch.vmap(torch.func.grad(loss), (None, 0))(weights, x)["weight"]
        assert torch.vmap(linear)(x).dtype is BF16
        one = torch.func.grad(loss)(weights, x[0])["weight"]
        assert (torch.eye(4).to_sparse() @ x[0].t()).dtype is BF16
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            out = linear(dual) + linear(dual)
            assert torch.autograd.forward_ad.unpack_dual(out).tangent.dtype is BF16
            weight = linear.weight.detach()
            dual = torch.autograd.forward_ad.make_dual(weight, torch.ones_like(weight))
            for given in (weight, dual, dual):
                out = torch.nn.functional.linear(x, given)
            assert torch.autograd.forward_ad.unpack_dual(out).tangent.dtype is BF16
    bound = 8 * torch.finfo(BF16).eps * one.abs().max()
    assert (per_sample[0] - one).abs().max() <= bound


def test_functions_whose_body_runs_later_are_refused() -> None:
    async def coroutine() -> None: ...

    def generator():  # type: ignore[no-untyped-def]
        yield

    async def both():  # type: ignore[no-untyped-def]
        yield

    for function in (coroutine, generator, both):
        with pytest.raises(RegionError, match=f"was put on {function.__name__}, a generator or coroutine.*Write `with"):
            autocast("cpu")(function)


def test_a_class_is_refused_since_its_calls_would_run_outside() -> None:
    with pytest.raises(RegionError, match=r"was put on the class Linear, .*: put it on forward"):
        autocast("cpu")(nn.Linear)


def test_text_and_functions_are_no_flags() -> None:
    for enabled in ("False", "", b"0", torch.cuda.is_available):
        with pytest.raises(RegionError, match=r"for enabled; give True or False"):
            autocast("cpu", enabled=enabled)  # type: ignore[arg-type]


def test_enabled_is_read_as_true_or_false() -> None:
    for enabled, dtype in ((None, torch.float32), (0, torch.float32), (1, torch.bfloat16)):
        with autocast("cpu", enabled=enabled):  # type: ignore[arg-type]  # what a config may hold
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype


@pytest.mark.parametrize("policy", ["bf16", "bf16, ops=mezzo", "bf16, op:softmax=fp32"])
def test_an_op_of_the_programs_own_is_cast_as_it_was_registered(policy: str) -> None:
    product = torch.library.custom_op(
        "mezzo_region_test::product",
        lambda a, b: a @ b,
        mutates_args=(),
        schema="(Tensor a, Tensor b) -> Tensor",
    )
    torch.library.register_autocast("mezzo_region_test::product", "cpu", torch.bfloat16)
    with autocast("cpu", policy=policy):
        assert product(torch.ones(2, 2), torch.ones(2, 2).bfloat16()).dtype is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert product(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float32
