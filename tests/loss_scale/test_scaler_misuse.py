"""What torch's scaler lets pass and ours refuses: each trap, on torch first, and the whole message."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mezzo.errors import CheckpointError, ScalerArgumentError, ScalerError
from mezzo.loss_scale import GradScaler

from .scalers import Scaler, one, refused, sgd

EDITED = (
    "1 of the 1 gradients of this SGD changed between backward() and unscale_(), while they were multiplied by the "
    "loss scale: parameter 0 (fp32[2] cpu). Clipping or editing scaled gradients, or adding those of a loss that was "
    "not scaled, gives wrong updates and hides overflow. Call scaler.unscale_(optimizer) before you touch gradients, "
    "and scale every loss; if the change keeps them scaled (an all-reduce, a division), call "
    "scaler.mark_scaled(optimizer) after it."
)


def replace_gradient(param: nn.Parameter) -> None:
    assert param.grad is not None
    param.grad = param.grad.clamp(-1.0, 1.0)


EDITS: dict[str, Callable[[nn.Parameter], object]] = {
    "norm": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "norm not foreach": lambda p: nn.utils.clip_grad_norm_([p], 1.0, foreach=False),
    "value": lambda p: nn.utils.clip_grad_value_([p], 1.0),
    "nan_to_num": lambda p: torch.nan_to_num_(p.grad, 0.0, 0.0, 0.0),
    "replaced": replace_gradient,
    "no_grad": lambda p: torch.no_grad()(lambda: p.grad.mul_(0.5))(),  # type: ignore[union-attr]
    "inference mode": lambda p: torch.inference_mode()(lambda: p.grad.mul_(0.5))(),  # type: ignore[union-attr]
    "unscaled loss added": lambda p: p.sum().backward(),
}


@pytest.mark.parametrize("explicit", [True, False], ids=["unscale_", "step"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("edit", [edit for edit in EDITS if edit != "nan_to_num"])  # which changes no finite value
def test_gradients_edited_while_scaled(edit: str, fused: bool, explicit: bool) -> None:
    """S4."""

    def run(scaler: Scaler) -> None:
        param = one()
        optimizer = sgd(param, fused=fused)
        scaler.scale(param.sum()).backward()
        EDITS[edit](param)
        (scaler.unscale_ if explicit else scaler.step)(optimizer)

    assert refused(run) == EDITED


@pytest.mark.parametrize("edit", ["value", "nan_to_num", "replaced"])
def test_an_edit_cannot_hide_an_overflow(edit: str) -> None:
    """S5: neither in the first iteration, when the optimizer is new, nor later; nor between micro-batches."""

    def run(scaler: Scaler, first: int, parts: int) -> None:
        param = one()
        optimizer = sgd(param)
        for number in range(first + 1):
            optimizer.zero_grad()
            for _ in range(parts):
                scaler.scale((param * (math.inf if number == first else 0.0)).sum()).backward()
            if number == first:
                EDITS[edit](param)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 65536.0  # no backoff

    for first in (0, 2):
        for parts in (1, 3):
            run(Scaler("cpu"), first, parts)
            with pytest.raises(ScalerError, match="changed between backward"):
                run(GradScaler("cpu"), first, parts)


def test_parameters_go_by_name_where_the_optimizer_knows_it() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer, scaler = torch.optim.SGD(model.named_parameters(), lr=0.1), GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    model[1].weight.grad.mul_(2.0)
    with pytest.raises(ScalerError, match=r"1 of the 4 gradients .* scale: 1.weight \(fp32\[1,3\] cpu\)\. Clipping"):
        scaler.step(optimizer)


def test_messages_name_five_parameters_and_count_the_rest() -> None:
    params = [one() for _ in range(8)]
    optimizer, scaler = sgd(*params), GradScaler("cpu")
    scaler.scale(torch.stack([param.sum() for param in params[:-1]]).sum()).backward()
    nn.utils.clip_grad_norm_(params, 1.0)
    with pytest.raises(ScalerError) as refusal:
        scaler.step(optimizer)
    named = ", ".join(f"parameter {i} (fp32[2] cpu)" for i in range(5))
    assert str(refusal.value).startswith("7 of the 8 gradients of this SGD changed")
    assert f"{named} and 2 more." in str(refusal.value)


@pytest.mark.parametrize("zero", ["kept", "clipped", "zeroed in place", "set to None"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_backward_between_unscale_and_step(fused: bool, zero: str) -> None:
    """S8: also after clipping, and after zeroing, when torch's step would apply scaled gradients as they are."""

    def run(scaler: Scaler) -> None:
        param = one()
        optimizer = sgd(param, fused=fused)
        scaler.scale(param.sum()).backward()
        scaler.unscale_(optimizer)
        if zero == "clipped":
            nn.utils.clip_grad_norm_([param], 0.1)
        elif zero != "kept":
            optimizer.zero_grad(set_to_none=zero == "set to None")
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)

    assert refused(run) == (
        "1 of the 1 gradients of this SGD had scaled gradients added after unscale_(): parameter 0 (fp32[2] cpu). "
        "Finish every backward() before unscale_(optimizer); to give a step up, call scaler.update() and "
        "optimizer.zero_grad() before the next backward()."
    )


