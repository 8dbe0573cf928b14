"""What torch's scaler lets pass and ours refuses: each trap, on torch first, and the whole message."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mezzo.errors import LossScaleExhausted, MasterError, ScalerError
from mezzo.loss_scale import GradScaler
from mezzo.optim import MasterWeights

Scaler = torch.amp.GradScaler
Make = Callable[..., torch.optim.Optimizer]


def sgd(*params: nn.Parameter, **arguments: Any) -> torch.optim.SGD:
    return torch.optim.SGD(params, lr=0.5, **arguments)


def one() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def refused(run: Callable[[Scaler], object], kind: type[Exception] = ScalerError, **arguments: Any) -> str:
    """Return the message by which ours refuses what torch's scaler does without a word."""
    run(Scaler("cpu"))
    with pytest.raises(kind) as refusal:
        run(GradScaler("cpu", **arguments))
    return str(refusal.value)


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
    with pytest.raises(ScalerError) as refusal:
        scaler.unscale_(optimizer)
    assert str(refusal.value) == (
        "unscale_() was called twice for this SGD since the last update(): its gradients would be divided by the loss "
        "scale twice. Call it once, after the last backward()."
    )


def test_unscale_after_step() -> None:
    scaler, optimizer = ready()
    scaler.step(optimizer)
    with pytest.raises(ScalerError) as refusal:
        scaler.unscale_(optimizer)
    assert str(refusal.value) == (
        "unscale_() was called for this SGD after step(). Call it between backward() and step(), and update() after "
        "step()."
    )


def test_step_twice() -> None:
    scaler, optimizer = ready()
    scaler.step(optimizer)
    with pytest.raises(ScalerError) as refusal:
        scaler.step(optimizer)
    assert str(refusal.value) == (
        "step() was called twice for this SGD since the last update(). "
        "Call scaler.update() once per iteration, after the last step()."
    )


def test_update_without_step() -> None:
    scaler, _ = ready()
    with pytest.raises(ScalerError) as refusal:
        scaler.update()
    assert str(refusal.value) == "update() was called before step(): no gradient was looked at in this iteration."


@pytest.mark.parametrize(
    ("new_scale", "what"),
    [
        (0.0, "0"), (-4.0, "-4"), (math.inf, "inf"), (math.nan, "nan"), (True, "True"), ("8", "'8'"),
        (torch.tensor(math.inf), "inf"), (torch.tensor([1.0, 2.0]), "fp32[2] cpu"), (torch.tensor(4), "int64[] cpu"),
        (torch.tensor(4.0, requires_grad=True), "fp32[] cpu"),
    ],
)  # fmt: skip
def test_update_refuses_what_is_no_scale(new_scale: Any, what: str) -> None:
    scaler, optimizer = ready()
    scaler.step(optimizer)
    with pytest.raises(ScalerError) as refusal:
        scaler.update(new_scale)
    assert str(refusal.value) == (
        f"update() got new_scale={what}. Pass a positive number, or a floating tensor of one element without a graph, "
        "within min_scale=1 and max_scale=None."
    )
    scaler.update()  # the iteration is not lost


@pytest.mark.parametrize("outputs", [None, 3.0, [torch.ones(()), None], "loss"])
def test_scale_refuses_what_is_no_loss(outputs: Any) -> None:
    kind = "NoneType" if outputs is None or isinstance(outputs, list) else type(outputs).__name__
    with pytest.raises(ScalerError) as refusal:
        GradScaler("cpu").scale(outputs)
    assert str(refusal.value) == (
        f"scale() got a {kind} where a loss belongs. Pass a tensor, or lists, tuples, dicts or other iterables that "
        "hold nothing but tensors."
    )


@pytest.mark.parametrize("copying", [copy.deepcopy, pickle.dumps])
def test_no_copy_in_the_middle_of_an_iteration(copying: Callable[[object], object]) -> None:
    scaler, optimizer = ready()
    scaler.unscale_(optimizer)
    with pytest.raises(ScalerError) as refusal:
        copying(scaler)
    assert str(refusal.value) == (
        "a GradScaler cannot be pickled or copied between unscale_() and update(): do it after."
    )


