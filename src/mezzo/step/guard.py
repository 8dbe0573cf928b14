"""The guard: keeps count of skipped steps, says what was wrong with them, and stops a run that cannot recover."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..errors import LossScaleExhausted, MezzoError, NonFiniteStep
from ..policy import Policy
from ..scaling.state import LossScale
from .verdict import Facts, Verdict

_log = logging.getLogger("mezzo.step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """How many steps there were.

    Attributes:
        seen: calls of `step`.
        applied: those that every optimizer took.
        skipped: the others.
        skipped_in_a_row: skipped steps since the last one that was taken.
    """

    seen: int = 0
    applied: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0


class Guard:
    """Reads the verdicts of past steps, one step late where the device decides, so that it never waits.

    A late reading harms nothing: the device has left out the bad steps already.

    Args:
        policy: its guard and scaling.
        nonfinite_weights: counts inf and NaN in parameters and in buffers, by name; asked only about a bad step.
    """

    def __init__(
        self, policy: Policy, nonfinite_weights: Callable[[], tuple[Mapping[str, int], Mapping[str, int]]]
    ) -> None:
        self._policy = policy
        self._nonfinite_weights = nonfinite_weights
        self._waiting: list[Verdict] = []
        self._error: MezzoError | None = None
        self.counters = Counters()

    @property
    def is_troubled(self) -> bool:
        """Whether the last step that was read was skipped. Syncs: no."""
        return self.counters.skipped_in_a_row > 0

    def push(self, verdict: Verdict) -> None:
        """Take note of a step. Syncs: no."""
        self._waiting.append(verdict)

    def settle(self) -> Counters:
        """Bring the counters up to the last step. Syncs: with the last step."""
        while self._waiting:
            self._count(self._waiting.pop(0))
        return self.counters

    def check(self) -> None:
        """Bring the counters up to the last step, and stop the run if that showed that it cannot go on.

        Raises:
            NonFiniteStep: parameters or buffers are not finite, or too many steps in a row were skipped.
            LossScaleExhausted: the loss scale cannot shrink any more, or too many steps in a row were skipped.

        Syncs: with the last step.
        """
        error = self.take_error()
        if error is not None:
            raise error

    def take_error(self) -> MezzoError | None:
        """Bring the counters up to the last step; return, once, what `check` would raise. Syncs: with the last step."""
        self.settle()
        error, self._error = self._error, None
        return error

    def _count(self, verdict: Verdict) -> None:
        facts, now = verdict.facts(), self.counters
        if facts.applied:
            self.counters = replace(now, seen=now.seen + 1, applied=now.applied + 1, skipped_in_a_row=0)
        else:
            row = now.skipped_in_a_row + 1
            self.counters = replace(now, seen=now.seen + 1, skipped=now.skipped + 1, skipped_in_a_row=row)
            self._log_skip(verdict, facts)
            if self._policy.guard.enabled:
                self._error = self._error or self._judge(verdict, facts)
        verdict.skipped_in_a_row = self.counters.skipped_in_a_row

    def _log_skip(self, verdict: Verdict, facts: Facts) -> None:
        row = self.counters.skipped_in_a_row
        if row & (row - 1) == 0:  # the 1st, 2nd, 4th, 8th, ... of a row
            _log.warning(
                "step %d skipped (%d in a row, %d in all): %s not finite; loss scale %g",
                self.counters.seen, row, self.counters.skipped, facts.reason, facts.scale,
            )  # fmt: skip

    def _judge(self, verdict: Verdict, facts: Facts) -> MezzoError | None:
        parameters, buffers = self._nonfinite_weights()
        if parameters or buffers:
            return NonFiniteStep(
                f"step {self.counters.seen} was skipped, and no loss scale can mend it: "
                f"{_spell_weights(parameters, buffers)}. Load the last good checkpoint; "
                "mezzo.diagnose.trace(model) names the op that makes the first inf or NaN."
            )
        row, scaling, patience = self.counters.skipped_in_a_row, self._policy.scaling, self._policy.guard.patience
        if scaling is not None and facts.reason == "gradients":
            state = LossScale(scale=facts.scale, skipped_in_a_row=row - 1)
            if not state.is_exhausted(True, scaling, patience):
                return None
            return LossScaleExhausted(
                f"{row} steps in a row were skipped, the last at loss scale {facts.scale:g} (floor {scaling.min_scale:g}): "
                f"{_spell_gradients(verdict)}. A smaller scale does not help; mezzo.diagnose.trace(model) "
                "names the op, and a rule such as 'NAME=fp32' for its module mends an fp16 overflow."
            )
        if row < patience:
            return None
        what = (
            _spell_gradients(verdict) if facts.reason == "gradients" else f"the {facts.reason} of each was inf or NaN"
        )
        return NonFiniteStep(
            f"{row} steps in a row were skipped (guard.patience={patience}): {what}. "
            "mezzo.diagnose.trace(model) names the op that makes the first inf or NaN."
        )


def _spell_counts(counts: Mapping[str, int | None], noun: str, limit: int = 5) -> str:
    shown = [f"{name} ({'at least 1' if count is None else count})" for name, count in list(counts.items())[:limit]]
    more = f" and {len(counts) - limit} more" if len(counts) > limit else ""
    return f"inf or NaN in {len(counts)} {noun}{'s' if len(counts) > 1 else ''}: {', '.join(shown)}{more}"


def _spell_weights(parameters: Mapping[str, int], buffers: Mapping[str, int]) -> str:
    return "; ".join(
        _spell_counts(counts, noun) for counts, noun in ((parameters, "parameter"), (buffers, "buffer")) if counts
    )


def _spell_gradients(verdict: Verdict) -> str:
    found = verdict.evidence.nonfinite()
    if not found:
        return "the norm of the gradients is beyond fp32, though each element is finite"
    return _spell_counts(found, "gradient")
