"""Seeds every test and keeps torch to one thread a worker."""

from __future__ import annotations

import gc
import os
import random

import hypothesis
import numpy as np
import pytest
import torch

hypothesis.settings.register_profile("two-cores", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("two-cores")

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_finish() -> None:
    """Take what was imported and collected, a million objects, out of every walk over the process's objects, by Python or by mezzo."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