# No gradients (P25)


def no_gradient_because(cause: str) -> str:
    return f"step() found no gradient in any of the 1 parameters of this SGD: {cause}"


def test_no_gradient_because_everything_is_frozen() -> None:
    scaler, _ = ready()
    with pytest.raises(ScalerError) as refusal:
        scaler.step(sgd(one().requires_grad_(False)))
    assert str(refusal.value) == no_gradient_because(
        "all of them are frozen. Give the optimizer parameters with requires_grad=True."
    )


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_no_gradient_because_backward_went_elsewhere(fused: bool) -> None:
    scaler, _ = ready()
    with pytest.raises(ScalerError) as refusal:
        scaler.step(sgd(one(), fused=fused))
    assert str(refusal.value) == no_gradient_because(
        "backward() ran but reached none of them. Give the optimizer the parameters of the model that computed the "
        "loss, and step it only in iterations that use them."
    )


def test_no_gradient_because_the_loss_has_no_graph() -> None:
    param, scaler = one(), GradScaler("cpu")
    scaler.scale(torch.tensor(param.sum().item()))
    with pytest.raises(ScalerError) as refusal:
        scaler.step(sgd(param))
    assert str(refusal.value) == no_gradient_because(
        "the scaled loss has no graph. It was detached, built by torch.tensor(...), or computed under no_grad()."
    )


def test_no_gradient_because_backward_did_not_run() -> None:
    param, scaler = one(), GradScaler("cpu")
    scaler.scale(param.sum())
    with pytest.raises(ScalerError) as refusal:
        scaler.step(sgd(param))
    assert str(refusal.value) == no_gradient_because(
        "no scaled loss ran backward(). Write scaler.scale(loss).backward() before step()."
    )


# fp16 weights (P5)


def test_fp16_weights_are_refused_with_the_remedies() -> None:
    half = [nn.Parameter(torch.ones(2, 3, dtype=torch.float16)) for _ in range(2)]
    full, frozen = one(), one().requires_grad_(False)
    optimizer, scaler = sgd(full, *half, frozen), GradScaler("cpu")
    scaler.scale(full.sum() + sum(param.sum() for param in half)).backward()
    before = [param.grad.clone() for param in (full, *half)]  # type: ignore[union-attr]
    with pytest.raises(MasterError) as refusal:
        scaler.step(optimizer)
    assert str(refusal.value) == (
        "unscale_() got fp16 gradients for 2 of the 3 trainable parameters of this SGD: parameter 1 (fp16[2,3] cpu), "
        "parameter 2 (fp16[2,3] cpu). Dividing them in fp16 would flush to zero what scaling saved. Keep trainable "
        "weights in fp32 (module.float(); adapters too) and let the region cast them, or keep fp16 weights with fp32 "
        'masters: mezzo.prepare(model, optimizer, policy="fp16-master"), or mezzo.optim.MasterWeights(optimizer).'
    )
    assert all(torch.equal(param.grad, old) for param, old in zip((full, *half), before, strict=True))
    assert isinstance(refusal.value, ValueError)  # as torch's refusal is


def test_fp16_weights_with_masters_need_no_unscale() -> None:
    half = nn.Parameter(torch.ones(2, 3, dtype=torch.float16))
    optimizer, scaler = MasterWeights(sgd(half)), GradScaler("cpu", 16.0)
    scaler.scale(half.sum()).backward()
    with pytest.raises(MasterError) as refusal:
        scaler.unscale_(optimizer)
    assert str(refusal.value) == (
        "unscale_() got fp16 gradients for 1 of the 1 trainable parameters of this MasterWeights: parameter 0 "
        "(fp16[2,3] cpu). Dividing them in fp16 would flush to zero what scaling saved. This optimizer divides by itself, "
        "in fp32: leave unscale_() out, and clip with mezzo.prepare(model, optimizer).step(max_norm=...)."
    )
    scaler.step(optimizer)
    assert half.unique().tolist() == [0.5]


