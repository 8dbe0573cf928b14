"""What a step says about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from types import MappingProxyType

from .flags import Reason, StepFlags


class StepResult:
    """What one step did. Every field is read from the device when it is asked for, and not before.

    True as a whole if the step was taken, so that `if amp.step(): ...` means what it says.

    Args:
        verdict: the step's findings.
        settle: brings the guard's counters up to this step.
    """

    __slots__ = ("_settle", "_verdict")

    def __init__(self, verdict: StepFlags, settle: Callable[[], object]) -> None:
        self._verdict = verdict
        self._settle = settle

    @property
    def is_read(self) -> bool:
        """Whether the host has read the findings already. Syncs: no."""
        return self._verdict.is_read

    @property
    def applied(self) -> bool:
        """Whether every optimizer that had gradients took its step. Syncs: once."""
        return self._verdict.facts().applied

    @property
    def optimizers(self) -> tuple[bool, ...]:
        """Whether each optimizer that had gradients took its step, in the order given to `prepare`. Syncs: once."""
        return tuple(not skipped for skipped in self._verdict.facts().skipped)

    @property
    def reason(self) -> Reason | None:
        """What was not finite first: "loss", "gradients" or "buffers"; None if the step was taken. Syncs: once."""
        return self._verdict.facts().reason

    @property
    def scale(self) -> float:
        """The loss scale that this step's gradients carried; 1.0 without scaling. Syncs: once."""
        return self._verdict.facts().scale

    @property
    def grad_norm(self) -> float:
        """L2 norm of the true gradients before clipping; with several optimizers, of all of them. Syncs: once."""
        return self._verdict.facts().grad_norm

    @property
    def nonfinite(self) -> Mapping[str, int | None]:
        """Parameters whose gradients were not finite, with the number of elements. Syncs: yes.

        The number is None (at least one) if it is asked for after the gradients were dropped, in the first skipped
        step of a row.
        """
        return MappingProxyType({} if self.applied else self._verdict.evidence.nonfinite())

    @property
    def skipped_in_a_row(self) -> int:
        """How many steps in a row were skipped, this one included; 0 after a step that was taken. Syncs: once."""
        self._settle()
        assert self._verdict.skipped_in_a_row is not None
        return self._verdict.skipped_in_a_row

    def __bool__(self) -> bool:
        return self.applied

    def _repr_html_(self) -> str:
        """Return what a notebook shows."""
        return f"<code>{escape(repr(self))}</code>"

    def __repr__(self) -> str:
        facts = self._verdict.facts()
        what = "applied" if facts.applied else f"skipped: {facts.reason} not finite"
        return f"StepResult({what}, scale={facts.scale:g}, grad_norm={facts.grad_norm:.6g})"
