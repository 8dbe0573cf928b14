"""A script whose ranks are processes of their own is traced in them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mezzo.cli import main
from mezzo.diagnose.doctor import trace_script

RANKS = """
import os, sys, torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

def train(rank, world, folder, is_bad):
    if "RANK" not in os.environ:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    else:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        y = model(torch.randn(4, 4))
        loss = (torch.log(y * 0) if is_bad and step else y.square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1], "bad" in sys.argv)
    else:
        world = 1 if "alone" in sys.argv else 2
        mp.spawn(train, args=(world, sys.argv[1], "bad" in sys.argv), nprocs=world)
"""
WORKERS = """
import math, sys, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        x = torch.randn(4)
        if i == 5 and "bad" in sys.argv:
            x[0] = math.nan
        return x

if __name__ == "__main__":
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(Rows(), batch_size=4, num_workers=1):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""
pytestmark = pytest.mark.distributed


def script(folder: Path, source: str) -> str:
    path = folder / "train.py"
    path.write_text(source, encoding="utf-8")
    return str(path)


@pytest.mark.slow
def test_healthy_ranks_are_seen(tmp_path: Path) -> None:
    run = trace_script(script(tmp_path, RANKS), [str(tmp_path)])
    assert [(r.record.rank, r.record.backwards, r.answer) for r in run.children] == [
        (0, 2, "healthy"),
        (1, 2, "healthy"),
    ]
    assert run.report.answer == "healthy" and run.error is None


@pytest.mark.parametrize("ranks", ["alone", pytest.param("two", marks=pytest.mark.slow)])
def test_the_fault_of_a_rank_is_the_scripts(tmp_path: Path, capfd: pytest.CaptureFixture[str], ranks: str) -> None:
    path = script(tmp_path, RANKS)
    assert main(["doctor", path, str(tmp_path), "bad", ranks]) == 1
    told = capfd.readouterr()
    line = next(n for n, text in enumerate(RANKS.splitlines(), 1) if "torch.log" in text)
    words = " ".join(told.out.split())
    assert f"Faulty: singularity in log, forward, module (outside any module) at {path}:{line}." in words
    assert "of the script were traced: " in told.err


@pytest.mark.slow
def test_ranks_of_torchrun_are_traced(tmp_path: Path) -> None:
    words = ["--standalone", "--nproc-per-node", "2", script(tmp_path, RANKS), str(tmp_path)]
    run = trace_script("torch.distributed.run", words, is_module=True)
    assert [r.answer for r in run.children] == ["healthy", "healthy"]


def test_nothing_traced_has_its_own_exit_code(tmp_path: Path) -> None:
    assert main(["doctor", script(tmp_path, "print('nothing')")]) == 4


def test_bad_data_of_a_worker_is_named_as_data(tmp_path: Path) -> None:
    sys.argv, before = [*sys.argv, "bad"], sys.argv
    try:
        [found, *_] = trace_script(script(tmp_path, WORKERS), ["bad"]).report.faults
    finally:
        sys.argv = before
    assert (found.verdict, found.op, found.module) == ("inherited", "addmm", "")
    assert "input [0] of Linear, from a DataLoader worker, already holds 1 NaN" in found.why
    assert "check the data" in found.fix.advice


def test_good_data_of_a_worker_is_healthy(tmp_path: Path) -> None:
    assert trace_script(script(tmp_path, WORKERS)).report.answer == "healthy"


ENDED = RANKS.replace(
    "    dist.destroy_process_group()",
    "    dist.destroy_process_group()\n    if 'fails' in sys.argv: raise ValueError('mine')",
)


def test_a_rank_that_ended_by_an_error_is_not_healthy(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The report of a rank is written as it ends, by whatever: its error was not told."""
    assert main(["doctor", script(tmp_path, ENDED), str(tmp_path), "fails", "alone"]) == 3
    assert "Not enough seen: the program ended by itself with " in " ".join(capfd.readouterr().out.split())
