"""The Hugging Face Trainer with a policy trains as `mezzo.prepare` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import accelerate
import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.integrations import loops
from tests.integrations.loops import BATCH, EPOCHS, OVERFLOWING, Case
from tests.torch_versions import warns_of_breaks
from torch import Tensor, nn
from torch.utils.data import SequentialSampler

import mezzo
from mezzo.integrations.transformers import PolicyMixin, Trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*before.*optimizer.step")


class Classifier(nn.Module):
    """Returns its loss as the models of the library do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = loops.make_model()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(x).float()
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class InOrder(PolicyMixin, transformers.Trainer):
    """A subclass as libraries write them; takes the data in order."""

    def _get_train_sampler(self, *args: Any) -> Any:
        return SequentialSampler(self.train_dataset)


def rows() -> list[dict[str, Tensor]]:
    return [{"x": x, "labels": y} for x, y in loops.make_data()]


def arguments(folder: Path | str, **kwargs: Any) -> transformers.TrainingArguments:
    quiet = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    return transformers.TrainingArguments(
        **{"output_dir": str(folder), "use_cpu": True, "per_device_train_batch_size": BATCH, **quiet, **kwargs}
    )


def run(policy: str, case: Case, folder: Path, load: bool = False, **kwargs: Any) -> InOrder:
    model = Classifier()
    args = arguments(
        folder,
        num_train_epochs=EPOCHS,
        max_grad_norm=case.max_norm or 0.0,
        gradient_accumulation_steps=case.accumulate,
        **kwargs,
    )
    pair = loops.make_optimizer(model)
    trainer = InOrder(model, args, train_dataset=rows(), optimizers=pair, policy=policy)
    trainer.train(resume_from_checkpoint=load)
    return trainer


@pytest.mark.parametrize(("policy", "case"), loops.EVERY_SECOND)
def test_weights_are_those_of_prepare(policy: str, case: Case, tmp_path: Path) -> None:
    if case.is_resumed:
        stop = Stop(after=3)
        args = {"save_strategy": "steps", "save_steps": 3}
        model = Classifier()
        optimizers = loops.make_optimizer(model)
        arguments_ = arguments(tmp_path, num_train_epochs=EPOCHS, max_grad_norm=case.max_norm, **args)
        InOrder(model, arguments_, train_dataset=rows(), optimizers=optimizers, callbacks=[stop], policy=policy).train()
    trainer = run(policy, case, tmp_path, load=case.is_resumed)
    loops.assert_same(trainer.model.net, trainer.lr_scheduler, policy, case)


class Stop(transformers.TrainerCallback):
    """Ends a run early, as a time limit does."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop = state.global_step >= self.after
        return control


def test_an_overflow_skips_the_scheduler(tmp_path: Path) -> None:
    trainer = run(OVERFLOWING, Case(), tmp_path, save_strategy="epoch")
    loops.assert_same(trainer.model.net, trainer.lr_scheduler, OVERFLOWING, Case())
    counters = trainer.stepper.counters()
    assert 0 < counters.skipped and trainer.lr_scheduler.last_epoch == counters.applied
    saved = torch.load(tmp_path / f"checkpoint-{EPOCHS * loops.BATCHES}" / "scaler.pt", weights_only=True)
    assert saved["scaling"]["scale"] == trainer.stepper.scale


def test_the_logged_norm_is_that_of_true_gradients(tmp_path: Path) -> None:
    trainer = run("fp16", Case(), tmp_path, logging_strategy="steps", logging_steps=1)
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(logged) == EPOCHS * loops.BATCHES and all(0 < norm < 10 for norm in logged)
    assert logged[-1] == pytest.approx(trainer.accelerator._adapter.result.grad_norm, rel=1e-4)


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16, scaling=1024"])
@pytest.mark.parametrize("max_norm", [0.0, 1e-3])
def test_callbacks_before_the_step_see_true_and_clipped_gradients(max_norm: float, policy: str, tmp_path: Path) -> None:
    class Looking(transformers.TrainerCallback):
        norms: ClassVar[list[float]] = []

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            grads = [p.grad for p in kwargs["model"].parameters() if p.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(grads)))

    class Late(Looking):
        norms: ClassVar[list[float]] = []

    args = arguments(tmp_path, num_train_epochs=1, max_grad_norm=max_norm, logging_strategy="steps", logging_steps=1)
    trainer = Trainer(Classifier(), args, train_dataset=rows(), callbacks=[Looking()], policy=policy)
    trainer.add_callback(Late())
    trainer.train()
    logged = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    assert len(logged) == loops.BATCHES and trainer.stepper.counters().applied == loops.BATCHES
    assert Looking.norms == Late.norms == pytest.approx([max_norm] * loops.BATCHES if max_norm else logged, rel=1e-2)


def test_it_creates_its_own_optimizer_and_evaluates(tmp_path: Path) -> None:
    args = arguments(tmp_path, num_train_epochs=1, eval_strategy="epoch", learning_rate=1e-2)
    trainer = Trainer(Classifier(), args, train_dataset=rows(), eval_dataset=rows(), policy="bf16")
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    assert trainer.stepper.counters().applied == loops.BATCHES


def test_a_model_of_the_library_trains_and_saves(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    data = [{"input_ids": torch.randint(0, 32, (8,)), "labels": torch.randint(0, 32, (8,))} for _ in range(8)]
    args = arguments(tmp_path, max_steps=2, activation_checkpointing=True)
    trainer = Trainer(model, args, train_dataset=data, policy="bf16")
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_it_trains_again(tmp_path: Path) -> None:
    trainer = run("bf16-master", Case(), tmp_path)
    trainer.train()
    assert trainer.stepper.counters().applied == EPOCHS * loops.BATCHES


@warns_of_breaks
def test_a_compiled_model_trains(tmp_path: Path) -> None:
    trainer = run("bf16", Case(), tmp_path, max_steps=2, torch_compile=True, torch_compile_backend="aot_eager")
    assert trainer.stepper.counters().applied == 2


@pytest.mark.parametrize("name", ["bf16", "bf16_full_eval"])
def test_another_precision_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(mezzo.errors.PolicyError, match="policy=fp16"):
        Trainer(Classifier(), arguments(tmp_path, **{name: True}), policy="fp16")


def test_checkpoints_of_its_own_are_refused_under_fsdp2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate.Accelerator, "is_fsdp2", True)
    with pytest.raises(mezzo.errors.PolicyError, match=r"save_strategy='epoch'.*masters.*save_strategy='no'"):
        Trainer(Classifier(), arguments(tmp_path, save_strategy="epoch"), policy="bf16-master")
