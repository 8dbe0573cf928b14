"""Matrix products, convolutions and recurrent layers in 16 bit on processors that only emulate it: in fp32, several times as fast."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._torch import function_modes, is_unwatched, num_function_modes
from ..formats import LOW_DTYPES
from ..kernels import is_emulated
from .attention import AttentionMode
from .frame import bind_recompute
from .mode import tensors_in
from .op_rule_table import callables_by_name
from .wide import in_fp32, is_castable, wide_linear

SMALLEST = {torch.bfloat16: 1 << 23, torch.float16: 1 << 20}
"""Products from which casts and Python cost less than emulation, by the dtype: a step of two linear layers of 2^23 is 1.03 times as fast in bf16, one of
2^22 0.75; in fp16, where more than products is emulated, 2.3 times with 2^20, 0.9 with 2^18 (a Xeon with AVX-512)."""
REUSE = 8
"""Products for each element of the operands from which casting these pays: with 4 rows 0.4 to 1.0 times, with 8 1.1, with 16 1.5."""


def _of_matrices(first: Tensor, second: Tensor, *_: object) -> int:
    return first.numel() * (second.shape[-1] if second.dim() > 1 else 1)


def _of_sum(_: Tensor, *matrices: Tensor) -> int:
    return _of_matrices(*matrices) if len(matrices) == 2 else 0  # else one was given by its name


def _of_linear(input: Tensor, weight: Tensor, *_: object) -> int:
    return input.numel() * weight.shape[0]


def _of_convolution(input: Tensor, weight: Tensor, *_: object) -> int:
    if input.dim() < weight.dim() - 1:  # torch says what is wrong with it
        return 0
    return input.numel() // max(1, input.shape[-weight.dim() + 1]) * weight.numel()


def _of_transposed(input: Tensor, weight: Tensor, *_: object) -> int:
    return input.numel() * weight.numel() // max(1, weight.shape[0])


def _of_recurrent(input: Tensor, *others: Tensor) -> int:
    return input.numel() // max(1, input.shape[-1]) * sum(one.numel() for one in others if one.dim() == 2)


def _of_sum_by_name(equation: object, operands: Sequence[Tensor]) -> int:
    """Each combination of indices is one product, where both of two operands have what is summed over; torch multiplies others element by element, not in 16 bit.

    Nothing is known of an ellipsis, nor of indices given as numbers.
    """
    given, arrow, kept = equation.replace(" ", "").partition("->") if isinstance(equation, str) else ("", "", "")
    terms = given.split(",")
    if "." in given or not len(terms) == len(operands) == 2:
        return 0
    alone, shared = set(terms[0]) ^ set(terms[1]), set(terms[0]) & set(terms[1])
    if arrow and (shared <= set(kept) or not alone <= set(kept)):
        return 0
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        sizes |= dict(zip(term, operand.shape, strict=False))
    return math.prod(sizes.values()) if shared else 0


ROWS = 16
"""Rows of a product that each element of a module's input may become: of a picture that is made of a few numbers."""

_COUNTS: Mapping[Callable[..., int], str] = {  # of the tensors among a call's positional arguments
    _of_matrices: "matmul mm bmm",
    _of_sum: "addmm baddbmm",
    _of_linear: "linear",
    _of_convolution: "conv1d conv2d conv3d",
    _of_transposed: "conv_transpose1d conv_transpose2d conv_transpose3d",
    _of_sum_by_name: "einsum",
    _of_recurrent: "lstm gru rnn_tanh rnn_relu",
}
"""How many products each op sums up, near enough, from its operands."""


@functools.cache
def _counted() -> Mapping[Callable[..., Any], Callable[..., int]]:
    names = callables_by_name()
    found = {function: count for count, ops in _COUNTS.items() for op in ops.split() for function in names[op]}
    del found[Tensor.__rmatmul__]  # whose operands are given in the other order
    return found


class ProductMode(AttentionMode):
    """Have large products on the CPU run as `run_in_fp32` says, and attention as in `AttentionMode`. Syncs: no.

    Where it counts, `num_products` are those of all calls; infinitely many where one ran its own way.
    """

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.counts, self.num_products = counts, 0.0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = run_in_fp32(func, args, kwargs or {}, self.has_grad)
        if self.counts:
            is_own = found is not NotImplemented or func in _ATTENTION or not is_unwatched()
            self.num_products += math.inf if is_own else _num_products(func, args)
        return super().__torch_function__(func, types, args, kwargs) if found is NotImplemented else found


_ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


def count_products(modes: Sequence[object], input: Tensor, weight: Tensor) -> None:
    """Count those of a linear layer that ran beside these modes. Host only."""
    for mode in modes:
        if isinstance(mode, ProductMode) and mode.counts:
            mode.num_products += _of_linear(input, weight)


def run_in_fp32(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], recomputes: bool = False) -> Any:
    """Run a large product in fp32 where the processor emulates the dtype that a region casts to, or that operands have.

    Operands are rounded as torch.autocast rounds them, products are summed in fp32, and the result is rounded once: the arithmetic of
    16-bit units. For backward the operands wait in 16 bit. With `recomputes` a checkpoint that runs just now does so too when it runs again.

    Returns `NotImplemented` for what is no such product, or seen by somebody. Syncs: no.
    """
    num_products = _num_products(func, args) if is_unwatched() else 0
    if num_products < min(SMALLEST.values()) or num_products < REUSE * sum(
        [one.numel() for one in tensors_in(args, {})]
    ):
        return NotImplemented
    low, count = _emulated_dtype(args, kwargs), _counted()[func]
    if low is None or num_products < SMALLEST[low]:
        return NotImplemented
    if recomputes:
        bind_recompute(ProductMode)
    layer = _as_layer(count, *args, **kwargs)
    if layer is not None:
        return wide_linear(*layer, low)
    floating = [one for one in args if isinstance(one, Tensor) and one.is_floating_point()]
    return in_fp32(func, args, kwargs, low, floating[1] if func is torch.gru else None)


