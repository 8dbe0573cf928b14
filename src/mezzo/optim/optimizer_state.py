"""Optimizer state: the values that parameters stand for, saved, and loaded exactly or converted to another master mode."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import ConfigError, OperandError, check_given
from ..formats import LOW_DTYPES, describe, dtype_name
from ..kernels import (
    AUX_STATE,
    aux_dtype,
    check_shape,
    give_master_,
    is_dtensor,
    like_dtensor,
    local,
    read_master,
    store_master,
)
from ..loss_scale import param_names, parameters
from ..policy import Master
from ..stamp import version_of
from .saved_state import AUX_MODES, check_saved, each_entry, is_torchs

_log = logging.getLogger("mezzo.optim")
_LOSS = {"kahan": "rounded to twice 16 bit", "stochastic": "rounded to 16 bit"}
OWN_OPTIONS = ("master", "state_dtype", "rounding_seed", "backend")
"""Options of a group that torch's optimizers do not have."""


@dataclass(frozen=True, slots=True, eq=False)
class Exact:
    """A tensor that torch's `load_state_dict` must not cast to the parameter's dtype, as it does with every other."""

    tensor: Tensor


def sealed(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter with its tensors wrapped, out of reach of torch's casts."""
    return {name: Exact(item) if isinstance(item, Tensor) else item for name, item in entry.items()}


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
    return next((mode for name, mode in AUX_MODES.items() if name in entry), None)


def take_master_(param: Tensor, entry: Mapping[str, Tensor], mode: Master) -> tuple[dict[str, Tensor], str]:
    """Return what a parameter must keep for its own master mode, out of state that another mode may have left.

    That is its aux state under its name in the state, in fresh memory; with it comes a clause that says what had to be converted, if
    anything. A remainder or compensation means something only beside its weight, so weights are loaded first.

    Writes: `param`, if a conversion rounds its master to another weight. Syncs: no.
    """
    saved = mode_of_state(entry)
    if saved == mode:
        name = AUX_STATE[mode]
        aux = entry[name].to(param.device, torch.int16 if mode == "split" else entry[name].dtype)
        return {name: aux.clone(memory_format=torch.preserve_format)}, ""
    if saved is None:
        if mode not in AUX_STATE:
            return {}, ""
        master = local(param.detach()).to(torch.float32)
        clause = f"no masters to {mode}: they start from the 16-bit weights"
    else:
        aux = local(entry[AUX_STATE[saved]].to(param.device))
        low = {"split": torch.bfloat16, "kahan": aux.dtype}.get(saved, param.dtype)
        master = read_master(saved, local(param.detach()).to(low), aux) if saved != "fp32" else aux
        target = mode if param.dtype in LOW_DTYPES else "fp32 weights"
        clause = f"{saved} masters to {target}, {_LOSS.get(mode, 'exactly')}"
    weight, aux_state = store_master(mode, master, param.dtype, None)
    with torch.no_grad():
        local(param).copy_(weight)
    return ({} if aux_state is None else {AUX_STATE[mode]: like_dtensor(aux_state.clone(), param)}), clause


@torch.no_grad()
def take_loaded_masters_(optimizer: torch.optim.Optimizer, undo: ExitStack) -> None:
    """Give fp32 weights the masters in the state of one of torch's optimizers, where both were loaded before it was prepared; `undo` takes it back.

    Writes: weights that are 16-bit ones, widened; state, which loses its aux entries, with a word in the log where they do not fit. Syncs: yes.
    """
    held = parameters(optimizer) if is_torchs(optimizer) else []
    modes = {p: mode_of_state(optimizer.state.get(p, {})) for p in held}
    fits = [_take_loaded_(p, optimizer.state[p], mode, undo) for p, mode in modes.items() if mode]
    if lost := fits.count(False):
        _log.warning(
            "%d masters in the state of %s were saved beside other weights than the model's, or torch cast them, and are dropped. Load model and "
            "optimizer of one checkpoint, the model in fp32, or after mezzo.prepare.", lost, type(optimizer).__name__,
        )  # fmt: skip


def _take_loaded_(param: Tensor, entry: dict[str, Any], mode: Master, undo: ExitStack) -> bool:
    """Take the aux state out of an entry, and give the weight the master that it means; return whether it means one. Syncs: yes."""
    value, aux = local(param.detach()), entry.pop(AUX_STATE[mode])
    if not isinstance(aux, Tensor) or local(aux).shape != value.shape or value.dtype is not torch.float32:
        return False
    aux = local(aux)
    for low in (torch.bfloat16,) if mode == "split" else (torch.bfloat16, torch.float16):
        weight, own = store_master(mode, value, low, None)
        if own is not None and torch.equal(own.to(aux.dtype), aux):  # the weight is the master
            return True
        rounded = {"fp32": (aux.to(low), weight), "kahan": (aux.to(low).to(aux.dtype), aux)}.get(mode, (aux, aux))
        if torch.equal(weight.to(value.dtype), value) and torch.equal(*rounded):
            undo.callback(value.copy_, weight)
            value.copy_(read_master(mode, weight, aux.to(aux_dtype(mode, low))))
            return True
    return False


def keep_masters(optimizer: Any, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved state with the masters that were set here, where it has none and nobody wrote the weights since: those were loaded before it. Host only."""
    state = dict(saved["state"])
    keys = chain.from_iterable(group["params"] for group in saved["param_groups"])
    for key, p in zip(keys, parameters(optimizer), strict=True):
        if optimizer.set_at.get(p) == version_of(p) and mode_of_state(entry := state.get(key, {})) is None:
            mode, aux = optimizer.aux_state(p)
            if aux is not None:
                state[key] = {**entry, AUX_STATE[mode]: aux}
    return {**saved, "state": state}


def take_masters_(optimizer: Any, entries: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
    """Give each parameter its aux state out of what was saved of it, and log what was converted. Writes: as `take_master_`. Syncs: no."""
    taken = {p: take_master_(p, entry, optimizer.aux_state(p)[0]) for p, entry in entries.items()}
    for p in [p for p, (aux, _) in taken.items() if aux]:
        optimizer.state[p].update(taken[p][0])
    report(clause for _, clause in taken.values())


def _saved_entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return what is saved of a parameter's state: counts copied, remainders of shards as int32, since no backend of torch.distributed sends int16. Syncs: no."""
    rest = entry.get(AUX_STATE["split"])
    wide = {} if rest is None or not is_dtensor(rest) else {AUX_STATE["split"]: rest.to(torch.int32)}
    return {**entry, **wide, **({"step": entry["step"].clone()} if "step" in entry else {})}


def own_state(
    param: Tensor, entry: Mapping[str, Any], names: Sequence[str], group: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the step count and moments of one parameter as mezzo's optimizers keep them, in fresh memory, from its state here or in torch's. Syncs: no."""
    dtype = moment_dtype(param, group)
    moments = {name: entry[name] for name in names if entry.get(name) is not None}
    # torch.optim.SGD counts no steps; that its sum exists says that the first one is over.
    count = torch.as_tensor(entry.get("step", float(bool(moments))), dtype=torch.float32, device=param.device)
    return {"step": count.clone(), **{name: held.to(param.device, dtype).clone() for name, held in moments.items()}}


def _name_of(optimizer: torch.optim.Optimizer, param: Tensor) -> str:
    index = next(index for index, p in enumerate(parameters(optimizer)) if p is param)
    return param_names(optimizer.param_groups)[index]


def checked_masters(optimizer: Any, masters: Any) -> dict[Tensor, Master]:
    """Return how each parameter keeps small updates, once nothing is left that `set_masters_` cannot take; errors are its own. Syncs: no."""
    if not isinstance(masters, Mapping):
        raise ConfigError(f"set_masters_() got {describe(masters)}, and takes a dict of a tensor for each parameter.")
    modes = {param: optimizer.aux_state(param)[0] for param in masters}
    for param, master in masters.items():
        if not isinstance(master, Tensor) or _kind(master) != _kind(param):
            _refuse_master(optimizer, param, master, ": write the value that it stands for, as a dense tensor in fp32.")
        if master.shape != param.shape:
            check_shape(_name_of(optimizer, param), "master", master, param)
        here, there = local(param.detach()), local(master)
        if here.is_cpu and there.is_cpu and bool((there.isnan() & ~here.isnan()).any()):  # looked for on the host alone
            _refuse_master(
                optimizer, param, master, ", with NaN where the parameter has none: no step leaves it again."
            )
    return modes


def _refuse_master(optimizer: Any, param: Tensor, master: object, why: str) -> NoReturn:
    raise OperandError(f"set_masters_() got {describe(master)} for {_name_of(optimizer, param)}{why}")


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.is_floating_point(), tensor.is_complex(), tensor.layout, tensor.is_meta


def check_shapes(optimizer: Any, params: Iterable[Tensor]) -> None:
    """Refuse gradients and aux state of another shape than their parameter. Raises: OperandError. Host only."""
    for p in params:
        mode, aux = optimizer.aux_state(p)
        for name, held in (("gradient", p.grad), (AUX_STATE.get(mode, ""), aux)):
            if held is not None and held.shape != p.shape:
                check_shape(_name_of(optimizer, p), name, held, p)


def report(clauses: Iterable[str]) -> None:
    """Log one warning for each kind of conversion, with the number of parameters."""
    for clause, count in Counter(clause for clause in clauses if clause).items():
        _log.warning("optimizer state of %d parameters converted from %s", count, clause)


def seal_loaded(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Keep torch from casting the state, and the groups from taking over another master mode."""
    own = tuple(name for name in OWN_OPTIONS if name != "rounding_seed")
    pairs = zip(optimizer.param_groups, state_dict["param_groups"], strict=True)
    groups = [{**now, **saved, **{name: now[name] for name in own}} for now, saved in pairs]
    state = each_entry(keep_masters(optimizer, state_dict), sealed)
    return {**state_dict, "state": state, "param_groups": groups}


def and_inside(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return an optimizer and those that it holds, alone or in a list or dict, and steps itself, as Lookahead does. Host only."""
    found = [optimizer]
    for one in found:  # which grows: one that is held may hold others, or its holder
        for name, held in vars(one).items():
            if name == "state":  # as long as there are parameters, and asked for in each step
                continue
            several = held.values() if isinstance(held, dict) else held
            for inner in several if isinstance(held, (dict, list, tuple)) else (held,):
                if isinstance(inner, torch.optim.Optimizer) and not any(inner is known for known in found):
                    found.append(inner)
    return found


class HasMasters(torch.optim.Optimizer):
    """An optimizer whose parameters may stand for fp32 values, which it reads and sets."""

    set_at: dict[Tensor, int]
    """The version of each weight when `set_masters_` gave it its master."""

    @abstractmethod
    def aux_state(self, param: Tensor) -> tuple[Master, Tensor | None]:
        """Return how a parameter keeps small updates, and its aux state now; None if nothing does. Host only."""

    def master(self, param: Tensor) -> Tensor:
        """Return the fp32 value that a parameter stands for.

        Args:
            param: a parameter of this optimizer.

        Returns:
            Its shape; fp32, or fp64 for an fp64 parameter. Before the first step, and for stochastic masters, the
            weight itself in fp32. Not a copy where the parameter is its own master.

        Syncs: no.
        """
        mode, aux = self.aux_state(param)
        part = read_master(mode, local(param.detach()), None if aux is None else local(aux))
        return like_dtensor(part, param)

    @torch.no_grad()
    def set_masters_(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Give parameters the fp32 values they stand for: those they had before they were made 16 bit.

        Args:
            masters: for each parameter of this optimizer that is named, its value; same shape, fp32.

        Raises:
            ConfigError: no dict, or not a parameter of this optimizer.
            OperandError: no tensor that could be the value of its parameter. Nothing was changed.

        Writes: the parameters, and their aux state. Syncs: no.
        """
        for param, mode in checked_masters(self, masters).items():
            aux = give_master_(mode, local(param), local(masters[param].to(param.device)))
            if aux is not None:
                self.state[param][AUX_STATE[mode]] = like_dtensor(aux, param)
            self.set_at[param] = version_of(param)


class KeepsMasters(HasMasters):
    """An optimizer that keeps masters itself, and saves and loads them."""

    _group_indices: dict[Tensor, tuple[dict[str, Any], int]]
    saves_own_options: bool = True
    """Whether `state_dict` has the options of a group that torch's optimizers do not have."""

    @abstractmethod
    def _forget(self) -> None:
        """Drop what is kept from step to step: state was replaced."""

    @abstractmethod
    def moment_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the running means that a parameter of this group has in its state."""

    @abstractmethod
    def init_state(self, group: Mapping[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        """Add to the state of a parameter what its first step begins with and is not there: a count of 0, moments of 0, aux state. Syncs: no."""

    def aux_state(self, param: Tensor) -> tuple[Master, Tensor | None]:
        """Return how a parameter keeps small updates, and its aux state now; None if nothing does. Host only."""
        mode = mode_of(param, self._group_of(param))
        return mode, self.state[param].get(AUX_STATE.get(mode, "")) if param in self.state else None

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        """Return the group of a parameter, where it was found before if it is still there: groups are the user's to change."""
        check_given(type(self).__name__, "param", param, Tensor, "one of its parameters")
        group, index = self._group_indices.get(param, ({"params": ()}, 0))
        is_there = any(param is p for p in group["params"][index : index + 1])
        if not is_there or not any(group is one for one in self.param_groups):
            self._group_indices = {p: (one, i) for one in self.param_groups for i, p in enumerate(one["params"])}
            if param not in self._group_indices:
                raise ConfigError(f"{describe(param)} is not a parameter of this {type(self).__name__}.")
        return self._group_indices[param][0]

    def state_dict(self) -> dict[str, Any]:
        """Return state and options as torch's optimizers do; `torch.load(weights_only=True)` reads them back.

        Where there are masters and nothing has stepped yet, moments are made first: `torch.distributed.checkpoint` reads only into what is there.

        Returns:
            The form of `torch.optim.Optimizer.state_dict`; each parameter has a step count of its own in it. Tensors are
            not copied, except for those counts.

        Syncs: no.
        """
        if self.state and not any("step" in entry for entry in self.state.values()):
            for group in self.param_groups:
                for p in [p for p in group["params"] if p.requires_grad]:
                    self.init_state(group, p, self.state[p])
        state_dict = super().state_dict()
        state = each_entry(state_dict, _saved_entry)
        groups = state_dict["param_groups"]
        if self.saves_own_options:  # a dtype by its name: torch.distributed.checkpoint.state_dict takes none apart
            groups = [{**group, "state_dtype": dtype_name(group["state_dtype"])} for group in groups]
        else:
            groups = [{k: v for k, v in group.items() if k not in OWN_OPTIONS} for group in groups]
        return {**state_dict, "state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, also that of another master mode or of torch's own optimizer.

        State of the same master mode and moment dtype is taken bit for bit. State of another is converted, as exactly
        as the new mode allows, and each kind of conversion is logged. Load the weights first: a remainder
        or compensation is part of a master only beside its weight.

        Args:
            state_dict: from `state_dict` of this class, or of the torch optimizer of the same name.

        Raises:
            CheckpointError: no state of such an optimizer; nothing was changed then.

        Writes: state, options of the groups; the weights, where a conversion rounds their masters anew.
        Syncs: yes.
        """
        check_saved(f"state of {type(self).__name__}", state_dict, self)
        was = {"state": self.state, "param_groups": self.param_groups}  # which loading replaces
        with self.register_load_state_dict_pre_hook(seal_loaded):
            try:
                super().load_state_dict(state_dict)
            except BaseException:
                self.__dict__.update(was)
                self._forget()
                raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over pickled state, or what `load_state_dict` read."""
        self._forget()
        torch.optim.Optimizer.__setstate__(self, state)  # and not that of a torch optimizer that was taken over
        clauses = [
            self._unseal(p, group)
            for group in self.param_groups
            for p in group["params"]
            if any(isinstance(item, Exact) for item in self.state.get(p, {}).values())
        ]
        report(clauses)

    def _unseal(self, param: Tensor, group: Mapping[str, Any]) -> str:
        entry = {name: item.tensor for name, item in self.state[param].items() if isinstance(item, Exact)}
        aux, clause = take_master_(param, entry, mode_of(param, group))
        self.state[param] = {**own_state(param, entry, self.moment_names(group), group), **aux}
        return clause
