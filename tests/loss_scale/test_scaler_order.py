"""Calls of the scaler out of order, what is no loss and no scale, and steps without gradients: each whole message."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.messages import message_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mezzo.errors import ScalerError
from mezzo.loss_scale import GradScaler

from .scalers import one, sgd


@pytest.mark.parametrize("keyword", [False, True])
def test_closures(keyword: bool) -> None:
    """S11: torch refuses the keyword only."""
    param = one()
    optimizer, scaler = sgd(param), GradScaler("cpu")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = scaler.scale(param.sum())
        loss.backward()
        return loss

    closure()
    with pytest.raises(ScalerError) as refusal:
        scaler.step(optimizer, closure=closure) if keyword else scaler.step(optimizer, closure)
    assert str(refusal.value) == (
        "step() got a closure, and a loss scaler cannot run one: the backward() inside would hand scaled gradients "
        "straight to the update. Call backward() before step(), or use "
        "mezzo.prepare(model, optimizer).step(closure=...)."
    )
    assert param.tolist() == [1.0, 1.0]


# Order of calls


@pytest.mark.parametrize("call", ["unscale_", "step", "update"])
def test_nothing_scaled_yet(call: str) -> None:
    param = one()
    param.sum().backward()
    arguments = [] if call == "update" else [sgd(param)]
    with pytest.raises(ScalerError) as refusal:
        getattr(GradScaler("cpu"), call)(*arguments)
    assert str(refusal.value) == (
        f"{call}() was called before scale(): this scaler has scaled no loss yet. "
        "Write scaler.scale(loss).backward() first."
    )


def ready() -> tuple[GradScaler, torch.optim.SGD]:
    param = one()
    scaler = GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    return scaler, sgd(param)


def test_unscale_twice() -> None:
    """B4."""
    scaler, optimizer = ready()
    scaler.unscale_(optimizer)
    assert message_of(ScalerError, scaler.unscale_, optimizer) == (
        "unscale_() was called twice for this SGD since the last update(): its gradients would be divided by the loss "
        "scale twice. Call it once, after the last backward()."
    )


def test_unscale_after_step() -> None:
    scaler, optimizer = ready()
    scaler.step(optimizer)
    assert message_of(ScalerError, scaler.unscale_, optimizer) == (
        "unscale_() was called for this SGD after step(). Call it between backward() and step(), and update() after "
        "step()."
    )


def test_step_twice() -> None:
    scaler, optimizer = ready()
    scaler.step(optimizer)
    assert message_of(ScalerError, scaler.step, optimizer) == (
        "step() was called twice for this SGD since the last update(). "
        "Call scaler.update() once per iteration, after the last step()."
    )


def test_update_without_step() -> None:
    scaler, _ = ready()
    assert (
        message_of(ScalerError, scaler.update)
        == "update() was called before step(): no gradient was looked at in this iteration."
    )


@pytest.mark.parametrize(
    ("new_scale", "what"),
    [
        (0.0, "0"), (-4.0, "-4"), (math.inf, "inf"), (math.nan, "nan"), (True, "True"), ("8", "'8'"),
        (torch.tensor(math.inf), "inf"), (torch.tensor([1.0, 2.0]), "fp32[2] cpu"), (torch.tensor(4), "int64[] cpu"),
        (torch.tensor(4.0, requires_grad=True), "fp32[] cpu"), (torch.ones((), device="meta"), "fp32[] meta"),
        (torch.ones(1).to_sparse(), "fp32[1] cpu"),
        (FakeTensorMode().from_tensor(torch.ones(1)), "fp32[1] cpu"),
    ],
)  # fmt: skip
def test_update_refuses_what_is_no_scale(new_scale: Any, what: str) -> None:
    scaler, optimizer = ready()
    scaler.step(optimizer)
    saved = scaler.state_dict()
    assert message_of(ScalerError, scaler.update, new_scale) == (
        f"update() got new_scale={what}. Pass a positive number, or a floating tensor of one element without a graph, "
        "within min_scale=1 and max_scale=None."
    )
    assert scaler.state_dict() == saved
    scaler.update()  # the iteration is not lost


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_no_scale() -> None:
    scaler, _ = ready()
    with pytest.raises(ScalerError, match=r"new_scale=fp32\[nested\] cpu"):
        scaler.update(torch.nested.nested_tensor([torch.ones(1)]))


@pytest.mark.parametrize("outputs", [None, 3.0, [torch.ones(()), None], "loss"])
def test_scale_refuses_what_is_no_loss(outputs: Any) -> None:
    kind = "NoneType" if outputs is None or isinstance(outputs, list) else type(outputs).__name__
    assert message_of(ScalerError, GradScaler("cpu").scale, outputs) == (
        f"scale() got a {kind} where a loss belongs. Pass a tensor, or lists, tuples, dicts or other iterables that "
        "hold nothing but tensors."
    )


@pytest.mark.parametrize("copying", [copy.deepcopy, pickle.dumps])
def test_no_copy_in_the_middle_of_an_iteration(copying: Callable[[object], object]) -> None:
    scaler, optimizer = ready()
    scaler.unscale_(optimizer)
    assert message_of(ScalerError, copying, scaler) == (
        "a GradScaler cannot be pickled or copied between unscale_() and update(): do it after."
    )


# No gradients (P25)


def no_gradient_because(cause: str) -> str:
    return f"step() found no gradient in any of the 1 parameters of this SGD: {cause}"


def test_no_gradient_because_everything_is_frozen() -> None:
    scaler, _ = ready()
    assert message_of(ScalerError, scaler.step, sgd(one().requires_grad_(False))) == no_gradient_because(
        "all of them are frozen. Give the optimizer parameters with requires_grad=True."
    )


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_no_gradient_because_backward_went_elsewhere(fused: bool) -> None:
    scaler, _ = ready()
    assert message_of(ScalerError, scaler.step, sgd(one(), fused=fused)) == no_gradient_because(
        "backward() ran but reached none of them, or zero_grad() was called after it. Give the optimizer the parameters of the model "
        "that computed the loss, step it only in iterations that use them, and write zero_grad() before backward()."
    )


def test_no_gradient_because_the_loss_has_no_graph() -> None:
    param, scaler = one(), GradScaler("cpu")
    scaler.scale(torch.tensor(param.sum().item()))
    assert message_of(ScalerError, scaler.step, sgd(param)) == no_gradient_because(
        "the scaled loss has no graph. It was detached, built by torch.tensor(...), or computed under no_grad()."
    )


def test_no_gradient_because_backward_did_not_run() -> None:
    param, scaler = one(), GradScaler("cpu")
    scaler.scale(param.sum())
    assert message_of(ScalerError, scaler.step, sgd(param)) == no_gradient_because(
        "no scaled loss ran backward(). Write scaler.scale(loss).backward() before step()."
    )


# fp16 weights (P5)
