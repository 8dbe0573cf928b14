"""A linear layer of 16-bit operands summed in fp32, some rows after the other, in memory that is kept."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from .._torch import is_batched_gradient, is_unwatched
from ..kernels import linear_gradients
from .wide import outside_autocast

AT_ONCE = 1 << 22
"""Elements of rows of input and result in fp32 at a time: with fewer the product takes longer."""
FEWEST_ROWS = 256
MOST_KEPT = 1 << 24
"""Elements up to which memory is kept. What is taken and freed again lies between what stays, and leaves the allocator's memory in pieces: a step of a vision
transformer held 660 MB of which 420 were in use."""


def wide_linear(input: Tensor, weight: Tensor, bias: Tensor | None, low: torch.dtype) -> Tensor:
    """Return `input @ weight.T + bias` of operands rounded to `low`: summed in fp32, rounded once.

    For backward wait the input in `low` and the weight as it is stored, or in `low` where it is no parameter. Gradients of fp32
    weights are sums in fp32 that are not rounded.

    Args:
        input: [..., K], plain, fp32 or 16 bit, on the CPU, as are the others.
        weight: [N, K].
        bias: [N], or None.
        low: dtype of the result.

    Returns:
        [..., N].

    Syncs: no.
    """
    source = weight if weight._base is None else weight._base
    is_parameter = isinstance(source, torch.nn.Parameter) or (source.is_leaf and source.requires_grad)
    operands = input.to(low), weight if is_parameter else weight.to(low), bias
    apply = _WideLinear.apply if torch.is_grad_enabled() else _forward
    with outside_autocast():
        out: Tensor = apply(*operands)
    return out


class _Memory(threading.local):
    """Memory of this thread that is kept, by what it is for."""

    def __init__(self) -> None:
        self.tensors: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, what: str, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return [rows, columns], as it comes."""
        size = rows * columns
        if size > MOST_KEPT:
            return torch.empty(rows, columns, dtype=dtype, device="cpu")
        found = self.tensors.get((what, dtype))
        if found is None or found.numel() < size:
            with torch.inference_mode(False):  # what is made there cannot be written elsewhere
                found = self.tensors[what, dtype] = torch.empty(size, dtype=dtype, device="cpu")
        return found[:size].view(rows, columns)

    def widened(self, what: str, matrix: Tensor, low: torch.dtype) -> Tensor:
        """Return a matrix in fp32, rounded to `low` before."""
        if matrix.dtype is not low:
            matrix = self.take(what, len(matrix), matrix.shape[1], low).copy_(matrix)
        return self.take(what, len(matrix), matrix.shape[1]).copy_(matrix)


_memory = _Memory()


def _split(rows: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return torch.split(rows, max(FEWEST_ROWS, AT_ONCE // sum(weight.shape)))


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    width, inner = weight.shape
    out = x.new_empty((*x.shape[:-1], width))
    rows, results = x.reshape(-1, inner), out.view(-1, width)
    wide, added = _memory.widened("weight", weight, x.dtype).t(), None if bias is None else bias.to(x.dtype).float()
    for some, result in zip(_split(rows, weight), _split(results, weight), strict=True):
        left, to = _memory.widened("rows", some, x.dtype), _memory.take("results", len(some), width)
        result.copy_(torch.mm(left, wide, out=to) if added is None else torch.addmm(added, left, wide, out=to))
    return out


class _WideLinear(torch.autograd.Function):
    """The layer and its gradients; those by torch's own ops in 16 bit where somebody watches ops, or differentiates twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.of_bias = None if bias is None else bias.dtype
        return _forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        if torch.is_grad_enabled() or is_batched_gradient(grad) or not is_unwatched():
            return linear_gradients(grad, x, weight, needs_bias)
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        width, inner = weight.shape
        of_input = torch.empty_like(inputs) if needs_input else None
        of_weight = torch.empty_like(weight) if needs_weight else None
        of_bias = rows.new_zeros(width, dtype=torch.float32) if needs_bias else None
        wide = _memory.widened("weight", weight, x.dtype) if needs_input else weight
        is_wide = of_weight is not None and of_weight.dtype is torch.float32
        summed = of_weight if is_wide or of_weight is None else _memory.take("gradient", width, inner)
        parts = [_split(one, weight) for one in (rows, inputs, inputs if of_input is None else of_input)]
        with outside_autocast():
            for n, (some, given, found) in enumerate(zip(*parts, strict=True)):
                of_some = _memory.widened("results", some, x.dtype)
                if needs_input:
                    found.copy_(torch.mm(of_some, wide, out=_memory.take("rows", *found.shape)))
                if summed is not None:
                    left, right = of_some.t(), _memory.widened("rows", given, x.dtype)
                    torch.addmm(summed, left, right, beta=int(n > 0), out=summed)
                if of_bias is not None:
                    of_bias += of_some.sum(0)
        if of_weight is not None and summed is not None and summed is not of_weight:
            of_weight.copy_(summed)
        return (
            None if of_input is None else of_input.view_as(x),
            of_weight,
            None if of_bias is None else of_bias.to(ctx.of_bias),
        )
