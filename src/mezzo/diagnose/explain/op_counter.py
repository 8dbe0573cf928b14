"""Counts what a step runs in which precision: ops, casts and their bytes, floating-point operations, shapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..._torch import OpOverload, storage_id
from ...formats import LOW_DTYPES, dtype_name
from ...trace import OpMode, Site, TraceContext, flops_of, op_facts

ALIGNMENT = 8
"""Tensor cores of 16-bit formats want sizes that are multiples of this. Source: NVIDIA, Matrix Multiplication Guide."""
_FLOATS = (torch.float32, *LOW_DTYPES)
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"})


@dataclass(slots=True, kw_only=True)
class Counts:
    """What one module ran itself, its submodules left out.

    Attributes:
        ops: number of ops by dtype of the result.
        flops: floating-point operations by dtype of the operands.
        weight_casts: casts of parameters.
        up_casts: casts of activations to fp32.
        down_casts: casts of activations to 16 bit.
        grad_casts: casts in backward.
        cast_bytes: bytes read and written by all casts.
        unaligned: sizes of products in 16 bit that are no multiples of `ALIGNMENT`, and how often.
    """

    ops: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    weight_casts: int = 0
    up_casts: int = 0
    down_casts: int = 0
    grad_casts: int = 0
    cast_bytes: int = 0
    unaligned: Counter[tuple[int, ...]] = field(default_factory=Counter)

    @property
    def ping_pong(self) -> int:
        """Round trips: a cast up and a cast down of activations."""
        return min(self.up_casts, self.down_casts)


class OpCounter(OpMode):  # type: ignore[no-untyped-call]  # torch's own
    """Counts ops by module while it is on.

    Args:
        context: says which module runs.
        model: its parameters are told apart from activations.

    Attributes:
        counts: by module name.
        has_backward: an op of a backward pass ran.

    Syncs: no.
    """

    def __init__(self, context: TraceContext, model: nn.Module) -> None:
        super().__init__(context)
        self._weights = {storage_id(p) for p in model.parameters()}
        self.counts: dict[str, Counts] = {}
        self.has_backward = False

    def run_op(self, func: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op and count it."""
        out = func(*args, **kwargs)
        facts = op_facts(func)
        result = out[0] if isinstance(out, (tuple, list)) and out else out
        if not facts.makes_nothing and isinstance(result, Tensor) and result.is_floating_point():
            site = self.context.site(facts.name)
            counts = self.counts.setdefault(site.module, Counts())
            self.has_backward |= site.phase == "backward"
            if facts.name == "to":
                self._cast(counts, site, args[0], result)
            else:
                counts.ops[dtype_name(result.dtype)] += 1
            self._product(counts, site, func, args, kwargs, out)
        return out

    def _cast(self, counts: Counts, site: Site, source: Tensor, result: Tensor) -> None:
        if source.dtype is result.dtype or source.dtype not in _FLOATS or result.dtype not in _FLOATS:
            return
        counts.cast_bytes += source.nbytes + result.nbytes
        if site.phase == "backward":
            counts.grad_casts += 1
        elif storage_id(source) in self._weights:
            counts.weight_casts += 1
        elif result.dtype in LOW_DTYPES:
            counts.down_casts += 1
        else:
            counts.up_casts += 1

    @staticmethod
    def _product(
        counts: Counts, site: Site, func: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        flops = flops_of(func, args, kwargs, out)
        if not flops and op_facts(func).name not in _PRODUCTS:
            return
        operands = [a for a in args if isinstance(a, Tensor) and a.is_floating_point()]
        dtype = operands[-1].dtype
        counts.flops[dtype_name(dtype)] += flops
        if dtype in LOW_DTYPES and op_facts(func).name in _PRODUCTS:
            sizes = _sizes(op_facts(func).name, operands)
            if any(n % ALIGNMENT for n in sizes):
                counts.unaligned[sizes] += 1


def _sizes(op: str, operands: list[Tensor]) -> tuple[int, ...]:
    """Return the sizes that decide whether a product can use tensor cores: rows, inner, columns; or channels."""
    if op.startswith("convolution"):
        weight = next(t for t in reversed(operands) if t.dim() >= 3)
        return weight.shape[0], weight.shape[1]
    left, right = operands[-2], operands[-1]
    return int(left.shape[-2]), int(left.shape[-1]), int(right.shape[-1])
