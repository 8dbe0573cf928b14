"""Ops of 16-bit operands computed in fp32, whose operands wait for backward in 16 bit; of a linear layer some rows at a time, in memory that is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .._torch import forward_ad_level, functorch_level, is_unwatched, saved_tensors_hooks, version
from ..formats import MIXED_DTYPES, describe
from ..kernels import PLAIN, is_wrapped, linear_gradients
from .mode import map_tensors
from .tracing import enter_switch, exit_switch

AT_ONCE = 1 << 22
"""Elements in fp32 at a time, of rows of the longer and of the result: with fewer the product takes more time."""
FEWEST_ROWS = 256
MOST_KEPT = 1 << 24
"""Elements up to which memory is kept. What is taken and freed again lies between what stays, and leaves the allocator's memory in pieces: a step of a vision
transformer held 660 MB of which 420 were in use."""


def is_castable(value: object) -> bool:
    """Whether a value is a plain tensor of fp32 or 16 bit on the CPU, of no forward-mode derivative. Host only."""
    if type(value) not in PLAIN or not isinstance(value, Tensor):
        return False
    return value.is_cpu and value.layout is torch.strided and value.dtype in MIXED_DTYPES and forward_ad_level() < 0


def in_fp32(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], low: torch.dtype, state: Tensor | None
) -> Any:
    """Call an op on operands rounded to 16 bit and widened again, outside torch's autocast, and round its floating results to `low`. Syncs: no.

    What waits for backward are the operands in 16 bit, and weights as they are stored: no copy of those, and their gradients are not rounded.
    Tensors, also those in lists, for which `is_castable` says no stay as they are; so does the precision of a `state`, as a GRU's, whose dtype the
    results have too where it is wider.
    """
    given: list[Tensor] = []
    wide: list[Tensor] = []

    def widened(tensor: Tensor) -> Tensor:
        if not is_castable(tensor):
            return tensor
        if tensor is state:
            return tensor.float()
        is_weight = tensor.dtype is torch.float32 and tensor.is_leaf and tensor.requires_grad
        kept = tensor if is_weight else tensor.to(low)
        rounds = is_weight and torch.is_grad_enabled()
        given.append(kept)
        wide.append(_Rounded.apply(kept, low) if rounds else kept.to(low).float())  # type: ignore[no-untyped-call]  # torch's own
        return wide[-1]

    with outside_autocast():
        args = [map_tensors(value, widened) for value in args]
        kwargs = {name: map_tensors(value, widened) for name, value in kwargs.items()}
        with saved_as_given(f"an operand of {function.__name__}", given, wide, low):
            out = function(*args, **kwargs)
        dtype = low if state is None else torch.promote_types(state.dtype, low)
        return map_tensors(out, lambda one: one.to(dtype) if is_castable(one) else one)


class outside_autocast:  # as torch's
    """Context manager that turns torch's autocast off on the CPU, in a tenth of the time of torch's own."""

    __slots__ = ("_was_enabled",)

    def __enter__(self) -> None:
        self._was_enabled = torch.is_autocast_enabled("cpu")
        enter_switch("cpu", False)

    def __exit__(self, *_: object) -> None:
        exit_switch("cpu", self._was_enabled)


class _Rounded(torch.autograd.Function):
    """fp32 rounded to 16 bit and widened, with the gradient as it comes: cast in two steps it would be rounded too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, low: torch.dtype) -> Tensor:
        return tensor.to(low).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def saved_as_given(
    what: str, given: Sequence[Tensor], wide: Sequence[Tensor], low: torch.dtype
) -> AbstractContextManager[object]:
    """Have backward keep operands as they were given and widen them again: half the bytes for the same values. Host only.

    Hooks on saved tensors that are there already, such as a checkpoint's, get what is kept. An operand in fp32 is rounded to `low` before it is
    widened; `what` they are is for a message.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or functorch_level() is not None:
        return nullcontext()
    by_address = {one.data_ptr(): kept for kept, one in zip(given, wide, strict=True) if one is not kept}
    around = saved_tensors_hooks()

    def pack(tensor: Tensor) -> tuple[Any, tuple[Any, ...] | None, int]:
        kept = by_address.get(tensor.data_ptr())
        if kept is None or tensor.dtype is not torch.float32:
            return tensor if around is None else around[0](tensor), None, 0
        kept = kept.detach()
        return kept if around is None else around[0](kept), (tensor.shape, tensor.stride()), version(kept)

    def unpack(packed: tuple[Any, tuple[Any, ...] | None, int]) -> Tensor:
        held, view, counted = packed
        kept: Tensor = held if around is None else around[1](held)
        if view is None:
            return kept
        if around is None and version(kept) != counted:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: {what}, {describe(kept)}. Write to a copy of it."
            )
        rounded = kept.to(low) if kept.dtype is torch.float32 else kept
        return rounded.float().as_strided(*view)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


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
        if torch.is_grad_enabled() or is_wrapped(grad) or not is_unwatched():
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
