"""The scaler's sentences: which parameters they name, and which cause they say."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from mezzo.loss_scale import messages
from mezzo.loss_scale.state import LossScale
from mezzo.policy import ScalingConfig


def with_grad(*values: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    p = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    p.grad = torch.tensor(values, dtype=dtype)
    return p


def test_names_count_over_all_groups() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}])
    assert messages.names(optimizer) == ["parameter 0 (fp32[2] cpu)", "parameter 1 (fp32[3] cpu)"]
    assert messages.names(torch.optim.SGD([("w", first)])) == ["w (fp32[2] cpu)"]


def test_a_verdict_names_its_optimizer_and_the_gradients_it_is_about() -> None:
    optimizer = torch.optim.SGD([("a", with_grad(1.0)), ("b", with_grad(1.0))])
    said = messages.about(optimizer, [1], messages.DIRECT)
    assert said.startswith("1 of the 2 gradients of this SGD are still multiplied by the loss scale, and SGD.step()")
    assert "directly: b (fp32[1] cpu). Call" in said and "{" not in said


@pytest.mark.parametrize("verdict", ["EDITED", "MIXED", "TWICE", "STALE", "UNSEEN", "ADDED", "DIRECT"])
def test_every_verdict_has_a_place_for_the_parameters(verdict: str) -> None:
    optimizer = torch.optim.SGD([("weight", with_grad(1.0))])
    assert ": weight (fp32[1] cpu)" in messages.about(optimizer, [0], getattr(messages, verdict))


@pytest.mark.parametrize(
    "needs_grad, passes, is_blind, said",
    [
        (False, 1, True, "all of them are frozen"),
        (True, 1, True, "reached none of them"),
        (True, 0, True, "has no graph"),
        (True, 0, False, "no scaled loss ran backward()"),
    ],
)
def test_why_there_is_no_gradient(needs_grad: bool, passes: int, is_blind: bool, said: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1), requires_grad=needs_grad)])
    assert said in messages.no_gradients(optimizer, passes, is_blind)


@pytest.mark.parametrize(
    "scale, said",
    [(1.0, "at its floor of 1"), (0.5, "at its floor of 1"), (2.0, "patience is 3 (the loss scale is 2)")],
)
def test_why_scaling_was_given_up(scale: float, said: str) -> None:
    state, config = LossScale(scale=scale, skipped_in_a_row=3), ScalingConfig(min_scale=1.0)
    optimizers = [torch.optim.SGD([with_grad(1.0, math.inf, math.nan)]), torch.optim.SGD([with_grad(1.0)])]
    message = messages.exhausted(state, config, 3, optimizers)
    assert message.startswith("3 steps in a row") and said in message
    assert "Non-finite gradients: parameter 0 (fp32[3] cpu): 2 of 3. " in message


def test_half_gradients_are_counted_beside_what_is_trained() -> None:
    frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
    optimizer = torch.optim.SGD([with_grad(1.0), with_grad(1.0, dtype=torch.float16), frozen])
    said = messages.half_gradients(optimizer)
    assert "for 1 of the 2 trainable parameters of this SGD: parameter 1 (fp16[1] cpu)." in said


def test_sparse_and_complex_gradients_are_counted_by_their_values() -> None:
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    values: Tensor = torch.tensor([math.nan, 1.0])
    p.grad = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), values, (3,), check_invariants=True)
    q.grad = torch.tensor([complex(math.inf, 1.0), 1.0])
    found = messages.nonfinite(torch.optim.SGD([p, q]))
    assert [line.rpartition(": ")[2] for line in found] == ["1 of 2", "1 of 4"]
