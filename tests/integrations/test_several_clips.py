"""Several clips before one step, and clips of gradients that no step takes, do what they do in Accelerate."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.integrations import loops
from torch import nn

from mezzo.integrations.accelerate import Accelerator


def norm(accelerator: Accelerator, model: nn.Module, bound: float) -> torch.Tensor:
    return accelerator.clip_grad_norm_(model.parameters(), bound)


def value(accelerator: Accelerator, model: nn.Module, bound: float) -> None:
    accelerator.clip_grad_value_(model.parameters(), bound)


def torch_norm(model: nn.Module, bound: float) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), bound)


def torch_value(model: nn.Module, bound: float) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), bound)


PLAIN: dict[Callable[..., object], Callable[..., None]] = {norm: torch_norm, value: torch_value}
AFTER = ("nothing", "dropped", "more")
CLIPS = {
    "norms": ((norm, 0.05), (norm, 5.0)),
    "norm then value": ((norm, 0.5), (value, 0.02)),
    "value then norm": ((value, 0.02), (norm, 0.05)),
    "one": ((norm, 0.05),),
}


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("clips", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("policy", ["fp32", "fp32, scaling=1024"])
def test_clips_are_taken_in_the_order_in_which_they_are_written(policy: str, clips, after: str) -> None:
    x, y = loops.make_data().tensors
    accelerator, plain = Accelerator(cpu=True, policy=policy), loops.make_model()
    model = loops.make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    accelerator.backward(F.cross_entropy(model(x), y))
    F.cross_entropy(plain(x), y).backward()
    for clip, bound in clips:
        clip(accelerator, model, bound)
        PLAIN[clip](plain, bound)
    if after == "dropped":
        optimizer.zero_grad()
        own.zero_grad()
    if after != "nothing":
        accelerator.backward(F.cross_entropy(model(x), y))
        F.cross_entropy(plain(x), y).backward()
    optimizer.step()
    own.step()
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_second_clip_returns_the_norm_that_the_first_left() -> None:
    accelerator, model = Accelerator(cpu=True, policy="fp16"), loops.make_model()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = loops.make_data().tensors
    accelerator.backward(F.cross_entropy(model(x), y))
    assert norm(accelerator, model, 0.05) > 0.05
    assert norm(accelerator, model, float("inf")).item() == pytest.approx(0.05, rel=1e-3)


@pytest.mark.parametrize("policy", ["bf16", "fp16, scaling=1024", "fp16-master, scaling=1024"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_gradients_that_no_optimizer_steps_and_that_carry_the_loss_scale_do_not_count(
    policy: str, norm_type: float
) -> None:
    """As of layers that were unfrozen, and are in `model.parameters()`: their norm times the scale clipped all others to nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    twin, x, y = copy.deepcopy(model), torch.randn(16, 8), torch.randint(0, 4, (16,))
    F.cross_entropy(twin(x), y).backward()
    counted = twin.parameters() if policy == "bf16" else twin[2].parameters()
    wanted = torch.nn.utils.clip_grad_norm_(counted, 0.05, norm_type)
    accelerator = Accelerator(policy=policy, cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = [p.detach().clone().float() for p in model[2].parameters()]
    accelerator.backward(F.cross_entropy(model(x), y))
    found = accelerator.clip_grad_norm_(model.parameters(), 0.05, norm_type)
    torch.testing.assert_close(found, wanted, rtol=0.03, atol=0)
    optimizer.step()
    for p, was, other in zip(model[2].parameters(), before, twin[2].parameters(), strict=True):
        torch.testing.assert_close(was - p.float(), 0.1 * other.grad, rtol=0.1, atol=2e-3)
