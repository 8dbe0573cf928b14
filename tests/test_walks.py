"""Which files of mezzo one call enters: docs/architecture.md has the walks, and this fails where one grows longer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch

import mezzo
from mezzo.formats import native_support
from mezzo.kernels import is_emulated

ROOT = str(Path(mezzo.__file__).parent)
HAS_OWN_OPS = native_support("cpu", torch.bfloat16).reason == "avx512_bf16"
AT_MOST = {"forward": 5 + HAS_OWN_OPS + 3 * is_emulated(torch.bfloat16), "backward": 4, "step": 12, "op": 4}


def files_entered(call: Callable[[], object]) -> set[str]:
    """Return the files of mezzo in which a function was called."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            found.add(frame.f_code.co_filename.removeprefix(f"{ROOT}/"))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def measured() -> dict[str, set[str]]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1))
    optimizer = mezzo.optim.AdamW(model.parameters(), master="split")
    amp = mezzo.prepare(model, optimizer, "bf16-master, output=fp32")
    batch = torch.ones(4, 8)
    for _ in range(5):  # the first steps look at the invariants too, and make what later ones keep
        amp.backward(model(batch).square().mean())
        amp.step()
        amp.zero_grad()
    found = {"forward": files_entered(lambda: model(batch))}
    loss = model(batch).square().mean()
    found["backward"] = files_entered(lambda: amp.backward(loss))
    found["step"] = files_entered(amp.step)
    with mezzo.autocast("cpu", policy="bf16, ops=mezzo"):
        torch.mm(batch, batch.T)
        found["op"] = files_entered(lambda: torch.mm(batch, batch.T))
    return found


@pytest.fixture(scope="module")
def walks() -> dict[str, list[str]]:
    """The walks of a process of their own: hooks that other tests left would lengthen them."""
    ran = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize("walk", AT_MOST)
def test_a_walk_is_no_longer_than_it_was(walk: str, walks: dict[str, list[str]]) -> None:
    assert 0 < len(walks[walk]) <= AT_MOST[walk], walks[walk]


def test_a_longer_walk_is_seen() -> None:
    assert files_entered(lambda: mezzo.Policy.parse("bf16")) > files_entered(lambda: None)


if __name__ == "__main__":
    print(json.dumps({walk: sorted(files) for walk, files in measured().items()}))
