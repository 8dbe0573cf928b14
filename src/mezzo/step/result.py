"""What a step says about itself: its flags on their way from the device, read when somebody asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from types import MappingProxyType

import torch
from torch import Tensor

from ..kernels import local
from ..stamp import Stamp
from .accumulation import OptimizerGrads, move
from .flags import Reason, StepFlags


@dataclass(kw_only=True, slots=True, eq=False)
class GradStats:
    """The gradients behind a result, by parameter.

    Attributes:
        params: that had gradients.
        names: of parameters.
        norms: shape (number of gradients,), fp32: the norm of each.
        counts: shape (number of gradients,), int64: inf and NaN in each, where they were counted in the step.
        stamps: of each gradient as it was, by the parameter's id.
    """

    params: Sequence[Tensor]
    names: Mapping[Tensor, str]
    norms: Tensor
    counts: Tensor | None
    stamps: Mapping[int, Stamp]

    @classmethod
    def of(
        cls, grads: Sequence[OptimizerGrads], names: Mapping[Tensor, str], stamps: Mapping[int, Stamp], count: bool
    ) -> GradStats:
        """Return them, without reading anything.

        Args:
            grads: of each optimizer that has any.
            names: of parameters.
            stamps: of the gradients as they are now.
            count: count inf and NaN in each gradient now; a second pass over the gradients.

        Syncs: no.
        """
        home = grads[0].check.norm.device
        norms = [move(one.check.tensor_norms, home) for one in grads]
        counts = [move(one.check.count_nonfinite(), home) for one in grads] if count else []
        return cls(
            params=[p for one in grads for p in one.params],
            names=names,
            norms=torch.cat(norms),
            counts=torch.cat(counts) if counts else None,
            stamps=stamps,
        )

    def nonfinite(self) -> dict[str, int | None]:
        """Return the parameters whose gradients are not finite, and how many elements are not.

        None stands for at least one: the gradient was gone, or written, before anybody asked.

        Syncs: yes.
        """
        bad = (~self.norms.isfinite()).tolist()
        counts = None if self.counts is None else self.counts.tolist()
        return {
            self.names.get(p, "a parameter"): counts[index] if counts is not None else self._count(p)
            for index, p in enumerate(self.params)
            if bad[index]
        }

    def _count(self, param: Tensor) -> int | None:
        stamp = self.stamps[id(param)]
        grad = stamp.tensor()
        if grad is None or not stamp.is_current(grad):
            return None
        # Of a sharded gradient the part here: one rank may ask alone, so nobody waits for the others.
        values = grad.coalesce().values() if grad.is_sparse else local(grad)
        return int((~values.isfinite()).sum())


class StepResult:
    """What one step did. Every field is read from the device when it is asked for, and not before.

    True as a whole if the step was taken, so that `if amp.step(): ...` means what it says. The copy to the host is
    queued behind the step and waits in pinned memory; reading it waits for that step only, not for what was queued
    later.

    Args:
        flags: of the step, on the device.
        stats: the gradients behind them.
        before: the result of the step before, or how many were skipped in a row before this one.
    """

    __slots__ = ("_before", "_event", "_flags", "_row", "_vector", "stats")

    def __init__(self, flags: StepFlags[Tensor], stats: GradStats, before: StepResult | int = 0) -> None:
        self._vector, self._event = _to_host(flags.pack())
        self._flags: StepFlags[float] | None = None
        self._before: StepResult | int = before
        self._row = 0
        self.stats = stats

    @property
    def is_read(self) -> bool:
        """Whether the host has read the flags already. Syncs: no."""
        return self._flags is not None

    @property
    def has_arrived(self) -> bool:
        """Whether reading the flags waits for nothing. Syncs: no."""
        return self._event is None or self._event.query()

    def flags(self) -> StepFlags[float]:
        """Return the flags as numbers. Syncs: yes, with the end of the step they are about, once."""
        if self._flags is None:
            if self._event is not None:
                self._event.synchronize()
            self._flags = StepFlags.unpack(self._vector)
            before, self._before = self._before, 0
            if not self._flags.applied:
                self._row = 1 + (before if isinstance(before, int) else before.skipped_in_a_row)
        return self._flags

    @property
    def applied(self) -> bool:
        """Whether every optimizer that had gradients took its step. Syncs: once."""
        return self.flags().applied

    @property
    def optimizers(self) -> tuple[bool, ...]:
        """Whether each optimizer that had gradients took its step, in the order given to `prepare`. Syncs: once."""
        return tuple(not skipped for skipped in self.flags().skipped)

    @property
    def reason(self) -> Reason | None:
        """What was not finite first: "loss", "gradients" or "buffers"; None if the step was taken. Syncs: once."""
        return self.flags().reason

    @property
    def scale(self) -> float:
        """The loss scale that this step's gradients carried; 1.0 without scaling. Syncs: once."""
        return self.flags().scale

    @property
    def grad_norm(self) -> float:
        """L2 norm of the true gradients before clipping; with several optimizers, of all of them. Syncs: once."""
        return self.flags().grad_norm

    @property
    def flushed(self) -> float:
        """Share of the gradients' elements that fp16 flushed to zero and fp32 would not; 0.0 unmeasured. Syncs: once.

        Measured in the steps after one whose gradients were so small that most of them may have been flushed.
        """
        return self.flags().flushed

    @property
    def nonfinite(self) -> Mapping[str, int | None]:
        """Parameters whose gradients were not finite, with the number of elements. Syncs: yes.

        The number is None (at least one) if it is asked for after the gradients were dropped, in the first skipped
        step of a row.
        """
        return MappingProxyType({} if self.applied else self.stats.nonfinite())

    @property
    def skipped_in_a_row(self) -> int:
        """How many steps in a row were skipped, this one included; 0 after a step that was taken. Syncs: once."""
        self.flags()
        return self._row

    def __bool__(self) -> bool:
        return self.applied

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return f"<code>{escape(repr(self))}</code>"

    def __repr__(self) -> str:
        flags = self.flags()
        what = "applied" if flags.applied else f"skipped: {flags.reason} not finite"
        lost = f", {flags.flushed:.0%} of the gradients flushed to zero" if flags.flushed else ""
        return f"StepResult({what}, scale={flags.scale:g}, grad_norm={flags.grad_norm:.6g}{lost})"


def _to_host(vector: Tensor) -> tuple[Tensor, torch.Event | None]:
    if vector.device.type == "cpu":
        return vector, None
    pinned = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
    pinned.copy_(vector, non_blocking=True)
    event = torch.Event(vector.device)
    event.record(torch.accelerator.current_stream(vector.device))  # left out, it is one of the current device
    return pinned, event
