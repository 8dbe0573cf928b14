"""The edit a diagnosis proposes is a policy, and training under it is healthy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mezzo.diagnose as diagnose
from mezzo.step import prepare


class Normed(nn.Module):
    """A sick part in front of a normalisation, as in every transformer."""

    def __init__(self, sick: nn.Module) -> None:
        super().__init__()
        self.before, self.sick, self.norm, self.after = nn.Linear(8, 8), sick, nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(self.sick(self.before(x))))


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = 1e3 * x
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class SmallEps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x - x
        return x / (x.abs().sum(-1, keepdim=True) + 1e-8)


class Stretched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(8, 8)
        nn.init.constant_(self.down.weight, 3e4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(x)


def report_of(model: nn.Module, policy: str) -> diagnose.TraceReport:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    amp = prepare(model, optimizer, policy=f"{policy}, scaling.init_scale=256")
    with diagnose.trace(model) as t:
        amp.backward(model(4 * torch.randn(4, 8)).float().square().mean())
        amp.step()
    return t.report


@pytest.mark.parametrize("sick", [Squares, SmallEps, Stretched])
def test_following_the_edits_leads_to_health(sick: Callable[[], nn.Module]) -> None:
    policy, edits = "fp16", []
    for _ in range(4):
        torch.manual_seed(0)
        report = report_of(Normed(sick()), policy)
        if report.is_healthy:
            break
        edit = report.faults[0].fix.edit
        assert edit and edit not in edits, report
        edits.append(edit)
        policy = f"{policy}, {edit}"
    assert report.is_healthy and edits, report
    assert edits[0].startswith(("module:sick", "sick"))


def test_gradients_that_overflow_where_they_are_added_up_are_told_so() -> None:
    def run(share: float) -> diagnose.TraceReport:
        model = nn.Linear(4, 1, bias=False).half()
        with diagnose.trace(model) as t:
            for _ in range(3):
                (model(torch.full((1, 4), 30.0).half()) * 1000 * share).sum().backward()
            torch.optim.SGD(model.parameters(), lr=1e-6).step()
        return t.report

    (found,) = run(1.0).findings
    assert found.verdict == "overflow" and found.fix.edit == "" and "None" not in found.fix.advice
    assert "divide each loss by the number of passes" in found.fix.advice
    assert run(1 / 3).findings == ()
