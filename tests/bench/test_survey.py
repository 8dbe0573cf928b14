"""The survey of models beside the suite: what it prints, and that its two sides train one model."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bench.script import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def survey() -> Any:
    return load_script("survey")


def test_it_prints_a_line_a_model(
    survey: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))  # of the model's own process
    monkeypatch.setattr(sys, "argv", ["survey.py", "--models", "mlp", "--seconds", "0", "--threads", "1"])
    assert survey.main() == 0
    said = capsys.readouterr().out
    assert re.search(r"^mlp +\d+\.\d\d ms +\d+\.\d\dx +\d+\.\d\dx$", said, re.MULTILINE), said


def test_a_name_that_is_none_is_refused(
    survey: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["survey.py", "--models", "mlp,mpl"])
    with pytest.raises(SystemExit) as ended:
        survey.main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "") and "'mpl'" in said.err


def test_every_way_trains_the_same_model(survey: Any) -> None:
    found = []
    for _ in range(2):
        model, loss = survey.build("mlp, batch norm")
        value = loss(model)
        value.backward()
        found.append([value.detach(), *[p.grad for p in model.parameters()]])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert list(survey.steps("mlp")) == ["torch.autocast", "bf16", "bf16-master"]


@pytest.mark.slow
def test_every_model_can_be_built_and_has_a_loss(survey: Any) -> None:
    for name in [*survey.LIBRARY, *survey.OWN]:
        model, loss = survey.build(name)
        assert bool(loss(model).isfinite()), name
