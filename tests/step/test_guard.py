"""The guard as a table: state, what a step found, and what is known after it. No model, no tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace

import pytest

from mezzo.errors import GradientUnderflow, LossScaleExhausted, NonFiniteStep, StoppedRun
from mezzo.policy import GuardConfig, ScalingConfig
from mezzo.step.guard import Counters, GuardState, Suspects, next_guard
from mezzo.step.result import StepFlags

CONFIG = GuardConfig(patience=4)
SCALING = ScalingConfig(init_scale=8.0)
CLEAN: StepFlags[float] = StepFlags(
    gradients_bad=0, loss_bad=0, buffers_bad=0, scale=1.0, grad_norm=1.0, flushed=0.0, norms=(1.0,), skipped=(0.0,)
)
BAD = replace(CLEAN, gradients_bad=1.0, skipped=(1.0,), grad_norm=math.inf)
BAD_LOSS = replace(BAD, loss_bad=1.0, gradients_bad=0.0)
FLUSHED = replace(CLEAN, grad_norm=0.0, flushed=1.0)


def suspects(weights: Mapping[str, int] | None = None, gradients: Mapping[str, int | None] | None = None) -> Suspects:
    return Suspects(weights=lambda: (weights or {}, {}), gradients=lambda: gradients or {})


def nobody() -> Suspects:
    def fail() -> tuple[Mapping[str, int], Mapping[str, int]]:
        raise AssertionError("a healthy step asks nobody")

    return Suspects(weights=fail, gradients=lambda: fail()[0])


def after(
    *steps: StepFlags[float],
    config: GuardConfig = CONFIG,
    scaling: ScalingConfig | None = None,
    who: Suspects | None = None,
    start: GuardState | None = None,
    floor: float = 0.0,
) -> GuardState:
    state = start or GuardState()
    for flags in steps:
        state = next_guard(state, flags, who or (nobody() if flags.applied else suspects()), config, scaling, floor)
    return state


@pytest.mark.parametrize(
    ("steps", "counters"),
    [
        ((), Counters()),
        ((CLEAN,), Counters(seen=1, applied=1)),
        ((CLEAN, BAD), Counters(seen=2, applied=1, skipped=1, skipped_in_a_row=1)),
        ((BAD, BAD_LOSS), Counters(seen=2, skipped=2, skipped_in_a_row=2)),
        ((BAD, BAD, CLEAN, BAD), Counters(seen=4, applied=1, skipped=3, skipped_in_a_row=1)),
    ],
)
def test_counters(steps: tuple[StepFlags[float], ...], counters: Counters) -> None:
    assert after(*steps).counters == counters


def test_a_state_is_never_written() -> None:
    start = GuardState()
    after(BAD, start=start)
    assert asdict(start) == asdict(GuardState())


@pytest.mark.parametrize(("steps", "skip"), [((BAD,), BAD), ((BAD, BAD_LOSS), BAD_LOSS), ((BAD, CLEAN), None)])
def test_the_last_skip_waits_until_somebody_deals_with_it(steps: tuple[StepFlags[float], ...], skip: object) -> None:
    assert after(*steps).skip is skip


def test_without_the_guard_steps_are_counted_and_nothing_stops() -> None:
    state = after(*[BAD] * 9, config=replace(CONFIG, enabled=False), who=nobody())
    assert (state.counters.skipped_in_a_row, state.skip, state.stop) == (9, None, None)


class TestStops:
    def stop(self, *steps: StepFlags[float], **arguments: object) -> StoppedRun | None:
        return after(*steps, **arguments).stop  # type: ignore[arg-type]

    @pytest.mark.parametrize("bad", [BAD, BAD_LOSS])
    def test_after_patience(self, bad: StepFlags[float]) -> None:
        assert self.stop(*[bad] * 3) is None
        stop = self.stop(*[bad] * 4)
        assert isinstance(stop, NonFiniteStep) and str(stop).startswith(
            "4 steps in a row were skipped (guard.patience=4): "
        )

    def test_a_clean_step_gives_patience_back(self) -> None:
        assert self.stop(BAD, BAD, BAD, CLEAN, BAD, BAD, BAD) is None

    def test_at_the_floor_of_the_scale(self) -> None:
        scales = [replace(BAD, scale=scale) for scale in (4.0, 2.0, 1.0)]
        assert self.stop(*scales[:2], scaling=SCALING) is None
        stop = self.stop(*scales, scaling=SCALING, who=suspects(gradients={"w": 3}))
        assert isinstance(stop, LossScaleExhausted)
        assert "loss scale 1 (floor 1): inf or NaN in 1 gradient: w (3)" in str(stop)

    @pytest.mark.parametrize(
        ("scaling", "scale", "words"),
        [
            (ScalingConfig.fixed(2.0**32), 2.0**32, "write scaling=dynamic"),
            (ScalingConfig(init_scale=2.0**90), 2.0**86, "write a smaller scaling.init_scale"),
            (ScalingConfig(init_scale=2048.0, min_scale=1024.0), 1024.0, "write a smaller scaling.min_scale"),
            (ScalingConfig.fixed(1.0), 1.0, "A smaller scale does not help"),
            (SCALING, 1.0, "A smaller scale does not help"),
        ],
    )
    def test_what_helps_where_the_scale_may_be_made_smaller(
        self, scaling: ScalingConfig, scale: float, words: str
    ) -> None:
        stop = self.stop(*[replace(BAD, scale=scale)] * 4, scaling=scaling)
        assert isinstance(stop, LossScaleExhausted) and words in stop.advice

    def test_a_bad_loss_never_exhausts_the_scale(self) -> None:
        assert self.stop(replace(BAD_LOSS, scale=1.0), scaling=SCALING) is None

    def test_bad_weights_stop_at_once_and_by_name(self) -> None:
        stop = self.stop(BAD, who=suspects(weights={"inner.weight": 2}), scaling=SCALING)
        assert isinstance(stop, NonFiniteStep) and not stop.is_batch_to_blame
        assert "step 0 was skipped, and no loss scale can fix it: inf or NaN in 1 parameter: inner.weight (2)" in str(
            stop
        )

    def test_the_first_reason_stays(self) -> None:
        first = after(BAD, who=suspects(weights={"w": 1}))
        later = after(BAD, start=first, who=suspects(weights={"v": 1}))
        assert later.stop is first.stop

    def test_a_norm_beyond_fp32_is_said_as_what_it_is(self) -> None:
        assert "the norm of the gradients is beyond fp32" in str(self.stop(*[BAD] * 4))

    def test_the_next_scale_follows_the_skips(self) -> None:
        assert after(replace(BAD, scale=8.0), scaling=SCALING).next_scale == 4.0
        assert after(BAD).next_scale == math.inf


class TestUnderflow:
    @pytest.mark.parametrize(
        ("norms", "row", "probes"),
        [((1.0,), 0, False), ((0.1,), 1, True), ((0.1, 0.0), 2, True), ((0.1,) * 3, 3, False), ((0.1,) * 4, 4, True),
         ((0.1, 1.0), 0, False)],
    )  # fmt: skip
    def test_small_gradients_are_counted_and_measured_ever_more_rarely(
        self, norms: tuple[float, ...], row: int, probes: bool
    ) -> None:
        state = after(*[replace(CLEAN, grad_norm=norm) for norm in norms], floor=0.5)
        assert (state.small_in_a_row, state.wants_probe, state.is_quiet) == (row, probes, row == 0)

    def test_the_floor_is_that_of_scaled_gradients(self) -> None:
        assert after(replace(CLEAN, grad_norm=0.1, scale=1024.0), floor=0.5).small_in_a_row == 0

    def test_patience_times_flushed_is_an_error(self) -> None:
        three = after(*[FLUSHED] * 3)
        assert three.stop is None and three.wants_probe and not three.is_quiet
        stop = after(*[FLUSHED] * 4).stop
        assert isinstance(stop, GradientUnderflow)
        assert str(stop) == (
            "every gradient of the last 4 steps was zero because fp16 flushed it: at a larger loss scale than 1, 100% of "
            "the elements are not. Write scaling=dynamic in the policy, or compute in bf16."
        )

    @pytest.mark.parametrize(
        "other", [CLEAN, BAD, replace(FLUSHED, grad_norm=0.1), replace(FLUSHED, flushed=0.0)],
        ids=["clean", "skipped", "not all of them", "zero in fp32 too"],
    )  # fmt: skip
    def test_any_other_step_starts_the_row_anew(self, other: StepFlags[float]) -> None:
        assert after(*[FLUSHED] * 3, other, *[FLUSHED] * 3).stop is None

    def test_true_zeros_are_no_fault(self) -> None:
        assert after(*[replace(CLEAN, grad_norm=0.0)] * 99).stop is None
