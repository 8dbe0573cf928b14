"""A linear layer of 16-bit operands summed in fp32: of input and weight the one with more rows some at a time, in memory that is kept."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from .._torch import is_batched_gradient, is_unwatched
from ..kernels import linear_gradients
from .wide import outside_autocast

AT_ONCE = 1 << 22
"""Elements in fp32 at a time, of rows of the longer and of the result: with fewer the product takes more time."""
FEWEST_ROWS = 256
MOST_KEPT = 1 << 24
"""Elements up to which memory is kept. What is taken and freed again lies between what stays, and leaves the allocator's memory in pieces: a step of a vision
transformer held 660 MB of which 420 were in use."""


def wide_linear(input: Tensor, weight: Tensor, bias: Tensor | None, low: torch.dtype) -> Tensor:
    """Return `input @ weight.T + bias` of operands rounded to `low`: [..., K], [N, K] and [N], plain, on the CPU; summed in fp32, rounded once.

    For backward wait the input in `low` and the weight as it is stored, or in `low` where it is no parameter. Gradients of fp32
    weights are sums in fp32 that are not rounded. Syncs: no.
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

    def take(self, what: str, like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a matrix of the shape of another, laid out as that is, with what is in it."""
        if like.stride(0) == 1 != like.stride(1):
            return self.take(what, like.t(), dtype).t()
        if (size := like.numel()) > MOST_KEPT:
            return torch.empty(like.shape, dtype=dtype, device="cpu")
        found = self.tensors.get((what, dtype))
        if found is None or found.numel() < size:
            with torch.inference_mode(False):  # what is made there cannot be written elsewhere
                found = self.tensors[what, dtype] = torch.empty(size, dtype=dtype, device="cpu")
        return found[:size].view(like.shape)

    def wide(self, what: str, matrix: Tensor) -> Tensor:
        """Return a matrix if it is in fp32, else memory that is."""
        return matrix if matrix.dtype is torch.float32 else self.take(what, matrix)

    def widened(self, what: str, matrix: Tensor, low: torch.dtype) -> Tensor:
        """Return a matrix in fp32, rounded to `low` before."""
        if matrix.dtype is not low:
            matrix = self.take(what, matrix, low).copy_(matrix)
        return self.take(what, matrix).copy_(matrix)


_memory = _Memory()


def _has_longer(weight: Tensor, inputs: Tensor) -> bool:
    """Return whether a weight is taken in parts: one that fits is not, which is up to 1.06 times as fast."""
    return weight.numel() > AT_ONCE and len(inputs) < len(weight)


def _split(longer: Tensor, shorter: Tensor) -> tuple[Tensor, ...]:
    return torch.split(longer, max(FEWEST_ROWS, AT_ONCE // sum(shorter.shape)))


def _store(to: Tensor, left: Tensor, right: Tensor, added: Tensor | None = None, what: str = "results") -> None:
    """Write `left @ right + added`, rounded once."""
    out = _memory.wide(what, to)
    to.copy_(torch.mm(left, right, out=out) if added is None else torch.addmm(added, left, right, out=out))


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    width, inner = weight.shape
    out = x.new_empty((*x.shape[:-1], width))
    longer, shorter, results = x.reshape(-1, inner), weight, out.view(-1, width)
    added = results if bias is None else bias.to(x.dtype).float().expand(results.shape)
    if _has_longer(weight, longer):
        longer, shorter, results, added = shorter, longer, results.t(), added.t()
    wide = _memory.widened("shorter", shorter, x.dtype).t()
    parts = [_split(one, shorter) for one in (longer, results, added)]
    for some, result, to_some in zip(*parts, strict=True):
        _store(result, _memory.widened("longer", some, x.dtype), wide, None if bias is None else to_some)
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
        of_input = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_input else None
        of_weight = torch.empty_like(weight) if needs_weight else None
        of_bias = grad.new_zeros(len(weight), dtype=torch.float32) if needs_bias else None
        with outside_autocast():
            _backward(grad.reshape(-1, len(weight)), x, weight, of_input, of_weight, of_bias)
        return of_input, of_weight, None if of_bias is None else of_bias.to(ctx.of_bias)


def _backward(
    grads: Tensor, x: Tensor, weight: Tensor, of_input: Tensor | None, of_weight: Tensor | None, of_bias: Tensor | None
) -> None:
    """Write gradients: those of the longer by parts, those of the shorter as their sum."""
    inputs = x.reshape(-1, x.shape[-1])
    longer, of_longer = inputs, None if of_input is None else of_input.view_as(inputs)
    shorter, of_shorter = weight, of_weight
    is_flipped = _has_longer(weight, inputs)
    if is_flipped:
        longer, shorter, of_longer, of_shorter, grads = shorter, longer, of_shorter, of_longer, grads.t()
    wide = shorter if of_longer is None else _memory.widened("shorter", shorter, x.dtype)
    summed = None if of_shorter is None else _memory.wide("gradient", of_shorter)
    parts = [_split(one, shorter) for one in (grads, longer, longer if of_longer is None else of_longer)]
    for n, (given, some, found) in enumerate(zip(*parts, strict=True)):
        of_some = _memory.widened("results", given, x.dtype)
        if of_longer is not None:
            _store(found, of_some, wide, what="longer")
        if summed is not None:
            torch.addmm(summed, of_some.t(), _memory.widened("longer", some, x.dtype), beta=int(n > 0), out=summed)
        if of_bias is not None:
            (_split(of_bias, shorter)[n] if is_flipped else of_bias).add_(of_some.sum(int(is_flipped)))
    if of_shorter is not None and summed is not None:
        of_shorter.copy_(summed)
