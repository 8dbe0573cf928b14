"""Handing many tensors to one Triton launch: a table of addresses and a list of blocks, kept on the device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ...._torch import is_capturing
from ....errors import ConfigError
from ...device_numbers import has_graph_tables, kept_on_device, on_device
from ...operands import FORMATS, MODES, Operands
from ...ops.gradients.scaled import ScaledGradients

BLOCK = 1024
"""Elements a program takes."""
WARPS = 8
"""Of a program: 4 elements a thread, so that no variant spills or holds more than 64 registers."""


@kept_on_device
def table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Return addresses on the device. From step to step they stay the same, or alternate between a few sets. Syncs: no."""
    return on_device(addresses, device)


@kept_on_device
def blocks(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Return, for each block of each tensor, the tensor and the first element: shape (2, blocks), int64. Syncs: no."""
    pairs = [(index, start) for index, size in enumerate(sizes) for start in range(0, size, BLOCK)]
    return on_device([index for index, _ in pairs] + [start for _, start in pairs], device).view(2, -1)


@functools.lru_cache(maxsize=64)
def is_aligned(addresses: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Say whether every address and every size is a multiple of 16: what the kernels' vectors of 4 elements need."""
    return not any(number % 16 for number in chain(addresses, sizes))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tables:
    """What a launch reads of its operands, on the device.

    Attributes:
        addresses: of weights, aux state, gradients and three lists of moments, one list after the other.
        sizes: of each weight; 0 for one that is left to the reference.
        seeds: of each weight's random bits.
        offsets: index of each weight's first element in its whole.
        blocks: as `blocks` returns them.
        grad_format: of all gradients, as in `FORMATS`.
        mean_format: of all moments.
        is_aligned: every address and size is a multiple of 16.
    """

    addresses: Tensor
    sizes: Tensor
    seeds: Tensor
    offsets: Tensor
    blocks: Tensor
    grad_format: int
    mean_format: int
    is_aligned: bool


def tables(operands: Operands, device: torch.device) -> Tables | None:
    """Return the tables of a launch; None if there is nothing to walk. Syncs: no."""
    where = operands.layout
    if where is None or operands.grad_addresses is None or operands.grad_formats is None:
        return None
    count = len(where.sizes)
    lists = (where.values, where.aux, operands.grad_addresses, *where.moments, *[()] * (3 - len(where.moments)))
    (grad_format,) = set(operands.grad_formats)
    addresses = tuple(chain.from_iterable(held or [0] * count for held in lists))
    return Tables(
        addresses=table(addresses, device),
        sizes=table(tuple(where.sizes), device),
        seeds=table(tuple(where.seeds), device),
        offsets=table(tuple(where.offsets), device),
        blocks=blocks(tuple(where.sizes), device),
        grad_format=grad_format,
        mean_format=FORMATS[where.moment_dtype],
        is_aligned=is_aligned(addresses, tuple(where.sizes)),
    )


def launch(
    step_kernel: Any, operands: Operands, scalars: Tensor, step: Tensor, numbers: Sequence[float], **constants: object
) -> None:
    """Launch a step's kernel once over all tensors that it can walk.

    Args:
        step_kernel: takes the tables, `scalars`, `step` and the factors of gradients, then the counts of tensors and blocks.
        operands: checked.
        scalars: shape (n, 3), fp32, on the device.
        step: shape (n,), fp32, same device.
        numbers: what the kernel takes after the counts.
        constants: by name, beside those that every step has.

    Raises:
        ConfigError: somebody else than `amp.capture` captures a graph on the device.

    Writes: weights, their aux state, moments; none of them if `found_inf` is set. Syncs: no.
    """
    device, weights, grads = step.device, operands.weights, operands.grads
    if is_capturing(device) and not has_graph_tables():
        raise ConfigError(
            f"an optimizer of mezzo's was stepped while a graph is captured on {device}: its kernel reads tables of addresses "
            "that the host fills, and nobody would keep them for the replays. Write step = amp.capture(function), take the "
            "step outside of the graph, or give the optimizer backend='reference'."
        )
    held = tables(operands, device)
    if held is None:
        return
    factors, scaled, found, guarded = factors_of(grads, device)
    count = held.blocks.shape[1]
    with on(device):
        step_kernel[(count,)](
            held.addresses, held.sizes, held.seeds, held.offsets, held.blocks, scalars, step, factors, found,
            len(weights.values), count, *numbers, **constants,
            MODE=MODES[weights.mode], VALUE=FORMATS[weights.values[0].dtype], GRAD=held.grad_format,
            MEAN=held.mean_format, MAXIMIZE=grads.maximize, SCALED=scaled, GUARDED=guarded, SIZE=BLOCK,
            ALIGNED=held.is_aligned, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    torch.autograd.graph.increment_version(list(weights.values))


def launch_once(one_kernel: Any, first: Tensor, *rest: object, **constants: object) -> None:
    """Launch one program of one warp, for what is a handful of numbers.

    Args:
        one_kernel: takes the arguments in their order, then constants by name.
        first: says where.
        rest: further arguments.
        constants: of the kernel.

    Writes: what the kernel does. Syncs: no.
    """
    with on(first.device):
        one_kernel[(1,)](first, *rest, **constants, num_warps=1, enable_fp_fusion=False)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which Triton launches on a device: by itself it takes the current one, whatever the pointers."""
    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def factors_of(grads: ScaledGradients, device: torch.device) -> tuple[Tensor, bool, Tensor, bool]:
    """Return 1/scale and clip coefficient, shape (2,) fp32, whether either is there, and the same for `found_inf`. Syncs: no."""
    one = torch.ones((), dtype=torch.float32, device=device)
    scaled = grads.inv_scale is not None or grads.clip_coef is not None
    given = [one if x is None else x.reshape(()).to(torch.float32) for x in (grads.inv_scale, grads.clip_coef)]
    found = one if grads.found_inf is None else grads.found_inf.reshape(()).to(torch.float32)
    return torch.stack(given) if scaled else one, scaled, found, grads.found_inf is not None
