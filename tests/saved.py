"""What torch.save writes, as torch.load reads it."""

from __future__ import annotations

import io
from typing import Any

import torch


def through_a_file(state: object, *, weights_only: bool = True) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)
