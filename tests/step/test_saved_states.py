"""States that are saved in the middle of a step, and those of sparse gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.step.test_state_dict import batch, train
from torch import nn

import mezzo


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, mezzo.optim.SGD])
@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
def test_a_state_that_is_saved_in_the_middle_of_a_step_is_said_to_be(
    policy: str, failure: Any, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It is saved all the same: who saves in `except KeyboardInterrupt` would lose the run. And the step is not taken twice."""
    model = nn.Linear(4, 1)
    optimizer = kind(model.parameters(), lr=0.1)
    amp = mezzo.prepare(model, optimizer, policy)
    train(amp, [batch()])
    assert amp.state_dict() and not caplog.records

    def fail(*_: Any) -> None:
        raise failure

    hook = amp.optimizers[0].register_step_post_hook(fail)
    with pytest.raises(failure):
        train(amp, [batch()])
    hook.remove()
    assert amp.state_dict()["counters"]["seen"] == 1
    (told,) = [record.getMessage() for record in caplog.records if "state_dict" in record.getMessage()]
    assert told.startswith("amp.state_dict() was called after a step()") and "may be half of that step" in told
    with pytest.raises(mezzo.errors.StepError, match="called after a step"):
        amp.step()
    amp.zero_grad()
    caplog.clear()
    train(amp, [batch()])
    assert amp.state_dict() and not caplog.records


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, mezzo.optim.AdamW])
@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
def test_a_checkpoint_in_memory_may_be_loaded_again(policy: str, kind: Any) -> None:
    """The best so far, to which a run goes back more than once: steps after a load must not write it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    amp = mezzo.prepare(model, kind(model.parameters(), lr=0.1), policy)
    batches = [batch() for _ in range(3)]
    train(amp, batches)
    saved, ends = copy.deepcopy(amp.state_dict()), []
    for _ in range(2):
        amp.load_state_dict(saved)
        train(amp, batches)
        ends.append(copy.deepcopy(amp.state_dict()))
    first, second = ([v for entry in end["optimizers"][0]["state"].values() for v in entry.values()] for end in ends)
    assert all(map(torch.equal, map(torch.as_tensor, first), map(torch.as_tensor, second)))


@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
def test_sparse_momentum_is_resumed_and_what_is_no_state_of_a_parameter_released(policy: str) -> None:
    """torch's SGD keeps the momentum of sparse gradients sparse."""

    def make() -> mezzo.Stepper:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1))
        return mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), policy)

    def go_on(amp: mezzo.Stepper) -> None:
        for row in range(2):
            amp.zero_grad()
            amp.backward(amp.model(torch.tensor([row, 3])).float().sum())
            assert amp.step()

    one, other = make(), make()
    go_on(one)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for amp in (one, other):
        go_on(amp)
        amp.optimizers[0].state["note"] = 3  # type: ignore[index]  # a key of the program's own
        amp.release()
    assert all(map(torch.equal, one_weights := list(one.model.parameters()), other.model.parameters()))
    assert all(p.dtype is torch.float32 for p in one_weights)


KINDS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda params: torch.optim.AdamW(params, lr=0.01),
    lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    lambda params: torch.optim.Rprop(params),
    lambda params: torch.optim.LBFGS(params, lr=0.01, max_iter=2),
    lambda params: mezzo.optim.Adam(params, lr=0.01),
]


@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-master"])
@pytest.mark.parametrize("kind", KINDS, ids=["AdamW", "SGD", "Rprop", "LBFGS", "mezzo"])
def test_a_state_that_stays_in_memory_is_gone_back_to_as_often_as_one_likes(
    kind: Callable[[Any], torch.optim.Optimizer], policy: str
) -> None:
    """The best so far, or the start of a search for a rate: training on from it leaves it as it is."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    amp, x = mezzo.prepare(model, kind(model.parameters()), policy), torch.randn(8, 4)

    def trained() -> list[torch.Tensor]:
        def closure() -> torch.Tensor:
            amp.zero_grad()
            amp.backward(loss := model(x).square().mean())
            return loss

        for _ in range(3):
            assert amp.step(closure)
        return [p.detach().clone() for p in amp.export_weights().values()]

    trained()
    saved = copy.deepcopy(amp.state_dict())
    ends = []
    for _ in range(3):
        assert amp.load_state_dict(saved) == ()
        ends.append(trained())
    assert all(torch.equal(a, b) for end in ends[1:] for a, b in zip(ends[0], end, strict=True))
