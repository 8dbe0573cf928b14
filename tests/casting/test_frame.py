"""Activation checkpointing recomputes the dtypes of forward (SPEC A12)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.casting.test_cast_cache import BF16, REGIONS
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import mezzo.casting.frame
from mezzo import checkpoint_contexts
from mezzo.casting import autocast


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.a(x))
        self.seen.append(y.dtype)
        return self.b(torch.nn.functional.gelu(y)) + x


def gradients(
    region: dict[str, Any], run: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.dtype]]:
    torch.manual_seed(0)
    first, second = Block(), Block()
    x = torch.randn(4, 8, requires_grad=True)
    with autocast("cpu", **region):
        loss = run(second, run(first, x)).float().square().mean()
    loss.backward()
    tensors = [x, *first.parameters(), *second.parameters()]
    return [t.grad for t in tensors if t.grad is not None], first.seen


WAYS: dict[str, dict[str, Any]] = {
    "unchanged": {"use_reentrant": False},
    "context_fn": {"use_reentrant": False, "context_fn": checkpoint_contexts},
    "reentrant": {"use_reentrant": True},
}


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_without_checkpointing(name: str, way: str) -> None:
    want, plain = gradients(REGIONS[name], lambda block, x: block(x))
    got, seen = gradients(REGIONS[name], lambda block, x: checkpoint(block, x, **WAYS[way]))
    assert seen == plain * 2, "recomputed in the same dtype"
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_nested_checkpoints(reentrant: bool) -> None:
    def nested(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda z: checkpoint(block, z, use_reentrant=reentrant), x, use_reentrant=reentrant)

    want, _ = gradients(REGIONS["mode"], lambda block, x: block(x))
    got, seen = gradients(REGIONS["mode"], nested)
    assert set(seen) == {BF16}
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_without_the_bound_frame_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mezzo.casting.frame, "_bind_frame", lambda *_: None)
    with pytest.raises(CheckpointError, match="different metadata"):
        gradients(REGIONS["mode"], lambda block, x: checkpoint(block, x, use_reentrant=False))
