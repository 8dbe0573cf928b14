"""Two runs that part: the op is named; two that agree but for rounding: nothing is."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.diagnose.pairs import EQUAL, IDS, NET, PART, X, lm, prepared, same_weights
from torch import nn

from mezzo.diagnose import mismatch
from mezzo.errors import ConfigError

Pair = tuple[Any, Any, Any]


@pytest.mark.parametrize(("build", "cause", "op", "module"), PART, ids=[p[0].__name__ for p in PART])
def test_the_op_where_two_runs_part_is_named(build: Callable[[], Pair], cause: str, op: str, module: str) -> None:
    found = mismatch(*build()).finding
    assert found is not None
    assert (found.cause, found.op, found.module) == (cause, op, module), found


@pytest.mark.parametrize("name", EQUAL)
def test_rounding_is_no_finding(name: str) -> None:
    report = mismatch(*EQUAL[name]())
    assert report.finding is None, report.finding
    assert report.is_healthy and "They agree" in str(report)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # inductor's own
def test_inductor_is_no_finding() -> None:
    model = lm().eval()
    assert mismatch(model, torch.compile(model), IDS).finding is None


# --- what the report says --------------------------------------------------------------------------------------------


def test_figures_are_those_of_the_outputs() -> None:
    a = lm().eval()
    b = same_weights(a, lm(eps=1e-2)).eval()
    report = mismatch(a, b, IDS)
    x, y = a(IDS).detach().double(), b(IDS).detach().double()
    kl = F.kl_div(y.log_softmax(-1), x.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    gap = report.outputs[0]
    assert gap.largest == pytest.approx(float((x - y).abs().max()))
    assert gap.difference == pytest.approx(float((x - y).norm() / x.norm()))
    assert (gap.kl_mean, gap.kl_max) == pytest.approx((float(kl.mean()), float(kl.max())))
    assert dict(report.growth)["embed"] == 0 < dict(report.growth)["layers.0.norm1"]


def test_where_most_rounding_is_made_is_told() -> None:
    report = mismatch(NET, prepared(NET, "bf16"), X)
    assert report.worst is not None and report.worst.dtype == "bf16"
    assert 0 < report.worst_error < torch.finfo(torch.bfloat16).eps


def test_nothing_is_changed() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(6), nn.Dropout(0.5))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    mismatch(model, copy.deepcopy(model), X)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()) and model[0].weight.grad is None


def test_it_is_refused_what_cannot_be_compared() -> None:
    with pytest.raises(ConfigError, match="shapes"):
        mismatch(nn.Linear(16, 2), nn.Linear(16, 3), X)
    with pytest.raises(ConfigError, match="function of the batch"):
        mismatch("model.pt", NET, X)


def test_the_three_forms(tmp_path: Path) -> None:
    report = mismatch(lm().eval(), lm(eps=1e-2).eval(), IDS)
    assert "They part at layer_norm" in str(report) and "eps is 1e-05 in a and 0.01 in b" in str(report)
    assert json.loads(report.to_json())["finding"]["op"] == "layer_norm"
    assert "layer_norm" in report.to_html(tmp_path / "page.html").read_text()


def test_outputs_that_are_equal_are_not_called_rounding() -> None:
    assert "in fp64 both give the same, and the outputs are equal" in str(mismatch(NET, copy.deepcopy(NET), X))
    low = torch.autocast("cpu", torch.bfloat16)(lambda x: NET(x))
    assert "is rounding" in str(mismatch(NET, low, X))
