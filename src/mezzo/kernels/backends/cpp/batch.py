"""Handing tensors to a C++ kernel: pointers and sizes, nothing copied."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...ops.gradients.scaled import ScaledGradients
from ...weights import Weights

FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""enum Format of formats.h."""
_MODES = {"none": 0, "split": 1, "fp32": 2, "kahan": 3, "stochastic": 4}


class Batch(ctypes.Structure):
    """struct Batch of batch.h."""

    _fields_ = (
        ("tensors", ctypes.c_int64),
        *(
            (name, ctypes.c_void_p)
            for name in ("sizes", "values", "kept", "grads", "means", "squares", "peaks", "seeds", "firsts")
        ),
        *((name, ctypes.c_void_p) for name in ("scalars", "step", "inv_scale", "clip_coef", "found_inf")),
        *(
            (name, ctypes.c_int32)
            for name in ("mode", "value_format", "grad_format", "mean_format", "maximize", "threads")
        ),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A batch, and everything its pointers point to."""

    batch: Batch
    held: tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Where weights, their aux state and their running means lie, as C reads it.

    Attributes:
        straight: places at which all of them are contiguous.
        other: the other places.
        sizes: numbers of elements.
        weights: addresses of the weights.
        aux: addresses of aux state of each.
        means: addresses of each list of running means; three lists, empty ones among them.
        seeds: of each weight's random bits.
        offsets: indices of the first elements, for the random bits.
    """

    straight: list[int]
    other: list[int]
    sizes: array[int]
    weights: array[int]
    aux: array[int]
    means: tuple[array[int], ...]
    seeds: array[int]
    offsets: array[int]


def layout(weights: Weights, means: Sequence[Sequence[Tensor]]) -> Layout:
    """Return where everything but the gradients lies; looked up once for as long as the weights stay where they are.

    Args:
        weights: fp32, bf16 or fp16.
        means: up to three lists of running means; always the same ones for the same weights.
    """
    return weights.once("layout", lambda: _layout(weights, means))


def _layout(weights: Weights, means: Sequence[Sequence[Tensor]]) -> Layout:
    straight, other = contiguous_indices(weights.values, weights.aux, *means)
    return Layout(
        straight,
        other,
        sizes(weights.values),
        pointers(weights.values),
        pointers(weights.aux),
        tuple(pointers(group) for group in (*means, *[()] * (3 - len(means)))),
        array("I", weights.seeds),
        array("I", [offset & 0xFFFFFFFF for offset in weights.offsets] or bytes(4 * len(weights.values))),
    )


def pointers(tensors: Sequence[Tensor]) -> array[int]:
    """Return the addresses of tensors as an array for C; `array` is filled twice as fast as one of ctypes."""
    return array("Q", [tensor.data_ptr() for tensor in tensors])


def sizes(tensors: Sequence[Tensor]) -> array[int]:
    """Return the numbers of elements as an array for C."""
    return array("q", [tensor.numel() for tensor in tensors])


def address(numbers: array[int]) -> int:
    """Return where an array lies, which must live until C is done with it."""
    return numbers.buffer_info()[0]


def pack(
    weights: Weights, grads: ScaledGradients, means: Sequence[Sequence[Tensor]], scalars: Tensor, step: Tensor
) -> Packed:
    """Return what a kernel needs of a step's tensors.

    Args:
        weights: contiguous, fp32, bf16 or fp16.
        grads: in fp32 or the dtype of the weights; any strides.
        means: up to three lists of running means, contiguous, fp32 or bf16; of the peaks only if they are used.
        scalars: shape (3,), fp32.
        step: shape (), fp32.

    Returns:
        The batch, and what must stay alive while it is used. Gradients that are not contiguous are copied.

    Syncs: no.
    """
    where = layout(weights, means)
    is_straight = all([grad.is_contiguous() for grad in grads.values])
    values = grads.values if is_straight else [grad.contiguous() for grad in grads.values]
    indices = pointers(values)
    factors = [None if x is None else x.to(torch.float32) for x in (grads.inv_scale, grads.clip_coef, grads.found_inf)]
    offset = next((group[0] for group in means if group), None)
    batch = Batch(
        len(weights.values),
        *(address(numbers) for numbers in (where.sizes, where.weights, where.aux, indices, *where.means)),
        address(where.seeds),
        address(where.offsets),
        scalars.data_ptr(),
        step.data_ptr(),
        *(None if factor is None else factor.data_ptr() for factor in factors),
        _MODES[weights.mode],
        FORMATS[weights.values[0].dtype],
        FORMATS[values[0].dtype],
        FORMATS[torch.float32 if offset is None else offset.dtype],
        grads.maximize,
        torch.get_num_threads(),
    )
    return Packed(batch, (where, values, indices, factors, scalars, step))


def contiguous_indices(*lists: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Return the places at which every list's tensor is contiguous, and the other places; empty lists have none."""
    filled = [group for group in lists if group]
    indices = range(len(filled[0]))
    if all([tensor.is_contiguous() for group in filled for tensor in group]):
        return list(indices), []
    straight = [all(group[index].is_contiguous() for group in filled) for index in indices]
    return [i for i in indices if straight[i]], [i for i in indices if not straight[i]]
