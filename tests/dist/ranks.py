"""Runs a function on several ranks. A rank that fails says so and ends; the others lose it, so none hangs."""

from __future__ import annotations

import io
import multiprocessing
import os
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 90.0
"""No test of a few ranks takes this long; what does, hangs."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "mezzo"]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one rank returned, or how it ended."""

    value: Any = None
    error: str | None = None


def _work(rank: int, world: int, store: str, fn: Callable[..., Any], args: tuple[Any, ...], pipe: Any) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=LIMIT_S / 3)
        )
        answer = {"value": fn(rank, world, *args)}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    packed = io.BytesIO()
    torch.save(answer, packed)
    pipe.send_bytes(packed.getvalue())
    pipe.close()
    os._exit(0)  # at once, so that ranks that wait for this one notice


def outcomes(world: int, fn: Callable[..., Any], *args: Any) -> list[Outcome]:
    """Return what `fn(rank, world, *args)` did on each of `world` fresh gloo ranks."""
    deadline = time.monotonic() + LIMIT_S
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world):
            receiver, sender = _context.Pipe(duplex=False)
            task = (rank, world, str(Path(folder) / "store"), fn, args, sender)
            process = _context.Process(target=_work, args=task, daemon=True)
            process.start()
            sender.close()
            ranks.append((process, receiver))
        found = [_receive(receiver, deadline) for _, receiver in ranks]
        for process, _ in ranks:
            process.kill()
            process.join()
    return found


def _receive(receiver: Any, deadline: float) -> Outcome:
    if not receiver.poll(max(0.0, deadline - time.monotonic())):
        return Outcome(error="hangs")
    try:
        return Outcome(**torch.load(io.BytesIO(receiver.recv_bytes()), weights_only=False))
    except EOFError:
        return Outcome(error="ended without an answer")


def run(world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what each rank returned; fails with every rank's error if any failed."""
    found = outcomes(world, fn, *args)
    errors = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(found) if outcome.error]
    assert not errors, "\n".join(errors)
    return [outcome.value for outcome in found]
