"""Importing mezzo changes nothing: no CUDA start, no environment read, no patch of torch, no heavy library."""

from __future__ import annotations

import subprocess
import sys

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
heavy = {{"transformers", "sklearn", "matplotlib", "rich", "tyro", "snownlp", "triton", "jinja2"}} & set(sys.modules)
found = {{
    "patched": sorted(new), "environment read": reads, "CUDA started": torch.cuda.is_initialized(), "heavy imports": heavy
}}
found = {{what: which for what, which in found.items() if which}}
assert not found, found
"""


def probe(plant: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROBE.format(plant=plant)], capture_output=True, text=True, check=False
    )


def test_import_is_inert() -> None:
    result = probe()
    assert result.returncode == 0, result.stderr


def test_the_probe_sees_planted_faults() -> None:
    result = probe("torch.add = lambda *a: None\nos.environ['HOME']\nimport rich")
    assert result.returncode != 0
    assert "'patched': [('torch', 'add')" in result.stderr, result.stderr
    assert "'environment read': ['HOME']" in result.stderr and "'heavy imports': {'rich'}" in result.stderr
