"""What programs written by strangers share: the loop of torch's documentation, and how a program is put into the zoo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tests.zoo.case import Case, Program
from tests.zoo.faulty_forward import ALL, FP16, FP32
from torch import nn

CASES: list[Case] = []
HEALTHY: dict[Program, tuple[torch.dtype, ...]] = {}


def case(op: str, verdict: str, module: str = "", **also: Any) -> Callable[[Program], Program]:
    """Put the program below among the faulty ones: what the diagnosis must say of it."""

    def note(build: Program) -> Program:
        CASES.append(Case(build=build, op=op, verdict=verdict, module=module, **{"dtypes": (FP32,), **also}))
        return build

    return note


def healthy(*dtypes: torch.dtype) -> Callable[[Program], Program]:
    """Put the program below among the healthy ones."""

    def note(build: Program) -> Program:
        HEALTHY[build] = dtypes or ALL
        return build

    return note


def amp(dtype: torch.dtype) -> torch.autocast:
    return torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32)


def mlp(out=4, width=16):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, out))


def fit(model, dtype, loss_fn, steps=3, lr=1e-3, scale=128.0, data=None):
    """torch's own recipe."""
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=dtype is FP16)
    for i in range(steps):
        x, y = (torch.randn(8, 8), torch.randint(4, (8,))) if data is None else data[i % len(data)]
        opt.zero_grad(set_to_none=True)
        with amp(dtype):
            loss = loss_fn(model, x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
