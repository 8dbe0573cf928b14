"""Kept memory: a block that is freed and taken again brings no new pages, until it is undone; in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

OFFER = """
import logging, sys, torch, mezzo
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
def prepare(policy):
    model = torch.nn.Linear(4, 4)
    mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
for policy in ("fp32", "bf16"):
    prepare(policy)
"""
PROGRAM = f"""
{OFFER}
import resource
from mezzo import keep_memory

def pages():  # that one block of 64 MB makes the kernel clear, once it was taken some times
    for _ in range(12):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.empty(16_000_000).fill_(1.0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

first = pages()
kept = keep_memory()
print(repr(kept))
again, held = pages(), resident()
kept.undo()
print(first, again, held - resident(), kept.is_kept)
"""


def run(program: str = PROGRAM, **environment: str) -> list[str]:
    own = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", program], env=own, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_prepare_offers_once_that_a_block_taken_again_costs_no_pages_until_undone() -> None:
    *said, shown, counted = run()
    assert sum("mezzo.keep_memory()" in line for line in said) == 1
    assert shown == "KeptMemory(kept until undo())"
    first, again, given_back, is_kept = counted.split()
    assert int(again) < int(first) / 10 and int(given_back) > 60_000_000
    assert is_kept == "False"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
@pytest.mark.parametrize(
    "setting", [{"MALLOC_TRIM_THRESHOLD_": "1000000"}, {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=1000000"}]
)
def test_settings_of_the_environment_stand(setting: dict[str, str]) -> None:
    (name,) = setting
    (shown,) = run("from mezzo import keep_memory; print(keep_memory())", **setting)
    assert shown == f"KeptMemory(unchanged: the environment has settings of its own: {name})"


def test_another_platform_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from mezzo import keep_memory

    monkeypatch.setattr(sys, "platform", "darwin")
    kept = keep_memory()
    assert not kept.is_kept and "darwin has no glibc" in kept.why_not
    kept.undo()


def test_another_allocator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from mezzo import allocator

    monkeypatch.setitem(allocator._OTHERS, "gnu_get_libc_version", "an allocator put before")
    assert "put before is loaded in place of glibc's" in allocator.keep_memory().why_not


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_prepare_offers_nothing_where_it_is_kept() -> None:
    assert not any("mezzo.keep_memory()" in line for line in run(f"import mezzo\nkept = mezzo.keep_memory()\n{OFFER}"))
