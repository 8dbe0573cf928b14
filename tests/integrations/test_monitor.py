"""`mezzo.monitor` writes what happened, into the real libraries, and reads nothing in between."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from tests.diagnose.test_off import Ops
from torch import nn

import mezzo
from mezzo.errors import ConfigError
from mezzo.integrations.monitor import Monitor


def prepared(policy: str = "fp16, scaling.init_scale=1024", lr: float = 0.1) -> mezzo.Stepper:
    model = nn.Linear(4, 1)
    return mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=lr), policy)


def steps(amp: mezzo.Stepper, values: list[float]) -> None:
    for value in values:
        amp.backward(amp.model(torch.full((2, 4), value)).sum())
        amp.step()
        amp.zero_grad()


class Log:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def __call__(self, values: dict[str, float], step: int) -> None:
        self.rows.append((step, dict(values)))


def test_values_are_those_of_the_run() -> None:
    amp, log = prepared(), Log()
    with mezzo.monitor(amp, every=2, to=log):
        steps(amp, [1.0, 2.0, math.inf, 4.0, 1.0])
    assert [step for step, _ in log.rows] == [2, 4]
    first, second = (values for _, values in log.rows)
    # the gradient of each weight is the sum over two rows, of the bias the number of rows
    assert first["mezzo/grad_norm"] == pytest.approx(math.sqrt(4 * 4.0**2 + 2.0**2))
    assert first["mezzo/headroom_binades"] == pytest.approx(math.log2(65504 / (4 * 1024)))
    assert first["mezzo/scale"] == 1024 and first["mezzo/skipped"] == 0
    assert second["mezzo/skipped"] == second["mezzo/skipped_by_loss"] == 1
    assert second["mezzo/skipped_by_gradients"] == second["mezzo/skipped_by_buffers"] == 0


@pytest.mark.parametrize(("lr", "share"), [(0.1, 0.0), (1e-30, 1.0)])
def test_lost_updates_are_those_of_weights_that_did_not_move(lr: float, share: float) -> None:
    amp, log = prepared("fp32, guard.check_every=0", lr), Log()
    with torch.no_grad():
        amp.model.bias.fill_(1.0)
    with mezzo.monitor(amp, every=1, to=log):
        steps(amp, [1.0])
    assert log.rows[0][1]["mezzo/lost_updates"] == share


def test_masters_lose_nothing() -> None:
    model = nn.Linear(4, 1)
    amp = mezzo.prepare(model, mezzo.optim.SGD(model.parameters(), lr=1e-6, master="split"), "bf16-master")
    log = Log()
    with mezzo.monitor(amp, every=1, to=log):
        steps(amp, [1.0])
    assert log.rows[0][1]["mezzo/lost_updates"] == 0


def test_a_skipped_step_shows_no_lost_updates_and_nothing_that_is_not_finite() -> None:
    amp, log = prepared(), Log()
    with mezzo.monitor(amp, every=1, to=log):
        steps(amp, [math.nan])
    ((_, values),) = log.rows
    assert values["mezzo/skipped"] == 1 and "mezzo/lost_updates" not in values
    assert all(math.isfinite(value) for value in values.values())


def test_steps_that_are_not_reported_are_not_read() -> None:
    amp, log = prepared("bf16"), Log()
    with mezzo.monitor(amp, every=10, to=log):
        amp.backward(amp.model(torch.ones(2, 4)).sum())
        (observer,) = amp._observers
        with Ops() as ops:
            observer.before_step()
            observer.after_step(Unread())
        assert ops.seen == [] and log.rows == []


class Unread:
    """The result of a step that the host has not read; asking it for more is an error."""

    is_read = False


def test_closing_ends_it() -> None:
    amp, log = prepared(), Log()
    watch = mezzo.monitor(amp, every=1, to=log)
    assert isinstance(watch, Monitor)
    watch.close()
    steps(amp, [1.0])
    assert log.rows == [] and amp._observers == ()


def test_tensorboard_reads_it_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    amp = prepared()
    with mezzo.monitor(amp, every=1, to=tmp_path):
        steps(amp, [1.0, 2.0])
    found = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in found.Scalars("mezzo/scale")] == [(1, 1024.0), (2, 1024.0)]
    assert len(found.Scalars("mezzo/grad_norm")) == 2


@pytest.mark.slow
def test_an_active_run_of_wandb_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.chdir(tmp_path)
    run = wandb.init(mode="offline", project="mezzo", dir=str(tmp_path), settings=wandb.Settings(silent=True))
    try:
        amp = prepared()
        run.log({"loss": 1.0}, step=7)
        with mezzo.monitor(amp, every=1):
            steps(amp, [1.0])
        assert run.summary["mezzo/scale"] == 1024 and run.summary["mezzo/step"] == 1
    finally:
        run.finish()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_what_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    amp = prepared()
    with pytest.raises(ConfigError, match="was given int; it writes to a SummaryWriter"):
        mezzo.monitor(amp, to=3)
    with pytest.raises(ConfigError, match="every=0"):
        mezzo.monitor(amp, every=0)
    (tmp_path / "file").touch()
    for folder, said in (
        ("a\0", "for to, which no file can be called"),
        (tmp_path / "file", "monitor cannot write to"),
        (os.fsdecode(os.fsencode(tmp_path) + b"/\xff"), "TensorBoard writes to no folder whose name"),
    ):
        with pytest.raises(ConfigError, match=said):
            mezzo.monitor(amp, to=folder)
    assert amp._observers == ()


def test_a_missing_tensorboard_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'mezzo\[trackers\]'"):
        mezzo.monitor(prepared(), to="runs")


def test_gradients_that_were_flushed_since_the_last_report_are_written() -> None:
    """They are measured in some steps only, which need not be those that are reported."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)])
    amp, log = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16, scaling=none"), Log()
    x, measured = torch.randn(16, 32), []
    with mezzo.monitor(amp, every=4, to=log):
        for factor in (*[1e-6] * 4, *[1.0] * 8):
            amp.zero_grad()
            amp.backward(model(x).square().mean() * factor)
            measured.append(amp.step().flushed)
    assert max(measured[:4]) > 0.9 and measured[-4:] == [0.0] * 4
    assert [values["mezzo/flushed"] for _, values in log.rows] == [max(measured[i : i + 4]) for i in (0, 4, 8)]
