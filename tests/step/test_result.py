"""What a step finds: packed and unpacked without loss, and which optimizers skip for what."""

from __future__ import annotations

import copy
import math
import pickle
import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from tests.step.step_models import wait_for_nothing
from torch import nn

import mezzo
from mezzo.errors import StepAttributeError, StepTypeError
from mezzo.loss_scale import AccumulationState
from mezzo.step.gradients import OptimizerGrads, grads_of
from mezzo.step.result import Skip, StepFlags, check_grads

INF = math.inf
CPU = torch.device("cpu")


def pending(scale: float | None = None, **flags: Any) -> AccumulationState:
    return AccumulationState(None if scale is None else torch.tensor(scale), CPU, **flags)


def grads(*values: list[float], scale: float = 1.0) -> list[OptimizerGrads]:
    """Return one optimizer with one parameter for each list of gradients."""
    optimizers = []
    for value in values:
        p = nn.Parameter(torch.zeros(len(value)))
        p.grad = torch.tensor(value)
        optimizers.append(torch.optim.SGD([p]))
    return grads_of(dict(enumerate(optimizers)), None if scale == 1.0 else torch.tensor(scale).reciprocal())


def check(
    found: list[OptimizerGrads], state: AccumulationState, skip: Skip = "together", **others: Any
) -> StepFlags[float]:
    """Return what the host finds, after a look whether a device that it does not wait for finds the same."""
    written = others.get("written", [])
    known = check_grads(found, state, written, skip, None, len(found))
    with pytest.MonkeyPatch.context() as patch:
        wait_for_nothing(patch)
        on_device = check_grads(found, on_its_way(state), written, skip, None, len(found))
    assert known.is_known and not on_device.is_known
    numbers: StepFlags[float] = StepFlags.unpack(on_device.vector)
    for name in (f.name for f in fields(StepFlags)):
        assert repr(getattr(numbers, name)) == repr(getattr(known, name)), name
    return known


def on_its_way(state: AccumulationState) -> AccumulationState:
    """Return a state whose flags are tensors, as an accelerator has them."""
    seen = {index: torch.tensor(bad) for index, bad in state.gradients_bad.items()}
    bad = torch.tensor(True) if state.penalty_bad else False
    return replace(state, penalty_bad=bad, loss_bad=torch.tensor(state.loss_bad), gradients_bad=seen)


def _values(flags: StepFlags[Any]) -> list[Any]:
    each = [getattr(flags, f.name) for f in fields(StepFlags) if f.name != "vector"]
    return [value for one in each for value in (one if isinstance(one, tuple) else (one,))]


class TestPacking:
    @pytest.mark.parametrize("num", [1, 2, 5])
    @pytest.mark.parametrize("clips", [False, True])
    def test_the_host_reads_what_the_device_has(self, num: int, clips: bool) -> None:
        vector = torch.arange(1.0, 10 + 5 * num)
        there, here = StepFlags.of(vector, num, clips=clips), StepFlags.unpack(vector)
        assert len(there.norms) == len(there.skipped) == num
        assert len(there.clip_coefs) == len(there.divisors) == num * clips
        read = [float(value) for value in _values(there)]
        assert read[: len(_values(here))] == _values(here)
        assert len(set(read)) == len(read), "no slot is read twice"

    def test_optimizers_that_skip_together_share_one_flag(self) -> None:
        vector = torch.arange(1.0, 20.0)
        together, apart = (StepFlags.of(vector, 2, clips=False, together=one) for one in (True, False))
        assert together.void is together.skipped[0] is together.skipped[1]
        assert apart.skipped[0] is not apart.skipped[1] and float(apart.void) == float(max(apart.skipped))

    @pytest.mark.parametrize(
        ("loss", "gradients", "buffers", "reason"),
        [
            (0, 0, 1, "buffers"), (0, 1, 0, "gradients"), (0, 1, 1, "gradients"), (1, 0, 0, "loss"),
            (1, 1, 0, "loss"), (1, 1, 1, "loss"),
        ],
    )  # fmt: skip
    def test_the_reason_is_what_came_first(self, loss: int, gradients: int, buffers: int, reason: str) -> None:
        flags: StepFlags[float] = StepFlags(
            gradients_bad=gradients, loss_bad=loss, buffers_bad=buffers, scale=1.0, grad_norm=1.0, flushed=0.0,
            norms=(1.0,), skipped=(1.0,),
        )  # fmt: skip
        assert (flags.applied, flags.reason) == (False, reason)


