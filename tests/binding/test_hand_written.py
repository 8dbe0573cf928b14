"""Modules that models write out op by op: which are known for one op, and that they run as it."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.binding.hand_written import hand_written_gelu

LOW = (torch.bfloat16, torch.float16)
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class NewGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class FewDigitsGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * (x * x * x))))


class ErfGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class OverriddenGELU(NewGELU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-4 * x


class ClippedGELU(NewGELU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-10, 10)


class StraightThroughGELU(NewGELU):
    def forward(self, x: Tensor) -> Tensor:
        return x + (super().forward(x) - x).detach()


class NoisyInTrainingGELU(NewGELU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (torch.rand_like(x) if self.training else 0)


class CountingGELU(NewGELU):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class ScaledGELU(NewGELU):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class Tanh(NewGELU):
    """Any other name: no stranger's forward is called to see."""


def prepared(module: nn.Module, policy: str) -> nn.Module:
    return mezzo.prepare(nn.Sequential(nn.Identity(), module), None, policy).model


def kept_for_backward(model: nn.Module, x: Tensor) -> int:
    sizes: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.update({t.data_ptr(): t.nbytes}) or t, lambda t: t):
        model(x)
    return sum(sizes.values())


@pytest.mark.parametrize("module", [NewGELU, FewDigitsGELU, ErfGelu], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("low", LOW, ids=NAMES.get)
def test_a_gelu_is_rounded_once_and_keeps_its_input(module: type[nn.Module], low: torch.dtype) -> None:
    """Values within a rounding of fp64, gradients nearer to it than those of the ops one by one, which keep several tensors."""
    x = torch.linspace(-6, 6, 4096).to(low)
    model, by_hand = prepared(module(), f"{NAMES[low]}, output=none"), module()
    wide = x.double().requires_grad_()
    exact = by_hand(wide)
    (slope,) = torch.autograd.grad(exact.sum(), wide)
    errors = []
    for one in (model, by_hand):
        given = x.clone().requires_grad_()
        out = one(given)
        assert out.dtype is low
        (found,) = torch.autograd.grad(out.sum(), given)
        errors.append(((out.double() - exact).abs().max(), (found.double() - slope).norm()))
    eps = torch.finfo(low).eps
    torch.testing.assert_close(model(x).double(), exact, rtol=eps / 2, atol=1e-5)
    assert errors[0][0] <= errors[1][0]
    assert errors[0][1] < errors[1][1]
    given = x.clone().requires_grad_()
    assert kept_for_backward(model, given) == given.nbytes < kept_for_backward(by_hand, given)


@pytest.mark.parametrize(
    "module",
    [QuickGELU, OverriddenGELU, ClippedGELU, StraightThroughGELU, NoisyInTrainingGELU, CountingGELU, ScaledGELU, Tanh, nn.GELU],
    ids=lambda kind: kind.__name__,
)  # fmt: skip
def test_what_is_no_gelu_or_may_become_another_stays(module: type[nn.Module]) -> None:
    state = torch.get_rng_state()
    made = module()
    assert hand_written_gelu(made) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert getattr(made, "calls", 0) == 0


def test_hooks_and_state_of_an_instance() -> None:
    """A class that is known, on instances: nothing of theirs is called to see, and one with a state of its own stays."""
    plain, other = NewGELU(), NewGELU()
    plain.register_forward_hook(lambda *_: pytest.fail("called to see"))
    plain._is_hf_initialized = True
    other.approximate = "none"
    assert hand_written_gelu(plain) is not None
    assert hand_written_gelu(other) is None
    other = NewGELU()
    other.inner = NewGELU()
    assert hand_written_gelu(other) is None


@pytest.mark.parametrize("policy", ["bf16, modules=none, output=none", "bf16, *GELU=bf16, output=none", "fp32"])
def test_policies_that_leave_it_as_it_is(policy: str) -> None:
    x = torch.randn(64, 64).to(torch.bfloat16)
    assert torch.equal(prepared(NewGELU(), policy)(x), NewGELU()(x))


def test_an_fp32_rule_around_it_and_fp32_inputs_run_its_own_forward() -> None:
    x = torch.randn(64, 64)
    assert torch.equal(prepared(NewGELU(), "bf16")(x), NewGELU()(x))
    assert torch.equal(
        prepared(nn.Sequential(NewGELU()), "bf16, module:1=fp32")(x.bfloat16()), NewGELU()(x.bfloat16().float())
    )


def test_a_policy_after_another_decides_anew() -> None:
    x, module = torch.randn(64, 64).to(torch.bfloat16), nn.Sequential(NewGELU())
    amp = mezzo.prepare(module, None, "bf16, output=none")
    assert torch.equal(module(x), F.gelu(x, approximate="tanh"))
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(again(x), F.gelu(x, approximate="tanh"))
    amp.release()
    assert type(module[0]) is NewGELU
    assert torch.equal(module(x), NewGELU()(x))
    mezzo.prepare(module, None, "bf16, modules=none, output=none")
    assert torch.equal(module(x), NewGELU()(x))


def test_a_forward_of_the_instance_stays() -> None:
    module = NewGELU()
    module.forward = lambda x: x + 1
    x = torch.zeros(4, dtype=torch.bfloat16)
    assert torch.equal(prepared(module, "bf16, output=none")(x), x + 1)


@pytest.mark.parametrize("way", ["checkpoint", "vmap", "keyword", "double backward"])
def test_it_is_called_in_any_way(way: str) -> None:
    x, model = torch.linspace(-3, 3, 64).to(torch.bfloat16).view(8, 8), prepared(NewGELU(), "bf16, output=none")
    if way == "keyword":
        assert torch.equal(model[1](x=x), NewGELU()(x))
        return
    if way == "vmap":
        assert torch.equal(torch.func.vmap(model)(x), model(x))
        return
    given, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    call = model if way == "double backward" else lambda x: checkpoint(model, x, use_reentrant=False)
    found, want = (
        torch.autograd.grad(f(v).sum(), v, create_graph=True)[0] for f, v in ((call, given), (NewGELU(), wide))
    )
    torch.testing.assert_close(found.double(), want, rtol=0.01, atol=0.01)
    if way == "double backward":
        second, wanted = (torch.autograd.grad(g.sum(), v)[0] for g, v in ((found, given), (want, wide)))
        torch.testing.assert_close(second.double(), wanted, rtol=0.02, atol=0.02)
