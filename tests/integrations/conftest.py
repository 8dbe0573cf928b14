"""Accelerate keeps the state of the first Accelerator of a process; each test starts without."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState


def start_anew() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def accelerate_starts_anew() -> Iterator[None]:
    start_anew()  # programs of other tests that ran in this process left theirs
    before = dict(os.environ)  # a plugin writes its options there
    yield
    os.environ.clear()
    os.environ.update(before)
    start_anew()
