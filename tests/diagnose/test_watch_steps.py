"""What steps did not do: skipped, moved nothing, had no gradient."""

from __future__ import annotations

import torch
from torch import nn

import mezzo
import mezzo.diagnose as diagnose


def unprepared(lr: float, factor: float = 1.0, steps: int = 4) -> diagnose.WatchReport:
    model = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with diagnose.watch(model, every=1) as w:
        for _ in range(steps):
            optimizer.zero_grad()
            (model(torch.randn(16, 8, dtype=torch.bfloat16)).float().mean() * factor).backward()
            optimizer.step()
    return w.report


def test_steps_that_move_nothing_are_no_health() -> None:
    report = unprepared(lr=1e-5)
    assert (report.idle, report.sampled) == (4, 4) and not report.is_healthy
    assert any("moved no sampled weight" in text for text in report.warnings)
    assert any("100% of its updates are rounded away" in text for text in report.warnings)


def test_a_rate_of_0_is_meant() -> None:
    report = unprepared(lr=0.0)
    assert (report.idle, report.sampled) == (0, 0)


def test_steps_that_move_are_healthy() -> None:
    report = unprepared(lr=10.0)
    assert report.idle == report.zero == 0 and report.is_healthy
    assert "Healthy: 4 steps, one in 1 sampled." in str(report)


def test_gradients_of_0_are_no_health() -> None:
    report = unprepared(lr=1.0, factor=0.0)
    assert report.zero == 4 and not report.is_healthy
    assert "every sampled gradient was 0 in 4 of 4 sampled steps" in report.warnings[0]


def prepared(policy: str, factor: float = 1.0, steps: int = 20) -> diagnose.WatchReport:
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())])
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
    with diagnose.watch(amp, every=1) as w:
        for _ in range(steps):
            amp.zero_grad()
            amp.backward(model(torch.randn(16, 64)).float().square().mean() * factor)
            amp.step()
    return w.report


def test_many_skipped_steps_are_no_health() -> None:
    report = prepared("fp16, scaling.init_scale=1099511627776")
    assert report.skipped > 3 and not report.is_healthy
    assert report.warnings[0].startswith(f"{report.skipped} of 20 steps were skipped; the last because of: ")


def test_gradients_that_fp16_flushes_are_no_health() -> None:
    report = prepared("fp16, scaling=none", factor=1e-7, steps=3)
    assert report.zero == 3 and not report.is_healthy and "underflow" in report.warnings[0]


def test_gradients_that_fp16_flushes_in_part_are_named() -> None:
    report = prepared("fp16, scaling=none", factor=1e-4, steps=3)
    assert any("underflow" in text and "GradScaler" in text for text in report.warnings)


def test_a_run_with_a_scale_is_healthy() -> None:
    report = prepared("fp16", steps=6)
    assert report.is_healthy, report.warnings


def test_no_step_is_not_enough() -> None:
    with diagnose.watch(nn.Linear(2, 2)) as w:
        pass
    assert not w.report.is_healthy and "Not enough seen" in str(w.report)
