"""What a diagnosis is given is looked at before anything runs, and refused in one sentence that says what to write."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader

import mezzo
from mezzo import diagnose
from mezzo.diagnose.trial import bind_copy
from mezzo.errors import ConfigError, DataError, RegionError, StepError

BATCH = torch.ones(4, 8)
LOADER = DataLoader([0, 1])
RUNS: dict[str, Callable[..., Any]] = {
    "compare": functools.partial(diagnose.compare, policy="bf16", tries=0),
    "explain": functools.partial(diagnose.explain, policy="bf16", budget_s=0.0),
    "lint": functools.partial(diagnose.lint, policy="bf16"),
    "memory": lambda model, batch, loss_fn=None: diagnose.memory(model, None, "bf16", batch=batch, loss_fn=loss_fn),
}
LOSSES: list[tuple[Any, str]] = [
    ("bf16", "str for loss_fn; it takes a function of (model, batch) that returns the loss. A policy is given by its name: policy=..."),
    (torch.bfloat16, "policy=..."),
    (mezzo.Policy(), "Policy for loss_fn"),
    (nn.MSELoss(), "MSELoss for loss_fn, which takes outputs and targets. Write lambda model, batch: loss_fn(model(batch[0]), batch[1])"),
    (F.mse_loss, "mse_loss for loss_fn, which takes outputs and targets"),
    (lambda out: out.sum(), "<lambda> for loss_fn, which takes other arguments than (model, batch)"),
    (lambda model, batch: None, "loss_fn returned NoneType instead of the loss, a tensor of one number."),
    (lambda model, batch: 1.5, "loss_fn returned float instead"),
    (lambda model, batch: (model(batch).sum(), 1), "loss_fn returned tuple instead"),
    (lambda model, batch: model(batch), "instead of the loss, a tensor of one number. Write .mean() or .sum()."),
]  # fmt: skip


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 2)


@pytest.mark.parametrize("call", RUNS)
@pytest.mark.parametrize(("loss_fn", "said"), LOSSES)
def test_a_loss_that_is_none_is_told_what_to_write(call: str, loss_fn: Any, said: str) -> None:
    given = model()
    before = {name: value.clone() for name, value in given.state_dict().items()}
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        RUNS[call](given, BATCH, loss_fn=loss_fn)
    assert str(caught.value).count("\n") == 0
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())
    assert type(given) is nn.Linear and all(p.grad is None for p in given.parameters())


@pytest.mark.parametrize("call", RUNS)
def test_a_loader_is_no_batch(call: str) -> None:
    with pytest.raises(ConfigError, match=r"DataLoader for batch.*next\(iter\(loader\)\)"):
        RUNS[call](model(), LOADER)


class Inner(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Inner.forward(self, x, x)  # type: ignore[call-arg]  # a slip inside of the model


@pytest.mark.parametrize("call", [*RUNS, "mismatch"])
@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_batch_that_the_model_does_not_take(call: str, is_prepared: bool) -> None:
    """Inputs and targets, as loaders give them, without a loss that takes them apart."""
    run = (lambda model, batch: diagnose.mismatch(model, model, batch)) if call == "mismatch" else RUNS[call]
    given = model()
    if is_prepared:
        mezzo.prepare(given, torch.optim.SGD(given.parameters(), lr=0.1), "bf16")
    for batch in ((BATCH, torch.zeros(4)), [BATCH] * 3, {"x": BATCH}, ()):
        with pytest.raises(
            ConfigError, match=r"Linear\.forward\(\) .*argument.*Write loss_fn=lambda model, batch: "
        ) as caught:
            run(given, batch)
        assert str(caught.value).count("\n") == 0
    with pytest.raises(TypeError, match=r"Inner\.forward\(\) takes 2"):
        run(nn.Sequential(Inner(8, 2)), BATCH)


@pytest.mark.parametrize("call", [*RUNS, "trace"])
@pytest.mark.parametrize("given", ["resnet", nn.Linear, lambda x: x, torch.optim.SGD(model().parameters(), lr=0.1)])
def test_what_is_no_model_is_refused(call: str, given: Any) -> None:
    run = (lambda model, batch: diagnose.trace(model)) if call == "trace" else RUNS[call]
    with pytest.raises((ConfigError, StepError), match=r"nn\.Module"):
        run(given, BATCH)


@pytest.mark.parametrize("call", ["compare", "explain", "lint", "trace"])
def test_a_stepper_is_told_of_its_model(call: str) -> None:
    run = (lambda model, batch: diagnose.trace(model)) if call == "trace" else RUNS[call]
    given = model()
    amp = mezzo.prepare(given, torch.optim.SGD(given.parameters(), lr=0.1), "bf16")
    with pytest.raises(ConfigError, match=rf"{call} was given Stepper for model.*amp\.model"):
        run(amp, BATCH)


def test_two_runs_are_held_to_a_loss_of_both() -> None:
    with pytest.raises(ConfigError, match="mismatch was given str for loss_fn"):
        diagnose.mismatch(model(), model(), BATCH, "mse")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="mismatch was given DataLoader for batch"):
        diagnose.mismatch(model(), model(), LOADER)


@pytest.mark.parametrize("optimizer", ["adam", BATCH, [BATCH], torch.optim.SGD])
def test_memory_takes_optimizers(optimizer: Any) -> None:
    with pytest.raises(StepError, match=r"memory\(model, optimizer, policy\) takes an optimizer that was made"):
        diagnose.memory(model(), optimizer)


@pytest.mark.parametrize("every", ["2", 1.5, 0, None])
def test_numbers_of_steps_are_whole(every: Any, tmp_path: Path) -> None:
    given = model()
    amp = mezzo.prepare(given, torch.optim.SGD(given.parameters(), lr=0.1), "bf16")
    with pytest.raises(ConfigError, match=r"watch was asked for every=.*whole numbers of at least 1"):
        diagnose.watch(amp, every=every)
    with pytest.raises(ConfigError, match=r"record was asked .*every="):
        diagnose.record(amp, tmp_path / "run", every=every)


@pytest.mark.parametrize("twice_every", ["2", 1.5, -1, None, True])
def test_steps_run_twice_are_counted_in_whole_numbers(twice_every: Any, tmp_path: Path) -> None:
    amp = mezzo.prepare(given := model(), torch.optim.SGD(given.parameters(), lr=0.1), "bf16")
    with pytest.raises(ConfigError, match=r"record was given twice_every=.* and a loss_fn; "):
        diagnose.record(amp, tmp_path / "run", twice_every=twice_every, loss_fn=lambda model, batch: model(batch).sum())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tries", ["x", 1.5, -1, None, []])
def test_tries_are_a_whole_number(tries: Any) -> None:
    with pytest.raises(ConfigError, match=r"compare was given tries=.*; give a whole number of 0 or more\."):
        diagnose.compare(model(), BATCH, None, "bf16", tries=tries)


@pytest.mark.parametrize("budget_s", ["x", -1, float("nan"), float("inf"), None, []])
def test_seconds_of_timing_are_a_number(budget_s: Any) -> None:
    with pytest.raises(ConfigError, match=r"explain was given budget_s=.*; give a number of 0 or more\."):
        diagnose.explain(model(), BATCH, "bf16", budget_s=budget_s)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda model, batch: None, "loss_fn returned NoneType instead of the loss"),
        (lambda model, batch: 3.0, "loss_fn returned float instead of the loss"),
        (
            lambda model, batch: model(batch),
            r"loss_fn returned fp32.* instead of the loss.*Write \.mean\(\) or \.sum\(\)",
        ),
    ],
)
def test_gradients_are_those_of_a_loss(loss: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        diagnose.mismatch(model(), model(), BATCH, loss)


@pytest.mark.parametrize("name", ["file", "file/run", "a\0"])
def test_a_record_needs_a_place(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    amp = mezzo.prepare(given := model(), torch.optim.SGD(given.parameters(), lr=0.1), "bf16")
    said = "cannot make the folder '.*': .*. Give record another" if "file" in name else "which no file can be called"
    with pytest.raises((ConfigError, DataError), match=said):
        diagnose.record(amp, tmp_path / name)
    assert "step" not in vars(amp)


@pytest.mark.parametrize("folder", [None, 3])
def test_a_record_needs_a_folder(folder: Any) -> None:
    given = model()
    amp = mezzo.prepare(given, torch.optim.SGD(given.parameters(), lr=0.1), "bf16")
    with pytest.raises(ConfigError, match="for folder; give a path"):
        diagnose.record(amp, folder)


def test_a_replay_is_told_what_builds_its_run(tmp_path: Path) -> None:
    def build(loss_fn: Any = lambda model, batch: model(batch).sum()) -> Any:
        given = model()
        return given, torch.optim.SGD(given.parameters(), lr=0.1), loss_fn

    given, optimizer, loss_fn = build()
    amp = mezzo.prepare(given, optimizer, "bf16")
    with diagnose.record(amp, tmp_path / "run") as recorder:
        for batch in recorder.batches([BATCH, BATCH]):
            amp.backward(loss_fn(given, batch))
            amp.step()
            amp.zero_grad()
    found = diagnose.replay(tmp_path / "run", 1, build)
    assert found.first_different is None and found.compared > 0
    wrong: list[tuple[Any, str]] = [
        (given, "Linear for build; give a function that returns"),
        ("model.py", "str for build"),
        (lambda: given, "a build that returns Linear"),
        (lambda: build()[:2], "a build that returns (Linear, SGD)"),
        (lambda: build(None), "a build that returns (Linear, SGD, NoneType)"),
        (lambda: build(nn.MSELoss()), "MSELoss for loss_fn, which takes outputs and targets"),
    ]
    for other, said in wrong:
        with pytest.raises(ConfigError, match=f"replay was given {re.escape(said)}"):
            diagnose.replay(tmp_path / "run", 1, other)
    with pytest.raises(ConfigError, match="replay was given Linear for folder"):
        diagnose.replay(given, 1, build)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, "amp", model(), BATCH])
def test_a_monitor_takes_a_stepper(given: Any) -> None:
    with pytest.raises(ConfigError, match="monitor was given"):
        mezzo.monitor(given)


def test_a_region_takes_no_tensor_for_its_device() -> None:
    with pytest.raises(RegionError, match="not a Tensor"):
        mezzo.autocast(BATCH)  # type: ignore[arg-type]


def test_what_is_sound_runs() -> None:
    """A loss by keyword, with more arguments than asked for, as a method and as an object; a batch of several."""

    class Loss:
        def __call__(self, model: nn.Module, batch: Tensor, weight: float = 1.0) -> Tensor:
            return model(batch).sum().reshape(1) * weight

    for loss_fn in (
        Loss(),
        Loss().__call__,
        functools.partial(Loss(), weight=2.0),
        lambda *given: given[0](given[1]).sum(),
    ):
        for run in RUNS.values():
            run(model(), BATCH, loss_fn=loss_fn)
    assert diagnose.compare(model(), BATCH, None, "bf16", tries=np.int64(0)).proposals == ()  # type: ignore[arg-type]
    assert diagnose.explain(model(), BATCH, "bf16", budget_s=np.float32(0)).policy_s == 0.0  # type: ignore[arg-type]
    assert diagnose.lint(nn.Bilinear(8, 8, 2), (BATCH, BATCH), lambda model, batch: model(*batch).sum()).is_healthy


@pytest.mark.parametrize("name", ["compare", "explain", "lint"])
def test_a_loss_of_another_model_than_the_one_it_is_given_is_refused(name: str) -> None:
    model = nn.Linear(8, 4)
    with pytest.raises(
        ConfigError, match=r"loss_fn\(model, batch\) went through a model of its caller's.*lambda model, batch"
    ):
        RUNS[name](model, BATCH, loss_fn=lambda _, batch: model(batch).mean())
    assert model.weight.grad is None


def pruned() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    prune.l1_unstructured(model[0], "weight", 0.3)
    return model


class Remembers(nn.Linear):
    """Keeps what it computed, plainly and deeper in what it holds."""

    last: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        self.seen = {"losses": [self.last.mean()]}
        return self.last


def remembers() -> nn.Module:
    model = Remembers(8, 3)
    model(BATCH)
    return model


@pytest.mark.parametrize("name", sorted(RUNS))
@pytest.mark.parametrize("build", [pruned, remembers])
def test_a_model_that_keeps_computed_tensors_is_looked_at(name: str, build: Callable[[], nn.Module]) -> None:
    model = build()
    kept = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    assert str(RUNS[name](model, BATCH))
    assert all(module.weight is kept.pop(0) for module in model.modules() if isinstance(module, nn.Linear))
    model(BATCH).sum().backward()


def test_a_copy_of_a_pruned_model_trains_what_it_prunes() -> None:
    model = pruned()
    with bind_copy(model, mezzo.Policy.parse("bf16")) as bound:
        bound(BATCH).sum().backward()
        assert bound.get_parameter("0.weight_orig").grad is not None


class SlipAbove(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x)  # type: ignore[call-arg]  # in the name of a class that it is of


@pytest.mark.parametrize("call", RUNS)
def test_a_slip_inside_of_the_model_is_no_misfit_of_the_batch(call: str) -> None:
    with pytest.raises(TypeError, match=r"Linear\.forward\(\) takes 2"):
        RUNS[call](SlipAbove(8, 2), BATCH)
