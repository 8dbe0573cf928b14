"""The guard: counts what past steps found, and says when a run cannot go on. A pure transition, and its reader."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from ..errors import GradientUnderflow, LossScaleExhausted, NonFiniteStep, StoppedRun, listed, plural
from ..kernels import LateNorm
from ..loss_scale import LossScale
from ..policy import GuardConfig, ScalingConfig
from ..read_only import read_only
from .invariants import unless_out_of_memory
from .result import StepFlags, StepResult

_log = logging.getLogger("mezzo.step")
MOSTLY = 0.5
"""Share of flushed elements from which on a step's gradients are said to be lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """How many steps there were, and what was demoted in them.

    Attributes:
        seen: calls of `step`.
        applied: those that every optimizer took.
        skipped: the others.
        skipped_in_a_row: skipped steps since the last one that was taken, or that demoted.
        demoted: edits that guard.on_overflow=demote made to the policy.
    """

    seen: int = 0
    applied: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    demoted: tuple[str, ...] = ()


@read_only
class GuardState:
    """What the guard knows after the last step that was read.

    Attributes:
        counters: up to that step.
        skip: its flags, where it was skipped and nobody has dealt with it yet.
        stop: the error that ends the run; None where it can go on.
        next_scale: loss scale of the next step, as far as skips tell; inf before the first.
        small_in_a_row: steps whose gradients were so small that fp16 may have flushed most of them.
        flushed_in_a_row: steps whose gradients were all zero, and not at a larger scale.
    """

    counters: Counters = field(default_factory=Counters)
    skip: StepFlags[float] | None = None
    stop: StoppedRun | None = None
    next_scale: float = math.inf
    small_in_a_row: int = 0
    flushed_in_a_row: int = 0

    @property
    def step(self) -> int:
        """The number of that step, from 0, as traces and recordings count."""
        return self.counters.seen - 1

    @property
    def is_troubled(self) -> bool:
        """Whether the last step was skipped."""
        return self.counters.skipped_in_a_row > 0

    @property
    def is_quiet(self) -> bool:
        """Whether there is nothing to act on, and nothing to go on counting."""
        return self.skip is None and self.stop is None and not (self.is_troubled or self.small_in_a_row)

    @property
    def wants_probe(self) -> bool:
        """Whether the next backward should measure what was flushed: in the 1st, 2nd, 4th, ... step after a small one."""
        return self.small_in_a_row.bit_count() == 1 or self.flushed_in_a_row > 0


@read_only
class Suspects:
    """What may be to blame for a skipped step, weights (parameters and buffers) and gradients, by name: asked for only then, since each reads from the device."""

    weights: Callable[[], tuple[Mapping[str, int], Mapping[str, int]]]
    gradients: Callable[[], Mapping[str, int | None]]


def next_guard(
    state: GuardState,
    flags: StepFlags[float],
    suspects: Suspects,
    config: GuardConfig,
    scaling: ScalingConfig | None,
    flush_norm: float = 0.0,
) -> GuardState:
    """Return what the guard knows after one more step; suspects are asked only if it was skipped.

    Below `flush_norm`, a norm of the scaled gradients, most of them may have been flushed.
    """
    if any(flags.skipped):
        return _after_skip(state, flags, suspects, config, scaling)
    return _after_update(state, flags, config, scaling, flush_norm)


def _after_update(
    state: GuardState, flags: StepFlags[float], config: GuardConfig, scaling: ScalingConfig | None, flush_norm: float
) -> GuardState:
    was = state.counters
    is_small = config.enabled and _is_small(flags, flush_norm)
    is_flushed = config.enabled and flags.flushed > 0 and float(flags.grad_norm) == 0
    row = state.flushed_in_a_row + 1 if is_flushed else 0
    return GuardState(
        counters=Counters(seen=was.seen + 1, applied=was.applied + 1, skipped=was.skipped, demoted=was.demoted),
        skip=state.skip if state.stop is not None else None,
        stop=_underflow(row, flags, scaling) if state.stop is None and row >= config.patience else state.stop,
        next_scale=state.next_scale,
        small_in_a_row=state.small_in_a_row + 1 if is_small else 0,
        flushed_in_a_row=row,
    )


def _is_small(flags: StepFlags[float], flush_norm: float) -> bool:
    norm = flags.grad_norm
    return norm.is_at_most(flush_norm, flags.scale) if isinstance(norm, LateNorm) else norm * flags.scale <= flush_norm


def _after_skip(
    state: GuardState, flags: StepFlags[float], suspects: Suspects, config: GuardConfig, scaling: ScalingConfig | None
) -> GuardState:
    was = state.counters
    row = was.skipped_in_a_row + 1
    counters = replace(was, seen=was.seen + 1, skipped=was.skipped + 1, skipped_in_a_row=row)
    after = replace(state, counters=counters, small_in_a_row=0, flushed_in_a_row=0)
    if not config.enabled:
        return after
    return replace(
        after,
        skip=flags,
        stop=state.stop or _stop(counters, flags, suspects, config, scaling),
        next_scale=state.next_scale if scaling is None else flags.scale * scaling.backoff_factor,
    )


def _stop(
    counters: Counters, flags: StepFlags[float], suspects: Suspects, config: GuardConfig, scaling: ScalingConfig | None
) -> StoppedRun | None:
    counted = [_count(bad, noun) for bad, noun in zip(suspects.weights(), ("parameter", "buffer"), strict=True) if bad]
    if counted:
        return NonFiniteStep(
            f"step {counters.seen - 1} was skipped, and no loss scale can fix it: {'; '.join(counted)}",
            "Load the last good checkpoint; mezzo.diagnose.trace(model) names the op that makes the first inf or NaN.",
            is_batch_to_blame=False,
        )
    row = counters.skipped_in_a_row
    skipped = f"{row} steps in a row were skipped" if row > 1 else "the step was skipped"
    if scaling is not None and flags.reason == "gradients":
        loss_scale = LossScale(scale=flags.scale, skipped_in_a_row=row - 1)
        if not loss_scale.is_exhausted(True, scaling, config.patience):
            return None
        lowest = f"floor {scaling.min_scale:g}" if scaling.dynamic else "fixed"
        return LossScaleExhausted(
            f"{skipped}, the last at loss scale {flags.scale:g} ({lowest}): {_count_gradients(suspects.gradients())}",
            _overflow_advice(flags.scale, scaling),
        )
    if row < config.patience:
        return None
    what = f"the {flags.reason} of each was inf or NaN" if row > 1 else f"its {flags.reason} was inf or NaN"
    if flags.reason == "gradients":
        what = _count_gradients(suspects.gradients())
    return NonFiniteStep(
        f"{skipped} (guard.patience={config.patience}): {what}",
        "mezzo.diagnose.trace(model) names the op that makes the first inf or NaN.",
    )


def _overflow_advice(scale: float, scaling: ScalingConfig) -> str:
    """Return what to write against gradients that overflow at a loss scale, which helps where it may be made smaller."""
    if scaling.dynamic and scale > scaling.min_scale:
        return (
            "The scale was still falling: write a smaller scaling.init_scale in the policy, or a larger guard.patience."
        )
    if scale > 1 and scaling.dynamic:
        return "The scale may not fall further: write a smaller scaling.min_scale in the policy."
    if scale > 1:
        return "Nothing lowers a fixed scale: write scaling=dynamic in the policy, which finds one that fits."
    return (
        "A smaller scale does not help; mezzo.diagnose.trace(model) names the op, and a rule such as 'NAME=fp32' for its "
        "module fixes an fp16 overflow."
    )


def _underflow(row: int, flags: StepFlags[float], scaling: ScalingConfig | None) -> StoppedRun:
    return GradientUnderflow(
        f"every gradient of the last {row} steps was zero because fp16 flushed it: at a larger loss scale than "
        f"{flags.scale:g}, {flags.flushed:.0%} of the elements are not",
        underflow_advice(scaling),
        is_batch_to_blame=False,
    )


def underflow_advice(scaling: ScalingConfig | None) -> str:
    """Return what to write against gradients that flush to zero."""
    if scaling is None or not scaling.dynamic:
        return "Write scaling=dynamic in the policy, or compute in bf16."
    return "Write a larger init_scale in the policy's scaling, or compute in bf16."


def _count(counts: Mapping[str, int | None], noun: str) -> str:
    shown = [f"{name} ({'at least 1' if count is None else count})" for name, count in counts.items()]
    return f"inf or NaN in {len(counts)} {plural(noun, len(counts))}: {listed(shown, 5)}"


def _count_gradients(found: Mapping[str, int | None]) -> str:
    if not found:
        return "the norm of the gradients is beyond fp32, though each element is finite"
    return _count(found, "gradient")


class Guard:
    """Reads the results of past steps, one step late where the device decides, so that it never waits.

    A late reading harms nothing: the device has left out the bad steps already.

    Args:
        nonfinite_weights: counts inf and NaN in the parameters and buffers that a step may have read, by name, given whether one was taken before; asked only about a bad one.
        flush_norm: see `next_guard`.

    Attributes:
        is_troubled: whether the last step that was read was skipped.
        may_stop: whether the next step may be the last one, or the first that needs a diagnosis.
        last_norm: of the gradients of the last step that was taken; None before the first.
    """

    def __init__(
        self,
        config: GuardConfig,
        scaling: ScalingConfig | None,
        nonfinite_weights: Callable[[StepResult, bool], tuple[Mapping[str, int], Mapping[str, int]]],
        flush_norm: float = 0.0,
    ) -> None:
        self.config, self.scaling, self._nonfinite_weights = config, scaling, nonfinite_weights
        self.flush_norm = flush_norm
        self._unread: list[StepResult] = []
        self.last_norm: LateNorm | float | None = None
        self.become(GuardState(next_scale=math.inf if scaling is None else scaling.init_scale))

    def become(self, state: GuardState) -> None:
        """Take a state for what is known after the last step that was read."""
        self._state, self._uneventful, config = state, 0, self.config
        self.is_troubled, self._is_quiet = state.is_troubled, state.is_quiet
        is_at_floor = self.scaling is not None and state.next_scale <= self.scaling.min_scale
        always = config.patience == 1 or config.on_overflow == "demote" or is_at_floor
        self.may_stop = config.enabled and (always or state.is_troubled)

    @property
    def state(self) -> GuardState:
        """After the last step that was read. Uneventful ones, which change nothing but counters, are counted when it is asked for."""
        if self._uneventful:
            counters, num = self._state.counters, self._uneventful
            counters = replace(counters, seen=counters.seen + num, applied=counters.applied + num)
            self._state, self._uneventful = replace(self._state, counters=counters), 0
        return self._state

    @property
    def is_last_chance(self) -> bool:
        """Whether the next step, or the one after it, will stop the run if it is skipped. Syncs: no."""
        config, scaling, state = self.config, self.scaling, self.state
        # The last step may not have been read yet.
        is_at_floor = scaling is not None and state.next_scale * scaling.backoff_factor <= scaling.min_scale
        is_near = is_at_floor or state.counters.skipped_in_a_row + 2 >= config.patience
        return config.enabled and state.is_troubled and is_near

    @property
    def last(self) -> StepResult | int:
        """The last step, or, where it was read, how many were skipped in a row up to it."""
        return self._unread[-1] if self._unread else self._state.counters.skipped_in_a_row

    def wants_probe(self, *, is_alone: bool) -> bool:
        """Whether the next backward should measure what fp16 flushed: the same answer on all ranks. Syncs: no."""
        if is_alone:
            self.read(wait=False)
        return self._state.wants_probe

    def add(self, result: StepResult) -> None:
        """Take note of a step. Syncs: no."""
        self._unread.append(result)

    def read(self, *, wait: bool = True, unread: int = 0) -> None:
        """Bring the state up to the last step but the `unread` ones; without `wait` to the last that has arrived. Syncs: with it; no without `wait`."""
        for result in self._unread[: -unread or None]:
            if not (wait or result.has_arrived):
                return
            self._read(result)

    def poll(self, unread: int = 0) -> GuardState | None:
        """Return the state after the last step if there is something to act on; what it says of a skip is said once. Syncs: as `read`."""
        self.read(unread=unread)
        if self._is_quiet:
            return None
        state = self.state
        if state.skip is not None or state.stop is not None:
            self.become(replace(state, skip=None, stop=None))
        return state

    def _read(self, result: StepResult) -> None:
        flags = result.flags()
        if flags.applied:
            self.last_norm = flags.grad_norm
        has_flushed = flags.flushed > 0 or _is_small(flags, self.flush_norm)
        is_uneventful = self._is_quiet and flags.applied and not has_flushed
        if not is_uneventful:
            was = self.state.counters
            look = partial(self._nonfinite_weights, result, was.applied > 0)
            suspects = Suspects(
                weights=lambda: unless_out_of_memory(look, was.seen) or ({}, {}), gradients=result.stats.nonfinite
            )
            after = next_guard(self.state, flags, suspects, self.config, self.scaling, self.flush_norm)
        try:
            self._unread.remove(result)  # not before: what is interrupted is read again
        except ValueError:  # a signal's handler has read it meanwhile
            return
        if is_uneventful:
            self._uneventful += 1
            return
        self.become(after)
        counters = after.counters
        if counters.skipped_in_a_row.bit_count() == 1:  # the 1st, 2nd, 4th, 8th
            _log.warning(
                "step %d skipped (%d in a row, %d in all): %s not finite; loss scale %g",
                after.step, counters.skipped_in_a_row, counters.skipped, flags.reason, flags.scale,
            )  # fmt: skip
        if flags.flushed > MOSTLY and (after.flushed_in_a_row or after.small_in_a_row).bit_count() == 1:
            _log.warning(
                "step %d: fp16 flushed %.0f%% of the gradients' elements to zero, at loss scale %g. %s",
                after.step, 100 * flags.flushed, flags.scale, underflow_advice(self.scaling),
            )  # fmt: skip
