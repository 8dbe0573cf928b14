"""Handing many tensors to one Triton launch: a table of addresses and a list of blocks, kept on the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from ...ops.gradients.scaled import ScaledGradients

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Constants FP32, BF16 and FP16 of tiles.py."""
MODES = {"none": 0, "split": 1, "fp32": 2, "kahan": 3, "stochastic": 4}
"""Constants OWN to CHANCE of tiles.py."""
BLOCK = 1024
"""Elements a program takes."""


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return whole numbers as int64 on a device, without waiting for it."""
    held = torch.tensor(numbers, dtype=torch.int64)
    return held if device.type == "cpu" else held.pin_memory().to(device, non_blocking=True)


@functools.lru_cache(maxsize=64)
def table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Return addresses on the device. From step to step they stay the same, or alternate between a few sets."""
    return on_device(addresses, device)


@functools.lru_cache(maxsize=64)
def blocks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return, for each block of each tensor, the tensor and the first element: shape (2, blocks), int64."""
    pairs = [(index, start) for index, size in enumerate(sizes) for start in range(0, size, BLOCK)]
    return on_device([index for index, _ in pairs] + [start for _, start in pairs], device).view(2, -1)


def addresses(lists: Sequence[Sequence[Tensor]], count: int) -> tuple[int, ...]:
    """Return the addresses of lists of tensors one after the other; an empty list is as many zeros."""
    return tuple(address for tensors in lists for address in ([t.data_ptr() for t in tensors] or [0] * count))


def factors_of(grads: ScaledGradients, device: torch.device) -> tuple[Tensor, bool, Tensor, bool]:
    """Return 1/scale and clip coefficient, shape (2,) fp32, whether either is there, and the same for `found_inf`."""
    one = torch.ones((), dtype=torch.float32, device=device)
    scaled = grads.inv_scale is not None or grads.clip_coef is not None
    given = [one if x is None else x.reshape(()).to(torch.float32) for x in (grads.inv_scale, grads.clip_coef)]
    found = one if grads.found_inf is None else grads.found_inf.reshape(()).to(torch.float32)
    return torch.stack(given) if scaled else one, scaled, found, grads.found_inf is not None
