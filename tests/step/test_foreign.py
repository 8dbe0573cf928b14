"""Optimizers that step a prepared model's 16-bit weights and were not prepared: those without masters are named in the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.step.test_advice import X, adamw, net, train
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo
from mezzo.errors import StepError


@pytest.mark.parametrize("policy", ["bf16-master", "fp16-master"])
def test_an_optimizer_made_anew_beside_masters(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """As where the cell of a notebook that makes the optimizer is run again: its small updates would be lost without a word."""
    model = net()
    amp = mezzo.prepare(model, adamw(model), policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    backward = amp.backward if amp.policy.scaling is None else Tensor.backward
    backward(F.mse_loss(model(X), X))
    with pytest.raises(StepError, match=r"SGD.step\(\) was called on 0.weight, .* it would round its updates away"):
        optimizer.step()
    optimizer.zero_grad()
    train(amp)
    amp.release()
    again = adamw(model)
    train(mezzo.prepare(model, again, policy))  # the one before is still there


def test_an_optimizer_without_masters_of_other_weights_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    amp = mezzo.prepare(model, None, "bf16-master")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(X), X).backward()
        optimizer.step()
    assert caplog.text.count("SGD steps 16-bit weights") == 1
    assert "Write amp.backward(loss) and amp.step()" in caplog.text
    assert amp.policy.params is torch.bfloat16


@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
def test_an_optimizer_with_masters_of_its_own_needs_no_word(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    mezzo.prepare(model, None, policy)
    F.mse_loss(model(X), X).backward()
    for optimizer in (
        mezzo.optim.MasterWeights(torch.optim.RMSprop(model.parameters()), mode="kahan"),
        mezzo.optim.AdamW(model.parameters(), master="split"),
    ):
        optimizer.step()
    assert "16-bit weights" not in caplog.text


class Judge(nn.Module):
    """Probabilities, some of them beyond what 16 bit tells from 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(8, 1)
        nn.init.normal_(self.head.weight, std=1.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).sigmoid()


class JudgeOfLogits(Judge):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def loss_and_told(judge: Judge, policy: str, caplog: pytest.LogCaptureFixture) -> tuple[float, list[str]]:
    """The first loss of a run of three steps, and what its log says of probabilities."""
    amp = mezzo.prepare(judge, torch.optim.SGD(judge.parameters(), lr=0.0), policy)
    x, y = torch.randn(2, 64, 8), torch.rand(64, 1).round()
    measure = F.binary_cross_entropy_with_logits if isinstance(judge, JudgeOfLogits) else F.binary_cross_entropy
    losses = []
    for _ in range(3):
        amp.zero_grad()
        for part in x:
            losses.append(measure(judge(part), y) + 0 * judge.head.bias.square().sum())
            amp.backward(losses[-1] / 2)
        amp.step()
    return losses[0].item(), [r.getMessage() for r in caplog.records if "binary_cross_entropy" in r.getMessage()]


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16"])
def test_a_cross_entropy_of_rounded_probabilities_names_the_logits_variant(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    right, told = loss_and_told(Judge(), "fp32", caplog)
    assert not told
    wrong, told = loss_and_told(Judge(), policy, caplog)
    assert len(told) == 1 and "binary_cross_entropy_with_logits" in told[0] and "op:sigmoid=fp32" in told[0]
    assert policy == "fp16" or abs(wrong - right) > 0.1 * right
    caplog.clear()
    eps = torch.finfo(torch.bfloat16).eps
    for advised in (
        loss_and_told(JudgeOfLogits(), policy, caplog),
        loss_and_told(Judge(), f"{policy}, op:sigmoid=fp32", caplog),
    ):
        assert advised == (pytest.approx(right, rel=4 * eps), [])


class SharpnessAware(torch.optim.Optimizer):
    """In two halves, as it is published: the second one is a step of the optimizer inside."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)
        self.base_optimizer = torch.optim.SGD(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.data.clone()
            p.add_(0.01 * p.grad.sign())
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old"]
        self.base_optimizer.step()

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        assert closure is not None
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


@pytest.mark.parametrize("policy", ["bf16-master", "fp16, scaling=1024", "fp16-master, scaling=1024"])
def test_an_optimizer_inside_of_a_prepared_one_is_told_to_be_stepped_by_it(policy: str) -> None:
    model = net()
    amp = mezzo.prepare(model, SharpnessAware(model.parameters(), lr=0.1), policy)
    sharp = next(
        one for one in (amp.optimizers[0], getattr(amp.optimizers[0], "inner", None)) if hasattr(one, "first_step")
    )

    def closure() -> Tensor:
        loss = F.mse_loss(model(X), X)
        amp.backward(loss)
        return loss

    first = float(closure().detach())
    sharp.first_step()
    closure()
    with pytest.raises(StepError, match=r"SharpnessAware was, and steps it: write amp\.step\(closure\)"):
        sharp.second_step()
    for _ in range(5):
        amp.zero_grad()
        closure()
        assert amp.step(closure)
    assert float(F.mse_loss(model(X), X).detach()) < first
