"""The wrong order of calls gives one sentence that names the right call. The sentences are pinned."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from tests.step.step_models import batch, mse, prepared
from torch import nn

import mezzo
from mezzo.errors import StepError


def loss_of(amp: mezzo.Stepper) -> torch.Tensor:
    x, y = batch()
    return mse(amp.model(x), y)


def step_first(amp: mezzo.Stepper) -> None:
    amp.step()


def step_twice(amp: mezzo.Stepper) -> None:
    amp.backward(loss_of(amp))
    amp.step()
    amp.step()


def unscaled_first(amp: mezzo.Stepper) -> None:
    with amp.unscaled_grads():
        pass


def forgot_zero_grad(amp: mezzo.Stepper) -> None:
    amp.backward(loss_of(amp))
    amp.step()
    amp.backward(loss_of(amp))


def plain_backward_first(amp: mezzo.Stepper) -> None:
    loss_of(amp).backward()
    amp.backward(loss_of(amp))


def plain_backward_after(amp: mezzo.Stepper) -> None:
    amp.backward(loss_of(amp))
    loss_of(amp).backward()
    amp.step()


def clipped_by_hand(amp: mezzo.Stepper) -> None:
    amp.backward(loss_of(amp))
    nn.utils.clip_grad_norm_(amp.model.inner.parameters(), 1.0)
    amp.step()


def edited_between_micro_batches(amp: mezzo.Stepper) -> None:
    amp.backward(loss_of(amp))
    amp.model.outer.weight.grad.mul_(2)
    amp.backward(loss_of(amp))


def stepped_directly(amp: mezzo.Stepper) -> None:
    amp.backward(loss_of(amp))
    amp.optimizers[0].step()


def step_inside_the_block(amp: mezzo.Stepper) -> None:
    amp.backward(loss_of(amp))
    with amp.unscaled_grads():
        amp.step()


def backward_inside_the_block(amp: mezzo.Stepper) -> None:
    amp.backward(loss_of(amp))
    with amp.unscaled_grads():
        amp.backward(loss_of(amp))


def block_inside_the_block(amp: mezzo.Stepper) -> None:
    amp.backward(loss_of(amp))
    with amp.unscaled_grads(), amp.unscaled_grads():
        pass


def zero_grad_inside_the_block(amp: mezzo.Stepper) -> None:
    amp.backward(loss_of(amp))
    with amp.unscaled_grads():
        amp.zero_grad()


def dropped_before_step(amp: mezzo.Stepper) -> None:
    amp.backward(loss_of(amp))
    amp.optimizers[0].zero_grad()
    amp.step()


def zeroed_by_the_stepper_before_step(amp: mezzo.Stepper) -> None:
    amp.backward(loss_of(amp))
    amp.zero_grad()
    amp.step()


def narrow_loss(amp: mezzo.Stepper) -> None:
    amp.backward(loss_of(amp).half())


def loss_without_graph(amp: mezzo.Stepper) -> None:
    amp.backward(torch.tensor(loss_of(amp).item()))


def loss_of_many(amp: mezzo.Stepper) -> None:
    amp.backward(torch.ones(3, requires_grad=True))


def loss_as_number(amp: mezzo.Stepper) -> None:
    amp.backward(loss_of(amp).item())  # type: ignore[arg-type]


def loss_of_counts(amp: mezzo.Stepper) -> None:
    amp.backward((loss_of(amp) > 0).sum())


def another_optimizer(amp: mezzo.Stepper) -> None:
    amp.backward(loss_of(amp))
    torch.optim.SGD(amp.model.outer.parameters(), lr=0.1).step()


def two_clippings(amp: mezzo.Stepper) -> None:
    amp.step(max_norm=1.0, clip_value=1.0)


def clipped_to_a_flag(amp: mezzo.Stepper) -> None:
    amp.step(clip_value=True)


def another_norm(amp: mezzo.Stepper) -> None:
    amp.step(max_norm=1.0, norm_type="inf")  # type: ignore[arg-type]  # refused


def clipped_to_nothing(amp: mezzo.Stepper) -> None:
    amp.step(max_norm=0.0)


def unknown_optimizer(amp: mezzo.Stepper) -> None:
    amp.backward(loss_of(amp))
    amp.step(optimizer=torch.optim.SGD([nn.Parameter(torch.ones(1))]))


SENTENCES: dict[Callable[[mezzo.Stepper], None], str] = {
    step_first: "step() was called before backward(loss). Write amp.backward(loss), then amp.step().",
    step_twice: "step() was called before backward(loss). Write amp.backward(loss), then amp.step().",
    zeroed_by_the_stepper_before_step: (
        "step() was called before backward(loss). Write amp.backward(loss), then amp.step()."
    ),
    unscaled_first: "unscaled_grads() was called before backward(loss). Write amp.backward(loss), then amp.step().",
    forgot_zero_grad: (
        "backward(loss) would add to the gradients of the last step, which inner.weight, inner.bias, stats.weight and "
        "5 more still have. Call amp.zero_grad() between step() and the next backward(loss)."
    ),
    plain_backward_first: (
        "inner.weight, inner.bias, stats.weight and 5 more have gradients that amp.backward did not make, so they carry "
        "no loss scale. Write amp.backward(loss) for every loss.backward(), and amp.zero_grad() to drop what is there."
    ),
    plain_backward_after: (
        "the gradients of inner.weight, inner.bias, stats.weight and 5 more were changed since backward(loss), while "
        "they carry the loss scale. Edit them inside `with amp.unscaled_grads():`, clip with amp.step(max_norm=...), and "
        "write amp.backward(loss) for every loss.backward()."
    ),
    clipped_by_hand: (
        "the gradients of inner.weight, inner.bias were changed since backward(loss), while they carry the loss scale. "
        "Edit them inside `with amp.unscaled_grads():`, clip with amp.step(max_norm=...), and write "
        "amp.backward(loss) for every loss.backward()."
    ),
    edited_between_micro_batches: (
        "the gradients of outer.weight were changed since backward(loss), while they carry the loss scale. Edit them "
        "inside `with amp.unscaled_grads():`, clip with amp.step(max_norm=...), and write amp.backward(loss) for every "
        "loss.backward()."
    ),
    stepped_directly: (
        "SGD.step() was called directly, past the guard and on gradients that may carry the loss scale. Write amp.step()."
    ),
    step_inside_the_block: "step() was called inside `with amp.unscaled_grads():`. Leave the block first.",
    backward_inside_the_block: "backward(loss) was called inside `with amp.unscaled_grads():`. Leave the block first.",
    block_inside_the_block: "unscaled_grads() was called inside `with amp.unscaled_grads():`. Leave the block first.",
    zero_grad_inside_the_block: "zero_grad() was called inside `with amp.unscaled_grads():`. Leave the block first.",
    dropped_before_step: (
        "step() found no gradients: those that backward(loss) left on the optimizer's 8 parameters were dropped before "
        "step(). Call amp.zero_grad() after step(), or before the first backward(loss)."
    ),
    narrow_loss: (
        "backward(loss) was given a fp16 loss, and the policy declares loss=fp32: its scaled gradient may overflow fp16. "
        "Compute it from outputs in fp32, as in loss_fn(output.float(), target), or write policy 'loss=fp16'."
    ),
    loss_without_graph: (
        "backward(loss) was given a loss that no parameter leads to: it was detached, made anew with torch.tensor, "
        "computed under torch.no_grad(), or every parameter is frozen. Hand over the loss as the model made it."
    ),
    loss_of_many: "backward(loss) takes one floating number with its graph, not fp32[3]. Write loss.mean().",
    loss_as_number: (
        "backward(loss) takes one floating number with its graph, not float. Hand over the tensor that the loss function "
        "returned, before .item(), float() or .numpy()."
    ),
    loss_of_counts: (
        "backward(loss) takes one floating number with its graph, not int64[]. Counts and other whole or complex numbers "
        "have no gradient: write a loss of real numbers."
    ),
    two_clippings: "step(max_norm=1.0, clip_value=1.0): clip by norm or by value, not both.",
    clipped_to_nothing: "step(max_norm=0.0): gradients are clipped to a positive number that fp32 holds; write one, or None.",
    clipped_to_a_flag: "step(clip_value=True): gradients are clipped to a positive number that fp32 holds; write one, or None.",
    another_norm: (
        "step(norm_type='inf'): steps clip by the L2 norm alone. Write torch.nn.utils.clip_grad_norm_ with this norm_type "
        "inside `with amp.unscaled_grads():`, and then step without max_norm."
    ),
    another_optimizer: (
        "SGD.step() was called on the gradients of outer.weight, outer.bias, which carry the loss scale, and this "
        "optimizer was not prepared. Give every optimizer to mezzo.prepare(model, [...]), and write "
        "amp.step(optimizer=...) for one of them."
    ),
    unknown_optimizer: (
        "step(optimizer=...) was given SGD, which prepare(model, optimizer) was not given. Write one of amp.optimizers: "
        "[0] SGD."
    ),
}


SCALED = "fp16, scaling.init_scale=256"
EDITS = (plain_backward_after, clipped_by_hand, edited_between_micro_batches, another_optimizer)
"""Mistakes only while gradients carry a loss scale: without one they are what torch would have applied."""
MISTAKES = [(m, p) for m in SENTENCES for p in ((SCALED,) if m in EDITS else ("fp32", "bf16", SCALED))]


@pytest.mark.parametrize(("mistake", "policy"), MISTAKES, ids=lambda of: getattr(of, "__name__", of))
def test_sentence(mistake: Callable[[mezzo.Stepper], None], policy: str) -> None:
    _, amp = prepared(policy)
    with pytest.raises(StepError) as error:
        mistake(amp)
    want = SENTENCES[mistake]
    if mistake is stepped_directly and policy != SCALED:
        want = want.replace(" and on gradients that may carry the loss scale", "")  # there is none
    assert str(error.value) == want


@pytest.mark.parametrize("mistake", [m for m in SENTENCES if m is not stepped_directly], ids=lambda m: m.__name__)
def test_zero_grad_mends_every_mistake(mistake: Callable[[mezzo.Stepper], None]) -> None:
    _, amp = prepared(SCALED)
    with pytest.raises(StepError):
        mistake(amp)
    amp.zero_grad()
    amp.backward(loss_of(amp))
    assert amp.step()


def test_true_gradients_may_be_edited_and_added_to_as_in_torch() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 3)
    plain = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    amp = mezzo.prepare(model, ours, "fp32")
    for backward, m, step in ((amp.backward, model, amp.step), (torch.Tensor.backward, plain, theirs.step)):
        x = torch.arange(24.0).view(3, 8) / 24
        backward(m(x).square().mean())
        m.weight.grad.mul_(2)
        backward(m(x).mean())
        m(x).sum().backward()
        step()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-master"])
@pytest.mark.parametrize(
    "clip", [partial(nn.utils.clip_grad_norm_, max_norm=0.1), partial(nn.utils.clip_grad_value_, clip_value=0.01)]
)
def test_clipping_by_hand_is_clipping_true_gradients(policy: str, clip: Callable[..., object]) -> None:
    runs = []
    for inside in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1), policy)
        for _ in range(4):
            amp.backward(nn.functional.cross_entropy(model(torch.randn(16, 8)), torch.randint(3, (16,))))
            with amp.unscaled_grads() if inside else nullcontext():
                clip(model.parameters())
            assert amp.step()
            amp.zero_grad()
        runs.append([p.detach() for p in model.parameters()])
    assert all(map(torch.equal, *runs))


def test_a_backward_that_fails_halfway() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def,override]
            return x.clone()

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def,override]
            raise KeyError("out of memory, say")

    _, amp = prepared("fp32")
    x, y = batch()
    amp.backward(mse(amp.model(x), y))
    with pytest.raises(KeyError):
        amp.backward(mse(amp.model(Fails.apply(x.requires_grad_())), y))
    for call, then in (("step()", amp.step), ("backward(loss)", lambda: amp.backward(loss_of(amp)))):
        with pytest.raises(StepError) as error:
            then()
        assert str(error.value) == (
            f"{call} was called after a backward(loss) that failed halfway, so the gradients are part of a sum. "
            "Call amp.zero_grad() and compute the loss again."
        )
    amp.zero_grad()
    amp.backward(loss_of(amp))
    assert amp.step()


def test_a_step_inside_of_backward() -> None:
    _, amp = prepared("fp32")
    handle = next(amp.model.parameters()).register_post_accumulate_grad_hook(lambda _: amp.step())
    with pytest.raises(StepError, match=r"step\(\) was called while a backward pass runs, which has more to add"):
        amp.backward(loss_of(amp))
    handle.remove()
    amp.zero_grad()
    amp.backward(loss_of(amp))
    assert amp.step()


def test_zeros_of_before_an_explanation_are_zeros_after_it() -> None:
    model = nn.Linear(8, 3)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    for x in (*[torch.ones(4, 8)] * 3, *[torch.full((4, 8), torch.inf)] * 2):
        amp.zero_grad(set_to_none=False)
        amp.backward(model(x).square().mean())
        amp.step()
    amp.zero_grad(set_to_none=False)
    with pytest.raises(StepError, match="before backward"):
        amp.step()  # says first why the loss was inf twice
    amp.backward(model(torch.ones(4, 8)).square().mean())
    assert amp.step()


def test_an_optimizer_outlives_its_stepper() -> None:
    model, amp = prepared("fp32")
    optimizer = amp.optimizers[0]
    with pytest.raises(StepError, match="prepared already"):
        mezzo.prepare(model, optimizer, "fp32")
    amp.backward(loss_of(amp))
    assert amp.step()
    del amp
    gc.collect()
    optimizer.step()


@pytest.mark.parametrize("at", ["master_store.py", "param_batches.py", "guard.py"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, mezzo.optim.SGD])
def test_a_step_that_ctrl_c_ended_is_not_taken_again(at: str, kind: Any) -> None:
    """Wherever it came, the gradients that were used are refused, and the run goes on with the next ones."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    amp = mezzo.prepare(model, kind(model.parameters(), lr=0.1), "fp16-master, scaling.init_scale=8")
    amp.backward(loss_of(amp))

    reached: set[str] = set()

    def interrupt(frame: Any, event: str, _: object) -> Any:
        reached.add(frame.f_code.co_name)
        if frame.f_code.co_filename.endswith(at) and "update_" in reached:
            sys.settrace(None)
            raise KeyboardInterrupt
        return None

    sys.settrace(interrupt)
    try:
        amp.step()
    except KeyboardInterrupt:
        with pytest.raises(StepError, match="interrupted and may have been taken in part"):
            amp.step()
    finally:
        sys.settrace(None)
    amp.zero_grad()
    amp.backward(loss_of(amp))
    assert amp.step().applied
    assert not vars(amp.optimizers[0]).keys() & {"grad_scale", "found_inf", "clip_coef"}


def test_a_step_inside_the_step_of_an_optimizer_is_refused() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = mezzo.prepare(model, optimizer, "bf16")
    optimizer.register_step_pre_hook(lambda *_: amp.step() and None)
    amp.backward(loss_of(amp))
    with pytest.raises(StepError, match="that has not ended"):
        amp.step()
