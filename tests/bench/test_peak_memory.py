"""Peak memory: what was allocated is seen, freed or not, and each watch starts anew."""

from __future__ import annotations

import os

import torch

from mezzo.bench.worker import PeakMemory, load_code

CPU = torch.device("cpu")
SIZE = 96 * 2**20
CPUS = os.cpu_count() or 1
# What Linux may still hold back in its per-CPU counters of the resident set (lib/percpu_counter.c, batch of pages):
# the set is the sum of three of them, file, anonymous and shared pages (get_mm_rss), and each of two readings may be off.
HELD_BACK = 2 * 3 * max(32, 2 * CPUS) * CPUS * os.sysconf("SC_PAGE_SIZE")


def test_a_peak_is_seen_after_it_is_gone_and_only_by_its_watch() -> None:
    load_code(CPU, torch.bfloat16)
    watch = PeakMemory(CPU)
    tensor = torch.ones(SIZE, dtype=torch.int8)
    held = watch.peak_bytes()
    assert held >= tensor.nbytes - HELD_BACK
    del tensor
    assert watch.peak_bytes() >= held - HELD_BACK
    later = PeakMemory(CPU)
    assert later.peak_bytes() <= HELD_BACK


def test_what_was_there_before_does_not_count() -> None:
    before = torch.ones(SIZE, dtype=torch.int8)
    assert PeakMemory(CPU).peak_bytes() <= HELD_BACK
    assert before.nbytes == SIZE
