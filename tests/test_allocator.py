"""Kept memory: a block that is freed and taken again brings no new pages and leaves no gap, until it is undone; in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


PEAK = """
import resource, torch
from mezzo import keep_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

kept, before, held = keep_memory(), resident(), []
for _ in range(200):
    passing = torch.ones(100_000)
    held.append((torch.ones(100_000), torch.ones(2)))
    del passing
print(resident() - before)
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
def test_what_an_op_frees_between_tensors_that_stay_is_taken_again() -> None:
    (grown,) = run(PEAK)
    assert int(grown) < 1.1 * 200 * 400_000  # what torch asks of glibc by itself takes twice the tensors' bytes


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_tensors_of_every_allocator_live_on_and_are_freed_when_memory_is_kept_and_undone() -> None:
    shown = run("""
import copy, io, torch
from mezzo import keep_memory
from torch.profiler import ProfilerActivity, profile

def uses(one):
    one.untyped_storage().resize_(4 * len(one))
    assert one.data_ptr() % 64 == 0 and torch.equal(one + 1, copy.deepcopy(one) + 1)
    torch.save(one, io.BytesIO())
    return one.sum().item()

before = torch.arange(1000.0)
first, second = keep_memory(), keep_memory()
between = torch.arange(1000.0)
first.undo()  # the second call's stands
also = torch.arange(1000.0)
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
    torch.empty(1000)
print(sum(event.cpu_memory_usage for event in seen.key_averages() if event.key == "aten::empty"))
try:
    torch.empty(1 << 50)
except RuntimeError as error:
    print("can't allocate memory" in str(error), str(1 << 52) in str(error))
second.undo()
after = torch.empty(0).data_ptr() or torch.arange(1000.0)
print([uses(one) for one in (before, between, also, after)], [one.share_memory_().is_shared() for one in (between, also)])
del before, between, also, after
""")
    assert shown == ["4000", "True True", "[499500.0, 499500.0, 499500.0, 499500.0] [True, True]"]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_blocks_that_onednn_frees_by_the_allocator_of_that_moment_are_known_by_who_made_them() -> None:
    shown = run("""
import torch
from mezzo import keep_memory

def blocks():
    return [torch.ones(100 + index, 1000).to_mkldnn() for index in range(50)]

before, kept = blocks(), keep_memory()
between = blocks()
del before
kept.undo()
after = blocks()
del between
kept = keep_memory()
print(sum(one.to_dense().sum().item() for one in after))
del after
print(sum(one.to_dense().sum().item() for one in blocks()))
""")
    assert shown == [str(1000.0 * sum(range(100, 150)))] * 2


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no large pages")
def test_large_tensors_ask_for_large_pages_and_small_ones_for_none() -> None:
    asks = run("""
import torch
from mezzo import keep_memory

def flags(address):
    inside = False
    for line in open("/proc/self/smaps"):
        first, dash, last = line.split()[0].partition("-")
        if dash:
            inside = int(first, 16) <= address < int(last, 16)
        elif inside and line.startswith("VmFlags"):
            return line.split()

kept = keep_memory()
large = torch.ones(8 << 20)
print("hg" in flags(large.data_ptr() + (4 << 20)), "hg" in flags(torch.ones(1 << 20).data_ptr()))
""")
    assert asks == ["True False"]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_memory_is_kept_without_a_compiler_too_and_the_log_says_what_that_costs(tmp_path: Path) -> None:
    said = run("import logging, sys; logging.basicConfig(stream=sys.stdout, format='%(message)s')\nfrom mezzo import keep_memory; print(keep_memory())",
               PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path), TMPDIR=str(tmp_path), CXX="")  # fmt: skip
    assert said == [
        "memory is kept with gaps between tensors, so the peak is higher: no C++ compiler (g++, clang++, or the one that CXX names). Install g++ or clang++, or set CXX.",
        "KeptMemory(kept until undo())",
    ]


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
