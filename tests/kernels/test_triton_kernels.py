"""The Triton kernels, where triton is installed: under its interpreter in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from mezzo.errors import ConfigError
from mezzo.kernels import registry

ALONE = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("cases", ["half", pytest.param("every", marks=pytest.mark.slow)])
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton, an optional import, is not installed")
def test_steps_equal_the_reference_under_the_interpreter(cases: str) -> None:
    command = [sys.executable, "-m", "tests.kernels.triton_program", cases]
    done = subprocess.run(command, env={**os.environ, **ALONE}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-500:]
    assert done.stdout.count("equal ") == 10


def test_without_a_gpu_triton_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as refused:
        registry.choose("sgd", torch.device("cpu"), torch.bfloat16, "triton")
    assert str(refused.value) == (
        "backend='triton' was asked for sgd on cpu bf16: it is for CUDA. Write backend='auto'."
    )
