"""Runs with optimizers that are neither torch's nor mezzo's go on from a checkpoint, whatever these keep under names that torch uses otherwise."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.optimization import Adafactor

import mezzo


class _Written(Optimizer):
    """An update written as papers' code writes one: `rule` takes a parameter and its state, and returns what to subtract."""

    def __init__(self, params: Any, rule: Callable[[Tensor, dict[str, Any]], Tensor]) -> None:
        self.rule = rule
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.rule(p, self.state[p]))


def lion(p: Tensor, state: dict[str, Any]) -> Tensor:
    """A momentum called "mu", which NAdam has for a number."""
    mu = state.setdefault("mu", torch.zeros_like(p))
    mu.lerp_(p.grad, 0.1)
    return mu.sign()


def low_rank(p: Tensor, state: dict[str, Any]) -> Tensor:
    """Moments of projected matrices, as GaLore keeps: of fewer rows than the weight."""
    if p.dim() < 2:
        return p.grad
    moment = state.setdefault("exp_avg", torch.zeros_like(p[:2]))
    moment.lerp_(p.grad[:2], 0.1)
    return torch.cat([moment, p.grad[2:]])


def hybrid(p: Tensor, state: dict[str, Any]) -> Tensor:
    """Momentum for matrices and Adam's moments for vectors, in one group."""
    if p.dim() > 1:
        return state.setdefault("momentum_buffer", torch.zeros_like(p)).mul_(0.9).add_(p.grad).clone()
    square = state.setdefault("exp_avg_sq", torch.zeros_like(p)).mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)
    return p.grad / (square.sqrt() + 1e-3)


def signed_sum(p: Tensor, state: dict[str, Any]) -> Tensor:
    """A "sum" of gradients, where Adagrad has one of squares, and a list of steps."""
    state["step"] = [*state.get("step", []), -1]
    return state.setdefault("sum", torch.zeros_like(p)).add_(p.grad).clone()


def written(rule: Callable[[Tensor, dict[str, Any]], Tensor]) -> Callable[[Any], Optimizer]:
    return lambda params: _Written(params, rule)


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adafactor of transformers": lambda params: Adafactor(params, lr=0.01, relative_step=False, scale_parameter=False),
    "lion": written(lion),
    "low rank": written(low_rank),
    "hybrid": written(hybrid),
    "signed sum": written(signed_sum),
}


def run(name: str, policy: str) -> tuple[nn.Module, mezzo.Stepper]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    return model, mezzo.prepare(model, MAKERS[name](model.parameters()), policy)


def train(model: nn.Module, amp: mezzo.Stepper, steps: range) -> None:
    for step in steps:
        amp.zero_grad()
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        amp.backward((model(x) - x[:, :1]).square().mean())
        assert amp.step().applied


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp32"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_run_goes_on_from_its_checkpoint(name: str, policy: str) -> None:
    model, amp = run(name, policy)
    train(model, amp, range(2))
    saved = copy.deepcopy(amp.state_dict())
    train(model, amp, range(2, 4))
    again, resumed = run(name, policy)
    for _ in range(2):  # the first time into an optimizer that has kept nothing yet
        resumed.load_state_dict(copy.deepcopy(saved))
        train(again, resumed, range(2, 4))
        assert all(map(torch.equal, model.parameters(), again.parameters()))


class _Lookahead(Optimizer):
    """Lookahead as timm has it: it leaves `super().__init__()` out, and makes hooks around steps alone, none on loading."""

    def __init__(self, base: Optimizer) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.base, self.count, self.slow = base, 0, dict[Tensor, Tensor]()
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, dict(base.defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.base.step()
        self.count += 1
        for p in [p for group in self.param_groups for p in group["params"] if not self.count % 2]:
            p.copy_(self.slow.setdefault(p, p.clone()).lerp_(p, 0.5))


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16, scaling=1024"])
def test_an_optimizer_around_another_without_hooks_on_loading_trains_as_in_torch(policy: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    twin = copy.deepcopy(model)
    of_twin = _Lookahead(torch.optim.Adam(twin.parameters(), 0.01))
    amp = mezzo.prepare(model, _Lookahead(torch.optim.Adam(model.parameters(), 0.01)), policy)
    train(model, amp, range(6))
    for step in range(6):
        of_twin.zero_grad()
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        (twin(x) - x[:, :1]).square().mean().backward()
        of_twin.step()
    tolerance = 0.0 if policy == "fp32" else 2.0**-8
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=tolerance)
