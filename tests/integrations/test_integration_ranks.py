"""Each framework on two ranks, started by torchrun: it wraps the model, and the weights are those of `prepare`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("how", "policies", "frameworks"),
    [
        ("copies", ("bf16-master",), 4),
        ("shards", ("bf16", "fp16, scaling.init_scale=64", "bf16-master"), 3),
    ],
)
def test_two_ranks_equal_prepare_under_every_framework(how: str, policies: tuple[str, ...], frameworks: int) -> None:
    program = [str(Path(__file__).with_name("ranks_program.py")), how, *policies]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal: ") == 2 * frameworks * len(policies)
