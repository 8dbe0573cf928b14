"""A step under torch.compile: one graph, no break, the eager step but for roundings the compiler moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.optim.streams import equal, feed, snapshot
from tests.tolerance import relative

from mezzo.optim import SGD, AdamW


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (SGD, {"master": "split", "momentum": 0.9}),
        pytest.param(AdamW, {"master": "split", "amsgrad": True}, marks=pytest.mark.slow),
        pytest.param(AdamW, {"master": "fp32"}, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_step_is_one_graph(optimizer: Any, options: dict[str, Any]) -> None:
    twins = []
    for _ in range(2):
        params = [torch.nn.Parameter(torch.linspace(-1, 1, size).bfloat16()) for size in (64, 5)]
        twins.append(optimizer(params, lr=torch.tensor(0.01), backend="reference", **options))
    eager, compiled = twins
    for one in twins:
        feed(one, [torch.ones(64), torch.ones(5)])  # makes the state
        one.grad_scale, one.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    step = torch.compile(compiled.step, fullgraph=True, backend="aot_eager")
    for value in (3.0, torch.inf, -0.5, 1.0):
        for one in twins:
            one.found_inf.fill_(float(value == torch.inf))
            for p in one.param_groups[0]["params"]:
                p.grad = torch.full_like(p, value)
        before = snapshot(compiled)
        eager.step()
        step()
        assert equal(snapshot(compiled), before) == (value == torch.inf)
    for p, q in zip(*(one.param_groups[0]["params"] for one in twins), strict=True):
        bound = relative(torch.float32, 40)  # four steps of about ten roundings; a compiler splits fused ones
        torch.testing.assert_close(compiled.master(q), eager.master(p), rtol=bound, atol=bound)
