"""Lightning's Trainer with the plugin trains as `mezzo.prepare` does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from tests.integrations import loops
from tests.integrations.loops import BATCH, CASES, EPOCHS, OVERFLOWING, POLICIES, Case
from tests.torch_versions import warns_of_breaks
from torch import nn
from torch.utils.data import DataLoader

import mezzo
from mezzo.integrations.lightning import MezzoPrecision

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*number of training batches"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(LightningModule):
    def __init__(self, policy: str) -> None:
        super().__init__()
        self.net, self.policy = loops.make_model(), policy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("itemsize", float((batch[0] @ batch[0].T).dtype.itemsize))

    def configure_optimizers(self) -> Any:
        optimizer, self.scheduler = loops.make_optimizer(self)
        return [optimizer], [{"scheduler": self.scheduler, "interval": "step"}]


def trainer(policy: str, tmp_path: Path | str, **kwargs: Any) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    plugin = MezzoPrecision(policy)
    options = {"accelerator": "cpu", "devices": 1, "plugins": plugin, "default_root_dir": tmp_path}
    return Trainer(**{**options, **quiet, **kwargs})


def loader() -> DataLoader[Any]:
    return DataLoader(loops.make_data(), batch_size=BATCH)


def run(policy: str, case: Case, tmp_path: Path, epochs: int = EPOCHS, load: Path | None = None) -> Trainer:
    module = Module(policy)
    fit = trainer(
        policy,
        tmp_path,
        max_epochs=epochs,
        gradient_clip_val=case.max_norm,
        accumulate_grad_batches=case.accumulate,
        enable_checkpointing=False,
    )
    fit.fit(module, loader(), ckpt_path=load)
    return fit


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_weights_are_those_of_prepare(policy: str, case: Case, tmp_path: Path) -> None:
    load = None
    if case.is_resumed:
        run(policy, case, tmp_path, epochs=1).save_checkpoint(load := tmp_path / "state.ckpt")
    module = run(policy, case, tmp_path, load=load).lightning_module
    loops.assert_same(module.net, module.scheduler, policy, case)


def test_an_overflow_skips_the_scheduler(tmp_path: Path) -> None:
    fit = run(OVERFLOWING, Case(), tmp_path)
    module, amp = fit.lightning_module, fit.precision_plugin.stepper
    loops.assert_same(module.net, module.scheduler, OVERFLOWING, Case())
    assert 0 < amp.counters().skipped and module.scheduler.last_epoch == amp.counters().applied
    fit.save_checkpoint(tmp_path / "state.ckpt")
    saved = torch.load(tmp_path / "state.ckpt", weights_only=True)["MezzoPrecision"]
    assert saved["scaling"]["scale"] == amp.scale and "model" not in saved
    assert "lr_scheduler_step" not in vars(module)


def test_evaluation_runs_in_the_policy(tmp_path: Path) -> None:
    module = Module("bf16")
    (found,) = trainer("bf16", tmp_path).validate(module, loader(), verbose=False)
    assert found["itemsize"] == 2


def test_functions_in_training_step_run_in_the_region(tmp_path: Path) -> None:
    class Functional(Module):
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            hidden = self.net[0](batch[0])
            self.seen = (hidden @ self.net[0].weight).dtype  # fp32 weight, bf16 activation: needs the region
            return super().training_step(batch, index)

    module = Functional("bf16")
    trainer("bf16", tmp_path, max_steps=1, enable_checkpointing=False).fit(module, loader())
    assert module.seen is torch.bfloat16


def test_hooks_before_the_step_see_true_gradients(tmp_path: Path) -> None:
    class Looking(Module):
        norm = None

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            self.norm = torch.nn.utils.get_total_norm(grads)

    module = Looking("fp16")
    fit = trainer("fp16", tmp_path, max_steps=1, enable_checkpointing=False, gradient_clip_val=0.1)
    fit.fit(module, loader())
    assert float(module.norm) == pytest.approx(fit.precision_plugin._adapter.result.grad_norm, rel=1e-5)


def test_a_clip_of_ones_own_edits_true_gradients(tmp_path: Path) -> None:
    class Clipping(Module):
        def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any):
            nn.utils.clip_grad_norm_(self.parameters(), 1e-3)

    module = Clipping("fp16")
    fit = trainer("fp16", tmp_path, max_steps=1, enable_checkpointing=False)
    fit.fit(module, loader())
    assert fit.precision_plugin._adapter.result.grad_norm == pytest.approx(1e-3, rel=2e-3)


@pytest.mark.parametrize("how", ["norm", "value"])
def test_a_module_that_looks_after_the_trainers_clip_sees_what_it_left(how: str, tmp_path: Path) -> None:
    clip = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[how]

    class Looking(Module):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.wanted = [torch.zeros_like(p) for p in self.parameters()]
            for copy, p in zip(self.wanted, self.parameters(), strict=True):
                copy.grad = p.grad.clone()
            clip(self.wanted, 1e-3)

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            super().configure_gradient_clipping(*args, **kwargs)
            torch.testing.assert_close([p.grad for p in self.parameters()], [copy.grad for copy in self.wanted])

    bounds = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": how}
    fit = trainer("fp16", tmp_path, max_steps=2, enable_checkpointing=False, **bounds)
    fit.fit(Looking("fp16"), loader())
    assert fit.precision_plugin.stepper.counters().applied == 2


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_the_region_is_there_before_a_model_and_keeps_no_cast_made_without_gradients(guard: Any) -> None:
    layer = nn.Linear(2, 1)
    with MezzoPrecision("bf16").forward_context():
        with guard():
            layer(torch.ones(1, 2))
        out = layer(torch.ones(1, 2))
    out.sum().backward()
    assert out.dtype is torch.bfloat16 and layer.weight.grad is not None


def test_a_gan_steps_its_optimizers_by_hand(tmp_path: Path) -> None:
    class Gan(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.g, self.d = nn.Linear(4, 6), nn.Linear(6, 1)

        def training_step(self, batch: Any, index: int) -> None:
            for own, optimizer in zip((self.g, self.d), self.optimizers(), strict=True):
                self.toggle_optimizer(optimizer)
                fake = self.d(self.g(torch.randn(8, 4))).float()
                self.manual_backward(fake.square().mean() if own is self.g else -fake.mean())
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (self.g, self.d)]

    module = Gan()
    fit = trainer("fp16", tmp_path, max_epochs=1, enable_checkpointing=False)
    fit.fit(module, loader())
    assert fit.precision_plugin.stepper.counters().seen == 2 * loops.BATCHES


@pytest.mark.parametrize("policy", POLICIES)
def test_fused_and_unfused_optimizers_end_alike(policy: str, tmp_path: Path) -> None:
    class Adam(Module):
        fused = False

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.1, fused=self.fused)

    modules = [Adam(policy), Adam(policy)]
    for module, fused in zip(modules, (False, True), strict=True):
        module.fused = fused
        trainer(policy, tmp_path, max_steps=3, enable_checkpointing=False).fit(module, loader())
    ours, fused = (dict(module.named_parameters()) for module in modules)
    torch.testing.assert_close(ours, fused)


class Closures(torch.optim.SGD):
    """Evaluates the loss twice a step, as SAM does."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure()
        return super().step(closure)


