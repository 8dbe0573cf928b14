"""Handing operands to a C++ kernel: addresses and sizes, nothing copied."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...operands import FORMATS, MODES, Layout, Operands, batch_of
from ...weights import Weights
from .build import c_functions, library

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
    source: Path, name: str, reference: ModuleType, pack: Callable[[Any], ctypes.Structure]
) -> Callable[[Operands, Any, Tensor, Tensor], None]:
    """Return an optimizer's step as one compiled pass; arguments, writes and results are those of `reference.step_`, to the last bit.

    Weights that no kernel can walk, such as slices of something larger, take the reference's way. `source` is compiled when the
    first step is taken; the struct that `pack` returns of a rule is kept as long as rules are equal. Syncs: no, nor does the step.
    """
    packed, kernel = functools.lru_cache(maxsize=64)(pack), functools.cache(lambda: getattr(library(source), name))

    def step_(operands: Operands, rule: Any, scalars: Tensor, step: Tensor) -> None:
        if operands.other:
            reference.step_(operands, rule, scalars, step, operands.other)
        run(kernel(), operands, packed(rule), scalars, step)

    return step_


def compiled_norms(
    source: Path, name: str
) -> tuple[Callable[[Sequence[Tensor]], Tensor], Callable[[Sequence[Tensor]], array[float]]]:
    """Return the gradient pass as one compiled pass, twice: as a tensor, shape (number of gradients,), fp32, and as so many numbers.

    The L2 norm of each gradient, within a few ulp of the reference; gradients that are not dense are copied. One that lies
    outside its storage, or not on the CPU, is an OperandError. Syncs: no, nor do the norms.
    """
    kernel = c_functions(source, "", **{name: "qPPPiP"})

    def numbers(grads: Sequence[Tensor]) -> array[float]:
        dense = grads if all(map(Tensor.is_contiguous, grads)) else [_dense(grad) for grad in grads]
        norms, given = array("f", [0.0]) * len(dense), batch_of(dense)
        kernel(name)(len(dense), *map(address, given), torch.get_num_threads(), address(norms))
        return norms

    def tensor(grads: Sequence[Tensor]) -> Tensor:
        if not grads:
            return torch.zeros(0, dtype=torch.float32, device="cpu")
        return torch.frombuffer(numbers(grads), dtype=torch.float32)

    return tensor, numbers


def _dense(grad: Tensor) -> Tensor:
    if grad.dim() == 4 and grad.is_contiguous(memory_format=torch.channels_last):  # asked for a tenth of the time
        return grad
    return grad if torch.ops.aten.is_non_overlapping_and_dense(grad) else grad.contiguous()


def run(kernel: Any, operands: Operands, rule: ctypes.Structure, scalars: Tensor, step: Tensor) -> None:
    """Call a C++ step on the operands that it can walk, with the struct of its rule, scalars [n, 3] and step counts [n].

    Writes: weights, their aux state, moments; none of them if `found_inf` is set. Syncs: no.
    """
    where, weights, grads = operands.layout, operands.weights, operands.grads
    if where is None or operands.grad_addresses is None or operands.grad_formats is None:
        return
    if not where.struct:
        where.struct.append(_struct_of(where, weights))
    (batch,), count = where.struct, len(weights.values)
    numbers = _numbers(scalars, (count, 3)), _numbers(step, (count,))
    factors = [None if x is None else _numbers(x, ()) for x in (grads.inv_scale, grads.clip_coef, grads.found_inf)]
    batch.scalars, batch.step = [x.data_ptr() for x in numbers]
    batch.inv_scale, batch.clip_coef, batch.found_inf = [None if x is None else x.data_ptr() for x in factors]
    batch.grads, batch.grad_formats = address(operands.grad_addresses), address(operands.grad_formats)
    batch.maximize, batch.threads = grads.maximize, torch.get_num_threads()
    if kernel(ctypes.byref(batch), ctypes.byref(rule)) != 0:
        raise AssertionError(f"{kernel.__name__} was given a gradient format that it has no loop for")
    torch.autograd.graph.increment_version(list(weights.values))


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