def _emulated_dtype(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """Return the 16-bit dtype in which a call multiplies by emulation; None if it does not."""
    if "out" in kwargs:
        return None
    operands = [one for one in tensors_in(args, kwargs) if one.is_floating_point()]
    if len(operands) < 2 or not all(map(is_castable, operands)):
        return None
    dtypes = {one.dtype for one in operands}
    is_cast = torch.is_autocast_enabled("cpu")
    if not (is_cast or len(dtypes) == 1):
        return None
    low = torch.get_autocast_dtype("cpu") if is_cast else dtypes.pop()
    return low if low in LOW_DTYPES and is_emulated(low) else None


def _num_products(func: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Return how many products a call sums up, near enough; 0 of any other function."""
    count = _counted().get(func)
    operands = [] if count is None else tensors_in(args, {})
    if count is None or len(operands) < 2 or any([one.is_nested or one.dim() == 0 for one in operands[:2]]):
        return 0
    return count(args[0], operands) if count is _of_sum_by_name else count(*operands)


def _as_layer(
    count: Callable[..., int], *args: Any, bias: Tensor | None = None, **others: Any
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return input, weight and bias of a product that is one of a linear layer; None of any other."""
    if others or not all([one is None or isinstance(one, Tensor) for one in args]):
        return None
    if count is _of_linear:
        input, weight, bias = (*args, bias)[:3]
    elif count is _of_matrices and bias is None and len(args) == 2:
        input, weight = args[0], args[1].mT if args[1].dim() == 2 else args[1]
    elif count is _of_sum and bias is None and len(args) == 3:
        bias, input, weight = args[0], args[1], args[2].mT
    else:
        return None
    is_layer = weight.dim() == 2 <= input.dim() and input.shape[-1] == weight.shape[1]
    return (input, weight, bias) if is_layer and (bias is None or bias.shape == weight.shape[:1]) else None


_MOST_KINDS = 256
"""Calls of different shapes that are remembered."""


class ProductWatch:
    """What is known of the products of a module's calls, of which only those with a large one need be seen op by op.

    After two calls of the same shapes that came to as many products, all of them small, a third is not: in a small model watching takes a tenth
    of a step. The bits are the same, watched or not.

    Args:
        largest: elements of the module's largest weight.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._found: dict[tuple[object, ...], float] = {}
        self._small: set[tuple[object, ...]] = set()

    def around(
        self, region: AbstractContextManager[object], trains: bool, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> AbstractContextManager[object]:
        """Return the region of a call with its large products in fp32; as it is for one that comes to none. Host only.

        Each element of the arguments' tensors may be one of a few rows; a module that `trains` is in training.
        """
        given = (*args, *kwargs.values())
        plain = [value is None or isinstance(value, (Tensor, bool, int, float, str)) for value in given]
        if not all(plain) or any([isinstance(value, Tensor) and value.is_nested for value in given]):
            return _ProductRegion(region)
        count = sum([value.numel() for value in given if isinstance(value, Tensor)])
        call = (trains, *kwargs, *[value.shape if isinstance(value, Tensor) else value for value in given])
        if ROWS * count * self._largest < SMALLEST[torch.bfloat16] or call in self._small:
            return region
        return _ProductRegion(region, partial(self._note, call) if self._found.get(call) != math.inf else None)

    def _note(self, call: tuple[object, ...], num_products: float) -> None:
        if num_products < math.inf and num_products == self._found.get(call):
            self._small.add(call)
        if len(self._found) >= _MOST_KINDS:
            self._found.clear()
            self._small.clear()
        self._found[call] = num_products


def beside_products(region: AbstractContextManager[object]) -> AbstractContextManager[object]:
    """Return a region with its large products in fp32 if those are in fp32 just here. Host only."""
    return _ProductRegion(region) if _is_there() else region


def _is_there() -> bool:
    return num_function_modes() > 0 and any([isinstance(mode, ProductMode) for mode in function_modes()])


class _ProductRegion(threading.local):
    """A region inside a `ProductMode`, unless it is entered inside of one. As the region it may be entered again, and by several threads."""

    def __init__(self, region: AbstractContextManager[object], note: Callable[[float], None] | None = None) -> None:
        self.region, self.note = region, note
        self.entered: list[AbstractContextManager[object]] = []

    def __enter__(self) -> None:
        mode: Any = nullcontext() if _is_there() else ProductMode(counts=self.note is not None)
        casts = getattr(self.region, "engine", "mode") == "mode"  # it sees each op before the products do
        with ExitStack() as both:
            if self.note is not None and isinstance(mode, ProductMode):
                both.callback(lambda note: note(mode.num_products), self.note)
            for one in (mode, self.region) if casts else (self.region, mode):
                both.enter_context(one)
            self.entered.append(both.pop_all())

    def __exit__(self, *error: Any) -> None:
        self.entered.pop().__exit__(*error)
