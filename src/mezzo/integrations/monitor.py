"""`monitor`: a prepared run in TensorBoard and Weights & Biases, through their own libraries."""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, kind_of, shown
from ..files import as_path
from ..formats import LOW_DTYPES, is_count, widest
from ..kernels import local
from ..step import Stepper, StepResult
from ..trace import spaced

Writer = Callable[[Mapping[str, float], int], object]
"""Takes values by name, and the number of the step."""

REASONS = ("loss", "gradients", "buffers")
_WIDTH = 1024
"""Values looked at of each parameter."""


class _Sample:
    """Gradients of one step before it is taken, and weights, to see what becomes of them. Syncs: no.

    A 16-bit weight of a prepared model has a master, which keeps what the weight cannot hold; fp32 weights do not.
    """

    def __init__(self, amp: Stepper) -> None:
        params = [p for p in amp.model.parameters() if p.grad is not None and p.numel()]
        grads = [local(p.grad) for p in params if p.grad is not None]
        self._largest = torch.nn.utils.get_total_norm(grads, math.inf) if grads else torch.zeros(())
        self._limit = torch.finfo(amp.policy.compute or torch.float32).max
        own = [p for p in params if p.dtype not in LOW_DTYPES]
        self._weights = [(p, _spaced(p), _spaced(p.grad) != 0) for p in own if p.grad is not None]

    def values(self) -> dict[str, float]:
        """Return what the step showed, now that it is taken. Syncs: once."""
        changed = [(has_gradient, _spaced(p) == before) for p, before, has_gradient in self._weights]
        meant = [has_gradient.sum() for has_gradient, _ in changed]
        lost = [(has_gradient & is_same).sum() for has_gradient, is_same in changed]
        count = len(meant)
        largest, *counts = torch.stack([self._largest.to(widest(self._largest.device)), *meant, *lost]).tolist()
        num_meant, num_lost = sum(counts[:count]), sum(counts[count:])
        return {
            "headroom_binades": math.log2(self._limit / largest) if 0 < largest < math.inf else math.nan,
            "lost_updates": num_lost / num_meant if num_meant else 0.0,
        }


def _spaced(tensor: Tensor) -> Tensor:
    return spaced(local(tensor.detach()), _WIDTH).clone()


