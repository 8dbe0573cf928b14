"""Every place that takes a policy takes every form of it: value, text, path, plain dict, dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
import mezzo.diagnose
from mezzo import Policy
from mezzo.policy import PolicyLike
from mezzo.train.config import TrainConfig

POLICY = Policy.parse("bf16, output=fp32")


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).float().square().mean()


def prepared(model: nn.Module, policy: PolicyLike) -> object:
    return mezzo.prepare(model, None, policy).policy


def cast(model: nn.Module, policy: PolicyLike) -> object:
    with mezzo.autocast("cpu", policy=policy):
        return model(torch.ones(2, 4)).dtype


x = torch.ones(2, 4)
PLACES: dict[str, Callable[[nn.Module, PolicyLike], object]] = {
    "prepare": prepared,
    "autocast": cast,
    "lint": lambda model, policy: str(mezzo.diagnose.lint(model, x, loss_fn, policy)),
    "compare": lambda model, policy: str(mezzo.diagnose.compare(model, x, loss_fn, policy)),
    "explain": lambda model, policy: mezzo.diagnose.explain(model, x, policy, budget_s=0).policy,
    "memory": lambda model, policy: str(mezzo.diagnose.memory(model, None, policy)),
    "diff": lambda model, policy: Policy().diff(policy).right,
}


@pytest.mark.parametrize("place", PLACES)
def test_every_form_means_the_same(place: str, tmp_path: Path) -> None:
    POLICY.save(tmp_path / "p.toml")
    outcomes = []
    for form in (POLICY, str(POLICY), tmp_path / "p.toml", str(tmp_path / "p.toml"), POLICY.to_dict()):
        torch.manual_seed(0)
        outcomes.append(PLACES[place](nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), form))
    assert all(outcome == outcomes[0] for outcome in outcomes)


@pytest.mark.parametrize("place", PLACES)
def test_a_dtype_is_a_policy(place: str) -> None:
    outcomes = []
    for form in (torch.bfloat16, "bf16"):
        torch.manual_seed(0)
        outcomes.append(PLACES[place](nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), form))
    assert outcomes[0] == outcomes[1]


def test_the_command_line_takes_a_path(tmp_path: Path) -> None:
    POLICY.save(tmp_path / "p.toml")
    assert TrainConfig(policy=str(tmp_path / "p.toml")).chosen_policy == POLICY


def test_a_notebook_shows_settings_and_what_was_edited() -> None:
    page = Policy.parse('fp16, scaling=1024, module:"<b>"=fp32')._repr_html_()
    assert "<td>scaling</td><td><b>fixed</b></td><td>edit 2</td>" in page
    assert "<td>compute</td><td>fp16</td><td>preset fp16</td>" in page
    assert '<b>"' not in page and "&lt;b&gt;" in page


def test_a_region_in_a_loop_reads_its_text_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    parse = Policy.parse
    monkeypatch.setattr(Policy, "parse", staticmethod(lambda text: read.append(text) or parse(text)))
    text = "bf16, op:sin=fp32"  # of no other test
    for _ in range(3):
        with mezzo.autocast("cpu", policy=text):
            pass
    assert read == [text]


def test_a_file_is_read_again(tmp_path: Path) -> None:
    for policy in (POLICY, Policy()):
        policy.save(tmp_path / "p.toml")
        assert mezzo.policy.as_policy(str(tmp_path / "p.toml")) == policy


def test_a_subclass_reads_itself(tmp_path: Path) -> None:
    class Own(Policy):
        pass

    own = Own.parse("bf16, output=none")
    own.save(tmp_path / "p.toml")
    for found in (own, Own.from_dict(own.to_dict()), Own.load(tmp_path / "p.toml"), own.replace(output=None)):
        assert type(found) is Own and found == own and repr(found) == "Own.parse('bf16, output=none')"
    assert mezzo.prepare(nn.Linear(2, 2), None, own).policy is own
