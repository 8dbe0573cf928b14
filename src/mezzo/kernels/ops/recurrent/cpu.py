"""One direction of an LSTM layer on the CPU, forward and back in time; `cpu.cpp` computes it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...backends.cpp.batch import int64s
from ...backends.cpp.build import library
from ...operands import batch_of, check_read

SOURCE = Path(__file__).with_suffix(".cpp")
GROUP = 16
"""Units that lie together in what forward keeps."""


def forward(operands: Sequence[Tensor], is_reversed: bool, keeps: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Take an LSTM through all steps of time.

    Products are of bf16, sums, gates and cells fp32; any number of threads gives the same bits.

    Args:
        operands: x [T, B, D], h [B, H], c [B, H], w_ih [4 H, D], w_hh [4 H, H], and both biases [4 H] if it has any; bf16.
        is_reversed: time runs backward.
        keeps: whether backward may follow.

    Returns:
        y [T, B, H], bf16, and the last c [B, H], bf16; for backward the cells, fp32 [T, B, H up to a multiple of 16], and the gates, bf16
        [T, B, groups of 16 units, 4, 16]: 12 bytes for each of y's elements. Of the cells one step, and no gates, unless it keeps.

    Syncs: no.
    """
    x = operands[0] if operands[0].stride(-1) == 1 else operands[0].contiguous()
    h, c, *weights = (one.contiguous() for one in operands[1:])
    (steps, batch, inputs), units = x.shape, h.shape[-1]
    groups = -(-units // GROUP)
    y = torch.empty((steps, batch, units), dtype=torch.bfloat16, device="cpu")
    cells = torch.empty((steps if keeps else 1, batch, groups * GROUP), dtype=torch.float32, device="cpu")
    gates = torch.empty((steps, batch, groups, 4, GROUP), dtype=torch.bfloat16, device="cpu") if keeps else None
    sizes = int64s([steps, batch, inputs, units])
    memory = _workspace("forward", sizes)
    addresses = _addresses([x, y, *weights, *[None] * (4 - len(weights)), h, c, gates, cells, memory])
    _function("forward")(
        (ctypes.c_void_p * 9)(*addresses[:9]), addresses[9], int64s([*x.stride()[:2], *y.stride()[:2]]), sizes, is_reversed,
        addresses[10], _threads(batch),
    )  # fmt: skip
    last = cells[0 if is_reversed else -1, :, :units]
    return y, last.to(torch.bfloat16), cells, gates


def backward(
    grads: Sequence[Tensor | None], operands: Sequence[Tensor], y: Tensor, cells: Tensor, gates: Tensor,
    is_reversed: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Go back through all steps of time.

    Args:
        grads: of y [T, B, H], of the last h and of the last c [B, H], bf16; None: none.
        operands: as for `forward`.
        y: what `forward` returned, as the next two.
        cells: likewise.
        gates: likewise.
        is_reversed: time runs backward.

    Returns:
        the gradients of the sums that the gates are made of, [T, B, 4 H], bf16, and of the first c, [B, H], bf16.

    Raises:
        OperandError: one that is not what it is said to be.

    Syncs: no.
    """
    steps, batch, units = y.shape
    _check(grads, operands, y, cells, gates)
    dy, dh, dc = (one if one is None or one.stride(-1) == 1 else one.contiguous() for one in grads)
    c, w_hh, dh = (None if one is None else one.contiguous() for one in (operands[2], operands[4], dh))
    d_sums = torch.empty((steps, batch, 4 * units), dtype=torch.bfloat16, device="cpu")
    d_cells = torch.zeros((batch, cells.shape[-1]), dtype=torch.float32, device="cpu")
    if dc is not None:
        d_cells[:, :units] = dc
    sizes = int64s([*operands[0].shape, units])
    memory = _workspace("backward", sizes)
    addresses = _addresses([dy, dh, w_hh, c, gates, d_sums, cells, d_cells, memory])
    _function("backward")(
        (ctypes.c_void_p * 6)(*addresses[:6]), *addresses[6:8], int64s([0, 0] if dy is None else list(dy.stride()[:2])), sizes,
        is_reversed, addresses[8], _threads(batch),
    )  # fmt: skip
    return d_sums, d_cells[:, :units].to(torch.bfloat16)


def _check(grads: Sequence[Tensor | None], operands: Sequence[Tensor], y: Tensor, cells: Tensor, gates: Tensor) -> None:
    """Refuse what hooks on saved tensors changed."""
    (steps, batch, units), inputs, low = y.shape, operands[0].shape[-1], torch.bfloat16
    of_batch, of_sums = (batch, units), (4 * units,)
    shapes = [(steps, batch, inputs), of_batch, of_batch, (*of_sums, inputs), (*of_sums, units), of_sums, of_sums]
    names = ["input", "first h", "first c", "input weight", "hidden weight", "input bias", "hidden bias"]
    for name, one, shape in zip(names, operands, shapes, strict=False):
        check_read("LSTM layers", name, one, shape, low)
    for name, grad, shape in zip(["output", "last h", "last c"], grads, [y.shape, of_batch, of_batch], strict=True):
        if grad is not None:
            check_read("LSTM layers", f"gradient of the {name}", grad, shape, low)
    groups = -(-units // GROUP)
    check_read("LSTM layers", "output", y, y.shape, low)
    check_read("LSTM layers", "cells", cells, (steps, batch, groups * GROUP), torch.float32)
    check_read("LSTM layers", "gates", gates, (steps, batch, groups, 4, GROUP), low)


def _workspace(name: str, sizes: Any) -> Tensor:
    return torch.empty(_function(f"{name}_workspace")(sizes) // 4, dtype=torch.float32, device="cpu")


def _addresses(tensors: Sequence[Tensor | None]) -> list[int | None]:
    """Return where tensors lie; None for those that are not there."""
    there = iter(batch_of([one for one in tensors if one is not None])[1])
    return [None if one is None else next(there) for one in tensors]


def _threads(batch: int) -> int:
    return min(torch.get_num_threads(), batch)


@functools.cache
def products() -> int:
    """Return what multiplies: 1 pairs of bf16, 0 nothing that the kernel is written for, or tiles, on which torch's is the faster one. Host only."""
    return int(_function("products")())


@functools.cache
def _function(name: str) -> Any:
    """Return a compiled function, with the types of its arguments."""
    pointer, whole = ctypes.c_void_p, ctypes.c_int32
    function = getattr(library(SOURCE), f"mezzo_recurrent_{name}")
    function.restype = None if name in ("forward", "backward") else ctypes.c_int64
    function.argtypes = {
        "forward": [*[pointer] * 4, whole, pointer, whole], "backward": [*[pointer] * 5, whole, pointer, whole],
        "products": [],
    }.get(name, [pointer])  # fmt: skip
    return function
