"""What the recorder keeps runs again bit for bit, in this process and in a fresh one, and stays within bounds."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.cli.main import main
from mezzo.diagnose import step_data
from mezzo.errors import ConfigError, DataError, StoppedRun

Batch = dict[str, Tensor]
POLICY = "fp16, guard.patience=50"


def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """The training program, as a user writes it down for `--model`."""
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"] + 0.01 * torch.randn_like(batch["x"])), batch["y"])


def batches(num: int, seed: int = 3) -> list[Batch]:
    g = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(16, 8, generator=g), "y": torch.randint(4, (16,), generator=g)} for _ in range(num)]


def train(
    folder: Path, data: list[Batch], *, every: int = 4, policy: str = POLICY, accumulate: int = 1
) -> list[mezzo.StepResult]:
    torch.manual_seed(7)
    model, optimizer, _ = build()
    amp = mezzo.prepare(model, optimizer, policy=policy)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    results = []
    with mezzo.record(amp, folder, every=every) as recorder:
        for i, batch in enumerate(recorder.batches(data)):
            amp.backward(loss_fn(model, batch))
            if (i + 1) % accumulate == 0:
                results.append(amp.step(max_norm=1.0))
                amp.zero_grad()
                schedule.step()
    return results


def planted(kind: str, at: int, num: int = 10) -> list[Batch]:
    """Batches, one of which holds a NaN, a spike, or a number with one bit turned."""
    data = batches(num)
    x = data[at]["x"]
    if kind == "nan":
        x[3, 2] = float("nan")
    elif kind == "spike":
        x *= 3e4
    else:
        x.view(torch.int32)[5, 1] ^= 1 << 28
    return data


@pytest.mark.parametrize("kind", ["nan", "spike", "bit flip"])
def test_a_planted_step_runs_again_bit_for_bit(tmp_path: Path, kind: str) -> None:
    results = train(tmp_path / "run", planted(kind, 6))
    again = mezzo.replay(tmp_path / "run", 6, build)
    assert (again.first_different, again.compared) == (None, 3)
    assert again.applied == results[6].applied
    assert again.scale == results[6].scale
    assert str(again.grad_norm) == str(results[6].grad_norm)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, whose betas move": torch.optim.AdamW,
    "a rate in a tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-3)),
    "both, fused": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-3), fused=True),
    "SGD, whose momentum moves": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
}


@pytest.mark.parametrize("policy", ["fp32", "bf16-master"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_a_schedule_moves_is_recorded(tmp_path: Path, name: str, policy: str) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model, _, loss = build()
        return model, OPTIMIZERS[name](model.parameters()), loss

    model, optimizer, _ = made()
    amp = mezzo.prepare(model, optimizer, policy=policy)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
    with mezzo.record(amp, tmp_path / "run", every=6) as recorder:
        for batch in recorder.batches(batches(6)):
            amp.backward(loss_fn(model, batch))
            amp.step()
            amp.zero_grad()
            schedule.step()
    again = mezzo.replay(tmp_path / "run", 5, made)
    assert (again.first_different, again.compared) == (None, 6)


def test_micro_batches_and_every_step_of_two_segments(tmp_path: Path) -> None:
    results = train(tmp_path / "run", batches(20), accumulate=2, every=3)
    for step in range(6, 10):
        again = mezzo.replay(tmp_path / "run", step, build)
        assert again.is_healthy and len(again.losses) == 2 and again.grad_norm == results[step].grad_norm


def test_disk_is_bounded(tmp_path: Path) -> None:
    sizes = []
    for num in (16, 40):
        train(tmp_path / str(num), batches(num))
        sizes.append(sum(f.stat().st_size for f in (tmp_path / str(num)).rglob("*")))
    assert len(list((tmp_path / "40").iterdir())) == 2
    assert sizes[1] <= 1.01 * sizes[0]


def test_the_run_is_the_same_with_and_without_a_recorder(tmp_path: Path) -> None:
    torch.manual_seed(7)
    model, optimizer, _ = build()
    amp = mezzo.prepare(model, optimizer, policy=POLICY)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for batch in batches(8):
        amp.backward(loss_fn(model, batch))
        last = amp.step(max_norm=1.0)
        amp.zero_grad()
        schedule.step()
    assert train(tmp_path / "run", batches(8))[-1].grad_norm == last.grad_norm


def test_another_policy_for_the_step_itself(tmp_path: Path) -> None:
    train(tmp_path / "run", planted("spike", 6))
    narrow = mezzo.replay(tmp_path / "run", 6, build)
    wide = mezzo.replay(tmp_path / "run", 6, build, policy="fp32")
    assert not narrow.applied and wide.applied and wide.policy == "fp32"
    assert wide.losses[0] == pytest.approx(narrow.losses[0], rel=0.05) or narrow.losses[0] != narrow.losses[0]
    assert "Run again under another policy, not compared; before it: bit for bit as recorded, 2 steps compared." in str(
        wide
    )
    first = mezzo.replay(tmp_path / "run", 4, build, policy="fp32")
    assert first.compared == 0 and "Run again under another policy, not compared." in str(first)
    same = mezzo.replay(tmp_path / "run", 6, build, policy=POLICY)  # which is that of the run
    assert (same.compared, same.is_own_policy, str(same)) == (3, True, str(narrow))


def test_a_weight_that_changed_by_itself_is_noticed(tmp_path: Path) -> None:
    torch.manual_seed(7)
    model, optimizer, _ = build()
    amp = mezzo.prepare(model, optimizer, policy="fp32")
    with mezzo.record(amp, tmp_path / "run", every=8) as recorder:
        for i, batch in enumerate(recorder.batches(batches(8))):
            if i == 5:
                with torch.no_grad():
                    model[0].weight.view(torch.int32)[0, 0] ^= 1 << 22
            amp.backward(loss_fn(model, batch))
            amp.step()
            amp.zero_grad()
    again = mezzo.replay(tmp_path / "run", 7, build)
    assert again.first_different == 5 and not again.is_healthy
    assert "Step 5 does not come out as recorded" in str(again)


def test_a_step_that_stopped_the_run_is_there(tmp_path: Path) -> None:
    with pytest.raises(StoppedRun):
        train(tmp_path / "run", planted("nan", 6), policy="bf16, guard.patience=1")
    with mezzo.diagnose.trace() as outer:
        pass
    assert outer.report.record.ops == 0
    traces: list[mezzo.diagnose.Trace] = []

    def traced(model: nn.Module) -> mezzo.diagnose.Trace:
        traces.append(mezzo.diagnose.trace(model))
        return traces[0]

    again = mezzo.replay(tmp_path / "run", 6, build, around=traced)
    assert not again.applied
    assert traces[0].report.findings[0].verdict == "inherited"
    found = mezzo.replay(tmp_path / "run", 6, build, around=mezzo.diagnose.trace)
    assert isinstance(found.traced, mezzo.diagnose.TraceReport)
    assert found.traced.findings[0].verdict == "inherited" and again.traced is not None
    assert "traced         Faulty: inherited" in str(found) and '"verdict": "inherited"' in found.to_json()
    assert mezzo.replay(tmp_path / "run", 6, build).traced is None


def test_a_fresh_process_replays_under_a_name(tmp_path: Path) -> None:
    results = train(tmp_path / "run", planted("spike", 6))
    program = tmp_path / "program.py"
    program.write_text(f"{Path(__file__).read_text()}\nprint('from the program')\n")
    words = ["replay", str(tmp_path / "run"), "--step", "6", "--model", f"{program}:build", "--trace", "--json"]
    done = subprocess.run([sys.executable, "-m", "mezzo", *words], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if results[6].applied else 1) and "from the program" in done.stderr
    found = json.loads(done.stdout)
    assert (found["first_different"], found["compared"], found["scale"]) == (None, 3, results[6].scale)
    assert found["traced"]["record"]["model"] == "Sequential"


@pytest.mark.slow
def test_a_hundred_planted_steps_in_fresh_processes(tmp_path: Path) -> None:
    code = (
        "import sys, mezzo; sys.path.insert(0, sys.argv[1]); from test_flight import build\n"
        "for a in sys.argv[2:]:\n"
        "    folder, step = a.rsplit('@', 1); r = mezzo.replay(folder, int(step), build)\n"
        "    print(r.first_different, r.compared, r.applied, repr(r.grad_norm), r.scale)\n"
    )
    wanted, asked = [], []
    for i in range(100):
        step, folder = 4 + i % 6, tmp_path / str(i)
        results = train(folder, planted(("nan", "spike", "bit flip")[i % 3], step))
        one = results[step]
        wanted.append(f"None {1 + step % 4} {one.applied} {one.grad_norm!r} {one.scale}")
        asked.append(f"{folder}@{step}")
    words = [sys.executable, "-c", code, str(Path(__file__).parent), *asked]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == wanted


def test_a_record_is_data_only(tmp_path: Path) -> None:
    train(tmp_path / "run", batches(6))
    files = [f for f in (tmp_path / "run").rglob("*") if f.is_file()]
    assert {f.suffix for f in files} == {".pt", ".batch", ".step", ".results"}
    for file in files:
        assert torch.load(file, weights_only=True) if file.suffix == ".pt" else step_data.read(file)
    amp = mezzo.prepare(*build()[:2], policy="fp32")
    with (
        mezzo.record(amp, tmp_path / "other") as recorder,
        pytest.raises(DataError, match="Path, and a record keeps data only"),
    ):
        recorder.note({"x": Path("x")})


class _Code:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.mkdir, (f"{os.environ['RAN']}",)


def test_code_in_a_record_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    for data in ({"batches": _Code()}, torch.nn.Linear(1, 1), {"batches": [np.zeros(2)]}):
        (tmp_path / "planted.step").write_bytes(pickle.dumps(data))
        with pytest.raises(DataError, match=r"cannot be read as a record: it names .* holds data only"):
            step_data.read(tmp_path / "planted.step")
    assert not (tmp_path / "ran").exists()


EVERY_KIND = {
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(3, 0, dtype=torch.float16),
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    **{
        str(d): torch.tensor([[1, 0], [2, 3]]).to(d)
        for d in (torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64)
    },
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")  # of torch 2.15, wherever one is loaded
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_tensor_of_every_kind_is_read_as_it_was(kind: str, tmp_path: Path) -> None:
    given = {"nested": [(EVERY_KIND[kind], 1, None, "x", b"y", {2: 0.5})]}
    with (tmp_path / "a.step").open("wb") as file:
        step_data.write(given, file)
    (found, *rest), (wanted, *others) = step_data.read(tmp_path / "a.step")["nested"][0], given["nested"][0]
    assert rest == others and (found.dtype, found.shape, found.layout) == (wanted.dtype, wanted.shape, wanted.layout)
    plain = [t.to_dense() for t in (found, wanted)]
    assert torch.equal(*(t.resolve_conj().resolve_neg() for t in plain))


@pytest.mark.parametrize("rates", [(0.1, 0.2), (0.1, 0.1)])
def test_what_changes_between_a_batch_and_its_step_is_replayed(tmp_path: Path, rates: tuple[float, float]) -> None:
    torch.manual_seed(7)
    amp = mezzo.prepare(*build()[:2], policy="fp32")
    with mezzo.record(amp, tmp_path / "run") as recorder:
        for i, batch in enumerate(recorder.batches(batches(5))):
            amp.backward(loss_fn(amp.model, batch))
            amp.optimizers[0].param_groups[0]["lr"] = rates[i % 2]
            amp.step(max_norm=None if i == 1 else torch.tensor(0.1))
            amp.zero_grad()
    again = mezzo.replay(tmp_path / "run", 4, build)
    assert (again.first_different, again.compared) == (None, 5)


def test_a_batch_that_the_loop_writes_over_is_kept_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda *given, **how: (time.sleep(0.02), save(*given, **how)))
    torch.manual_seed(7)
    amp = mezzo.prepare(*build()[:2], policy="fp32")
    with mezzo.record(amp, tmp_path / "run", every=4) as recorder:
        for batch in recorder.batches(batches(4)):
            loss = loss_fn(amp.model, batch)
            batch["x"].fill_(float("nan"))
            amp.backward(loss)
            amp.step()
            amp.zero_grad()
    again = mezzo.replay(tmp_path / "run", 3, build)
    assert (again.first_different, again.compared) == (None, 4)


def damaged(file: Path, at: int) -> None:
    """Turn one bit of a file, as a disk may."""
    content = bytearray(file.read_bytes())
    content[at] ^= 64
    file.write_bytes(content)


@pytest.mark.parametrize("kind", ["batch", "step", "results", "pt"])
def test_damage_on_the_disk_is_not_told_as_other_compute(kind: str, tmp_path: Path) -> None:
    train(tmp_path / "run", batches(6))
    file = sorted((tmp_path / "run").rglob(f"*.{kind}"))[-1]
    step, whole = int(file.parent.name) + 1, file.read_bytes()
    for at in range(0, len(whole), len(whole) // 12):
        damaged(file, at)
        try:
            assert mezzo.replay(tmp_path / "run", step, build).is_healthy  # where the mark of the checksum is hit
            assert at >= len(whole) - 9
        except DataError as error:
            assert f"{str(file)!r} cannot be read as a record: its checksum is not" in str(error)
        file.write_bytes(whole)
    damaged(file, len(whole) // 2)
    assert main(["replay", str(tmp_path / "run"), "--step", f"{step}", "--model", f"{__file__}:build"]) == 2
    file.write_bytes(whole)
    assert mezzo.replay(tmp_path / "run", step, build).is_healthy


def test_a_record_without_checksums_is_read(tmp_path: Path) -> None:
    train(tmp_path / "run", batches(6))
    for file in [f for f in (tmp_path / "run").rglob("*") if f.is_file()]:
        file.write_bytes(file.read_bytes()[:-9])
    assert mezzo.replay(tmp_path / "run", 5, build).is_healthy


def test_a_file_that_cannot_be_written_is_told_by_its_step(tmp_path: Path) -> None:
    amp = mezzo.prepare(*build()[:2], policy="fp32")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with mezzo.record(amp, tmp_path / "run") as recorder:
        for batch in batches(2):
            recorder.note(batch)
            amp.backward(loss_fn(amp.model, batch))
            amp.step()
            amp.zero_grad()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
        try:
            with pytest.raises(DataError, match=r"keep step 2 in .*could not be written.*Close the recorder"):
                recorder.note(batches(1)[0])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    amp.backward(loss_fn(amp.model, batches(1)[0]))
    assert amp.step().applied  # without it
    assert mezzo.replay(tmp_path / "run", 1, build).step == 1
    with pytest.raises(DataError, match="it holds steps 0 to 1"):
        mezzo.replay(tmp_path / "run", 2, build)


def test_what_cannot_be_recorded_or_replayed_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run", batches(12))
    with pytest.raises(DataError, match="does not hold it: it holds steps 4 to 11"):
        mezzo.replay(tmp_path / "run", 2, build)
    with pytest.raises(DataError, match="another record already"):
        train(tmp_path / "run", batches(2))
    (tmp_path / "run" / "00000008" / "00000009.0.batch").write_bytes(b"no record")
    with pytest.raises(DataError, match="cannot be read as a record"):
        mezzo.replay(tmp_path / "run", 9, build)
    assert main(["replay", str(tmp_path / "run"), "--step", "2", "--model", f"{__file__}:build"]) == 2
    assert "step 2 was asked for" in capsys.readouterr().err
    assert main(["replay", str(tmp_path / "nothing"), "--step", "2", "--model", "not_there:build"]) == 2
    assert "nothing" in capsys.readouterr().err  # before the model's module is looked for
    amp = mezzo.prepare(*build()[:2], policy="fp32")
    with mezzo.record(amp, tmp_path / "closure"), pytest.raises(ConfigError, match="with a closure"):
        amp.step(lambda: torch.zeros(()))
    with pytest.raises(ConfigError, match="every=0"):
        mezzo.record(amp, tmp_path / "more", every=0)


def test_the_stepper_is_left_as_it_was(tmp_path: Path) -> None:
    amp = mezzo.prepare(*build()[:2], policy="fp32")
    with mezzo.record(amp, tmp_path / "run"):
        assert {"step", "backward"} <= vars(amp).keys()
    assert not {"step", "backward"} & vars(amp).keys()
