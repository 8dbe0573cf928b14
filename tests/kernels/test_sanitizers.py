"""The compiled kernels under AddressSanitizer and UBSan: no generated call reads or writes where it must not.

`make sanitize`, which is `python -m tests.kernels.test_sanitizers`, makes 20,000 calls.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from mezzo.kernels.ops.attention import cpu as attention_cpu
from mezzo.kernels.ops.convolution import cpu as convolution_cpu
from mezzo.kernels.ops.dropout import cpu as dropout_cpu
from mezzo.kernels.ops.linear_training import cpu as training_cpu
from mezzo.kernels.ops.recurrent import cpu as recurrent_cpu

FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g1 -O1"


def preloaded() -> str:
    """Return what AddressSanitizer wants loaded first, for exceptions too; empty where the compiler has none."""
    compiler = shutil.which("g++")
    if compiler is None or sys.platform != "linux":
        return ""
    asked = [[compiler, f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so.6")]
    found = [subprocess.run(one, capture_output=True, text=True, check=True).stdout.strip() for one in asked]
    return " ".join(found) if all(os.path.isabs(path) for path in found) else ""


def sanitized(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the program of generated calls on kernels that were compiled with sanitizers."""
    env = {
        **os.environ, "MEZZO_CXXFLAGS": FLAGS, "LD_PRELOAD": preloaded(), "OMP_NUM_THREADS": "2",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.kernels.sanitizer_program", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


pytestmark = pytest.mark.skipif(not preloaded(), reason="the compiler has no AddressSanitizer")


def test_generated_calls_stay_inside_their_operands_and_one_that_does_not_is_seen() -> None:
    done = sanitized("120", "planted")
    faster = (
        attention_cpu.products() > 0,
        2 * (recurrent_cpu.products() > 0),
        convolution_cpu.is_faster(),
        dropout_cpu.is_faster(),
        training_cpu.is_faster(),
    )
    calls = 120 + 6 * (2 + sum(faster))
    assert done.stdout.startswith(f"{calls} calls: "), done.stderr[
        -3000:
    ]  # after which the planted one ends the program
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr


if __name__ == "__main__":
    ended = sanitized(*(sys.argv[1:] or ["20000"]))
    print(ended.stdout, ended.stderr[-3000:])
    sys.exit(ended.returncode)
