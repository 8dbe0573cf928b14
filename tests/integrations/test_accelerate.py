"""An Accelerator with a policy trains as `mezzo.prepare` does, and refuses what it cannot honour."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from tests.integrations import loops
from tests.integrations.conftest import start_anew
from tests.integrations.loops import BATCH, CASES, EPOCHS, OVERFLOWING, POLICIES, Case
from tests.torch_versions import warns_of_breaks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import mezzo
from mezzo.integrations.accelerate import Accelerator


def plain(**options: Any) -> Accelerator:
    return Accelerator(cpu=True, **options)


def sharding(policy: str, plugin: dict[str, Any] | None = None, **options: Any) -> Accelerator:
    """Return an Accelerator as it starts for FSDP2 on GPUs; on CPUs Accelerate itself ignores the plugin."""
    how = {"transformer_cls_names_to_wrap": ["Linear"], "state_dict_type": "SHARDED_STATE_DICT", **(plugin or {})}
    given = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **how)
    accelerator = plain(policy=policy, fsdp_plugin=given, **options)
    for state in (accelerator.state, PartialState()):
        vars(state).update(distributed_type=DistributedType.FSDP, fsdp_plugin=given)
    assert accelerator.is_fsdp2
    return accelerator


def run(
    policy: str,
    case: Case,
    epochs: int = EPOCHS,
    load: Path | None = None,
    save: Path | None = None,
    start: Callable[..., Accelerator] = plain,
):
    """The loop as people write it for Accelerate."""
    accelerator = start(policy=policy, gradient_accumulation_steps=case.accumulate)
    model = loops.make_model()
    optimizer, scheduler = loops.make_optimizer(model)
    loader = DataLoader(loops.make_data(), batch_size=BATCH)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if load is not None:
        accelerator.load_state(str(load))
    skipped = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients and case.max_norm:
                    accelerator.clip_grad_norm_(model.parameters(), case.max_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
    if save is not None:
        accelerator.save_state(str(save))
    return accelerator, model, scheduler, skipped


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_weights_are_those_of_prepare(policy: str, case: Case, tmp_path: Path) -> None:
    if case.is_resumed:
        run(policy, case, epochs=1, save=tmp_path)
        _, model, scheduler, _ = run(policy, case, epochs=1, load=tmp_path)
    else:
        _, model, scheduler, _ = run(policy, case)
    loops.assert_same(model, scheduler, policy, case)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_weights_sharded_by_fsdp2_are_those_of_prepare(policy: str, case: Case, one_rank: None, tmp_path: Path) -> None:
    if case.is_resumed:
        run(policy, case, epochs=1, save=tmp_path, start=sharding)
        start_anew()
    epochs, load = (1, tmp_path) if case.is_resumed else (EPOCHS, None)
    _, model, scheduler, _ = run(policy, case, epochs=epochs, load=load, start=sharding)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    loops.assert_same(model, scheduler, policy, case)


@pytest.mark.parametrize(
    "given",
    [
        {"activation_checkpointing": True},
        {"cpu_ram_efficient_loading": True},
        {"transformer_cls_names_to_wrap": ["LayerNorm"]},
    ],
    ids=str,
)
def test_options_of_fsdp2_change_no_bit(given: dict[str, Any], one_rank: None) -> None:
    models = []
    for options in ({}, given):
        models.append(run("bf16", Case(), epochs=1, start=partial(sharding, plugin=options))[1])
        start_anew()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())


@pytest.mark.parametrize("given", [{"mixed_precision_policy": "bf16"}, {"ignored_modules": "0"}], ids=str)
def test_what_contradicts_the_policy_in_an_fsdp2_plugin_is_refused(given: dict[str, Any], one_rank: None) -> None:
    with pytest.raises(
        mezzo.errors.PolicyError, match=f"FullyShardedDataParallelPlugin has {next(iter(given))}=.*policy=fp16"
    ):
        run("fp16", Case(), start=partial(sharding, plugin=given))


def test_an_optimizer_that_has_stepped_is_refused_under_fsdp2(one_rank: None) -> None:
    model = loops.make_model()
    optimizer = loops.make_optimizer(model)[0]
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    with pytest.raises(
        mezzo.errors.StepError, match=r"AdamW that holds the state of 6 weights.*accelerator\.load_state"
    ):
        sharding("bf16").prepare(model, optimizer)
    assert not any(isinstance(p, DTensor) for p in model.parameters())


def test_an_overflow_is_reported_and_skips_the_scheduler(tmp_path: Path) -> None:
    accelerator, model, scheduler, skipped = run(OVERFLOWING, Case())
    assert skipped[0] and 0 < skipped.count(False) < len(skipped)
    assert scheduler.scheduler.last_epoch == skipped.count(False)
    loops.assert_same(model, scheduler, OVERFLOWING, Case())
    assert accelerator.stepper.counters().skipped == skipped.count(True)


def test_the_loss_scale_is_saved_where_a_scaler_is(tmp_path: Path) -> None:
    before, *_ = run(OVERFLOWING, Case(), epochs=1, save=tmp_path)
    after, *_ = run(OVERFLOWING, Case(), epochs=0, load=tmp_path)
    assert (tmp_path / "scaler.pt").exists()
    assert after.stepper.scale == before.stepper.scale < 2**24
    assert after.stepper.counters() == before.stepper.counters()


@pytest.fixture
def ready() -> tuple[Accelerator, nn.Module, torch.optim.Optimizer]:
    """After one backward, with a loss scale."""
    accelerator = Accelerator(cpu=True, policy="fp16")
    model = loops.make_model()
    optimizer, _ = loops.make_optimizer(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = loops.make_data().tensors
    accelerator.backward(F.cross_entropy(model(x), y))
    return accelerator, model, optimizer


def plain_norm(norm_type: float = 2.0) -> torch.Tensor:
    model = loops.make_model()
    x, y = loops.make_data().tensors
    with torch.autocast("cpu", torch.float16):
        loss = F.cross_entropy(model(x).float(), y)
    loss.backward()
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], norm_type)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipping_returns_the_true_norm(ready, norm_type: float) -> None:
    accelerator, model, optimizer = ready
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.01, norm_type)
    torch.testing.assert_close(norm, plain_norm(norm_type), rtol=2e-2, atol=0)
    optimizer.step()
    assert accelerator.stepper.counters().applied == 1


@pytest.mark.parametrize("bound", [None, -1.0, 0, True, float("nan"), "1", 10**400, torch.ones(2)])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_bound_that_would_leave_no_gradient_is_refused_where_it_is_given(ready, bound: Any, norm_type: float) -> None:
    accelerator, model, optimizer = ready
    before = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(
        mezzo.errors.StepError,
        match=r"max_norm=.*: gradients are clipped to a positive number that fp32 holds; write one\.",
    ):
        accelerator.clip_grad_norm_(model.parameters(), bound, norm_type)
    with pytest.raises(
        mezzo.errors.StepError,
        match=r"clip_value=.*: gradients are clipped to a positive number that fp32 holds; write one\.",
    ):
        accelerator.clip_grad_value_(model.parameters(), bound)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before, strict=True))
    optimizer.step()
    assert accelerator.stepper.counters().applied == 1


def test_a_norm_is_measured_by_clipping_to_inf(ready) -> None:
    accelerator, model, optimizer = ready
    norm = accelerator.clip_grad_norm_(model.parameters(), float("inf"))
    optimizer.step()
    assert float(norm) == pytest.approx(accelerator._adapter.result.grad_norm, rel=1e-6)


def test_a_part_of_the_parameters_is_clipped_on_true_gradients(ready) -> None:
    accelerator, model, optimizer = ready
    accelerator.clip_grad_norm_(model[0].parameters(), 1e-3)
    accelerator.unscale_gradients()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model[0].parameters()])
    torch.testing.assert_close(norm, torch.tensor(1e-3), rtol=1e-3, atol=0)
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped


def test_values_are_clamped_as_the_step_does(ready) -> None:
    accelerator, model, optimizer = ready
    accelerator.clip_grad_value_(model.parameters(), 1e-3)
    optimizer.step()
    twin = loops.make_model()
    other, _ = loops.make_optimizer(twin)
    amp = mezzo.prepare(twin, other, "fp16")
    x, y = loops.make_data().tensors
    amp.backward(F.cross_entropy(twin(x), y))
    amp.step(clip_value=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_gradients_are_true_after_unscaling(ready) -> None:
    accelerator, model, _ = ready
    accelerator.unscale_gradients()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    torch.testing.assert_close(norm, plain_norm(), rtol=2e-2, atol=0)


@pytest.mark.parametrize("order", ["clipped first", "unscaled first", "both"])
@pytest.mark.parametrize("by", ["norm", "value"])
def test_gradients_that_are_unscaled_are_those_that_the_step_takes(ready, order: str, by: str) -> None:
    accelerator, model, optimizer = ready
    if order != "clipped first":
        accelerator.unscale_gradients()
    if by == "norm":
        accelerator.clip_grad_norm_(model.parameters(), 1e-3)
    else:
        accelerator.clip_grad_value_(model.parameters(), 1e-3)
    if order != "unscaled first":
        accelerator.unscale_gradients()
    grads = [p.grad.clone() for p in model.parameters()]
    size = torch.nn.utils.get_total_norm(grads) if by == "norm" else max(grad.abs().max() for grad in grads)
    torch.testing.assert_close(size, torch.tensor(1e-3), rtol=1e-3, atol=0)
    optimizer.step()
    result = accelerator._adapter.result
    assert result.applied and (by == "value" or result.grad_norm == pytest.approx(1e-3, rel=1e-3))


def test_a_model_may_come_before_its_optimizer() -> None:
    accelerator = Accelerator(cpu=True, policy="bf16")
    model = accelerator.prepare(loops.make_model())
    optimizer, _ = loops.make_optimizer(model)
    optimizer = accelerator.prepare(optimizer)
    accelerator.backward(model(torch.randn(4, 6)).square().mean())
    optimizer.step()
    assert accelerator.stepper.counters().applied == 1


def test_a_teacher_runs_in_the_policy_beside_a_student() -> None:
    accelerator = Accelerator(cpu=True, policy="bf16")
    student, teacher = loops.make_model(), loops.make_model()
    optimizer, _ = loops.make_optimizer(student)
    student, teacher, optimizer = accelerator.prepare(student, teacher, optimizer)
    inside = []
    teacher[0].register_forward_hook(lambda module, args, out: inside.append(out.dtype))
    accelerator.backward((student(torch.ones(4, 6)) - teacher(torch.ones(4, 6))).square().mean())
    optimizer.step()
    assert inside == [torch.bfloat16]


def test_the_region_can_be_entered_and_left() -> None:
    accelerator = Accelerator(cpu=True, policy="bf16")
    a = torch.ones(2, 2)
    with accelerator.autocast():  # before a model is there
        assert (a @ a).dtype is torch.bfloat16
    model = loops.make_model()
    optimizer, _ = loops.make_optimizer(model)
    accelerator.prepare(model, optimizer)
    with accelerator.autocast():
        assert (a @ a).dtype is torch.bfloat16
        with accelerator.autocast(accelerate.utils.AutocastKwargs(enabled=False)):
            assert (a @ a).dtype is torch.float32


@warns_of_breaks
def test_a_compiled_model_trains() -> None:
    accelerator = Accelerator(cpu=True, policy="bf16", dynamo_backend="aot_eager")
    model = loops.make_model()
    optimizer, _ = loops.make_optimizer(model)
    model, optimizer = accelerator.prepare(model, optimizer)
    x, y = loops.make_data().tensors
    accelerator.backward(F.cross_entropy(model(x), y))
    optimizer.step()
    assert accelerator.stepper.counters().applied == 1
    assert torch.equal(model(x), accelerator.unwrap_model(model)(x))


def test_another_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(mezzo.errors.PolicyError, match=r"mixed_precision=bf16.*beside policy=fp16"):
        Accelerator(cpu=True, policy="fp16", mixed_precision="bf16")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(mezzo.errors.PolicyError, match="ACCELERATE_MIXED_PRECISION"):
        Accelerator(cpu=True, policy="fp16")


def test_a_scaler_of_its_own_is_refused() -> None:
    with pytest.raises(mezzo.errors.PolicyError, match=r"GradScalerKwargs.*scaling.init_scale"):
        Accelerator(cpu=True, policy="fp16", kwargs_handlers=[accelerate.utils.GradScalerKwargs()])


def test_two_trained_models_are_refused_and_left_alone() -> None:
    accelerator = Accelerator(cpu=True, policy="bf16")
    models = [loops.make_model(), loops.make_model()]
    optimizers = [loops.make_optimizer(model)[0] for model in models]
    with pytest.raises(mezzo.errors.StepError, match=r"belong to 2 of the models.*ModuleDict"):
        accelerator.prepare(*models, *optimizers)
    assert all(model(torch.ones(1, 6)).dtype is torch.float32 and type(model) is nn.Sequential for model in models)
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("is_copied", [False, True])
def test_an_optimizer_of_no_model_is_told_apart_from_one_of_two(is_copied: bool) -> None:
    accelerator, model = Accelerator(cpu=True, policy="bf16"), loops.make_model()
    optimizer = loops.make_optimizer(model)[0]
    given = [copy.deepcopy(model)] if is_copied else []
    with pytest.raises(mezzo.errors.StepError, match=r"belong to none of the models.*model\.parameters\(\)"):
        accelerator.prepare(*given, optimizer)


def test_a_policy_that_does_not_exist_is_refused_before_data_is_loaded() -> None:
    with pytest.raises(mezzo.errors.PolicyError, match=r"bf61.*Did you mean 'bf16'"):
        Accelerator(cpu=True, policy="bf61")


def test_two_optimizers_that_step_after_one_backward() -> None:
    """The weights of torch's own Accelerator, to the last bit."""
    runs = []
    for make in (lambda: accelerate.Accelerator(cpu=True), lambda: Accelerator(cpu=True, policy="fp32")):
        start_anew()
        accelerator, model = make(), loops.make_model()
        params = list(model.parameters())
        both = [torch.optim.AdamW(params[:2], lr=0.01), torch.optim.SGD(params[2:], lr=0.01)]
        model, *both = accelerator.prepare(model, *both)
        for _ in range(4):
            for optimizer in both:
                optimizer.zero_grad()
            accelerator.backward(model(torch.ones(2, 6)).square().mean())
            for optimizer in both:
                optimizer.step()
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *runs))


