"""What live tensors hold is what fp64 and Python's own arithmetic say; running an op again disturbs nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mezzo.trace import measure
from mezzo.trace.ops import Call, op_facts

aten = torch.ops.aten
INF, NAN = math.inf, math.nan


def call_of(func: Any, *args: Any) -> Call:
    return Call(func, op_facts(func), args, {})


TENSORS = {
    "empty": torch.zeros(0),
    "plain": torch.tensor([[1.0, -7.0], [0.5, 0.0]]),
    "turned": torch.tensor([[1.0, -7.0], [0.5, 0.0], [2.0, 3.0]]).t(),
    "fp16": torch.tensor([6.0e-8, -65504.0, 0.0], dtype=torch.float16),
    "bf16 with inf": torch.tensor([1.0, INF, -INF, -INF, 0.0], dtype=torch.bfloat16),
    "nan": torch.tensor([NAN, 2.0, -3.0, INF]),
    "fp8": torch.tensor([1.0, -448.0, 0.0]).to(torch.float8_e4m3fn),
}


def exact(tensor: Tensor) -> list[float]:
    return tensor.float().double().flatten().tolist()


@pytest.mark.parametrize("name", TENSORS)
def test_facts_are_those_of_its_numbers(name: str) -> None:
    tensor = TENSORS[name]
    values = exact(tensor)
    finite = [v for v in values if math.isfinite(v)]
    facts = measure.tensor_facts("x", tensor)
    assert facts.amax == max(map(abs, finite), default=0.0)
    assert (facts.nan, facts.posinf, facts.neginf) == (
        sum(map(math.isnan, values)),
        values.count(INF),
        values.count(-INF),
    )
    assert facts.zeros == values.count(0.0) and facts.shape == tuple(tensor.shape)
    assert measure.is_finite(tensor) is (len(finite) == len(values))
    assert measure.any_nan([tensor.float()]) is (facts.nan > 0)
    want = math.sqrt(math.fsum(v * v for v in finite) / len(values)) if values else 0.0
    assert measure.rms(tensor) == pytest.approx(want, rel=1e-12)


def test_exponents_are_those_of_frexp() -> None:
    values = [1.0, -0.75, 2.0**-126, 2.0**-149, 0.0, INF, NAN, 3.4e38]
    fields = measure.exponent_fields(torch.tensor(values)).tolist()
    normal = [math.frexp(v)[1] - 1 + 127 for v in values[:3]]
    assert fields == [*normal, 0, 0, 255, 255, math.frexp(3.4e38)[1] - 1 + 127]


@pytest.mark.parametrize(("numel", "count", "step"), [(10, 4, 3), (10, 10, 1), (3, 10, 1), (9, 3, 3)])
def test_spaced_values_are_evenly_spaced_and_no_more_than_asked(numel: int, count: int, step: int) -> None:
    found = measure.spaced(torch.arange(numel).float(), count).tolist()
    assert found == [float(k) for k in range(0, numel, step)] and len(found) <= count


@pytest.mark.parametrize(
    ("x", "narrow", "tried"),
    [
        (20.0, torch.float16, [("fp32", True, math.exp(20.0), False)]),
        (100.0, torch.bfloat16, [("fp32", False, 0.0, False), ("fp64", True, math.exp(100.0), False)]),
        (100.0, torch.float32, [("fp64", True, math.exp(100.0), False)]),
        (1000.0, torch.float32, [("fp64", False, 0.0, False)]),
        (NAN, torch.float16, [("fp32", False, 0.0, True), ("fp64", False, 0.0, True)]),
    ],
)
def test_wider_formats_are_tried_until_one_is_finite(x: float, narrow: torch.dtype, tried: list[Any]) -> None:
    found = measure.wide_results(call_of(aten.exp.default, torch.tensor([x]).to(narrow)), narrow)
    assert [(w.dtype, w.is_finite, w.has_nan) for w in found] == [(d, f, n) for d, f, _, n in tried]
    assert [w.amax for w in found] == pytest.approx([top for _, _, top, _ in tried], rel=1e-6)


def test_an_op_that_is_run_again_writes_draws_and_records_nothing() -> None:
    x, state = torch.ones(4, requires_grad=True), torch.random.get_rng_state()
    plain = torch.ones(4)
    [added] = measure.rerun(call_of(aten.add_.Tensor, plain, plain))
    [dropped, *_] = measure.rerun(call_of(aten.native_dropout.default, x, 0.5, True))
    assert added.tolist() == [2.0] * 4 and plain.tolist() == [1.0] * 4
    assert not dropped.requires_grad and torch.equal(torch.random.get_rng_state(), state)
    assert measure.rerun_wide(call_of(aten.bitwise_not.default, x), torch.float64) is None


def test_what_waits_for_other_ranks_is_not_run_again() -> None:
    facts = replace(op_facts(aten.exp.default), kernel="c10d.allreduce_")
    with pytest.raises(NotImplementedError, match="waits for other ranks"):
        measure.rerun(Call(aten.exp.default, facts, (torch.ones(1),), {}))


def test_the_first_bad_element_and_what_was_read_there() -> None:
    bad = torch.tensor([[1.0, 2.0], [INF, NAN]])
    inputs = [("row", torch.tensor([5.0, 6.0])), ("column", torch.tensor([[7.0], [8.0]])), ("other", torch.ones(3))]
    assert measure.first_bad(bad) == (1, 0) and measure.first_bad(torch.ones(2)) == ()
    assert measure.offending_values(inputs, bad) == (("row", 5.0), ("column", 8.0))
    assert measure.offending_values(inputs, torch.ones(2, 2)) == ()
    assert measure.sanitised([bad])[0].tolist() == [[1.0, 2.0], [1.0, 1.0]]


def test_rows_without_a_value_are_counted_along_the_axis_of_the_softmax() -> None:
    scores = torch.tensor([[-INF, -INF], [-INF, 1.0], [-INF, 2.0]])
    softmax = aten._softmax.default
    for dim, want in ((-1, 1), (0, 1), (1, 1)):
        assert measure.full_rows(call_of(softmax, scores, dim, False)) == want
    assert measure.full_rows(call_of(softmax, scores.t(), 0, False)) == 1
    assert measure.full_rows(call_of(aten.exp.default, scores)) == 0


@pytest.mark.parametrize(
    ("other", "want"), [(3, (("other", 3.0),)), (0.0, (("other", 0.0),)), (0.5, ()), (torch.ones(1), ())]
)
def test_a_divisor_is_a_whole_number_or_zero(other: Any, want: tuple[Any, ...]) -> None:
    assert measure.divisors(call_of(aten.div.Scalar, torch.ones(2), other)) == want
    assert measure.numbers((torch.ones(2), other, True), {"eps": 1e-5}) == [
        *([] if isinstance(other, Tensor) else [float(other)]), 1e-5,
    ]  # fmt: skip
