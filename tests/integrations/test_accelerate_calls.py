"""Accelerate's other ways to prepare lead to the same run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import torch.nn.functional as F
from tests.integrations import loops
from torch import nn

import mezzo
from mezzo.errors import PolicyError, StepError
from mezzo.integrations.accelerate import Accelerator

Prepare = Callable[[Accelerator, nn.Module, torch.optim.Optimizer], tuple[nn.Module, Any]]
WAYS: dict[str, Prepare] = {
    "by their methods": lambda a, m, o: (a.prepare_model(m), a.prepare_optimizer(o)),
    "by methods, the optimizer's after prepare": lambda a, m, o: (a.prepare(m), a.prepare_optimizer(o)),
    "twice": lambda a, m, o: a.prepare(*a.prepare(m, o)),
    "the optimizer twice": lambda a, m, o: (a.prepare(m, o)[0], a.prepare(a.prepare_optimizer(o))),
}


@pytest.mark.parametrize("policy", loops.POLICIES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_weights_are_those_of_prepare(way: Prepare, policy: str) -> None:
    accelerator, model = Accelerator(cpu=True, policy=policy), loops.make_model()
    optimizer, scheduler = loops.make_optimizer(model)
    model, optimizer = way(accelerator, model, optimizer)
    accelerator.stepper.on_applied(scheduler.step)
    x, y = loops.make_data().tensors
    for step in range(loops.EPOCHS * loops.BATCHES):
        rows = slice(step % loops.BATCHES * loops.BATCH, (step % loops.BATCHES + 1) * loops.BATCH)
        accelerator.backward(F.cross_entropy(model(x[rows]), y[rows]))
        optimizer.step()
        optimizer.zero_grad()
    loops.assert_same(model, scheduler, policy, loops.Case())


@pytest.mark.parametrize("policy", ["fp16", mezzo.Policy.parse("fp16, output=none")])
def test_a_policy_is_given_by_name(policy: Any) -> None:
    """The first argument of an Accelerator is `device_placement`, which took any text for true: the policy was auto."""
    with pytest.raises(PolicyError, match=rf": write Accelerator\(policy='{policy}'\), by its name"):
        Accelerator(policy, cpu=True)


def test_its_scaler_says_the_loss_scale_as_that_of_accelerate() -> None:
    accelerator, model = Accelerator(cpu=True, policy="fp16, scaling.init_scale=1024"), loops.make_model()
    with pytest.raises(StepError, match=r"there is no stepper.*accelerator\.prepare\(model, optimizer\)"):
        accelerator.scaler.get_scale()
    model, optimizer = accelerator.prepare(model, loops.make_optimizer(model)[0])
    assert accelerator.scaler.get_scale() == 1024
    accelerator.backward(model(loops.make_data().tensors[0]).sum() * float("inf"))
    optimizer.step()
    assert accelerator.scaler.get_scale() == accelerator.stepper.scale


def test_a_step_that_is_to_clip_is_told_what_clips() -> None:
    accelerator, model = Accelerator(cpu=True, policy="bf16"), loops.make_model()
    model, optimizer = accelerator.prepare(model, loops.make_optimizer(model)[0])
    x, y = loops.make_data().tensors
    accelerator.backward(F.cross_entropy(model(x), y))
    with pytest.raises(StepError, match=r"no argument 'max_norm': write accelerator\.clip_grad_norm_\("):
        optimizer.step(max_norm=1.0)
    accelerator.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    assert not optimizer.step_was_skipped


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda a, m: a.backward("loss"), r"backward\(loss\) .*str"),
        (lambda a, m: a.clip_grad_norm_(None, 1.0), r"given NoneType in place of parameters: write model\.parameters\(\)"),
        (lambda a, m: a.clip_grad_norm_(m, 1.0, 1), r"given Linear in place of parameters"),
        (lambda a, m: a.clip_grad_norm_([*m.parameters(), None], 1.0), r"given NoneType in place of parameters"),
        (lambda a, m: a.clip_grad_value_("weights", 1.0), r"given str in place of parameters"),
        (lambda a, m: a.clip_grad_norm_(m.parameters(), 1.0, float("nan")), r"norm_type=nan: write a number, as 2"),
        (lambda a, m: a.clip_grad_norm_(m.parameters(), 1.0, None), r"norm_type=None: write a number, as 2"),
    ],
)  # fmt: skip
def test_what_is_no_loss_parameter_or_norm_is_refused_and_the_step_goes_on(call: Any, words: str) -> None:
    accelerator, model = Accelerator(cpu=True, policy="fp16"), loops.make_model()
    model, optimizer = accelerator.prepare(model, loops.make_optimizer(model)[0])
    x, y = loops.make_data().tensors
    accelerator.backward(F.cross_entropy(model(x), y))
    with pytest.raises(StepError, match=words):
        call(accelerator, model)
    optimizer.step()
    assert accelerator.stepper.counters().applied == 1


@pytest.mark.parametrize(("given", "policy"), [("no", "fp32"), ("fp16", "fp16"), ("bf16", "bf16"), (None, "auto")])
def test_a_precision_without_a_policy_is_the_policy(given: str | None, policy: str) -> None:
    """A program that changes its import alone trains in what it asked for; "no" trained in bf16."""
    accelerator = Accelerator(cpu=True, mixed_precision=given)
    model = loops.make_model()
    accelerator.prepare(model, loops.make_optimizer(model)[0])
    assert accelerator.stepper.policy == mezzo.Policy.parse(policy).resolve("cpu")


def test_casting_that_is_off_beside_a_policy_is_told_what_to_write() -> None:
    off = accelerate.utils.AutocastKwargs(enabled=False)
    said = r"AutocastKwargs was given beside policy=bf16, which says what is cast\. Leave it out: policy='fp32' casts nothing"
    with pytest.raises(PolicyError, match=said):
        Accelerator(cpu=True, policy="bf16", kwargs_handlers=[off])
    accelerator = Accelerator(cpu=True, policy="bf16")
    with accelerator.autocast(off):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_a_policy_that_is_none_is_named_before_what_accelerate_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")  # which it cannot import
    with pytest.raises(PolicyError, match="unknown preset 'bf17'"):
        Accelerator(cpu=True, policy="bf17")


def test_schedules_of_two_optimizers_stay_where_their_own_step_was_skipped() -> None:
    """An optimizer's answer was that of whichever stepped last: the skipped one's schedule moved, or the other's did not."""
    accelerator, model = Accelerator(cpu=True, policy="fp16, scaling.init_scale=1024"), loops.make_model()
    params = list(model.parameters())
    both = [torch.optim.SGD(group, lr=1.0) for group in (params[:2], params[2:])]
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in both]
    model, *prepared = accelerator.prepare(model, *both, *schedules)
    both, schedules = prepared[:2], prepared[2:]
    accelerator.backward(model(torch.ones(2, 6)).square().mean())
    with accelerator.stepper.unscaled_grads():
        params[0].grad.fill_(float("inf"))
    for part in (*both, *schedules):
        part.step()
    assert [optimizer.step_was_skipped for optimizer in both] == [True, False]
    assert accelerator.optimizer_step_was_skipped
    assert [optimizer.param_groups[0]["lr"] for optimizer in both] == [1.0, 0.5]


@pytest.mark.parametrize(("launched", "policy"), [("fp16", "fp16"), ("bf16", "bf16"), ("no", "auto")])
def test_a_launchers_precision_without_a_policy_is_the_policy(
    launched: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`accelerate launch --mixed_precision bf16`: it was refused beside policy=auto, which nobody had written; "no" is its default."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    accelerator, model = Accelerator(cpu=True), loops.make_model()
    accelerator.prepare(model, loops.make_optimizer(model)[0])
    assert accelerator.stepper.policy == mezzo.Policy.parse(policy).resolve("cpu")
    assert accelerator.mixed_precision == "no"
