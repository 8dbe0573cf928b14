"""Seeds every test, keeps torch to one thread a worker, and spares what a suite repeats ten thousand times."""

from __future__ import annotations

import gc
import itertools
import os
import random
import sys
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed as dist

hypothesis.settings.register_profile("two-cores", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("two-cores")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
# The suite starts some seventy processes: each reads what the first compiled, wherever the environment forbids to keep it.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if not any(kind.is_available() for kind in (torch.cuda, torch.xpu, torch.mtia)):
    # Each torch.manual_seed would write the stack down thrice, a millisecond under pytest, for devices that never come.
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda seed: None


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def accelerate_starts_anew() -> None:
    """Forget what the first Accelerator of this process was asked for, in whichever test: Accelerate gives it to all others."""
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Have a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


FROZEN_AFTER = (10, 100, 300, 1000, 3000)
"""Numbers of tests after which what they imported is taken out of walks over objects too."""
MANY_MODULES = 100
"""That tests imported since, of which the objects are taken out as well."""
_num_run = itertools.count(1)
_num_modules = [0]


def _freeze() -> None:
    """Take what lives, a million objects, out of every walk over the process's objects, by Python or by mezzo."""
    gc.collect()
    gc.freeze()
    _num_modules[0] = len(sys.modules)


gc.disable()  # until the tests are collected: imports leave no garbage, and each walk would go over all they made


def _quiet_compiler() -> None:
    """Spare each compilation two things that are only logged: where it saw a mutation, and a guard's time on an emptied cache."""
    if (config := sys.modules.get("torch._dynamo.config")) is not None and hasattr(config, "side_effect_replay_policy"):
        config.side_effect_replay_policy = "silent"
    if hasattr(guards := sys.modules.get("torch._dynamo.guards"), "profile_guard_manager"):
        guards.profile_guard_manager = lambda *args: 0.0


def pytest_collection_finish() -> None:
    gc.enable()
    _quiet_compiler()
    _freeze()


def pytest_runtest_logfinish() -> None:
    if next(_num_run) in FROZEN_AFTER or len(sys.modules) > _num_modules[0] + MANY_MODULES:
        _freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
