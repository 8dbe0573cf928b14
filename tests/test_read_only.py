"""Read-only for the type checker: a dataclass with keywords and slots, set without the detour of a frozen one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mezzo.read_only import read_only


@read_only
class Found:
    norm: torch.Tensor
    count: int = 0


def test_a_read_only_dataclass() -> None:
    found = Found(norm=torch.ones(2))
    assert dataclasses.replace(found, count=2).count == 2
    assert found != Found(norm=found.norm) and found in {found}
    with pytest.raises(TypeError):
        Found(torch.ones(2))  # type: ignore[misc]  # keywords alone
    with pytest.raises(AttributeError):
        found.other = 1  # type: ignore[attr-defined]  # nothing else