@pytest.mark.parametrize("policy", ["fp32", "bf16-master", "fp16, scaling.init_scale=64"])
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Closures])
def test_optimizers_that_evaluate_the_loss(kind: type[torch.optim.Optimizer], policy: str, tmp_path: Path) -> None:
    norms: list[float] = []

    class Evaluated(Module):
        def configure_optimizers(self) -> Any:
            return kind(self.net.parameters(), lr=1e-3)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(float(torch.cat([p.grad.double().flatten() for p in self.net.parameters()]).norm()))

    fit = trainer(policy, tmp_path, max_epochs=1, gradient_clip_val=0.05, enable_checkpointing=False)
    fit.fit(Evaluated(policy), loader())
    model = loops.make_model()
    amp = mezzo.prepare(model, kind(model.parameters(), lr=1e-3), policy)
    expected = []
    for x, y in loader():

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            amp.zero_grad()
            loss = F.cross_entropy(model(x), y)
            amp.backward(loss)
            expected.append(float(amp.grad_norm()))
            return loss

        amp.step(closure, max_norm=0.05)
        amp.zero_grad()
    for found, weight in zip(fit.lightning_module.net.parameters(), model.parameters(), strict=True):
        assert torch.equal(found, weight)
    assert norms == pytest.approx(expected, rel=1e-6) and max(norms) > 0.05


def test_a_step_without_a_loss_is_left_out(tmp_path: Path) -> None:
    class Skipping(Module):
        def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
            return None if index == 1 else super().training_step(batch, index)

    fit = trainer("bf16", tmp_path, max_epochs=1, enable_checkpointing=False)
    fit.fit(Skipping("bf16"), loader())
    assert fit.precision_plugin.stepper.counters().applied == loops.BATCHES - 1


@pytest.mark.parametrize("left_out", [0, 1])
def test_gradients_before_a_batch_without_loss_are_stepped(left_out: int, tmp_path: Path) -> None:
    class EverySecond(Module):
        def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
            return None if index % 2 == left_out else super().training_step(batch, index)

    ours, theirs = EverySecond("fp32"), EverySecond("fp32")
    how = {"max_epochs": 1, "accumulate_grad_batches": 2, "enable_checkpointing": False}
    trainer("fp32", tmp_path, **how).fit(ours, loader())
    trainer("fp32", tmp_path, plugins=None, precision=32, **how).fit(theirs, loader())
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_an_epoch_for_batch_norms_alone_takes_no_step(tmp_path: Path) -> None:
    """Stochastic weight averaging ends with one; averages are those of the fp32 run, up to bf16."""

    class Averaged(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    found = []
    for policy in ("fp32", "bf16", "bf16-master"):
        module = Averaged(policy)
        module.net = nn.Sequential(nn.BatchNorm1d(loops.make_data()[0][0].numel()), module.net)
        average = StochasticWeightAveraging(1e-2, swa_epoch_start=1)
        fit = trainer(policy, tmp_path, max_epochs=3, callbacks=[average], enable_checkpointing=False)
        fit.fit(module, loader())
        found.append([p.float().clone() for p in module.parameters()])
    for name, low in zip(("bf16", "bf16-master"), found[1:], strict=True):
        for a, b in zip(found[0], low, strict=True):
            torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-7, msg=name)