class TestWhoSkips:
    def test_nobody_after_a_clean_step(self) -> None:
        flags = check(grads([3.0, 4.0], [12.0]), pending())
        assert flags.applied and flags.reason is None and flags.skipped == (0.0, 0.0)
        assert (flags.norms, flags.grad_norm, flags.scale) == ((5.0, 12.0), 13.0, 1.0)

    def test_norms_are_those_of_true_gradients(self) -> None:
        flags = check(grads([3.0 * 8, 4.0 * 8], scale=8.0), pending(scale=8.0))
        assert (flags.grad_norm, flags.scale) == (5.0, 8.0)

    @pytest.mark.parametrize(("skip", "skipped"), [("together", (1.0, 1.0)), ("independent", (0.0, 1.0))])
    def test_bad_gradients_of_one(self, skip: Skip, skipped: tuple[float, ...]) -> None:
        flags = check(grads([1.0], [INF]), pending(), skip)
        assert (flags.skipped, flags.reason, flags.gradients_bad) == (skipped, "gradients", 1.0)

    @pytest.mark.parametrize("skip", ["together", "independent"])
    @pytest.mark.parametrize("what", ["loss", "buffers"])
    def test_what_belongs_to_no_optimizer_stops_all(self, what: str, skip: Skip) -> None:
        written = [torch.tensor([1.0, math.nan])] if what == "buffers" else []
        flags = check(grads([1.0], [2.0]), pending(loss_bad=what == "loss"), skip, written=written)
        assert (flags.skipped, flags.reason) == ((1.0, 1.0), what)

    def test_a_bad_loss_belongs_to_those_whose_gradients_it_spoilt(self) -> None:
        flags = check(grads([1.0], [math.nan]), pending(loss_bad=True), "independent")
        assert (flags.skipped, flags.reason) == ((0.0, 1.0), "loss")

    @pytest.mark.parametrize("early", [{"gradients_bad": {0: True}}, {"penalty_bad": True}])
    def test_what_was_seen_before_an_edit_counts(self, early: dict[str, Any]) -> None:
        flags = check(grads([1.0]), pending(**early))
        assert (flags.skipped, flags.reason) == ((1.0,), "gradients")

    def test_a_loss_made_of_a_bad_penalty_is_no_witness(self) -> None:
        flags = check(grads([1.0]), pending(loss_bad=True, penalty_bad=True))
        assert (flags.loss_bad, flags.reason) == (0.0, "gradients")

    @pytest.mark.parametrize("scale", [0.0, INF, math.nan])
    def test_a_scale_without_reciprocal_is_a_finding(self, scale: float) -> None:
        assert check(grads([1.0], scale=scale), pending(scale=scale)).reason == "gradients"

    def test_a_parameter_of_two_optimizers_counts_once(self) -> None:
        p = nn.Parameter(torch.zeros(2))
        p.grad = torch.tensor([3.0, 4.0])
        found = grads_of({0: torch.optim.SGD([p]), 1: torch.optim.SGD([p])}, None)
        flags = check(found, pending())
        assert (flags.norms, flags.grad_norm) == ((5.0, 5.0), 5.0)


def test_the_row_is_read_with_the_first_question(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_nothing(monkeypatch)
    model = nn.Linear(4, 1)
    amp = mezzo.prepare(model, mezzo.optim.SGD(model.parameters(), lr=0.1), "bf16, guard.check_every=0")
    results = []
    for value in (1.0, 1.0, 1.0, 1.0, INF, INF):
        amp.zero_grad()
        amp.backward(model(torch.full((2, 4), value)).sum())
        results.append(amp.step())
    assert not results[-1].is_read
    assert [result.skipped_in_a_row for result in reversed(results)] == [2, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("is_bad", [False, True])
def test_a_result_travels(is_bad: bool) -> None:
    """To another process, and as a copy: what it knows, without the gradients it was found in."""
    model = nn.Linear(4, 1)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16, scaling.init_scale=16")
    amp.backward(model(torch.full((2, 4), INF if is_bad else 1.0)).float().sum() * 1.0)
    result = amp.step()
    for other in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result), copy.copy(result)):
        assert repr(other) == repr(result)
        assert (bool(other), other.optimizers, other.skipped_in_a_row) == (not is_bad, (not is_bad,), int(is_bad))
        assert other.nonfinite == result.nonfinite and other.stats.gradient(model.weight) is None
        assert repr(pickle.loads(pickle.dumps(other))) == repr(result)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("skipped", "Write not result, or not result.applied."), ("overflow", "not result.applied"), ("item", "its loss is what amp.backward was given, or what the closure returned"),
        ("loss", "its loss is what amp.backward was given"), ("norm", "Write result.grad_norm."), ("aplied", "Did you mean 'applied'?"),
    ],
)  # fmt: skip
def test_a_word_that_a_result_lacks_is_answered(name: str, said: str) -> None:
    model = nn.Linear(4, 1)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    amp.backward(model(torch.ones(2, 4)).sum())
    result = amp.step()
    with pytest.raises(AttributeError, match=f"the result of a step has no '{name}'. .*{re.escape(said)}"):
        getattr(result, name)
    assert not hasattr(result, name) and repr(copy.deepcopy(result)) == repr(result)


@pytest.mark.parametrize("use", [float, lambda one: 0.0 + one, lambda one: one + 1, lambda one: one / 2, math.isnan])
def test_a_result_that_is_taken_for_a_loss_says_where_the_loss_is(use: Any) -> None:
    model = nn.Linear(2, 1)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    amp.backward(model(torch.ones(1, 2)).sum())
    result = amp.step()
    with pytest.raises(StepTypeError, match=r"is no number\. A step keeps no loss: its loss is what amp\.backward was"):
        use(result)
    assert f"{result}".startswith("StepResult(applied") and result


def test_what_prepare_made_is_not_assigned_and_not_called() -> None:
    model = nn.Linear(2, 1)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    for name in ("optimizers", "model", "policy", "scale"):
        with pytest.raises(StepAttributeError, match=rf"amp\.{name} was assigned, and stays .*amp\.release\(\), then"):
            setattr(amp, name, [])
    with pytest.raises(StepTypeError, match=r"tuple of what is stepped.*Write amp\.optimizers\[0\]"):
        amp.optimizers()  # type: ignore[operator]  # as in Lightning
    assert [type(one) for one in amp.optimizers] == [torch.optim.SGD] and amp.optimizers[0].param_groups
    amp.backward(model(torch.ones(1, 2)).sum())
    assert amp.step()
    amp.release()
    assert [type(one) for one in amp.optimizers] == [torch.optim.SGD]
