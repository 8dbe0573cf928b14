"""Gradients that fp16 flushes to zero are said by the step itself; zeros that fp32 has too are not."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mezzo
from mezzo.errors import GradientUnderflow


class Deep(nn.Module):
    """Tanh layers, whose gradients shrink from layer to layer."""

    def __init__(self, depth: int = 6, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def train(
    policy: str, factor: float, steps: int, model: nn.Module | None = None, optimizer: str = "SGD"
) -> list[mezzo.StepResult]:
    net = Deep() if model is None else model
    made = getattr(torch.optim, optimizer)(net.parameters(), lr=0.01)
    amp = mezzo.prepare(net, made, policy)
    results = []
    for _ in range(steps):
        amp.zero_grad()
        amp.backward(net(torch.randn(16, 32)).float().square().mean() * factor)
        results.append(amp.step())
    return results


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "flushed" in record.getMessage()]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_all_of_them(optimizer: str, caplog: pytest.LogCaptureFixture) -> None:
    results = train("fp16, scaling=none", 1e-6, 4, optimizer=optimizer)
    assert all(result.grad_norm == 0 and result.applied for result in results)
    assert [result.flushed > 0.9 for result in results] == [False, True, True, True]  # the first is only suspicious
    assert "of the gradients flushed to zero" in repr(results[-1])
    first = warnings_in(caplog)[0]
    assert first.startswith("step 1: fp16 flushed 100% of the gradients' elements to zero, at loss scale 1. ")
    assert first.endswith("Write scaling=dynamic in the policy, or compute in bf16.")


def test_patience_times_in_a_row_is_an_error() -> None:
    with pytest.raises(GradientUnderflow, match="every gradient of the last 5 steps was zero because fp16 flushed it"):
        train("fp16, scaling=none, guard.patience=5", 1e-6, 12)


@pytest.mark.parametrize(("factor", "share"), [(1e-3, 0.3), (1e-4, 0.9)])
def test_most_of_them(factor: float, share: float) -> None:
    """The share is that of elements which fp32 keeps and fp16 does not, by the same passes run again."""
    results = train("fp16, scaling=none", factor, 3)
    assert results[-1].grad_norm > 0 and results[-1].flushed == pytest.approx(share, abs=0.3)


def test_the_share_is_that_of_an_fp32_twin() -> None:
    model = Deep()
    twin = Deep()
    twin.load_state_dict(model.state_dict())
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), "fp16, scaling=none, guard.check_every=0")
    x = torch.randn(16, 32)
    for _ in range(2):
        amp.zero_grad()
        amp.backward(model(x).float().square().mean() * 1e-4)
        zeros = [p.grad == 0 for p in model.parameters() if p.grad is not None]
        result = amp.step()
    (twin(x).square().mean() * 1e-4).backward()
    lost = sum(
        int((zero & (p.grad != 0)).sum())
        for zero, p in zip(zeros, twin.parameters(), strict=True)
        if p.grad is not None
    )
    total = sum(zero.numel() for zero in zeros)
    assert result.flushed == pytest.approx(lost / total, abs=0.02)


class Dead(nn.Module):
    """A ReLU that no input wakes: every gradient is zero in any precision."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)
        nn.init.constant_(self.inner.bias, -1e4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x).relu())


@pytest.mark.parametrize("policy", ["fp16, scaling=none", "fp16", "bf16"])
def test_zeros_of_fp32_are_no_fault(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    results = train(f"{policy}, guard.patience=3", 1.0, 9, Dead())
    assert all(result.applied and result.grad_norm == result.flushed == 0 for result in results)
    assert warnings_in(caplog) == []


def test_a_constant_loss_is_no_fault() -> None:
    results = train("fp16, scaling=none, guard.patience=3", 0.0, 9)
    assert all(result.flushed == 0 for result in results)


@pytest.mark.parametrize("policy", ["fp16", "bf16", "fp32", "fp16, scaling=none"])
def test_healthy_gradients_are_never_measured(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that measures is run after small gradients only."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a healthy step ran backward twice")

    monkeypatch.setattr(torch.autograd, "grad", never)
    assert all(result.flushed == 0 for result in train(policy, 1e4 if policy == "fp32" else 1.0, 5))


def test_the_loss_scale_keeps_what_was_flushed() -> None:
    results = train("fp16", 1e-6, 4)
    assert results[-1].grad_norm > 0 and results[-1].flushed < 0.1


def test_a_graph_that_runs_once_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """A reentrant checkpoint refuses `autograd.grad`: nothing is measured, and the step goes on."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=True)  # refuses autograd.grad

    with caplog.at_level(logging.INFO, "mezzo.step"):
        results = train("fp16, scaling=none", 1e-9, 3, Layer())
    assert all(result.applied and result.flushed == 0 for result in results)
    assert any("could not be measured" in record.getMessage() for record in caplog.records)