def test_backward_of_another_model_between_unscale_and_step_is_fine() -> None:
    param, other = one(), one()
    optimizer, scaler = sgd(param), GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.scale(other.sum()).backward()
    scaler.step(optimizer)
    assert param.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("clip", [False, True], ids=["", "clip"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_zero_grad_forgotten(fused: bool, clip: bool) -> None:
    """The last step's gradients are true, the new ones are scaled: their sum is neither."""

    def run(scaler: Scaler) -> None:
        param = one()
        optimizer = sgd(param, fused=fused)
        for _ in range(2):
            scaler.scale(param.sum()).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_([param], 0.1)
            scaler.step(optimizer)
            scaler.update()

    assert refused(run) == (
        "1 of the 1 gradients of this SGD are the unscaled gradients of an earlier step with scaled ones added on top: "
        "parameter 0 (fp32[2] cpu). Call optimizer.zero_grad() before the backward passes of the next step."
    )


@pytest.mark.parametrize("unscale_first", [True, False])
def test_parameters_of_two_optimizers(unscale_first: bool) -> None:
    """S10."""

    def run(scaler: Scaler) -> None:
        param, own = one(), one()
        first, second = sgd(param), sgd(own, param)
        scaler.scale((param * own).sum()).backward()
        (scaler.unscale_ if unscale_first else scaler.step)(first)
        (scaler.unscale_ if unscale_first else scaler.step)(second)

    assert refused(run) == (
        "1 of the 2 gradients of this SGD were already divided by the loss scale in this iteration: parameter 1 "
        "(fp32[2] cpu). They belong to two optimizers, or to an optimizer and the one it wraps. Give each parameter to "
        "one optimizer, and pass the same object to unscale_() and step()."
    )


def test_an_optimizer_inside_another() -> None:
    """S10: unscale_ on the wrapper, step on what it wraps."""

    class Wrapper:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.param_groups = inner.param_groups

    def run(scaler: Scaler) -> None:
        param = one()
        inner = sgd(param)
        wrapper: Any = Wrapper(inner)
        scaler.scale(param.sum()).backward()
        scaler.unscale_(wrapper)
        nn.utils.clip_grad_norm_([param], 0.1)
        scaler.step(inner)

    assert "already divided by the loss scale in this iteration" in refused(run)


def test_step_again_on_what_is_left_over() -> None:
    def run(scaler: Scaler) -> None:
        param = one()
        optimizer = sgd(param)
        for number in range(2):
            if number == 0:
                scaler.scale(param.sum()).backward()
            scaler.step(optimizer)
            scaler.update()

    assert refused(run) == (
        "1 of the 1 gradients of this SGD are left over from an earlier step and were divided by the loss scale then: "
        "parameter 0 (fp32[2] cpu). Call optimizer.zero_grad() before the backward passes of the next step."
    )


UNSEEN = (
    "1 of the 1 gradients of this SGD did not come from a scaled loss, and would be divided by the loss scale all the "
    "same: parameter 0 (fp32[2] cpu). Write scaler.scale(loss).backward(); if you multiplied the loss by hand, call "
    "scaler.mark_scaled(optimizer) before this step."
)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("good_steps", [0, 1, 2])
def test_backward_of_the_unscaled_loss(good_steps: int, to_none: bool) -> None:
    """S9: scale() called and its result not used, or not called at all."""

    def run(scaler: Scaler, calls_scale: bool) -> None:
        param = one()
        optimizer = sgd(param)
        for number in range(good_steps + 1):
            optimizer.zero_grad(set_to_none=to_none)
            loss = param.sum()
            if number < good_steps:
                loss = scaler.scale(loss)
            elif calls_scale:
                scaler.scale(loss)
            loss.backward()
            scaler.step(optimizer)
            scaler.update()

    for calls_scale in (True, False) if good_steps else (True,):
        assert refused(lambda scaler, calls=calls_scale: run(scaler, calls)) == UNSEEN


def test_one_of_two_losses_not_scaled() -> None:
    """S9: seen as soon as both optimizers are known."""

    def run(scaler: Scaler) -> None:
        params = [one(), one()]
        optimizers = [sgd(param) for param in params]
        for number in range(2):
            for param, optimizer in zip(params, optimizers, strict=True):
                optimizer.zero_grad()
                loss = param.sum()
                (loss if number and param is params[1] else scaler.scale(loss)).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()

    assert refused(run) == UNSEEN


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_optimizer_stepped_directly(fused: bool, known: bool) -> None:
    """S9: before any weight has changed, also for an optimizer that the scaler never met."""

    def run(scaler: Scaler) -> None:
        optimizer = torch.optim.Adam([param], lr=0.5, fused=fused)
        for number in range(2):
            optimizer.zero_grad()
            scaler.scale(param.sum()).backward()
            if known and number == 0:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()

    param = one()
    steps = 1 if known else 0
    message = (
        "1 of the 1 gradients of this Adam are still multiplied by the loss scale, and Adam.step() was called on them "
        "directly: parameter 0 (fp32[2] cpu). Call scaler.step(optimizer): it divides them first, and skips the step if "
        "they overflowed."
    )
    run(Scaler("cpu"))
    with torch.no_grad():
        param.fill_(1.0)
    with pytest.raises(ScalerError) as refusal:
        run(GradScaler("cpu"))
    assert str(refusal.value) == message
    assert param[0].item() == pytest.approx(1.0 - 0.5 * steps, abs=torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("clip", [False, True])
def test_stepping_directly_on_divided_gradients_is_allowed(clip: bool) -> None:
    param = one()
    optimizer, scaler = sgd(param), GradScaler("cpu")
    scaler.scale(param.sum()).backward()
    scaler.unscale_(optimizer)
    if not clip or nn.utils.clip_grad_norm_([param], 10.0).isfinite():
        optimizer.step()
    assert param.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_what_is_no_optimizer(call: str) -> None:
    scaler = GradScaler("cpu")
    for given, kind in ((nn.Linear(1, 1), "Linear"), ([sgd(one())], "list")):
        with pytest.raises(ScalerError, match=rf"{call}\(\) takes an optimizer, and got {kind}"):
            getattr(scaler, call)(given)


def test_scales_that_are_no_numbers() -> None:
    with pytest.raises(ScalerArgumentError, match="init_scale='65536' must be a number"):
        GradScaler("cpu", init_scale="65536")
    scaler = GradScaler("cpu")
    with pytest.raises(CheckpointError, match="scale='x', which is no number"):
        scaler.load_state_dict({**scaler.state_dict(), "scale": "x"})


@pytest.mark.parametrize("given", [(65536.0, 2.0, 0.5, 2000), (1024,), (True,)])
def test_the_signature_of_torch_cuda_amp(given: tuple[Any, ...]) -> None:
    with pytest.raises(ScalerArgumentError) as refusal:
        GradScaler(*given)
    assert str(refusal.value) == (
        f"GradScaler({given[0]}): a device stands first. torch.cuda.amp's order is mezzo.cuda.amp.GradScaler's."
    )
