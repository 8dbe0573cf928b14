"""Fabric with the plugin trains as `mezzo.prepare` does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from tests.integrations import loops
from tests.integrations.loops import BATCH, BATCHES, EPOCHS, OVERFLOWING, POLICIES, Case
from torch import nn
from torch.utils.data import DataLoader

import mezzo
from mezzo.integrations.lightning import MezzoPrecision


def run(policy: str, case: Case, epochs: int = EPOCHS, load: Path | None = None, save: Path | None = None):
    """The loop as people write it for Fabric."""
    fabric = Fabric(accelerator="cpu", devices=1, plugins=MezzoPrecision(policy))
    model = loops.make_model()
    optimizer, scheduler = loops.make_optimizer(model)
    model, optimizer = fabric.setup(model, optimizer)
    fabric._precision.stepper.on_applied(scheduler.step)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "amp": fabric._precision}
    if load is not None:
        fabric.load(load, state)
    loader = fabric.setup_dataloaders(DataLoader(loops.make_data(), batch_size=BATCH))
    for _ in range(epochs):
        for index, (x, y) in enumerate(loader):
            fabric.backward(F.cross_entropy(model(x), y) / case.accumulate)
            if (index + 1) % case.accumulate == 0:
                if case.max_norm:
                    fabric.clip_gradients(model, optimizer, max_norm=case.max_norm)
                optimizer.step()
                optimizer.zero_grad()
    if save is not None:
        fabric.save(save, state)
    return fabric._precision.stepper, model, scheduler


@pytest.mark.parametrize(("policy", "case"), loops.EVERY_SECOND)
def test_weights_are_those_of_prepare(policy: str, case: Case, tmp_path: Path) -> None:
    if case.is_resumed:
        run(policy, case, epochs=1, save=tmp_path / "state")
        _, model, scheduler = run(policy, case, epochs=1, load=tmp_path / "state")
    else:
        _, model, scheduler = run(policy, case)
    loops.assert_same(model, scheduler, policy, case)


def test_an_overflow_skips_and_the_run_goes_on(tmp_path: Path) -> None:
    amp, model, scheduler = run(OVERFLOWING, Case(), save=tmp_path / "state")
    loops.assert_same(model, scheduler, OVERFLOWING, Case())
    assert 0 < amp.counters().skipped and scheduler.last_epoch == amp.counters().applied
    again, *_ = run(OVERFLOWING, Case(), epochs=0, load=tmp_path / "state")
    assert (again.scale, again.counters()) == (amp.scale, amp.counters())


@pytest.mark.parametrize("bound", [{"max_norm": 0.1, "norm_type": "inf"}, {"clip_val": 1e-3}, {"max_norm": 0.1}])
def test_every_clip_of_fabric_works(bound: dict[str, object]) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=MezzoPrecision("fp16"))
    model = loops.make_model()
    model, optimizer = fabric.setup(model, loops.make_optimizer(model)[0])
    x, y = loops.make_data().tensors
    fabric.backward(F.cross_entropy(model(x), y))
    norm = fabric.clip_gradients(model, optimizer, **bound)
    assert norm is None or 0 < float(norm) < 10
    optimizer.step()
    assert fabric._precision.stepper.counters().applied == 1


def test_model_and_optimizer_may_come_one_after_the_other() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=MezzoPrecision("bf16"))
    model = fabric.setup_module(loops.make_model())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    fabric.backward(model(torch.ones(2, 6)).sum())
    optimizer.step()
    assert fabric._precision.stepper.counters().applied == 1
    with pytest.raises(mezzo.errors.StepError, match=r"Write fabric.backward\(loss\), then optimizer.step\(\)"):
        optimizer.step()


@pytest.mark.parametrize("policy", POLICIES)
def test_weights_of_a_model_that_came_first_are_those_of_prepare(policy: str) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=MezzoPrecision(policy))
    model = fabric.setup_module(loops.make_model())
    optimizer, scheduler = loops.make_optimizer(model)
    optimizer = fabric.setup_optimizers(optimizer)
    fabric._precision.stepper.on_applied(scheduler.step)
    x, y = (t.split(BATCH) for t in loops.make_data().tensors)
    for step in range(EPOCHS * BATCHES):
        fabric.backward(F.cross_entropy(model(x[step % BATCHES]), y[step % BATCHES]))
        optimizer.step()
        optimizer.zero_grad()
    loops.assert_same(model.module, scheduler, policy, Case())


def test_the_region_is_that_of_fabric() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=MezzoPrecision("bf16"))
    for models in ([], [nn.Flatten()], [loops.make_model()]):
        for model in models:
            fabric.setup(model)
        with fabric.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.bfloat16


def test_lbfgs_takes_its_closure() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=MezzoPrecision("fp32"))
    model = loops.make_model()
    model, optimizer = fabric.setup(model, torch.optim.LBFGS(model.parameters(), max_iter=4))
    x, y = loops.make_data().tensors
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        losses.append(loss.detach())
        fabric.backward(loss)
        return loss

    optimizer.step(closure)
    assert len(losses) > 1 and losses[-1] < losses[0]


def test_another_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="both `precision=bf16-mixed` and `plugins="):
        Fabric(accelerator="cpu", devices=1, precision="bf16-mixed", plugins=MezzoPrecision("bf16"))


def test_backward_without_an_optimizer_says_what_to_call() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=MezzoPrecision("bf16"))
    model = fabric.setup(loops.make_model())
    with pytest.raises(mezzo.errors.StepError, match=r"fabric\.setup\(model, optimizer\)"):
        fabric.backward(model(torch.ones(2, 6)).sum())
