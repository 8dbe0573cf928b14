"""The guard: keeps count of skipped steps, says what was wrong with them, and stops a run that cannot recover."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import LossScaleExhausted, NonFiniteStep
from ..loss_scale.state import LossScale
from ..policy import Policy
from .flags import Reason, StepFlags, StepStats

if TYPE_CHECKING:
    from ..trace import Diagnosis

_log = logging.getLogger("mezzo.step")


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """How many steps there were, and what was demoted in them.

    Attributes:
        seen: calls of `step`.
        applied: those that every optimizer took.
        skipped: the others.
        skipped_in_a_row: skipped steps since the last one that was taken.
        demoted: edits that guard.on_overflow=demote made to the policy.
    """

    seen: int = 0
    applied: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    demoted: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Why a run cannot go on.

    Attributes:
        kind: the error to raise.
        what: what happened.
        advice: what to do, where no diagnosis says it.
        is_batch_to_blame: running the last batch again may show the cause.
    """

    kind: type[NonFiniteStep] | type[LossScaleExhausted]
    what: str
    advice: str
    is_batch_to_blame: bool = True

    def error(self, diagnosis: Diagnosis | None = None) -> NonFiniteStep | LossScaleExhausted:
        """Return the error, with what running the last batch again has shown."""
        is_found = diagnosis is not None and bool(diagnosis.sentence)
        advice = f"{diagnosis.sentence} {diagnosis.fix}" if diagnosis is not None and is_found else self.advice
        error = self.kind(f"{self.what}. {advice}")
        error.report = None if diagnosis is None else diagnosis.report
        return error


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipInfo:
    """The last step that was read, where it was skipped.

    Attributes:
        step: its number, from 0.
        reason: what was not finite.
        scale: loss scale of its gradients.
        stop: why the run cannot go on; None where it can.
    """

    step: int
    reason: Reason | None
    scale: float
    stop: Stop | None


