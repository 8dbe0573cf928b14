"""Settings of torch that benchmarks write are as they were after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _settings_of_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # torch's own test tools, which other tests import, freeze these settings for the whole process
    monkeypatch.setitem(torch.backends.flags_frozen.__globals__, "__allow_nonbracketed_mutation_flag", True)
    precision, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = convolutions
