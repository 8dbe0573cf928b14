"""RMS norms that models write out op by op: which are known for one op, and that they run as it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.binding.test_hand_written import kept_for_backward
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.binding.hand_written import hand_written_rms_norm
from mezzo.kernels import registry

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
needs_kernel = pytest.mark.skipif(
    registry.choose("layer_norm", torch.device("cpu"), BF16).backend != "cpu", reason="no compiler"
)


class LlamaRMSNorm(nn.Module):
    def __init__(self, size: int = 64, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        dtype, x = x.dtype, x.to(FP32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class T5LayerNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.rsqrt(x.to(FP32).pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (x.to(self.weight.dtype) if self.weight.dtype in (BF16, FP16) else x)


class GemmaRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class FewWordsRMSNorm(nn.Module):
    """As teaching code has it, with a width beside it and a weight of another name."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.eps, self.size, self.elementwise = 1e-5, size, True
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        norm = x.norm(dim=-1, keepdim=True) * self.size**-0.5
        return x / (norm.square() + self.eps).sqrt() * self.gain


class EpsOutsideRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon) * self.weight


class CentredRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class ClippedRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-100, 100))


class DetachedRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).detach() * self.weight


class NoisyInTrainingRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (torch.rand_like(x) if self.training else 0)


class TwoWeightsRMSNorm(LlamaRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64))


class BufferRMSNorm(LlamaRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))


class ListRMSNorm(LlamaRMSNorm):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return super().forward(x)


class GatedRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x) * gate


class FirstDimensionRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Scale(LlamaRMSNorm):
    """Any other name: no stranger's forward is called to see."""


KNOWN = [LlamaRMSNorm, T5LayerNorm, GemmaRMSNorm, FewWordsRMSNorm]
OTHERS = [
    EpsOutsideRMSNorm, CentredRMSNorm, ClippedRMSNorm, DetachedRMSNorm, NoisyInTrainingRMSNorm, TwoWeightsRMSNorm,
    BufferRMSNorm, ListRMSNorm, GatedRMSNorm, FirstDimensionRMSNorm, Scale, nn.RMSNorm,
]  # fmt: skip


def built(kind: type[nn.Module]) -> nn.Module:
    module = kind(64) if kind is nn.RMSNorm else kind()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module


def prepared(module: nn.Module, policy: str = "bf16, output=none") -> nn.Module:
    return mezzo.prepare(nn.Sequential(nn.Identity(), module), None, policy).model


def is_one_op(out: Tensor) -> bool:
    return type(out.grad_fn).__name__ == "_NormBackward"


def gradients(module: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    given = [x.clone().requires_grad_(), *module.parameters()]
    out = module(given[0])
    return [out.detach(), *torch.autograd.grad(out, given, grad.to(out.dtype))]


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.detach().double() - other.detach()).norm())


@needs_kernel
@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16-master"])
@pytest.mark.parametrize("wide", [False, True], ids=["16 bit", "fp32"])
def test_a_norm_is_rounded_once_and_keeps_its_input(kind: type[nn.Module], policy: str, wide: bool) -> None:
    """Nearer to fp64 than the module as torch.autocast runs it, and in the dtype that its rule says."""
    low = FP16 if policy == "fp16" else BF16
    norm = built(kind)
    x, grad = torch.randn(300, 64).to(FP32 if wide else low), torch.randn(300, 64).to(low)
    exact = gradients(copy.deepcopy(norm).double(), x.double(), grad.double()) if kind is FewWordsRMSNorm else None
    by_hand = gradients(copy.deepcopy(norm), x, grad)
    model = prepared(copy.deepcopy(norm), f"{policy}, output=none")
    out = model(x.clone().requires_grad_())
    assert is_one_op(out) and out.dtype is low
    assert kept_for_backward(model, x.clone().requires_grad_()) == x.nbytes + 300 * 4 + 64 * 4
    found = gradients(model, x, grad)
    as_written = copy.deepcopy(norm).double()
    weight = next(as_written.parameters())
    given = [x.double().requires_grad_(), weight]
    eps = getattr(norm, "eps", None) or norm.variance_epsilon
    true = nn.functional.rms_norm(given[0], [64], weight + (kind is GemmaRMSNorm), eps)
    want = [true, *torch.autograd.grad(true, given, grad.double())]
    half = torch.finfo(low).eps / 2
    assert ((found[0].double() - true).abs() <= (half + 1e-6) * true.abs() + 1e-7).all()
    for one, other, best in zip(found, by_hand, want, strict=True):
        assert (
            distance(one, best) <= 1.02 * distance(other, best) + 1e-6 * float(best.detach().norm())
            or other.dtype is FP32
        )
    assert exact is None or distance(exact[0], true) < 1e-9


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.__name__)
def test_what_is_no_rms_norm_or_may_become_another_stays(kind: type[nn.Module]) -> None:
    state = torch.get_rng_state()
    made = built(kind)
    state = torch.get_rng_state()
    assert hand_written_rms_norm(made) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert not getattr(made, "calls", torch.zeros(()))


