"""Runs a function on several ranks. Failures are returned, never raised over there, and who then waits is ended: no hangs."""

from __future__ import annotations

import gc
import io
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mezzo._torch import group_store

LIMIT_S = 90.0
"""No function of these tests takes this long; what does, hangs."""
PATIENCE_S = 5.0
"""How long ranks may go on after one has failed."""

_context = multiprocessing.get_context("forkserver")
# Imported once for all ranks of all tests.
_context.set_forkserver_preload([
    "pytest", "torch", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.checkpoint", "mezzo", "mezzo.train",
    "sklearn.metrics", "transformers.models.auto.modeling_auto", "transformers.models.bert.modeling_bert",
])  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one rank returned, or how it failed."""

    value: Any = None
    error: str | None = None


@contextmanager
def logged() -> Iterator[list[str]]:
    """Yield what mezzo logs inside the block."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mezzo").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("mezzo").removeHandler(handler)


def _answer(task: Callable[[], Any]) -> bytes:
    try:
        answer = {"value": task()}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    packed = io.BytesIO()
    torch.save(answer, packed)
    return packed.getvalue()


def _serve(rank: int, world: int, store: str, pipe: Any) -> None:
    gc.freeze()  # walks over objects, by Python or by mezzo, leave out what was imported for all
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=LIMIT_S / 3)
    )
    while True:
        fn, args = pickle.loads(pipe.recv_bytes())
        torch.manual_seed(0)
        pipe.send_bytes(_answer(partial(fn, rank, world, *args)))


class Ranks:
    """Processes that form one gloo group and run functions together."""

    def __init__(self, world: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._members = []
        for rank in range(world):
            ours, theirs = _context.Pipe()
            args = (rank, world, str(Path(self._folder.name) / "store"), theirs)
            process = _context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def call(self, fn: Callable[..., Any], *args: Any, patience_s: float = PATIENCE_S) -> list[Outcome]:
        """Return what `fn(rank, world, *args)` did on each rank; after a failure the others have `patience_s` left."""
        task = pickle.dumps((fn, args))
        for _, pipe in self._members:
            pipe.send_bytes(task)
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + LIMIT_S
        while len(found) < len(self._members) and time.monotonic() < deadline:
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._members) if rank not in found}
            for pipe in multiprocessing.connection.wait(list(waiting), timeout=0.5):
                outcome = found[waiting[pipe]] = _receive(pipe)
                if outcome.error:
                    deadline = min(deadline, time.monotonic() + patience_s)
        return [found.get(rank, Outcome(error="still waits")) for rank in range(len(self._members))]

    def end(self) -> None:
        """End the processes."""
        for process, _ in self._members:
            process.kill()
            process.join()
        self._folder.cleanup()


def _receive(pipe: Any) -> Outcome:
    try:
        return Outcome(**torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False))
    except (EOFError, ConnectionResetError):
        return Outcome(error="ended without an answer")


def tell(word: str) -> None:
    """Say to the other ranks how far this one is, in a broken group too."""
    group_store(dist.group.WORLD).set(word, "")


def hear(*words: str) -> None:
    """Wait until all of these are said."""
    group_store(dist.group.WORLD).wait(list(words), timedelta(seconds=LIMIT_S))


_standing: dict[tuple[int, int], Ranks] = {}


def run(world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Return what each rank returned; fails with every rank's error if any failed. Healthy ranks serve again."""
    key = (os.getpid(), world)
    if key not in _standing:
        _standing[key] = Ranks(world)
    found = _standing[key].call(fn, *args)
    errors = [f"rank {rank}: {outcome.error}" for rank, outcome in enumerate(found) if outcome.error]
    if errors:
        _standing.pop(key).end()
    assert not errors, "\n".join(errors)
    return [outcome.value for outcome in found]


def outcomes(world: int, fn: Callable[..., Any], *args: Any) -> list[Outcome]:
    """Return what each of `world` fresh ranks did, for functions that leave their group broken."""
    ranks = Ranks(world)
    try:
        return ranks.call(
            fn, *args, patience_s=LIMIT_S
        )  # a rank may be meant to end, and the others then wait their time
    finally:
        ranks.end()