def test_a_module_is_tested_and_trained_again_by_another_trainer(tmp_path: Path) -> None:
    first, second = (trainer("bf16-master", tmp_path, max_epochs=1, enable_checkpointing=False) for _ in range(2))
    module = Module("bf16-master")
    first.fit(module, loader())
    for who in (first, second):
        (found,) = who.validate(module, loader(), verbose=False)
        assert found["itemsize"] == 2
    second.fit(module, loader())
    assert second.precision_plugin.stepper.counters().applied == loops.BATCHES
    assert module.net[0].weight.dtype is torch.bfloat16


def test_any_optimizer_gets_masters_that_are_saved(tmp_path: Path) -> None:
    class Rms(Module):
        def configure_optimizers(self) -> Any:
            return torch.optim.RMSprop(self.parameters(), lr=1e-3)

    fit = trainer("bf16-master", tmp_path, max_epochs=1, enable_checkpointing=False)
    fit.fit(Rms("bf16-master"), loader())
    fit.save_checkpoint(tmp_path / "state.ckpt")
    (saved,) = torch.load(tmp_path / "state.ckpt", weights_only=True)["optimizer_states"]
    (stepped,) = fit.precision_plugin.stepper.optimizers
    assert saved["state"].keys() == stepped.state_dict()["state"].keys()
    assert saved["state"][0].keys() == stepped.state_dict()["state"][0].keys()


@warns_of_breaks
def test_a_compiled_module_trains(tmp_path: Path) -> None:
    fit = trainer("bf16", tmp_path, max_steps=2, enable_checkpointing=False)
    fit.fit(torch.compile(Module("bf16"), backend="aot_eager"), loader())
    assert fit.precision_plugin.stepper.counters().applied == 2


@pytest.mark.filterwarnings("ignore:.*this fit will run with no optimizer")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_manual", [False, True])
def test_a_module_without_optimizer_runs_as_under_lightning(policy: str, is_manual: bool, tmp_path: Path) -> None:
    class Measured(Module):
        def __init__(self) -> None:
            super().__init__(policy)
            self.automatic_optimization = not is_manual

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = super().training_step(batch, index)
            if is_manual:
                self.manual_backward(loss)
            return loss

        def configure_optimizers(self) -> Any:
            return None

    module, other, clip = Measured(), Measured(), {"gradient_clip_val": None if is_manual else 1.0}
    fit = trainer(policy, tmp_path, max_epochs=1, **clip)
    fit.fit(Module(policy), loader())  # the plugin knows an optimizer, which the next fit has not
    fit = trainer(policy, tmp_path, plugins=fit.precision_plugin, max_epochs=1, **clip)
    fit.fit(module, loader())
    theirs = "bf16-mixed" if "bf16" in policy else 32
    trainer(policy, tmp_path, plugins=None, precision=theirs, max_epochs=1).fit(other, loader())
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=0.05, atol=0.02)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), Module(policy).parameters(), strict=True))
    fit.save_checkpoint(tmp_path / "state.ckpt")
    trainer(policy, tmp_path, max_epochs=2).fit(Measured(), loader(), ckpt_path=tmp_path / "state.ckpt")


def test_an_overridden_backward_is_refused(tmp_path: Path) -> None:
    class Backward(Module):
        def backward(self, loss: torch.Tensor, *args: Any) -> None:
            loss.backward()

    module = Backward("bf16")
    with pytest.raises(mezzo.errors.StepError, match=r"Backward overrides backward.*manual_backward"):
        trainer("bf16", tmp_path, max_steps=1, enable_checkpointing=False).fit(module, loader())
    assert module(torch.ones(1, 6)).dtype is torch.float32


def test_another_precision_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="both `precision=bf16-mixed` and `plugins="):
        trainer("bf16", tmp_path, precision="bf16-mixed")


def test_a_backward_of_ones_own_is_told_in_lightnings_words(tmp_path: Path) -> None:
    class ByHand(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization, self.layer = False, nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> None:
            self.layer(torch.ones(2, 4)).sum().backward()
            self.optimizers().step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(mezzo.errors.StepError, match=r"Write self\.manual_backward\(loss\), then optimizer\.step\(\)"):
        trainer("bf16", tmp_path, max_epochs=1, enable_checkpointing=False).fit(ByHand(), loader())
