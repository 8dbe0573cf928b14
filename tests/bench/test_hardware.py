"""What a device is measured to be, and the advice drawn from it."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys

import pytest
import torch

from mezzo.bench.hardware import PROBE_ROWS, PROBE_WIDTH, DeviceReport, FormatReport, advice, measure_device
from mezzo.formats import native_support

CPU = torch.device("cpu")


def seen(times_fp32: float, reported: bool) -> FormatReport:
    return FormatReport(flops_per_s=times_fp32 * 1e11, reported=reported, reason="a flag", times_fp32=times_fp32)


def report(bf16: FormatReport, fp16: FormatReport, **changes: object) -> DeviceReport:
    made = DeviceReport(
        device="cpu", formats={"fp32": seen(1.0, True), "bf16": bf16, "fp16": fp16}, fastest="bf16", even_width=1024,
        uneven_share=0.5, share_by_rows={1: 0.004, 8: 0.1, 64: 0.85, 512: 1.0},
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


FAST, SLOW = seen(4.2, True), seen(0.2, False)


def test_fast_units() -> None:
    assert advice(report(FAST, SLOW)) == (
        "bf16 products run at 4.2x the rate of fp32: this device has fast 16-bit units, and mixed precision pays where large products dominate.",
        "fp16 products run at 0.20x the rate of fp32; prefer bf16 on this device.",
        "width 1023 runs at 50% of the rate of width 1024: make widths multiples of 8.",
        "64 rows at width 1024 reach 85% of the best bf16 rate, 1 row reaches 0.4%: below that, moving weights and launching work cost more than the products.",
    )  # fmt: skip


def test_no_fast_units() -> None:
    lines = advice(report(seen(0.9, False), SLOW, uneven_share=0.99, share_by_rows={8: 0.1, 512: 0.5}))
    assert lines == (
        "no 16-bit format multiplies faster than fp32 here (bf16 0.90x): 16 bit saves memory on this device, not time; write policy fp32 unless memory is short.",
        "width 1023 runs at 99% of the rate of width 1024: widths that are no multiples of 8 cost little on this device.",
        "even 512 rows at width 1024 reach only 50% of the best bf16 rate, 8 rows reach 10.0%: larger batches and widths use this device better.",
    )  # fmt: skip


def test_memory_that_is_given_back_is_named() -> None:
    said = advice(report(FAST, SLOW, fresh_share=0.25))[-1]
    assert said.startswith(
        "memory that was freed and taken again is written at 25% of the rate of memory that was kept"
    )
    assert "MALLOC_TRIM_THRESHOLD_" in said
    assert not any("MALLOC" in line for line in advice(report(FAST, SLOW, fresh_share=0.9)))


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's setting")
def test_the_advised_setting_keeps_memory() -> None:
    code = """
import resource, torch
from mezzo.bench.hardware import FRESH_BYTES
def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def write():
    before = faults()
    torch.empty(FRESH_BYTES, dtype=torch.uint8).fill_(1)
    return faults() - before
print(min(write() for _ in range(8)))  # a small block may take the place of the first
"""
    setting = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4294967296"}
    bare = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    bare_faults, set_faults = (
        int(subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout)
        for env in (bare, bare | setting)
    )
    assert set_faults * 100 < bare_faults


@pytest.mark.parametrize(
    ("times_fp32", "reported", "disagrees"),
    [(2.0, True, False), (0.5, False, False), (0.5, True, True), (2.0, False, True)],
)
def test_a_report_that_does_not_fit_the_measurement_is_named(
    times_fp32: float, reported: bool, disagrees: bool
) -> None:
    fp16 = seen(times_fp32, reported)
    said = [line for line in advice(report(FAST, fp16)) if line.startswith("fp16 is reported as")]
    assert fp16.disagrees == disagrees == bool(said)
    if disagrees:
        word = "native" if reported else "not native"
        assert said[0].startswith(f"fp16 is reported as {word} (a flag) but measured at {times_fp32:.2f}x fp32")


def test_measured() -> None:
    found = measure_device(CPU, 0.3)
    assert list(found.formats) == ["fp32", "bf16", "fp16"]
    assert found.formats["fp32"].times_fp32 == 1.0
    assert found.formats["bf16"].reported == native_support(CPU, torch.bfloat16).native
    assert found.formats[found.fastest].flops_per_s == max(found.formats[n].flops_per_s for n in ("bf16", "fp16"))
    assert tuple(found.share_by_rows) == PROBE_ROWS["cpu"]
    assert all(0 < share <= 1 for share in found.share_by_rows.values())
    assert found.even_width == PROBE_WIDTH["cpu"]
    assert found.even_width % 8 == 0
    assert 0 < found.fresh_share <= 1
