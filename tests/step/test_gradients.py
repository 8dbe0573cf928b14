"""Gradients of a step: why there may be none, and how they may be dropped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from tests.messages import message_of
from tests.step.step_models import Net, batch, mse, prepared
from torch import nn

import mezzo
from mezzo.errors import StepError, StepTypeError


def loss_of(amp: mezzo.Stepper) -> torch.Tensor:
    x, y = batch()
    return mse(amp.model(x), y)


class TestNoGradients:
    """Five causes, five sentences."""

    def test_all_frozen(self) -> None:
        model, amp = prepared()
        extra = nn.Parameter(torch.ones(()))
        model.requires_grad_(False)
        amp.backward(amp.model(batch()[0]).mean() * extra)
        assert message_of(StepError, amp.step) == (
            "step() found no gradients: all 8 parameters of the optimizer are frozen (requires_grad=False). Unfreeze "
            "some, or give the optimizer the trainable ones."
        )

    @pytest.mark.parametrize("empty", [lambda o: o.param_groups.clear(), lambda o: o.param_groups[0]["params"].clear()])
    def test_no_parameters_any_more(self, empty: Callable[[torch.optim.Optimizer], None]) -> None:
        _, amp = prepared()
        empty(amp.optimizers[0])
        amp.backward(loss_of(amp))
        with pytest.raises(
            StepError, match=r"has no parameters any more, in no group\. Write optimizer\.add_param_group"
        ):
            amp.step()

    def test_parameters_of_another_model(self) -> None:
        _, amp = prepared("fp32")
        amp.optimizers[0].param_groups[0]["params"] = list(Net().parameters())
        amp.backward(loss_of(amp))
        assert message_of(StepError, amp.step) == (
            "step() found no gradients: none of the optimizer's 8 trainable parameters belongs to the prepared model; the "
            "model was copied or replaced after the optimizer was made. Make the optimizer from model.parameters() of "
            "the prepared model."
        )

    def test_parameters_of_another_model_alone_are_refused_before_the_first_step(self) -> None:
        model = Net()
        optimizer = torch.optim.SGD(Net().parameters())
        with pytest.raises(
            StepError, match=r"none of the optimizer's 8 trainable .*\. Make the optimizer from model\.parameters"
        ):
            mezzo.prepare(model, optimizer, "bf16-master")
        own, loss = torch.optim.SGD(model.parameters()), nn.Linear(2, 1)
        mezzo.prepare(model, [own, torch.optim.SGD(loss.parameters())], "bf16").release()
        own.add_param_group({"params": loss.parameters()})
        mezzo.prepare(model, own, "bf16").release()
        plain, parameter = torch.zeros(3, 4, requires_grad=True), nn.Parameter(torch.zeros(3, 4))
        for image, frozen in ((plain, model), (parameter, model.requires_grad_(False))):
            amp = mezzo.prepare(frozen, torch.optim.SGD([image]), "bf16")
            amp.backward(amp.model(image).square().mean())
            assert amp.step()
            amp.release()

    def test_out_of_reach(self) -> None:
        model = Net()
        amp = mezzo.prepare(model, torch.optim.SGD(model.outer.parameters()), "fp32")
        amp.backward(model.inner(batch()[0]).mean())
        assert message_of(StepError, amp.step) == (
            "step() found no gradients: the loss reaches 2 parameters of the model, but none of the optimizer's 2 "
            "(outer.weight, outer.bias). Step the optimizer whose parameters this loss trains, or check where the graph "
            "is cut."
        )

    def test_a_loss_of_another_model(self) -> None:
        _, amp = prepared("fp32")
        x, y = batch()
        amp.backward(mse(Net()(x), y))
        assert message_of(StepError, amp.step) == (
            "step() found no gradients: backward(loss) reached none of the optimizer's 8 trainable parameters: the loss was "
            "made by another model, or behind a detach(). Hand over a loss that this model made."
        )


def test_inference_has_no_step() -> None:
    amp = mezzo.prepare(Net(), None, "bf16")
    amp.backward(loss_of(amp))
    with pytest.raises(StepError, match="prepared without an optimizer, for inference"):
        amp.step()


def test_the_call_that_was_made_too_early_is_named() -> None:
    _, amp = prepared("fp16")
    for call in (amp.step, amp.grad_norm):
        assert message_of(StepError, call).startswith(f"{call.__name__}() was called before backward(loss). ")
    with (
        pytest.raises(StepTypeError, match=r"cannot be entered: .*with mezzo\.autocast\(device, policy=amp\.policy\)"),
        amp,
    ):  # type: ignore[attr-defined]
        pass


@pytest.mark.parametrize(
    "drop",
    [
        lambda amp: amp.optimizers[0].zero_grad(),
        lambda amp: amp.model.zero_grad(),
        lambda amp: amp.optimizers[0].zero_grad(set_to_none=False),
        lambda amp: amp.zero_grad(set_to_none=False),
    ],
)
def test_gradients_may_be_dropped_in_any_way(drop: Callable[[mezzo.Stepper], None]) -> None:
    _, amp = prepared("fp16, scaling.init_scale=256")
    for _ in range(3):
        amp.backward(loss_of(amp))
        assert amp.step()
        drop(amp)


def test_single_gradients_may_be_dropped() -> None:
    model, amp = prepared("fp32")
    before = model.inner.bias.clone()
    amp.backward(loss_of(amp))
    model.inner.bias.grad = None
    assert amp.step() and torch.equal(model.inner.bias, before)


def test_abandoned_gradients_start_a_new_step() -> None:
    _, amp = prepared("fp32")
    amp.backward(loss_of(amp) * float("nan"))
    amp.optimizers[0].zero_grad()
    amp.backward(loss_of(amp))
    assert amp.step()


ENDS_INSIDE = """
from contextlib import ExitStack
import torch, mezzo
model = torch.nn.Linear(4, 1)
amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16, scaling.init_scale=8")
amp.backward(model(torch.ones(2, 4)).float().mean())
scope = ExitStack()
scope.enter_context(amp.unscaled_grads())
"""


def test_a_program_may_end_while_true_gradients_are_shown() -> None:
    """As one that ends, or raises, between Accelerate's `unscale_gradients` and the step; torch aborted the process."""
    done = subprocess.run([sys.executable, "-c", ENDS_INSIDE], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_shown_gradient_is_edited_in_place_and_not_replaced() -> None:
    model = torch.nn.Linear(4, 1)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    amp.backward(model(torch.ones(2, 4)).sum())
    with amp.unscaled_grads() as grads:
        with pytest.raises(StepError, match=r"grads\['weight'\] = \.\.\. would leave the gradient as it is"):
            grads["weight"] = torch.zeros(1, 4)
        with pytest.raises(
            StepError, match=r"no gradient in this step is that of a parameter 'wieght'. Did you mean 'weight'\?"
        ):
            grads["wieght"].zero_()
        grads["weight"].copy_(torch.zeros(1, 4))
    assert model.weight.grad is not None and not model.weight.grad.any()
