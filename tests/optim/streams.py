"""The same gradients for an optimizer under test and for an fp32 oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (63,), (127,), (5, 0, 2), (33, 65), (4, 3, 5, 2))
"""0-d, empty, one, odd and even sizes; the last is kept in channels_last order."""

Build = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def parameters(dtype: torch.dtype, seed: int = 1) -> list[torch.nn.Parameter]:
    """Return parameters of every shape whose values `dtype` holds exactly, among them a transposed and a strided one."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator) * 0.5 for shape in SHAPES]
    values[-1] = values[-1].to(memory_format=torch.channels_last)
    values.append(torch.randn(9, 6, generator=generator).t())
    whole = torch.randn(9, 6, generator=generator)
    stored = [value.to(torch.bfloat16).to(dtype) for value in [*values, whole]]
    return [torch.nn.Parameter(value) for value in [*stored[:-1], stored[-1][::2, ::3]]]


def gradients(
    params: list[torch.nn.Parameter], steps: int, dtype: torch.dtype, seed: int = 2
) -> Iterator[list[Tensor]]:
    """Yield for each step one fp32 gradient a parameter, of values that `dtype` holds; some large, some exactly 0."""
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        size = (1.0, 1e-3, 8.0, 0.0)[step % 4] if step % 5 else 1e-2
        yield [(torch.randn(p.shape, generator=generator) * size).to(dtype).float() for p in params]


def feed(optimizer: torch.optim.Optimizer, grads: list[Tensor], scale: float = 1.0) -> None:
    """Give each parameter its gradient in its own dtype, then step."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p, grad in zip(params, grads, strict=True):
        p.grad = (grad * scale).to(p.dtype)
    optimizer.step()


def run(build: Build, dtype: torch.dtype, steps: int, grad_dtype: torch.dtype) -> tuple[Any, list[torch.nn.Parameter]]:
    """Return an optimizer and its parameters after some steps on the common stream."""
    params = parameters(dtype)
    optimizer = build(params)
    for grads in gradients(params, steps, grad_dtype):
        feed(optimizer, grads)
    return optimizer, params


def snapshot(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the bits of every weight and every state tensor."""
    held = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            held += [p, *(item for item in optimizer.state.get(p, {}).values() if isinstance(item, Tensor))]
    return [bits(item) for item in held]


def bits(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's values as bytes, so that equal means equal bit for bit, NaN and -0 too."""
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    """Say whether two snapshots hold the same bits."""
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
