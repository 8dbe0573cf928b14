"""Which Python callables an op name stands for, and which Python composites must be decomposed to see their parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType, MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import get_overridable_functions

from .._torch import LOWRANK, OP_NAMESPACES
from ..policy import ALIASES, OpRow, OpRules, names_of_op, op_table

AnyCallable = Callable[..., Any]

# Python functions whose bodies reach no ruled op, called often enough that opening them would cost.
_LEAVES = frozenset(
    "relu relu6 dropout dropout1d dropout2d dropout3d alpha_dropout embedding embedding_bag silu mish selu celu elu "
    "leaky_relu hardtanh hardsigmoid hardswish sigmoid tanh softsign tanhshrink threshold rrelu one_hot "
    "glu batch_norm instance_norm broadcast_tensors meshgrid split unique unique_consecutive "
    "block_diag atleast_1d atleast_2d atleast_3d cartesian_prod".split()
)


# Functions that draw numbers in the dtype of their input: torch casts below the draw, so each is decomposed in the form that shows it.
_DRAWING = {
    F.fractional_max_pool2d: F.fractional_max_pool2d_with_indices,
    F.fractional_max_pool3d: F.fractional_max_pool3d_with_indices,
}


def _full_name(name: str, function: AnyCallable) -> str:
    """Return linalg_polar for torch.linalg.polar, which is another op than torch.polar."""
    own = getattr(function, "__name__", "")
    return own if own.endswith(f"_{name}") else name


def _namespaces() -> list[tuple[str, AnyCallable]]:
    public = [(n, getattr(space, n)) for space in OP_NAMESPACES for n in dir(space) if not n.startswith("__")]
    found = [(_full_name(name, function), function) for name, function in public]
    for functions in get_overridable_functions().values():
        found += [(getattr(f, "__name__", ""), f) for f in functions]
    return [(name, f) for name, f in found if callable(f) and name not in ("", "__get__", "__set__", "__delete__")]


@lru_cache
def callables_by_name() -> Mapping[str, tuple[AnyCallable, ...]]:
    """Return op name to the callables that reach it: functions, methods, operators, aliases. Syncs: no."""
    found: dict[str, list[AnyCallable]] = {}
    for name, function in _namespaces():
        found.setdefault(ALIASES.get(name, name), []).append(function)
        if name in ALIASES:
            found.setdefault(name, []).append(function)
    return MappingProxyType({name: tuple(functions) for name, functions in found.items()})


def _decomposed(function: FunctionType) -> FunctionType:
    silenced = {name: lambda *_: False for name in function.__globals__ if name.startswith("has_torch_function")}
    names = {**function.__globals__, **silenced}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _is_composite(function: FunctionType) -> bool:
    return (
        function.__module__ in {space.__name__ for space in (F, torch.functional, LOWRANK)}
        and function.__name__ not in _LEAVES
        and any(name.startswith("has_torch_function") for name in function.__globals__)
    )


@lru_cache
def decomposed_composites() -> dict[AnyCallable, AnyCallable]:
    """Return the Python functions of torch whose parts must be seen one by one, each with a copy that shows them.

    torch's Python functions begin with `if has_torch_function(...)`, which hands the whole call to the mode once
    more; the copy answers that question with no. Syncs: no.
    """
    composites = [f for _, f in _namespaces() if isinstance(f, FunctionType) and _is_composite(f)]
    copies: dict[AnyCallable, AnyCallable] = {f: _decomposed(f) for f in composites}
    return copies | {f: _without_indices(shown) for f, shown in _DRAWING.items()}


def _without_indices(function: AnyCallable) -> AnyCallable:
    def values(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)[0]

    return values


@lru_cache
def rows_by_callable(ops: OpRules, device_type: str) -> dict[AnyCallable, OpRow]:
    """Return callable to row: the table with its edits, for one device. Syncs: no."""
    rows = dict(op_table(ops.table, device_type))
    for op, rule in ops.edits:
        instead = "another op, or another rule for it"
        for one in names_of_op(op):
            rows[one] = OpRow(op=one, rule=rule, reason="edited in the policy", instead=instead)
    names, drawing = callables_by_name(), (*_DRAWING, *_DRAWING.values())
    return {f: row for name, row in rows.items() for f in names.get(name, ()) if f not in drawing}


@dataclass(frozen=True, slots=True)
class OpRuleTable:
    """What a function mode looks up for every call: by device type and callable the row, by Python composite the copy that shows its parts."""

    rows: dict[str, dict[AnyCallable, OpRow]]
    decomposed: dict[AnyCallable, AnyCallable]


@lru_cache
def op_rule_table(ops: OpRules, device_types: tuple[str, ...]) -> OpRuleTable:
    """Return the rules of a table with its edits for some devices. Syncs: no."""
    return OpRuleTable({device: rows_by_callable(ops, device) for device in device_types}, decomposed_composites())