class Guard:
    """Reads the verdicts of past steps, one step late where the device decides, so that it never waits.

    A late reading harms nothing: the device has left out the bad steps already.

    Args:
        policy: its guard and scaling.
        nonfinite_weights: counts inf and NaN in parameters and in buffers, by name; asked only about a bad step.

    Attributes:
        policy: as given, or the one that demotion made of it.
        counters: up to the last step that was read.
    """

    def __init__(
        self, policy: Policy, nonfinite_weights: Callable[[], tuple[Mapping[str, int], Mapping[str, int]]]
    ) -> None:
        self.policy = policy
        self._nonfinite_weights = nonfinite_weights
        self._waiting: list[StepFlags] = []
        self._trouble: SkipInfo | None = None
        self._next_scale = math.inf if policy.scaling is None else policy.scaling.init_scale
        self.counters = Counters()

    @property
    def is_troubled(self) -> bool:
        """Whether the last step that was read was skipped. Syncs: no."""
        return self.counters.skipped_in_a_row > 0

    @property
    def may_stop(self) -> bool:
        """Whether the next step may be the last one, or the first that needs a diagnosis. Syncs: no."""
        guard, scaling = self.policy.guard, self.policy.scaling
        is_at_floor = scaling is not None and self._next_scale <= scaling.min_scale
        always = guard.patience == 1 or guard.on_overflow == "demote" or is_at_floor
        return guard.enabled and (always or self.is_troubled)

    @property
    def is_last_chance(self) -> bool:
        """Whether the next step, or the one after it, will stop the run if it is skipped. Syncs: no."""
        guard, scaling = self.policy.guard, self.policy.scaling
        # The last step may not have been read yet.
        is_at_floor = scaling is not None and self._next_scale * scaling.backoff_factor <= scaling.min_scale
        return (
            guard.enabled and self.is_troubled and (is_at_floor or self.counters.skipped_in_a_row + 2 >= guard.patience)
        )

    def push(self, verdict: StepFlags) -> None:
        """Take note of a step. Syncs: no."""
        self._waiting.append(verdict)

    def settle(self) -> Counters:
        """Bring the counters up to the last step. Syncs: with the last step."""
        while self._waiting:
            self._count(self._waiting.pop(0))
        return self.counters

    def take(self) -> SkipInfo | None:
        """Bring the counters up to the last step; return, once, what was wrong with it. Syncs: with the last step."""
        self.settle()
        trouble, self._trouble = self._trouble, None
        return trouble

    def _count(self, verdict: StepFlags) -> None:
        facts, now = verdict.facts(), self.counters
        if facts.applied:
            self.counters = replace(now, seen=now.seen + 1, applied=now.applied + 1, skipped_in_a_row=0)
            if self._trouble is not None and self._trouble.stop is None:
                self._trouble = None
        else:
            row = now.skipped_in_a_row + 1
            self.counters = replace(now, seen=now.seen + 1, skipped=now.skipped + 1, skipped_in_a_row=row)
            self._log_skip(verdict, facts)
            if self.policy.guard.enabled:
                self._note(verdict, facts)
        verdict.skipped_in_a_row = self.counters.skipped_in_a_row

    def _note(self, verdict: StepFlags, facts: StepStats) -> None:
        before, scaling = self._trouble, self.policy.scaling
        stop = before.stop if before is not None and before.stop is not None else self._judge(verdict, facts)
        self._trouble = SkipInfo(step=self.counters.seen - 1, reason=facts.reason, scale=facts.scale, stop=stop)
        if scaling is not None:
            self._next_scale = facts.scale * scaling.backoff_factor

    def _log_skip(self, verdict: StepFlags, facts: StepStats) -> None:
        row = self.counters.skipped_in_a_row
        if row & (row - 1) == 0:  # the 1st, 2nd, 4th, 8th, ... of a row
            _log.warning(
                "step %d skipped (%d in a row, %d in all): %s not finite; loss scale %g",
                self.counters.seen, row, self.counters.skipped, facts.reason, facts.scale,
            )  # fmt: skip

    def _judge(self, verdict: StepFlags, facts: StepStats) -> Stop | None:
        parameters, buffers = self._nonfinite_weights()
        if parameters or buffers:
            return Stop(
                kind=NonFiniteStep,
                what=f"step {self.counters.seen} was skipped, and no loss scale can mend it: "
                f"{_spell_weights(parameters, buffers)}",
                advice="Load the last good checkpoint; mezzo.diagnose.trace(model) names the op that makes the first "
                "inf or NaN.",
                is_batch_to_blame=False,
            )
        row, scaling, patience = self.counters.skipped_in_a_row, self.policy.scaling, self.policy.guard.patience
        if scaling is not None and facts.reason == "gradients":
            state = LossScale(scale=facts.scale, skipped_in_a_row=row - 1)
            if not state.is_exhausted(True, scaling, patience):
                return None
            return Stop(
                kind=LossScaleExhausted,
                what=f"{_spell_row(row)}, the last at loss scale {facts.scale:g} "
                f"(floor {scaling.min_scale:g}): {_spell_gradients(verdict)}",
                advice="A smaller scale does not help; mezzo.diagnose.trace(model) "
                "names the op, and a rule such as 'NAME=fp32' for its module mends an fp16 overflow.",
            )
        if row < patience:
            return None
        loss = f"the {facts.reason} of each was inf or NaN" if row > 1 else f"its {facts.reason} was inf or NaN"
        what = _spell_gradients(verdict) if facts.reason == "gradients" else loss
        return Stop(
            kind=NonFiniteStep,
            what=f"{_spell_row(row)} (guard.patience={patience}): {what}",
            advice="mezzo.diagnose.trace(model) names the op that makes the first inf or NaN.",
        )


def _spell_row(row: int) -> str:
    return f"{row} steps in a row were skipped" if row > 1 else "the step was skipped"


def _spell_counts(counts: Mapping[str, int | None], noun: str, limit: int = 5) -> str:
    shown = [f"{name} ({'at least 1' if count is None else count})" for name, count in list(counts.items())[:limit]]
    more = f" and {len(counts) - limit} more" if len(counts) > limit else ""
    return f"inf or NaN in {len(counts)} {noun}{'s' if len(counts) > 1 else ''}: {', '.join(shown)}{more}"


def _spell_weights(parameters: Mapping[str, int], buffers: Mapping[str, int]) -> str:
    return "; ".join(
        _spell_counts(counts, noun) for counts, noun in ((parameters, "parameter"), (buffers, "buffer")) if counts
    )


def _spell_gradients(verdict: StepFlags) -> str:
    found = verdict.evidence.nonfinite()
    if not found:
        return "the norm of the gradients is beyond fp32, though each element is finite"
    return _spell_counts(found, "gradient")