@pytest.mark.parametrize("kind", KNOWN, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("eps", [1e-8, 1e-5, 0.01])
def test_its_eps_is_told_from_others(kind: type[nn.Module], eps: float) -> None:
    module = built(kind)
    name = "eps" if kind is FewWordsRMSNorm else "variance_epsilon"
    module.__dict__.update({name: eps, "dropout": 0.1, "another": 1.001 * eps})
    known = hand_written_rms_norm(module)
    assert known is not None and (known.eps, known.offset) == (eps, float(kind is GemmaRMSNorm))


def test_hooks_of_an_instance_are_not_called_and_its_weight_is_not_touched() -> None:
    module = built(LlamaRMSNorm)
    module.register_forward_hook(lambda *_: pytest.fail("called to see"))
    module._is_hf_initialized = True
    before, version = module.weight.clone(), module.weight._version
    assert hand_written_rms_norm(module) is not None
    assert torch.equal(module.weight, before) and module.weight._version == version and module.weight.grad is None


POLICIES = ["bf16, modules=none", "bf16, *RMSNorm=bf16", "bf16, *RMSNorm=fp32", "fp32"]


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_that_leave_it_as_it_is(policy: str) -> None:
    x, norm = torch.randn(64, 64).to(BF16), built(LlamaRMSNorm)
    out = prepared(copy.deepcopy(norm), f"{policy}, output=none")(x.clone().requires_grad_())
    assert not is_one_op(out)
    given = x.float() if "*RMSNorm=fp32" in policy else x
    with torch.autocast("cpu", BF16, enabled=policy != "fp32"):
        assert torch.equal(out, norm(given))


@needs_kernel
def test_attributes_that_change_bring_its_own_forward_back() -> None:
    x, norm = torch.randn(64, 64).to(BF16), built(LlamaRMSNorm)
    model = prepared(norm)
    assert is_one_op(model(x))
    norm.variance_epsilon = 0.5
    assert not is_one_op(model(x))
    torch.testing.assert_close(model(x).double(), nn.functional.rms_norm(x.double(), [64], norm.weight.double(), 0.5), rtol=0.01, atol=0.01)  # fmt: skip
    norm.variance_epsilon = 1e-6
    assert is_one_op(model(x))
    norm.register_parameter("bias", nn.Parameter(torch.zeros(64)))
    assert not is_one_op(model(x))


@needs_kernel
def test_a_policy_after_another_decides_anew() -> None:
    x, module = torch.randn(64, 64).to(BF16), nn.Sequential(built(LlamaRMSNorm))
    plain = copy.deepcopy(module)
    amp = mezzo.prepare(module, None, "bf16, output=none")
    out = module(x)
    assert is_one_op(out)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(again(x), out) and is_one_op(again(x))
    amp.release()
    assert type(module[0]) is LlamaRMSNorm
    assert torch.equal(module(x), plain(x))
    mezzo.prepare(module, None, "bf16, modules=none, output=none")
    assert not is_one_op(module(x))


def test_a_forward_of_the_instance_stays() -> None:
    module = built(LlamaRMSNorm)
    module.forward = lambda x: x + 1
    x = torch.zeros(4, 64, dtype=BF16)
    assert torch.equal(prepared(module)(x), x + 1)


@needs_kernel
@pytest.mark.parametrize("size", [32, 2048])
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints_give_the_same_bits(size: int, is_reentrant: bool) -> None:
    model, x, grad = prepared(built(LlamaRMSNorm)), torch.randn(size, 64).to(BF16), torch.randn(size, 64)
    want = gradients(model, x, grad)
    given = [x.clone().requires_grad_(), *model.parameters()]
    out = checkpoint(model, given[0], use_reentrant=is_reentrant)
    out.backward(grad.to(BF16))
    assert all(map(torch.equal, want, [out, *(one.grad for one in given)]))
    with torch.inference_mode():
        assert torch.equal(model(x), want[0])


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("way", ["vmap", "keyword", "double backward", "forward mode", "export", "trace", "dispatch mode"])  # fmt: skip
def test_it_is_called_in_any_way(way: str) -> None:
    norm = built(LlamaRMSNorm)
    x, model = torch.randn(8, 64).to(BF16), prepared(copy.deepcopy(norm))
    want = model(x)
    same: dict[str, Any] = {
        "vmap": lambda: torch.func.vmap(model)(x),
        "keyword": lambda: model[1](x=x),
        "export": lambda: torch.export.export(model, (x,)).module()(x),
        "trace": lambda: torch.jit.trace(model, (x,), check_trace=False)(x),
        "dispatch mode": lambda: watched(model, x),
    }
    if way in same:
        torch.testing.assert_close(same[way](), want, rtol=0.01, atol=0.01)
        return
    if way == "forward mode":
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            tangent = torch.autograd.forward_ad.unpack_dual(model(dual)).tangent
        _, wanted = torch.func.jvp(norm.double(), (x.double(),), (torch.ones_like(x).double(),))
        torch.testing.assert_close(tangent.double(), wanted, rtol=0.02, atol=0.02)
        return
    given, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    pairs = ((model, given), (norm.double(), wide))
    first = [torch.autograd.grad(f(v).square().sum(), v, create_graph=True)[0] for f, v in pairs]
    second = [torch.autograd.grad(g.square().sum(), v)[0] for g, v in zip(first, (given, wide), strict=True)]
    assert distance(second[0], second[1]) <= 0.02 * float(second[1].norm())


def watched(model: nn.Module, x: Tensor) -> Tensor:
    from tests.binding.test_norms import Ops

    with Ops() as ops:
        out: Tensor = model(x)
    assert "rsqrt" in [name for name, _ in ops.seen], "its own lines"
    return out


@needs_kernel
def test_an_overflow_inside_is_named_at_its_line() -> None:
    """A trace watches ops, so the module runs its own."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), built(LlamaRMSNorm), nn.Linear(64, 1))
    nn.init.constant_(model[0].weight, 1e20)
    mezzo.prepare(model, None, "bf16")
    assert hand_written_rms_norm(model[1]) is not None
    with mezzo.diagnose.trace(model) as t:
        model(torch.ones(2, 64)).sum().backward()
    born = t.report.findings[0]
    assert (born.op, born.module) == ("pow", "1") and __file__.endswith(born.frame.file), born
