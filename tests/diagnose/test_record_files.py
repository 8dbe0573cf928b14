"""What the files of a record hold, whoever wrote them, is looked at before a step is taken."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from tests.diagnose.test_flight import batches, build, loss_fn, train

import mezzo
from mezzo.diagnose import step_data
from mezzo.errors import DataError

LAID_OUT = "is not laid out as this version writes it|is no snapshot of a record of this version"
CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "no dict": ("batch", lambda made: [1]),
    "no data": ("batch", lambda made: {key: value for key, value in made.items() if key != "data"}),
    "random number": ("batch", lambda made: {**made, "random": (1, 2)}),
    "random alone": ("batch", lambda made: {**made, "random": made["random"][:1]}),
    "groups text": ("batch", lambda made: {**made, "groups": ["x"]}),
    "rate text": ("step", lambda made: {**made, "groups": [{"lr": "x"}]}),
    "no options": ("step", lambda made: {"groups": made["groups"]}),
    "results list": ("results", lambda found: [*found.values()]),
    "result number": ("results", lambda found: dict.fromkeys(found, 3)),
    "losses none": ("results", lambda found: {k: {**v, "losses": [None]} for k, v in found.items()}),
    "norm text": ("results", lambda found: {k: {**v, "grad_norm": "x"} for k, v in found.items()}),
    "no scale": ("results", lambda found: {k: {"losses": v["losses"]} for k, v in found.items()}),
    "no run": ("pt", lambda start: {"format": start["format"], "policy": "fp16"}),
    "policy number": ("pt", lambda start: {**start, "policy": 3}),
    "format later": ("pt", lambda start: {**start, "format": 99}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_record_that_is_laid_out_otherwise_is_refused(change: str, tmp_path: Path) -> None:
    kind, changed = CHANGES[change]
    train(tmp_path / "run", batches(2))
    file = min((tmp_path / "run").rglob(f"*.{kind}"))
    if kind == "pt":
        torch.save(changed(torch.load(file, weights_only=True)), file)
    else:
        made = changed(step_data.read(file))
        with file.open("wb") as writes:
            step_data.write(made, writes)
    with pytest.raises(DataError, match=LAID_OUT):
        mezzo.replay(tmp_path / "run", 0, build)


def test_groups_that_were_added_since_the_snapshot_are_said(tmp_path: Path) -> None:
    model, optimizer, _ = build()
    amp = mezzo.prepare(model, optimizer, policy="fp32")
    extra = torch.nn.Parameter(torch.ones(1))
    with mezzo.record(amp, tmp_path / "run") as recorder:
        for batch in recorder.batches(batches(2)):
            amp.backward(loss_fn(model, batch))
            amp.step()
            amp.zero_grad()
            if len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": [extra]})
    with pytest.raises(
        DataError, match="step 1 was taken with 2 parameter groups, and the optimizers that build returned have 1"
    ):
        mezzo.replay(tmp_path / "run", 1, build)


def test_memory_that_runs_out_is_not_told_as_a_damaged_file(tmp_path: Path) -> None:
    def load(file: BinaryIO) -> Any:
        raise torch.OutOfMemoryError("planted")

    train(tmp_path / "run", batches(1))
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        step_data.read(min((tmp_path / "run").rglob("*.step")), load=load)


def test_a_record_of_somebody_else_is_not_called_empty() -> None:
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "run"
        train(kept, batches(2))
        amp = mezzo.prepare(*build()[:2], "fp32")
        kept.chmod(0o300)  # to be written, not read
        Path(folder).chmod(0o755)
        is_root = os.geteuid() == 0
        if is_root:  # who may read everything
            os.chown(kept, 65534, 65534)
            os.seteuid(65534)
        try:
            with pytest.raises(DataError, match=r"run' cannot be read as a record: Permission denied\. Have its owner"):
                mezzo.replay(kept, 0, build)
            with pytest.raises(DataError, match="Permission denied"):  # another record may lie in it
                mezzo.record(amp, kept)
        finally:
            if is_root:
                os.seteuid(0)
            kept.chmod(0o700)


def test_a_folder_takes_one_recorder_at_a_time(tmp_path: Path) -> None:
    """Ranks that were given one folder wrote their batches over each other's, without a word, until the first snapshot."""
    amps = [mezzo.prepare(*build()[:2], policy="fp32") for _ in range(2)]
    with mezzo.record(amps[0], tmp_path / "run"):
        with pytest.raises(DataError, match="another record already; give a new folder, each rank its own"):
            mezzo.record(amps[1], tmp_path / "run")
    with mezzo.record(amps[0], tmp_path / "run") as recorder:  # which the first has left without a step
        [batch] = recorder.batches(batches(1))
        amps[0].backward(loss_fn(amps[0].model, batch))
        assert amps[0].step().applied
    assert mezzo.replay(tmp_path / "run", 0, build).is_healthy
