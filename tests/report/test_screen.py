"""What a diagnosis prints fits one screen, however much it found; the rest is printed on request."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mezzo.diagnose as diagnose
from mezzo.report import Report

LINES, COLUMNS = 40, 100
BATCH = torch.ones(4, 8)


class Faulty(nn.Module):
    """A layer with faults of four kinds and broken lint rules."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.project(x)
        lost = [h / (h - h), torch.log(h * 0), torch.sqrt(-h.abs() - 1), torch.exp(h.abs() * 1e5)]
        return h + sum(t.nan_to_num(0, 0, 0) for t in lost) + torch.arange(8, dtype=h.dtype) * 1e4


def stack(layer: Callable[[], nn.Module], count: int = 30) -> nn.Sequential:
    return nn.Sequential(*[layer() for _ in range(count)])


def traced() -> Report:
    net = stack(Faulty, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    with diagnose.trace() as t:
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(BATCH).square().mean()
            loss.backward()
            optimizer.step()
    return t.report


def compared() -> Report:
    return diagnose.compare(stack(lambda: nn.Linear(8, 8)), BATCH, policy="bf16")


def mismatched() -> Report:
    net = stack(lambda: nn.Linear(8, 8))
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.01)
    return diagnose.mismatch(net, other, BATCH)


def explained() -> Report:
    return diagnose.explain(stack(lambda: nn.Linear(8, 8), 12), BATCH, "fp16", budget_s=0.05)


def watched() -> Report:
    net = stack(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with diagnose.watch(net, every=2) as w:
        for step in range(6):
            optimizer.zero_grad()
            (net(BATCH * 1e3).square().mean() * (float("nan") if step > 3 else 1e-12)).backward()
            optimizer.step()
    return w.report


@pytest.mark.parametrize("diagnosis", [traced, compared, mismatched, explained, watched])
def test_a_diagnosis_fits_one_screen(diagnosis: Callable[[], Report]) -> None:
    torch.manual_seed(0)
    report = diagnosis()
    lines = str(report).splitlines()
    assert len(lines) <= LINES
    assert max(len(line) for line in lines if __file__ not in line) <= COLUMNS  # a path that is cut could not be copied
    assert len(report.to_text().splitlines()) > len(lines)
