"""Optimizer state on its way out of a checkpoint: kept exactly, or converted to another master mode."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..formats import LOW_DTYPES
from ..kernels.dtensor import like_dtensor, local
from ..kernels.operands import check_shape
from ..kernels.weights import AUX_STATE, read_master, store_master
from ..policy import Master

_log = logging.getLogger("mezzo.optim")
_LOSS = {
    "none": "exactly",
    "split": "exactly",
    "fp32": "exactly",
    "kahan": "rounded to twice 16 bit",
    "stochastic": "rounded to 16 bit",
}
_MODES = {name: mode for mode, name in AUX_STATE.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Exact:
    """A tensor that torch's `load_state_dict` must not cast to the parameter's dtype, as it does with every other."""

    tensor: Tensor


def sealed(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return per-parameter state with its tensors wrapped, out of reach of torch's casts."""
    return {
        index: {name: Exact(item) if isinstance(item, Tensor) else item for name, item in entry.items()}
        if isinstance(entry, Mapping) else entry
        for index, entry in state.items()
    }  # fmt: skip


def mode_of(param: Tensor, group: Mapping[str, Any]) -> Master:
    """Return how a parameter keeps small updates: the group's master mode if it is 16 bit, else "none"."""
    mode: Master = group["master"] if param.dtype in LOW_DTYPES else "none"
    return mode


def moment_dtype(param: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that a parameter's running means are stored in."""
    asked: torch.dtype = group["state_dtype"]
    if param.is_complex():
        return param.dtype
    if asked is torch.bfloat16:
        return asked
    return torch.float64 if param.dtype is torch.float64 else torch.float32


def mode_of_state(entry: Mapping[str, Any]) -> Master | None:
    """Return the master mode that left this state of one parameter; None if it keeps nothing beside the weight."""
    modes: list[Master] = [mode for name, mode in _MODES.items() if name in entry]  # type: ignore[misc]  # keys of KEPT
    return modes[0] if modes else None


def take_master_(param: Tensor, entry: Mapping[str, Tensor], mode: Master) -> tuple[dict[str, Tensor], str]:
    """Return what a parameter must keep for its own master mode, out of state that another mode may have left.

    A remainder or compensation means something only beside its weight, so weights are loaded first.

    Args:
        param: the parameter, its weights loaded already.
        entry: the saved state of this parameter.
        mode: how the parameter keeps small updates now.

    Returns:
        its aux state under its name in the state, in fresh memory; and, where something had to
        be converted, a clause that says what.

    Writes: `param`, if a conversion rounds its master to another weight. Syncs: no.
    """
    saved = mode_of_state(entry)
    if saved == mode:
        name = AUX_STATE[mode]
        return {name: entry[name].to(param.device).clone(memory_format=torch.preserve_format)}, ""
    if saved is None:
        if mode not in AUX_STATE:
            return {}, ""
        master, clause = (
            local(param.detach()).to(torch.float32),
            f"no masters to {mode}: they start from the 16-bit weights",
        )
    else:
        aux = local(entry[AUX_STATE[saved]].to(param.device))
        low = {"split": torch.bfloat16, "kahan": aux.dtype}.get(saved, param.dtype)
        master = read_master(saved, local(param.detach()).to(low), aux) if saved != "fp32" else aux
        clause = f"{saved} masters to {mode if param.dtype in LOW_DTYPES else 'fp32 weights'}, {_LOSS[mode]}"
    weight, aux_state = store_master(mode, master, param.dtype, None)
    with torch.no_grad():
        local(param).copy_(weight)
    return ({} if aux_state is None else {AUX_STATE[mode]: like_dtensor(aux_state.clone(), param)}), clause


def report(clauses: Iterable[str]) -> None:
    """Log one warning for each kind of conversion, with the number of parameters."""
    for clause, count in Counter(clause for clause in clauses if clause).items():
        _log.warning("optimizer state of %d parameters converted from %s", count, clause)


def seal_loaded(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Keep torch from casting the state, and the groups from taking over another master mode.

    Raises:
        OperandError: state of another shape than its parameter.
    """
    _check_shapes(optimizer, state_dict)
    own = ("master", "state_dtype", "backend")
    groups = [
        {**now, **saved, **{name: now[name] for name in own}}
        for now, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False)
    ]
    # A different number of groups is torch's to refuse.
    groups += state_dict["param_groups"][len(groups) :]
    return {**state_dict, "state": sealed(state_dict["state"]), "param_groups": groups}


def _check_shapes(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    labels = [label for group in optimizer.param_groups for label in group.get("param_names", ())]
    saved = [index for group in state_dict["param_groups"] for index in group["params"]]
    for number, (p, index) in enumerate(zip(params, saved, strict=False)):
        for name, item in state_dict["state"].get(index, {}).items():
            if isinstance(item, Tensor) and item.dim() > 0:
                check_shape(labels[number] if labels else f"parameter {number}", name, item, p)
