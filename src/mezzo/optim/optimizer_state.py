"""Optimizer state on its way out of a checkpoint: kept exactly, or converted to another master mode."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..formats import LOW_DTYPES
from ..kernels import AUX_STATE, like_dtensor, local, read_master, store_master
from ..policy import Master

_log = logging.getLogger("mezzo.optim")
_LOSS = {
    "none": "exactly",
    "split": "exactly",
    "fp32": "exactly",
    "kahan": "rounded to twice 16 bit",
    "stochastic": "rounded to 16 bit",
}
OWN_OPTIONS = ("master", "state_dtype", "rounding_seed", "backend")
"""Options of a group that torch's optimizers do not have."""
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
    """Return how a parameter keeps small updates: the group's master mode if it is 16 bit, else "none". Host only."""
    mode: Master = (group["master"] or "none") if param.dtype in LOW_DTYPES else "none"
    return mode


def moment_dtype(param: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that a parameter's running means are stored in. Host only."""
    asked: torch.dtype = group["state_dtype"]
    if param.is_complex():
        return param.dtype
    if asked is torch.bfloat16:
        return asked
    return torch.float64 if param.dtype is torch.float64 else torch.float32


def mode_of_state(entry: Mapping[str, Any]) -> Master | None:
    """Return the master mode that left this state of one parameter; None if it keeps nothing beside the weight."""
    modes: list[Master] = [mode for name, mode in _MODES.items() if name in entry]  # type: ignore[misc]  # keys of AUX_STATE
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


def own_state(
    param: Tensor, entry: Mapping[str, Any], names: Sequence[str], group: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the step count and moments of one parameter as mezzo's optimizers keep them, in fresh memory.

    Args:
        param: the parameter.
        entry: its state, here or in torch's optimizer of the same name.
        names: of its moments.
        group: with its options.

    Syncs: no.
    """
    dtype, moments = moment_dtype(param, group), {name: entry[name] for name in names if entry.get(name) is not None}
    # torch.optim.SGD counts no steps; that its sum exists says that the first one is over.
    count = torch.as_tensor(entry.get("step", float(bool(moments))), dtype=torch.float32, device=param.device)
    return {"step": count.clone(), **{name: held.to(param.device, dtype).clone() for name, held in moments.items()}}


def label_of(optimizer: torch.optim.Optimizer, param: Tensor) -> str:
    """Return what errors call a parameter: its name where the optimizer was given names, else its number. Host only."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
    number = next((number for number, p in enumerate(params) if p is param), 0)
    return names[number] if names else f"parameter {number}"


def report(clauses: Iterable[str]) -> None:
    """Log one warning for each kind of conversion, with the number of parameters."""
    for clause, count in Counter(clause for clause in clauses if clause).items():
        _log.warning("optimizer state of %d parameters converted from %s", count, clause)


def seal_loaded(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Keep torch from casting the state, and the groups from taking over another master mode."""
    own = tuple(name for name in OWN_OPTIONS if name != "rounding_seed")
    groups = [
        {**now, **saved, **{name: now[name] for name in own}}
        for now, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    ]
    return {**state_dict, "state": sealed(state_dict["state"]), "param_groups": groups}


def and_inside(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer and those that it holds, alone or in a list or dict, and steps itself, as Lookahead does. Host only."""
    found = [optimizer]
    for one in found:  # which grows: one that is held may hold others, or its holder
        for name, held in vars(one).items():
            if name != "state":  # as long as there are parameters, and asked for in each step
                items = (
                    held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else (held,)
                )
                found += [
                    inner
                    for inner in items
                    if isinstance(inner, torch.optim.Optimizer) and not any(inner is known for known in found)
                ]
    return found
