"""Handing operands to a C++ kernel: addresses and sizes, nothing copied."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...operands import FORMATS, MODES, Layout, Operands, batch_of
from ...weights import Weights
from .build import Kernel

_gradients = Kernel("gradients", norms="qPPPiP")
_POINTERS = (
    "sizes", "values", "aux", "grads", "means", "squares", "peaks", "seeds", "offsets", "grad_formats", "scalars",
    "step", "inv_scale", "clip_coef", "found_inf",
)  # fmt: skip


class _BatchStruct(ctypes.Structure):
    """struct Batch of batch.h."""

    _fields_ = (
        ("tensors", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int32) for name in ("mode", "value_format", "mean_format", "maximize", "threads")),
    )


def int64s(numbers: Sequence[int]) -> Any:
    """Return numbers as C takes an array of them."""
    return (ctypes.c_int64 * len(numbers))(*numbers)


def address(numbers: array[Any]) -> int:
    """Return where an array lies, which must live until C is done with it."""
    return numbers.buffer_info()[0]


def compiled_step(
    op: str, reference: ModuleType, numbers_of: Callable[[Any], Sequence[float]]
) -> Callable[[Operands, Any, Tensor, Tensor], None]:
    """Return an optimizer's step as one compiled pass; arguments, writes and results are those of `reference.step_`, to the last bit.

    Weights that no kernel can walk, such as slices of something larger, take the reference's way. The kernel is compiled when the
    first step is taken. It takes the numbers of a rule as fp32, which are kept as long as rules are equal. Syncs: no, nor does the step.
    """
    kernel = Kernel(op, step="PP:i")

    @functools.lru_cache(maxsize=64)
    def packed(rule: Any) -> bytes:
        return array("f", numbers_of(rule)).tobytes()

    def step_(operands: Operands, rule: Any, scalars: Tensor, step: Tensor) -> None:
        if operands.unwalkable:
            reference.step_(operands, rule, scalars, step, operands.unwalkable)
        where, weights, grads = operands.layout, operands.weights, operands.grads
        if where is None or operands.grad_addresses is None or operands.grad_formats is None:
            return
        if where.struct is None:
            where.struct = _struct_of(where, weights)
        batch, count = where.struct, len(weights.values)
        numbers = _numbers(scalars, (count, 3)), _numbers(step, (count,))
        factors = [None if x is None else _numbers(x, ()) for x in (grads.inv_scale, grads.clip_coef, grads.found_inf)]
        batch.scalars, batch.step = [x.data_ptr() for x in numbers]
        batch.inv_scale, batch.clip_coef, batch.found_inf = [None if x is None else x.data_ptr() for x in factors]
        batch.grads, batch.grad_formats = address(operands.grad_addresses), address(operands.grad_formats)
        batch.maximize, batch.threads = grads.maximize, torch.get_num_threads()
        if kernel.step(ctypes.byref(batch), packed(rule)) != 0:
            raise AssertionError(f"{op} was given a gradient format that it has no loop for")
        torch.autograd.graph.increment_version(list(weights.values))

    return step_


def known_norms(grads: Sequence[Tensor]) -> array[float]:
    """Return the L2 norm of each gradient, within a few ulp of the reference, as numbers of the host; gradients that are not dense are copied.

    Raises: OperandError: one that lies outside its storage, or not on the CPU. Syncs: no.
    """
    dense = grads if all(map(Tensor.is_contiguous, grads)) else [_dense(grad) for grad in grads]
    norms, given = array("f", [0.0]) * len(dense), batch_of(dense)
    _gradients.norms(len(dense), *map(address, given), torch.get_num_threads(), address(norms))
    return norms


def _dense(grad: Tensor) -> Tensor:
    if grad.dim() == 4 and grad.is_contiguous(memory_format=torch.channels_last):  # asked for a tenth of the time
        return grad
    return grad if torch.ops.aten.is_non_overlapping_and_dense(grad) else grad.contiguous()


def tensor_norms(grads: Sequence[Tensor]) -> Tensor:
    """Return `known_norms` as a tensor, shape (len(grads),), fp32. Syncs: no."""
    return torch.frombuffer(known_norms(grads), dtype=torch.float32)


def _struct_of(where: Layout, weights: Weights) -> _BatchStruct:
    """Return what of a batch stays the same from step to step; its arrays live as long as the layout that keeps it."""
    moments = dict(zip(("means", "squares", "peaks"), map(address, where.moments), strict=False))
    names = ("sizes", "values", "aux", "seeds", "offsets")
    return _BatchStruct(
        tensors=len(weights.values), mode=MODES[weights.mode], value_format=FORMATS[weights.values[0].dtype],
        mean_format=FORMATS[where.moment_dtype], **{name: address(getattr(where, name)) for name in names}, **moments,
    )  # fmt: skip


def _numbers(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    if x.shape == shape and x.dtype is torch.float32 and x.device.type == "cpu" and x.is_contiguous():
        return x
    return x.reshape(shape).to("cpu", torch.float32).contiguous()
