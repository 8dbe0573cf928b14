"""Plugins of Accelerate write their options into the environment; no test leaves any."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState


def start_anew() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def options_of_plugins_end() -> Iterator[None]:
    before = dict(os.environ)  # a plugin writes its options there
    yield
    os.environ.clear()
    os.environ.update(before)
