"""The op tables: what each op runs in, per table and device, with a reason a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

import torch

from .._torch import UNSEEN, ops_with_kernel
from .families import FAMILIES, Family
from .kinds import Rule

TableName = Literal["torch", "mezzo"]
DISPATCH_KEYS = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU", "mps": "AutocastMPS", "xpu": "AutocastXPU"}
"""Devices whose autocast kernels can be read in any build of torch."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "__matmul__": "matmul", "__rmatmul__": "matmul", "linalg_matmul": "matmul",
        "__pow__": "pow", "__rpow__": "pow", "float_power": "pow", "__rdiv__": "reciprocal", "__rtruediv__": "reciprocal",
        "__rsub__": "rsub", "__floordiv__": "floor_divide", "__rfloordiv__": "floor_divide", "__rmod__": "remainder",
        "arccos": "acos", "arcsin": "asin", "special_exp2": "exp2", "special_expm1": "expm1",
        "special_log1p": "log1p", "special_logsumexp": "logsumexp", "special_softmax": "softmax",
        "special_log_softmax": "log_softmax", "special_erfinv": "erfinv", "linalg_cross": "cross",
        "interpolate": "upsample", "cross_entropy": "cross_entropy_loss",
        "grouped_mm": "_grouped_mm", "trapz": "trapezoid",
    }
)  # fmt: skip
"""Public spellings of an op that ATen knows under another name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRow:
    """One op of a table.

    Attributes:
        op: ATen name, without overload.
        rule: what the region does to its inputs.
        reason: why, in one line.
        by_dtype: the op's own `dtype` argument is set instead of casting the input.
        instead: what to write instead of a forbidden op.
    """

    op: str
    rule: Rule
    reason: str
    by_dtype: bool = False
    instead: str | None = None


@lru_cache
def registered(device_type: str) -> frozenset[str]:
    """Return the ATen names that the installed torch casts on a device, read from its dispatcher.

    Args:
        device_type: cpu, cuda, mps or xpu; the kernels of a device can be read in a build without it.
            Other devices have no readable table: the result is empty.

    Syncs: no. Costs about 10 ms the first time for a device.
    """
    key = DISPATCH_KEYS.get(device_type)
    if key is None:
        return frozenset()
    return frozenset(name.removeprefix("aten::").split(".")[0] for name in ops_with_kernel(key))


_REFUSES_DTYPE = frozenset({"norm", "linalg_matrix_norm"})  # for the nuclear norm, if the input is 16 bit


def _mezzo_row(family: Family, op: str) -> OpRow | None:
    if family.mezzo is None:
        return None
    reason = f"{family.reason}; {family.repair}" if family.repair else family.reason
    by_dtype = family.by_dtype and family.mezzo is Rule.FP32 and op not in _REFUSES_DTYPE
    return OpRow(op=op, rule=family.mezzo, reason=reason, by_dtype=by_dtype, instead=family.instead)


def _torch_row(family: Family, op: str, device_type: str) -> OpRow | None:
    rule = next((rule for rule, devices in family.torch if device_type in devices), None)
    if rule is None or op not in registered(device_type):
        return None
    by_dtype = family.by_dtype and device_type in ("cuda", "xpu")
    return OpRow(op=op, rule=rule, reason=family.reason, by_dtype=by_dtype, instead=family.instead)


# Composites that torch's CPU list reaches through their parts. A matrix product of cast inputs is what their parts do.
_CPU_PARTS = ("linalg_multi_dot", "chain_matmul")


@lru_cache
def op_table(name: TableName, device_type: str) -> Mapping[str, OpRow]:
    """Return an op table: ATen name to row. An op without a row runs as it is.

    Args:
        name: "torch", what the installed torch does on that device, or "mezzo", one repaired table for all.
        device_type: cpu, cuda, mps, xpu, or another device torch can autocast on (which gets CUDA's rows).

    Syncs: no.
    """
    if name == "mezzo":
        rows = [_mezzo_row(family, op) for family in FAMILIES for op in family.ops]
    else:
        readable = device_type if device_type in DISPATCH_KEYS else "cuda"
        rows = [_torch_row(family, op, readable) for family in FAMILIES for op in family.ops]
        if readable == "cpu":
            rows += [OpRow(op=op, rule=Rule.LOW, reason="matrix products underneath") for op in _CPU_PARTS]
    return MappingProxyType({row.op: row for row in rows if row is not None})


@lru_cache
def known_ops() -> frozenset[str]:
    """Return every op name that a policy may edit: rows of any table and every other op torch lets be intercepted.

    Syncs: no.
    """
    overridable = [f for functions in torch.overrides.get_overridable_functions().values() for f in functions]
    names = {f.__name__ for f in overridable if hasattr(f, "__name__")} - UNSEEN
    public = {name for name in names if not name.startswith("__") and not name.endswith("_")}
    return frozenset(public) | {op for family in FAMILIES for op in family.ops}


def names_of_op(op: str) -> tuple[str, ...]:
    """Return the names that a rule for an op holds for: its own in a table, and what max pooling calls for return_indices=True. Syncs: no."""
    name = ALIASES.get(op, op)
    return tuple(one for one in (name, f"{name}_with_indices") if one == name or one in known_ops())