class Monitor(AbstractContextManager["Monitor"]):
    """Writes what a stepper did to trackers, until it is closed; made by `mezzo.monitor`.

    `own` ends the writers that are this monitor's own. Writes: the observers of the stepper.
    """

    def __init__(self, amp: Stepper, every: int, writers: Sequence[Writer], own: ExitStack) -> None:
        self._amp, self._every, self._writers, self._own = amp, every, writers, own
        self._first = self._seen = amp.counters().seen
        self._unread: list[StepResult] = []
        self._skips = Counter(dict.fromkeys(REASONS, 0))
        self._sample: _Sample | None = None
        self._flushed = 0.0
        own.callback(amp.observe(self))

    def before_step(self) -> None:
        """Look at gradients and weights, in steps that are reported. Syncs: no."""
        is_due = (self._seen + 1 - self._first) % self._every == 0
        self._sample = _Sample(self._amp) if is_due else None

    def after_step(self, result: StepResult) -> None:
        """Count the step, and write if it is one that is reported. Syncs: only then, with the step."""
        self._seen += 1
        self._unread.append(result)
        while self._unread and (self._unread[0].is_read or self._sample is not None):
            step = self._unread.pop(0)
            self._flushed = max(self._flushed, step.flushed)
            if (reason := step.reason) is not None:
                self._skips[reason] += 1
        if self._sample is not None:
            self._write(result, self._sample)

    def _write(self, result: StepResult, sample: _Sample) -> None:
        seen = sample.values() if result.applied else {**sample.values(), "lost_updates": math.nan}
        values = {
            "scale": result.scale,
            "grad_norm": result.grad_norm,
            "flushed": self._flushed,
            **seen,
            "skipped": float(self._skips.total()),
            **{f"skipped_by_{reason}": float(count) for reason, count in self._skips.items()},
        }
        finite = {f"mezzo/{name}": value for name, value in values.items() if math.isfinite(value)}
        for write in self._writers:
            write(finite, self._seen)
        self._flushed = 0.0

    def close(self) -> None:
        """Stop, and end what this monitor opened."""
        self._own.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def monitor(amp: Stepper, *, every: int = 100, to: object = None) -> Monitor:
    """Write a prepared run to TensorBoard or Weights & Biases: its loss scale, skips and their causes, norms, what is lost.

    Names begin with "mezzo/": `scale`, `grad_norm` (true, before clipping), `flushed` (largest since the last report), `skipped` and `skipped_by_loss`, `_gradients`,
    `_buffers` (counted since the monitor began), `headroom_binades` (from the largest gradient, as it is carried, to
    the largest number of the compute dtype), `lost_updates` (share of weights with a gradient that an applied step
    did not move; 0 where masters keep what the weight cannot hold). What is not finite is left out.

    Args:
        amp: what `mezzo.prepare` returned; `trainer.stepper` and the like under a framework.
        every: steps from one report to the next; the host reads nothing in the others.
        to: a `SummaryWriter`, a run of `wandb.init`, a folder for TensorBoard, a function of (values, step), or several
            of them. Left out: the W&B run that is active, or else the folder "runs/mezzo".

    Raises:
        ConfigError: no stepper, `every` below 1, a tracker of another kind, or a library that is not installed.
        StepError: the stepper was released.

    Writes: the trackers; the observers of the stepper until it is closed. Syncs: in steps that are reported.

    >>> import mezzo
    >>> model = torch.nn.Linear(4, 1)
    >>> amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    >>> with mezzo.monitor(amp, every=1, to=lambda values, step: print(step, values["mezzo/skipped"])):
    ...     amp.backward(model(torch.ones(2, 4)).sum())
    ...     _ = amp.step()
    1 0.0
    """
    if not isinstance(amp, Stepper):
        raise ConfigError(f"monitor was given {kind_of(amp)}; it takes what mezzo.prepare returned.")
    if not is_count(every, 1):
        raise ConfigError(
            f"monitor was asked for every={shown(every)}, which reports nothing. Write a whole number of 1 or more."
        )
    _ = amp.policy  # which a stepper that was released refuses
    own = ExitStack()
    if to is None:  # the run of Weights & Biases, where one is on
        run = getattr(sys.modules.get("wandb"), "run", None)
        to = "runs/mezzo" if run is None else run
    targets = list(to) if isinstance(to, (list, tuple)) else [to]
    return Monitor(amp, every, [_writer(target, own) for target in targets], own)


def _writer(target: Any, own: ExitStack) -> Writer:
    if isinstance(target, (str, os.PathLike)):
        target = _summary_writer(str(as_path("monitor", "to", target)))
        own.callback(target.close)
    if hasattr(target, "add_scalar"):
        return lambda values, step: [target.add_scalar(name, value, step) for name, value in values.items()]
    if hasattr(target, "define_metric"):
        # an axis of its own: the step of a run belongs to whoever else logs
        target.define_metric("mezzo/*", step_metric="mezzo/step")
        return lambda values, step: target.log({**values, "mezzo/step": step})
    if callable(target):
        return target
    raise ConfigError(
        f"monitor(to=...) was given {type(target).__name__}; it writes to a SummaryWriter of TensorBoard, a run of wandb.init(), a folder, or a function of (values, step)."
    )


def _summary_writer(folder: str) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "monitor writes to TensorBoard, which is not installed: pip install 'mezzo[trackers]', or give to= a function of (values, step)."
        ) from error
    try:
        return SummaryWriter(folder)
    except UnicodeError as error:
        raise ConfigError(
            f"TensorBoard writes to no folder whose name is not UTF-8, as {folder!r} is. Give another folder."
        ) from error
    except OSError as error:
        raise ConfigError(f"monitor cannot write to {folder}: {error.strerror}. Give another folder.") from error