def test_a_frozen_fp16_base_with_fp32_adapters_trains() -> None:
    base, adapter = nn.Linear(4, 4).half().requires_grad_(False), nn.Linear(4, 4)
    optimizer, scaler = torch.optim.SGD([*base.parameters(), *adapter.parameters()], lr=0.5), GradScaler("cpu")
    before = adapter.weight.detach().clone()
    scaler.scale(adapter(base(torch.randn(2, 4).half()).float()).sum()).backward()
    scaler.step(optimizer)
    assert scaler.last_step.applied and not torch.equal(adapter.weight, before)


# Scale exhausted (S6)


def overflow(scaler: Scaler, param: nn.Parameter, optimizer: torch.optim.Optimizer, bad: int = 2) -> None:
    optimizer.zero_grad()
    scaler.scale((param * torch.tensor([math.inf] * bad + [1.0] * (2 - bad))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_the_floor_is_an_error_and_weights_survive_it(fused: bool, make: Make) -> None:
    """S6: 200 overflows in a row; torch's scale is 0 after them, and its next healthy step writes NaN."""

    def run(scaler: Scaler) -> tuple[Tensor, list[str]]:
        param, messages = one(), []
        optimizer = make([param], lr=0.5, fused=fused)
        for _ in range(200):
            try:
                overflow(scaler, param, optimizer, bad=1)
            except LossScaleExhausted as error:
                messages.append(str(error))
        assert param.tolist() == [1.0, 1.0] and not optimizer.state[param].get("step")
        optimizer.zero_grad()
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return param.detach(), messages

    theirs = Scaler("cpu")
    assert not run(theirs)[0].isfinite().all() or theirs.get_scale() == 0.0
    scaler = GradScaler("cpu")
    param, messages = run(scaler)
    reference = one()
    plain = make([reference], lr=0.5, fused=fused)
    reference.sum().backward()
    plain.step()
    assert torch.equal(param, reference) and scaler.get_scale() == 1.0
    assert len(messages) == 200 - 16
    assert messages[0] == (
        "17 steps in a row had inf or NaN gradients and the loss scale is at its floor of 1; no weight was changed by "
        "them. Non-finite gradients: parameter 0 (fp32[2] cpu): 1 of 2. A loss scale can no longer be the cause: look "
        "for inf or NaN in the loss, the inputs, the weights and the buffers, or allow more with "
        "GradScaler(min_scale=...)."
    )


def test_patience_is_an_error_too() -> None:
    scaler, param = GradScaler("cpu", patience=3), one()
    optimizer = sgd(param)
    for _ in range(2):
        overflow(scaler, param, optimizer)
    with pytest.raises(LossScaleExhausted) as refusal:
        overflow(scaler, param, optimizer)
    assert str(refusal.value) == (
        "3 steps in a row had inf or NaN gradients and patience is 3 (the loss scale is 8192); no weight was changed by "
        "them. Non-finite gradients: parameter 0 (fp32[2] cpu): 2 of 2. A loss scale can no longer be the cause: look "
        "for inf or NaN in the loss, the inputs, the weights and the buffers, or allow more with "
        "GradScaler(patience=...)."
    )


def test_the_error_does_without_gradients_that_were_dropped() -> None:
    scaler, param = GradScaler("cpu", patience=1), one()
    optimizer = sgd(param)
    scaler.scale((param * math.nan).sum()).backward()
    scaler.step(optimizer)
    optimizer.zero_grad()
    with pytest.raises(LossScaleExhausted, match=r"changed by them\. A loss scale can"):
        scaler.update()


def test_a_floor_below_one_still_never_applies_what_division_overflowed() -> None:
    """A gradient that is finite and not after dividing by a scale under one."""
    scaler, param = GradScaler("cpu", init_scale=2.0**-100, min_scale=0.0), one()
    optimizer = sgd(param)
    scaler.scale((param * 2.0**120).sum() * 2.0**100).backward()
    scaler.step(optimizer)
    assert not scaler.last_step.applied and param.tolist() == [1.0, 1.0]
