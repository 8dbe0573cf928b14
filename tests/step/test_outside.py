"""Parameters that an optimizer trains and that are not the model's: a temperature, weights of losses, centres of classes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.saved import through_a_file
from tests.step.step_models import Net
from torch import Tensor, nn

import mezzo
from mezzo.distributed import load_checkpoint, save_checkpoint
from mezzo.errors import CheckpointError

POLICIES = ("fp32", "bf16", "bf16-master", "fp16-master, scaling=1024")


def build(count: int = 1) -> tuple[nn.Module, list[nn.Parameter], torch.optim.Optimizer]:
    torch.manual_seed(0)
    model, outside = Net(), [nn.Parameter(torch.ones(3)) for _ in range(count)]
    return model, outside, torch.optim.AdamW([*model.parameters(), *outside], lr=0.1)


def loss_of(model: nn.Module, outside: list[nn.Parameter], x: Tensor) -> Tensor:
    return (model(x) * torch.stack([one.sum() for one in outside]).sum()).square().mean()


def trained(policy: str, steps: int = 3) -> tuple[mezzo.Stepper, list[nn.Parameter]]:
    model, outside, optimizer = build()
    amp = mezzo.prepare(model, optimizer, policy)
    for seed in range(steps):
        step(amp, outside, seed)
    return amp, outside


def step(amp: mezzo.Stepper, outside: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    amp.zero_grad()
    amp.backward(loss_of(amp.model, outside, torch.randn(8, 4)))
    assert amp.step()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("how", ["state_dict", "folder"])
def test_they_go_on_bit_for_bit(policy: str, how: str, tmp_path: Path) -> None:
    amp, outside = trained(policy)
    model, other, optimizer = build()
    resumed = mezzo.prepare(model, optimizer, policy)
    if how == "folder":
        save_checkpoint(amp, tmp_path / "saved")
        load_checkpoint(resumed, tmp_path / "saved")
    else:
        assert resumed.load_state_dict(through_a_file(amp.state_dict())) == ()
    for run, params in ((amp, outside), (resumed, other)):
        step(run, params, seed=7)
    assert not torch.equal(outside[0], torch.ones(3))
    assert torch.equal(outside[0], other[0])
    assert all(map(torch.equal, amp.model.parameters(), resumed.model.parameters()))


def test_they_are_saved_beside_weights_that_are_saved_elsewhere() -> None:
    amp, outside = trained("bf16")
    model, other, optimizer = build()
    resumed = mezzo.prepare(model, optimizer, "bf16")
    resumed.load_state_dict(through_a_file(amp.state_dict(weights=False)))
    assert torch.equal(outside[0], other[0])


def test_a_checkpoint_without_them_says_so_and_leaves_them() -> None:
    amp, _ = trained("bf16")
    state = amp.state_dict()
    del state["outside"]
    model, other, optimizer = build()
    (sentence,) = mezzo.prepare(model, optimizer, "bf16").load_state_dict(state)
    assert sentence == "1 trained parameters that are not the model's were not saved: they stay what they are"
    assert torch.equal(other[0], torch.ones(3))


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({}, "missing 1"),
        ({"0.99": torch.ones(3)}, "unknown 1"),
        (3, "must be a dict"),
        ("shape", "has shape"),
        ("number", "must be a tensor"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_changed(wrong: Any, word: str) -> None:
    amp, _ = trained("bf16")
    state = copy.deepcopy(amp.state_dict())
    (key,) = state["outside"]
    made = {"shape": {key: torch.ones(4)}, "number": {key: 1.0}}
    model, other, optimizer = build()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match=word):
        mezzo.prepare(model, optimizer, "bf16").load_state_dict(
            {**state, "outside": made[wrong] if isinstance(wrong, str) else wrong}
        )
    assert torch.equal(other[0], torch.ones(3))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_run_that_has_none_saves_no_word_of_them() -> None:
    model = Net()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    assert "outside" not in amp.state_dict()


def test_a_replay_of_them_comes_out_as_recorded(tmp_path: Path) -> None:
    def run() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model, outside, optimizer = build(2)
        return model, optimizer, lambda inner, x: loss_of(inner, outside, x)

    model, optimizer, loss_fn = run()
    amp = mezzo.prepare(model, optimizer, "bf16")
    with mezzo.record(amp, tmp_path / "record", every=2) as recorder:
        for x in recorder.batches(torch.randn(6, 8, 4)):
            amp.backward(loss_fn(model, x))
            amp.step()
            amp.zero_grad()
    assert mezzo.replay(tmp_path / "record", 5, run).is_healthy
