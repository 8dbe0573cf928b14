"""What one step found, as numbers on the device that the host reads when somebody asks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .._torch import version
from ..kernels.dtensor import local
from .grad_versions import Mark

Reason = Literal["gradients", "loss", "buffers"]
"""What was not finite first in a step that was skipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """A verdict as the host has read it.

    Attributes:
        gradients_bad: inf or NaN in a gradient, or a norm whose square fp32 cannot hold.
        loss_bad: inf or NaN in a loss that backward was given, before scaling.
        buffers_bad: inf or NaN in a buffer that the forward wrote.
        scale: that the losses were multiplied by.
        grad_norm: L2 norm of the true gradients, before clipping.
        skipped: of each optimizer that had gradients, whether it left everything as it was.
    """

    gradients_bad: bool
    loss_bad: bool
    buffers_bad: bool
    scale: float
    grad_norm: float
    skipped: tuple[bool, ...]

    @property
    def applied(self) -> bool:
        """Whether every optimizer took its step."""
        return not any(self.skipped)

    @property
    def reason(self) -> Reason | None:
        """What was not finite first; None after a step that was taken."""
        if self.applied:
            return None
        return "loss" if self.loss_bad else "gradients" if self.gradients_bad else "buffers"


@dataclass(kw_only=True, slots=True, eq=False)
class GradStats:
    """The gradients behind a verdict.

    Attributes:
        params: that had gradients.
        names: of parameters.
        norms: shape (number of gradients,), fp32: the norm of each.
        counts: shape (number of gradients,), int64: inf and NaN in each, where they were counted in the step.
        marks: of each gradient as it was, by the parameter's id.
    """

    params: Sequence[Tensor]
    names: Mapping[Tensor, str]
    norms: Tensor
    counts: Tensor | None
    marks: Mapping[int, Mark]

    def nonfinite(self) -> dict[str, int | None]:
        """Return the parameters whose gradients are not finite, and how many elements are not.

        None stands for at least one: the gradient was gone, or written, before anybody asked.

        Syncs: yes.
        """
        bad = (~self.norms.isfinite()).tolist()
        counts = None if self.counts is None else self.counts.tolist()
        return {
            self.names.get(p, "a parameter"): counts[index] if counts is not None else self._count(index)
            for index, p in enumerate(self.params)
            if bad[index]
        }

    def _count(self, index: int) -> int | None:
        reference, seen = self.marks[id(self.params[index])]
        grad = reference()
        if grad is None or version(grad) != seen:
            return None
        # Of a sharded gradient the part here: one rank may ask alone, so nobody waits for the others.
        values = grad.coalesce().values() if grad.is_sparse else local(grad)
        return int((~values.isfinite()).sum())


class StepFlags:
    """One step's findings, on their way from the device to the host.

    The copy is queued behind the step and waits in pinned memory; reading it waits for that step only, not for
    what was queued later.

    Args:
        flags: fp32 vector: gradients, loss and buffers not finite, scale, norm, then for each optimizer whether it
            was told to skip.
        evidence: the gradients behind it.

    Attributes:
        skipped_in_a_row: skipped steps in a row up to this one; the guard fills it in.
    """

    def __init__(self, flags: Tensor, evidence: GradStats) -> None:
        self._flags, self._event = _to_host(flags)
        self._facts: StepStats | None = None
        self.evidence = evidence
        self.skipped_in_a_row: int | None = None

    @property
    def is_read(self) -> bool:
        """Whether the host has read the findings already. Syncs: no."""
        return self._facts is not None

    def facts(self) -> StepStats:
        """Return the findings. Syncs: yes, with the end of the step they are about, once."""
        if self._facts is None:
            if self._event is not None:
                self._event.synchronize()
            gradients, loss, buffers, scale, norm, *skipped = self._flags.numpy().tolist()
            self._facts = StepStats(
                gradients_bad=bool(gradients),
                loss_bad=bool(loss),
                buffers_bad=bool(buffers),
                scale=scale,
                grad_norm=norm,
                skipped=tuple(bool(flag) for flag in skipped),
            )
        return self._facts


def _to_host(flags: Tensor) -> tuple[Tensor, torch.Event | None]:
    if flags.device.type == "cpu":
        return flags, None
    pinned = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
    pinned.copy_(flags, non_blocking=True)
    event = torch.Event(flags.device.type)
    event.record()
    return pinned, event
