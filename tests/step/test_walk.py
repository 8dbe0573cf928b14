"""The files that a healthy step enters: the engine is the order of calls, and what is for sick steps is not entered."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType

import torch
from torch import nn

import mezzo

ROOT = Path(mezzo.__file__).parent
OWN = ("step", "loss_scale", "stamp.py")
SCALERS = ("loss_scale/grad_tracker.py", "step/strangers.py", "loss_scale/fused.py")
"""Whoever scales elsewhere in the process, a GradScaler or another stepper, is asked before any optimizer steps."""


def walk(call: Callable[[], object]) -> list[str]:
    """Return the files of the step and the loss scale whose functions a call runs, in the order they are entered."""
    return [file for file in counted(call) if file not in SCALERS]


def counted(call: Callable[[], object]) -> dict[str, int]:
    """Return how many functions of each of these files a call runs."""
    found: dict[str, int] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and ROOT in path.parents and path.relative_to(ROOT).parts[0] in OWN:
            file = path.relative_to(ROOT).as_posix()
            found[file] = found.get(file, 0) + 1

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def test_a_healthy_step_of_bf16_master() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    amp = mezzo.prepare(model, mezzo.optim.AdamW(model.parameters(), master="split"), "bf16-master")
    for _ in range(5):  # the first three look at invariants
        loss = model(torch.randn(4, 8)).float().square().mean()
        backward = walk(lambda loss=loss: amp.backward(loss))  # type: ignore[misc]
        step = walk(amp.step)
        amp.zero_grad()
    assert len(backward) <= 4, " ".join(backward)
    assert len(step) <= 7, " ".join(step)
    for file in ("recovery", "replay", "invariants", "report", "closure"):
        assert f"step/{file}.py" not in (*backward, *step)


def test_buffers_that_a_step_writes_are_looked_at_together() -> None:
    """On a small model each call of Python counts: a batch norm more adds few, since buffers are not asked one by one."""
    found = []
    for num in (2, 12):
        model = nn.Sequential(*[nn.BatchNorm1d(4) for _ in range(num)], nn.Linear(4, 1))
        amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters(), fused=True), "bf16")
        step = partial(one_step, model, amp)
        found.append([sum(counted(step).values()) for _ in range(5)][-1])
    assert (found[1] - found[0]) / 10 <= 25, found


def one_step(model: nn.Module, amp: mezzo.Stepper) -> None:
    amp.zero_grad()
    amp.backward(model(torch.randn(8, 4)).square().mean())
    amp.step()
