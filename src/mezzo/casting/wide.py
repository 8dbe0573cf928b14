"""An op of 16-bit operands computed in fp32, whose operands wait for backward in 16 bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .._torch import forward_ad_level, functorch_level, saved_tensors_hooks, version
from ..formats import LOW_DTYPES, describe
from ..kernels import PLAIN
from .mode import map_tensors

_CASTABLE = (torch.float32, *LOW_DTYPES)


def is_castable(value: object) -> bool:
    """Whether a value is a plain tensor of fp32 or 16 bit on the CPU, of no forward-mode derivative. Host only."""
    if type(value) not in PLAIN or not isinstance(value, Tensor):
        return False
    return value.is_cpu and value.layout is torch.strided and value.dtype in _CASTABLE and forward_ad_level() < 0


def in_fp32(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    low: torch.dtype,
    state: Tensor | None = None,
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
        torch.set_autocast_enabled("cpu", False)

    def __exit__(self, *_: object) -> None:
        torch.set_autocast_enabled("cpu", self._was_enabled)


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
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{what}, {describe(kept)}. Write to a copy of it."
            )
        rounded = kept.to(low) if kept.dtype is torch.float32 else kept
        return rounded.float().as_strided(*view)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
