"""Checkpoints move between a framework's own precision and a policy, and to runs that train nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from tests.integrations import loops
from tests.integrations.conftest import start_anew
from tests.integrations.test_lightning import Module, loader, trainer
from tests.integrations.test_transformers import Classifier, arguments, rows
from torch import nn

import mezzo
from mezzo.integrations.accelerate import Accelerator
from mezzo.integrations.lightning import MezzoPrecision
from mezzo.integrations.transformers import Trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*number of training batches"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]
SCALER = {"scale": 4096.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7}
"""What torch's GradScaler saves."""


class Measured(Module):
    def test_step(self, batch: Any, index: int) -> None:
        self.log("loss", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(batch[0])


@pytest.mark.parametrize("policy", loops.POLICIES)
def test_lightning_tests_and_predicts_from_a_checkpoint_of_a_training(policy: str, tmp_path: Path) -> None:
    fit, module, path = trainer(policy, tmp_path, max_epochs=1), Measured(policy), tmp_path / "run.ckpt"
    fit.fit(module, loader())
    fit.save_checkpoint(path)
    wanted = fit.test(module, loader(), verbose=False)
    other = trainer(policy, tmp_path)
    assert other.test(Measured(policy), loader(), ckpt_path=path, verbose=False) == wanted
    assert len(other.predict(Measured(policy), loader(), ckpt_path=path)) == loops.BATCHES


def test_lightning_saves_what_was_only_tested_and_trains_from_it(tmp_path: Path) -> None:
    first, path = trainer("fp16", tmp_path), tmp_path / "run.ckpt"
    first.test(Measured("fp16"), loader(), verbose=False)
    first.save_checkpoint(path)
    second = trainer("fp16", tmp_path, max_epochs=1)
    second.fit(Measured("fp16"), loader(), ckpt_path=path)
    assert second.precision_plugin.stepper.counters().seen == loops.BATCHES


def test_lightning_takes_gradients_in_a_test(tmp_path: Path) -> None:
    """As an attack on the inputs does."""

    class Attacked(Measured):
        automatic_optimization = False

        @torch.enable_grad()
        def test_step(self, batch: Any, index: int) -> None:
            x = batch[0].clone().requires_grad_()
            self.manual_backward(F.cross_entropy(self(x), batch[1]))
            assert x.grad is not None and x.grad.count_nonzero()

    trainer("bf16", tmp_path, inference_mode=False).test(Attacked("bf16"), loader(), verbose=False)


def start(accelerator: accelerate.Accelerator, trains: bool = True) -> tuple[nn.Module, Any]:
    model = loops.make_model()
    optimizer, _ = loops.make_optimizer(model)
    parts = accelerator.prepare(model, optimizer) if trains else (accelerator.prepare(model), None)
    return parts


def step(accelerator: accelerate.Accelerator, model: nn.Module, optimizer: Any) -> None:
    x, y = loops.make_data().tensors
    accelerator.backward(F.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("policy", loops.POLICIES)
def test_accelerates_own_state_goes_on_under_a_policy(policy: str, tmp_path: Path) -> None:
    before = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    plain, optimizer = start(before)
    step(before, plain, optimizer)
    before.save_state(str(tmp_path))
    start_anew()
    after = Accelerator(cpu=True, policy=policy)
    model, optimizer = start(after)
    after.load_state(str(tmp_path))
    saved = after.stepper.export_weights()
    assert all(torch.equal(saved[name], value) for name, value in plain.state_dict().items())
    step(after, model, optimizer)
    assert after.stepper.counters().seen == 1


def test_a_scaler_that_accelerate_saved_goes_on_in_the_stepper(tmp_path: Path) -> None:
    before = Accelerator(cpu=True, policy="fp16")
    step(before, *start(before))
    before.save_state(str(tmp_path))
    torch.save(SCALER, tmp_path / "scaler.pt")  # as mixed_precision="fp16" leaves it
    start_anew()
    after = Accelerator(cpu=True, policy="fp16")
    start(after)
    after.load_state(str(tmp_path))
    assert after.stepper.scale == SCALER["scale"]
    assert after.stepper.state_dict(weights=False)["scaling"]["growth_tracker"] == SCALER["_growth_tracker"]
    torch.save({**SCALER, "scale": float("nan")}, tmp_path / "scaler.pt")
    kept = loops.copied(after._models[0])
    with pytest.raises(mezzo.errors.CheckpointError, match="scale is nan"):
        after.load_state(str(tmp_path))
    assert all(torch.equal(value, kept[name]) for name, value in after._models[0].state_dict().items())


def test_accelerate_loads_a_training_to_evaluate_it_and_trains_what_comes_later(tmp_path: Path) -> None:
    before = Accelerator(cpu=True, policy=loops.OVERFLOWING)
    model, optimizer = start(before)
    step(before, model, optimizer)
    before.save_state(str(tmp_path / "trained"))
    start_anew()
    after = Accelerator(cpu=True, policy=loops.OVERFLOWING)
    alone, _ = start(after, trains=False)
    after.load_state(str(tmp_path / "trained"))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in alone.state_dict().items())
    after.save_state(str(tmp_path / "again"))
    for name in ("trained", "again"):
        assert torch.load(tmp_path / name / "scaler.pt")["counters"]["seen"] == 1
    after.prepare(loops.make_optimizer(alone)[0])
    assert after.stepper.scale == before.stepper.scale and after.stepper.counters().seen == 1


def test_the_trainer_goes_on_from_a_scaler_of_its_own(tmp_path: Path) -> None:
    def train(load: bool, steps: int) -> Trainer:
        args = arguments(tmp_path, max_steps=steps, save_strategy="steps", save_steps=2)
        one = Trainer(Classifier(), args, train_dataset=rows(), policy="fp16")
        one.train(resume_from_checkpoint=load)
        return one

    train(False, 2)
    torch.save(SCALER, tmp_path / "checkpoint-2" / "scaler.pt")
    assert train(True, 4).stepper.scale == SCALER["scale"]


def test_fabric_keeps_a_scale_that_is_loaded_before_the_optimizer(tmp_path: Path) -> None:
    plugin = MezzoPrecision("fp16")
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
    model = fabric.setup_module(loops.make_model())
    plugin.load_state_dict(SCALER)
    fabric.setup_optimizers(loops.make_optimizer(model)[0])
    assert plugin.stepper.scale == SCALER["scale"]


def test_a_stepper_that_is_asked_for_too_early_is_told_so() -> None:
    with pytest.raises(
        mezzo.errors.StepError, match=r"no model was given together with its optimizer yet.*trainer\.train\(\)"
    ):
        _ = MezzoPrecision("bf16").stepper


def test_folds_are_trained_one_after_the_other_as_the_error_says() -> None:
    accelerator = Accelerator(cpu=True, policy="bf16")
    model, optimizer = start(accelerator)
    step(accelerator, model, optimizer)
    with pytest.raises(mezzo.errors.StepError, match=r"accelerator\.free_memory\(\)"):
        start(accelerator)
    step(accelerator, model, optimizer)  # what was refused changed nothing
    accelerator.free_memory()
    step(accelerator, *start(accelerator))
    assert accelerator.stepper.counters().applied == 1
