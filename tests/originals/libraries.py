"""The same program under two libraries: each test of this folder runs it on both and compares what came out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import mezzo


@dataclass(frozen=True)
class Library:
    """The names a program uses, from one of the two libraries."""

    autocast: Callable[..., Any]
    GradScaler: Callable[..., Any]
    custom_fwd: Callable[..., Any]
    custom_bwd: Callable[..., Any]


TORCH = Library(torch.autocast, torch.amp.GradScaler, torch.amp.custom_fwd, torch.amp.custom_bwd)
MEZZO = Library(mezzo.autocast, mezzo.GradScaler, mezzo.custom_fwd, mezzo.custom_bwd)
PRECISIONS = {
    "fp32": {"dtype": torch.bfloat16, "enabled": False},
    "bf16": {"dtype": torch.bfloat16, "enabled": True},
    "fp16": {"dtype": torch.float16, "enabled": True},
}
"""What `autocast` is given; off is fp32, as `use_amp=False` has it."""

Program = Callable[[Library, dict[str, Any]], object]


def make_model(in_size: int, out_size: int, num_layers: int) -> nn.Sequential:
    """The network of the recipe: linear layers with a ReLU after each but the last."""
    layers: list[nn.Module] = []
    for _ in range(num_layers - 1):
        layers += [nn.Linear(in_size, in_size), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(in_size, out_size))


def batches(count: int = 4, rows: int = 8, width: int = 16, out: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets in the default precision, the same for every library."""
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, width, generator=made), torch.randn(rows, out, generator=made)) for _ in range(count)]


def weights(*models: nn.Module) -> list[Tensor]:
    """Every parameter, as it is now."""
    return [p.detach().clone() for model in models for p in model.parameters()]


def _leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def check_same(program: Program, precision: str) -> None:
    """Run a program on both libraries from one seed; every tensor and number that it returns must be the same."""
    outcomes = []
    for library in (TORCH, MEZZO):
        torch.manual_seed(0)
        outcomes.append(list(_leaves(program(library, PRECISIONS[precision]))))
    want, got = outcomes
    assert len(want) == len(got)
    for ours, theirs in zip(got, want, strict=True):
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert ours == theirs
