"""Importing mezzo changes nothing: no CUDA start, no environment read, no patch of torch, no heavy library."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROBE = """
import os, sys, torch, torch.nn.functional as F
def surface():
    import torch.optim, torch.amp
    places = (torch, F, torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.amp, torch.amp.GradScaler)
    return {{(p.__name__, n): id(v) for p in places for n, v in vars(p).items()}}
before, reads = surface(), []
class Watched(type(os.environ)):
    def __getitem__(self, key): reads.append(key); return super().__getitem__(key)
os.environ.__class__ = Watched
{plant}
import mezzo
mezzo.prepare, mezzo.autocast, mezzo.GradScaler, mezzo.Policy, mezzo.optim, mezzo.cuda
os.environ.__class__ = Watched.__mro__[1]
after = surface()
new = {{k for k in after if before.get(k) != after[k] and k[1] != "__annotations__"}}
assert not new, f"patched: {{sorted(new)}}"
assert not reads, f"environment read: {{reads}}"
assert not torch.cuda.is_initialized(), "CUDA started"
heavy = {{"transformers", "sklearn", "matplotlib", "rich", "tyro", "snownlp", "triton", "jinja2"}} & set(sys.modules)
assert not heavy, f"heavy imports: {{heavy}}"
"""


def probe(plant: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROBE.format(plant=plant)], capture_output=True, text=True, check=False
    )


def test_import_is_inert() -> None:
    result = probe()
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("plant", "complaint"),
    [
        ("torch.add = lambda *a: None", "patched"),
        ("os.environ['HOME']", "environment read"),
        ("import rich", "heavy imports"),
    ],
)
def test_the_probe_sees_a_planted_fault(plant: str, complaint: str) -> None:
    result = probe(plant)
    assert result.returncode != 0
    assert complaint in result.stderr
