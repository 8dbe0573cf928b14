"""Trends over depth: steady changes are found, jumps and short chains are not."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.nn import functional as F

from mezzo.diagnose import trace
from mezzo.trace.depth import BINADES, LAYERS, STEADY, chains, grew_over_steps, trends
from mezzo.trace.records import Size


def size(
    name: str, rms: float, *, kind: str = "output", nonfinite: int = 0, call: int = 0, cls: str = "Linear"
) -> Size:
    return Size(
        kind=kind, root="Net", name=name, cls=cls, dtype="fp32", rms=rms, amax=4 * rms, nonfinite=nonfinite, step=0,
        call=call,
    )  # fmt: skip


def stack(values: list[float], **named: object) -> list[Size]:
    return [size(f"layers.{i}", v, **named) for i, v in enumerate(values)]


@given(st.integers(LAYERS, 60), st.floats(-3, 3, allow_nan=False), st.floats(-40, 40))
def test_a_geometric_chain_is_a_trend_exactly_beyond_the_limit(count: int, per_layer: float, start: float) -> None:
    found = trends(stack([2.0 ** (start + per_layer * i) for i in range(count)]))
    total = abs(per_layer) * (count - 1)
    if abs(total - BINADES) < 1e-6:
        return
    assert bool(found) == (total > BINADES)
    if found:
        assert found[0].verdict == ("exploding" if per_layer > 0 else "vanishing")
        assert math.isclose(abs(found[0].binades), total, rel_tol=1e-9)


def test_a_jump_at_one_layer_is_no_trend() -> None:
    assert trends(stack([1.0] * 10 + [2.0**30] * 10)) == []


@pytest.mark.parametrize("share", [STEADY - 0.2, STEADY + 0.05])
def test_steadiness_is_a_share_of_the_layers(share: float) -> None:
    moves = [3.0 if (i + 1) * share - int(i * share) >= 1 else -0.1 for i in range(40)]
    logs = [sum(moves[:i]) for i in range(41)]
    assert bool(trends(stack([2.0**x for x in logs]))) == (share > STEADY)


def test_a_short_chain_is_no_trend() -> None:
    assert trends(stack([2.0 ** (10 * i) for i in range(LAYERS - 1)])) == []
    assert trends(stack([2.0 ** (10 * i) for i in range(LAYERS)])) != []


def test_an_overflowed_chain_is_left_to_the_event() -> None:
    values = stack([2.0 ** (10 * i) for i in range(LAYERS)])
    assert trends([*values, size(f"layers.{LAYERS}", 1.0, nonfinite=3)]) == []


def test_gradients_are_read_from_the_last_layer() -> None:
    grads = [size(f"layers.{i}.weight", 2.0 ** (3 * i - 40), kind="gradient", cls="") for i in range(12)]
    [found] = trends(grads)
    assert (found.verdict, found.pattern) == ("vanishing", "layers.*.weight")
    assert found.sizes[0] > found.sizes[-1]


def test_gradients_flushed_to_zero_end_the_chain() -> None:
    grads = [size(f"layers.{i}.weight", 2.0 ** (4 * i - 60) if i > 4 else 0.0, kind="gradient") for i in range(14)]
    [found] = trends(grads)
    assert found.verdict == "vanishing" and found.sizes[-1] > 0


def test_a_chain_that_begins_at_zero_grew_from_nothing() -> None:
    sizes = [0.0, *(2.0**-9 * 1.2**n for n in range(LAYERS))]
    assert trends(stack(sizes)) == [] and trends(stack(sizes[::-1], kind="gradient")) == []


def test_parts_side_by_side_of_which_one_got_nothing_are_no_depth() -> None:
    sizes = [0.0, *(2.0**-13 * 3**n for n in range(LAYERS - 1))]  # experts, by how often they were chosen
    assert trends(stack(sizes, kind="gradient")) == []


def test_chains_keep_classes_patterns_and_first_calls_apart() -> None:
    linear = stack([1.0] * 8)
    tanh = [size(f"layers.{i}", 2.0, cls="Tanh") for i in range(8)]
    again = stack([9.0] * 8, call=1)
    found = chains([*linear, *tanh, *again])
    assert {key[2]: [s.rms for s in chain] for key, chain in found.items()} == {"Linear": [1.0] * 8, "Tanh": [2.0] * 8}


@pytest.mark.parametrize(
    ("values", "grows"),
    [
        ([5.0, 3.0, 40.0, 700.0, 9e3], True),
        ([3.0, 3.0, 60.0, 60.0, 60.0, 4e3], True),  # steps that a loss scaler leaves out change nothing
        ([1.5**n for n in range(20)], True),
        ([1.0, 5e3], False),
        ([3.0, 40.0, 2.0, 900.0, 1.0, 5e3], False),
        ([1.0, 2.0, 3.0, 900.0], False),
    ],
)
def test_training_diverges_where_sizes_keep_growing_from_step_to_step(values: list[float], grows: bool) -> None:
    sizes = [replace(size("head", 1.0), amax=value, step=n) for n, value in enumerate(values)]
    told = grew_over_steps(sizes, len(values))
    assert told.startswith("outputs of head grow from step to step: ") == grows == bool(told)
    assert not grew_over_steps(sizes, 1)


def test_a_network_that_shares_its_names_with_a_steady_one_is_told() -> None:
    head = size("head", 1.0, kind="gradient")
    grows = [replace(head, amax=4.0**n, step=3 * n + 1, owner=1) for n in range(20)]
    steady = [replace(head, step=n, owner=2) for n in range(60)]
    assert grew_over_steps(sorted([*grows, *steady], key=lambda s: s.step), 60).startswith("gradients of head grow")


def test_gradients_that_fp16_flushed_are_no_depth() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)], nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(64, 64), torch.randint(0, 10, (64,))
    with trace(model) as t:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                out = model(x)
            (F.cross_entropy(out.float(), y) * 3e-5).backward()
            optimizer.step()
    assert [f.verdict for f in t.report.findings] == ["underflow"], t.report
