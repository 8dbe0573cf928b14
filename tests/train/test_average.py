from __future__ import annotations

import copy
import math

import pytest
import torch
from tests.train.test_train_step import UPDATES, config, loss_of, model
from torch import Tensor

from mezzo import Policy
from mezzo.train.dist_context import one_rank
from mezzo.train.train_step import Average, Updater

ALONE = one_rank(torch.device("cpu"))
DECAY = 0.6
POISONED = 4


def made(policy: str) -> tuple[Updater, Average]:
    updater = Updater(model(), Policy.parse(policy), config(), updates=UPDATES, world=ALONE)
    return updater, Average(updater.amp, DECAY)


def step(updater: Updater, number: int, poison: bool = False) -> bool:
    return updater.step(lambda: loss_of(updater.amp.model, number, poison)).applied


def wide(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in weights.items() if tensor.is_floating_point()}


@pytest.mark.parametrize("policy", ["fp32", "bf16-master", "fp16-master"])
def test_it_is_the_average_of_the_masters_after_updates_that_were_applied(policy: str) -> None:
    updater, average = made(policy)
    wanted, applied = wide(updater.amp.export_weights()), 0
    for number in range(UPDATES):
        if step(updater, number, poison=number == POISONED):
            applied += 1
            now = wide(updater.amp.export_weights())
            wanted = {name: DECAY * tensor + (1 - DECAY) * now[name] for name, tensor in wanted.items()}
    assert applied == UPDATES - 1
    found = average.weights()
    assert found.keys() == updater.amp.export_weights().keys()
    for name, tensor in wanted.items():
        assert found[name].dtype is torch.float32
        torch.testing.assert_close(
            found[name].double(), tensor, rtol=UPDATES * torch.finfo(torch.float32).eps, atol=1e-9
        )
    moved = max(float((tensor - now[name]).abs().max()) for name, tensor in wanted.items())
    assert moved > 1e-4  # it is not the last weights


@pytest.mark.parametrize("policy", ["fp32", "bf16-master"])
def test_the_model_holds_it_inside_the_block_and_its_own_bits_after(policy: str) -> None:
    updater, average = made(policy)
    step(updater, 0)
    net = updater.amp.model
    before = copy.deepcopy(updater.state_dict())
    with pytest.raises(KeyError), average.swapped_in():
        inside = {name: p.detach().clone() for name, p in net.named_parameters()}
        raise KeyError
    for name, tensor in average.weights().items():
        if name in inside:
            assert torch.equal(inside[name], tensor.to(inside[name].dtype))
    assert repr(updater.state_dict()) == repr(before)
    assert all(
        torch.equal(now, was)
        for now, was in zip(net.state_dict().values(), before["step"]["model"].values(), strict=True)
    )
    assert step(updater, 1)


def test_a_saved_average_goes_on_as_it_was() -> None:
    updater, average = made("bf16")
    step(updater, 0)
    other_updater, other = made("bf16")
    other_updater.load_state_dict(copy.deepcopy(updater.state_dict()))
    other.load_state_dict(copy.deepcopy(average.state_dict()))
    for one, number in ((updater, 1), (other_updater, 1)):
        step(one, number)
    for name, tensor in average.weights().items():
        assert torch.equal(tensor, other.weights()[name])
    assert math.isfinite(
        float(sum(tensor.sum() for tensor in average.weights().values() if tensor.is_floating_point()))
    )