def test_backward_before_an_optimizer_is_refused() -> None:
    accelerator = Accelerator(cpu=True, policy="bf16")
    model = accelerator.prepare(loops.make_model())
    with pytest.raises(mezzo.errors.StepError, match=r"accelerator\.prepare\(model, optimizer\)"):
        accelerator.backward(model(torch.ones(1, 6)).sum())


def test_what_is_left_out_is_asked_for_in_accelerates_words() -> None:
    accelerator, model = plain(policy="bf16"), loops.make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = loops.make_data().tensors[0]
    with pytest.raises(mezzo.errors.StepError, match=r"Write accelerator.backward\(loss\), then optimizer.step\(\)\.$"):
        optimizer.step()
    accelerator.backward(model(x).sum())
    optimizer.step()
    with pytest.raises(mezzo.errors.StepError, match=r"Call optimizer.zero_grad\(\) between step"):
        accelerator.backward(model(x).sum())


@pytest.mark.parametrize("ask", [lambda a, p: a.clip_grad_norm_(p, 1.0), lambda a, p: a.unscale_gradients()])
def test_a_backward_past_accelerate_is_told_in_its_words_where_gradients_are_clipped(ask: Callable[..., Any]) -> None:
    accelerator, model = plain(policy="bf16"), loops.make_model()
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(loops.make_data().tensors[0]).sum().backward()
    with pytest.raises(mezzo.errors.StepError, match=r"accelerator.backward\(loss\)") as caught:
        ask(accelerator, model.parameters())
    assert "amp." not in str(caught.value)
