"""What Lightning hands over besides weights: scalers of its own, options that an optimizer cannot serve, and words in its terms."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler, ModelPruning
from tests.integrations.test_lightning import Module, loader, pytestmark, trainer

import mezzo
from mezzo.errors import StepError
from mezzo.integrations.lightning import MezzoPrecision

__all__ = ["pytestmark"]


class Evaluated(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.net.parameters(), lr=0.1)


@pytest.mark.parametrize("name", ["MixedPrecision", "native_amp_scaling_state"])
def test_the_loss_scale_that_lightning_saved_goes_on(name: str, tmp_path: Path) -> None:
    fit = trainer("fp16", tmp_path, max_epochs=1, enable_checkpointing=False)
    fit.fit(Module("fp16"), loader())
    fit.save_checkpoint(path := tmp_path / "state.ckpt")
    saved = torch.load(path, weights_only=True)
    del saved["MezzoPrecision"]
    torch.save({**saved, name: torch.amp.GradScaler("cpu", init_scale=1024.0).state_dict() | {"scale": 1024.0}}, path)
    again = trainer("fp16", tmp_path, max_epochs=2, enable_checkpointing=False)
    again.fit(Module("fp16"), loader(), ckpt_path=path)
    assert again.precision_plugin.stepper.scale == 1024.0


@pytest.mark.parametrize("given", ["argument", "callback"])
def test_lbfgs_over_several_batches_is_refused_before_the_first(given: str, tmp_path: Path) -> None:
    module = Evaluated("bf16")
    before = module.net[0].weight.clone()
    more = (
        {"accumulate_grad_batches": 2}
        if given == "argument"
        else {"callbacks": [GradientAccumulationScheduler({1: 2})]}
    )
    fit = trainer("bf16", tmp_path, max_epochs=2, enable_checkpointing=False, **more)
    with pytest.raises(mezzo.errors.StepError, match=r"accumulate_grad_batches=2 was given with LBFGS.*batch_size"):
        fit.fit(module, loader())
    assert torch.equal(module.net[0].weight, before)


def test_log_lines_are_in_lightnings_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    averaging = EMAWeightAveraging(decay=0.5)
    fit = trainer("bf16-master", tmp_path, max_epochs=1, callbacks=[averaging], enable_checkpointing=False)
    with caplog.at_level(logging.WARNING, "mezzo"):
        fit.fit(Module("bf16-master"), loader())
    assert "plugin.stepper.export_weights()" in caplog.text and "amp." not in caplog.text


def test_two_precisions_are_told_by_their_names(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"plugins=MezzoPrecision\('bf16-master, \*\.norm=fp32'\)"):
        Trainer(precision="bf16-mixed", plugins=MezzoPrecision("bf16-master, *.norm=fp32"), default_root_dir=tmp_path)


def test_a_precision_by_lightnings_name_is_told_where_it_goes() -> None:
    with pytest.raises(
        StepError, match=r"MezzoPrecision\(\) has no argument 'precision': write MezzoPrecision\('bf16-mixed'\)"
    ):
        MezzoPrecision(precision="bf16-mixed")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"MezzoPrecision\(\) takes policy"):
        MezzoPrecision("bf16", "fp16")  # type: ignore[call-arg]


@pytest.mark.parametrize("policy", ["bf16-master", "fp16-master"])
def test_pruning_goes_back_to_the_weights_of_the_first_step(policy: str, tmp_path: Path) -> None:
    """The lottery ticket hypothesis, which `ModelPruning` follows by default: it assigns `.data` after each epoch."""
    module = Module(policy)
    begun = copy.deepcopy(module.net.state_dict())
    pruning = ModelPruning("l1_unstructured", amount=0.25)
    trainer(policy, tmp_path, max_epochs=3, callbacks=[pruning], enable_checkpointing=False).fit(module, loader())
    ended = {name: weight.double() for name, weight in module.net.named_parameters() if weight.dim() == 2}
    assert sum(int((weight == 0).sum()) for weight in ended.values()) > 0
    for name, weight in ended.items():
        first = begun[name].to(module.net.get_parameter(name).dtype).double()
        assert torch.equal(weight, first * (weight != 0)), name
