"""What a checkpoint must be before a bit of it is written: every part is read, and named if it does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import CheckpointError, PolicyError, did_you_mean, listed
from ..kernels import AUX_STATE
from ..loss_scale import LossScale
from ..optim import parameters
from ..policy import Policy
from .guard import Counters
from .invariants import MOMENTS


def check_tensors(entries: Sequence[Any], weights: Any, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse weights and optimizer states that could not be loaded as a whole.

    Args:
        entries: the optimizers' states.
        weights: the model's, under the names of this one.
        model: to load into, without wrappers.
        optimizers: to load into, in this order.

    Raises:
        CheckpointError: names the part, what it has, and what it must have.
    """
    _check_weights(weights, model.state_dict())
    for index, (optimizer, entry) in enumerate(zip(optimizers, entries, strict=True)):
        _check_optimizer(f"optimizers[{index}]", entry, optimizer)


def check_numbers(state: Mapping[str, Any], policy: Policy) -> None:
    """Refuse a policy, loss scale or counters that no run could have saved.

    Args:
        state: a checkpoint with every key.
        policy: in force.

    Raises:
        CheckpointError: names the part and what it has.
    """
    _check_policy(state["policy"])
    _check_numbers("scaling", state["scaling"], LossScale)
    counters = state["counters"]
    _check_numbers("counters", counters, Counters)
    for edit in (counters or {}).get("demoted", ()):
        try:
            Policy.parse(f"{policy}, {edit}")
        except PolicyError as error:
            _refuse("counters.demoted", f"has {edit!r}: {error}")


def _refuse(part: str, what: str) -> NoReturn:
    raise CheckpointError(
        f"the checkpoint's {part} {what}. Nothing was loaded. Take a whole checkpoint of amp.state_dict(), of such a model "
        "and such optimizers."
    )


def _check_mapping(part: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        _refuse(part, f"is {type(value).__name__}, and must be a dict")


def _check_policy(saved: Any) -> None:
    if saved is None:
        return
    _check_mapping("policy", saved)
    try:
        Policy.from_dict(saved)
    except PolicyError as error:
        _refuse("policy", f"cannot be read: {error}")


def _check_weights(saved: Any, wanted: Mapping[str, Any]) -> None:
    _check_mapping("model", saved)
    missing = [name for name in wanted if name not in saved]
    unknown = [name for name in saved if name not in wanted]
    if missing or unknown:
        parts = [
            f"{word} {len(names)} ({listed(names)})"
            for word, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        _refuse("model", f"has other names: {' and '.join(parts)}")
    for name, own in wanted.items():
        if isinstance(own, Tensor):
            _check_shape(f"model[{name!r}]", saved[name], own)


def _check_shape(part: str, value: Any, own: Tensor) -> None:
    if not isinstance(value, Tensor):
        _refuse(part, f"is {type(value).__name__}, and must be a tensor of shape {list(own.shape)}")
    if value.shape != own.shape:
        _refuse(part, f"has shape {list(value.shape)}, and {list(own.shape)} is wanted")


def _check_optimizer(part: str, entry: Any, optimizer: Optimizer) -> None:
    _check_mapping(part, entry)
    groups, params = entry.get("param_groups"), parameters(optimizer)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if not isinstance(groups, Sequence) or not all(isinstance(g, Mapping) and "params" in g for g in groups):
        _refuse(part, f"has no param_groups with params, and {type(optimizer).__name__} has {len(sizes)} groups")
    if [len(group["params"]) for group in groups] != sizes:
        found = [len(group["params"]) for group in groups]
        _refuse(
            f"{part}.param_groups", f"are {len(found)} groups with {found} params, and this optimizer's have {sizes}"
        )
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        for name, own in group.items():
            if isinstance(own, float) and not _is_number(saved.get(name, own)):
                _refuse(f"{part}.param_groups[{index}]['{name}']", f"is {saved[name]!r}, and must be a number")
    _check_mapping(f"{part}.state", entry.get("state"))
    owners = dict(zip(chain.from_iterable(group["params"] for group in groups), params, strict=True))
    for key, saved in entry["state"].items():
        where = f"{part}.state[{key!r}]"
        if key not in owners:
            _refuse(where, f"belongs to none of the {len(params)} parameters")
        _check_mapping(where, saved)
        _check_entry(where, saved, owners[key], optimizer)


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) or (isinstance(value, Tensor) and value.numel() == 1)


def _check_entry(part: str, saved: Mapping[str, Any], param: Tensor, optimizer: Optimizer) -> None:
    own = optimizer.state.get(param, {})
    for name, value in saved.items():
        now = own.get(name)
        if isinstance(now, Tensor) and now.dim() > 0:
            _check_shape(f"{part}[{name!r}]", value, now)
        elif (name in MOMENTS or name in AUX_STATE.values()) and value is not None:
            _check_shape(f"{part}[{name!r}]", value, param)


def _check_numbers(part: str, saved: Any, kind: type[LossScale] | type[Counters]) -> None:
    """Refuse numbers that no run could have saved."""
    if saved is None:
        return
    _check_mapping(part, saved)
    names = [field.name for field in fields(kind)]
    for name, value in saved.items():
        if name not in names:
            _refuse(part, f"has an unknown number {name!r}.{did_you_mean(name, names)}")
        if name == "scale":
            if not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
                _refuse(f"{part}.scale", f"is {value!r}, and must be a finite number above 0")
        elif name == "demoted":
            if not isinstance(value, (list, tuple)) or not all(isinstance(edit, str) for edit in value):
                _refuse(f"{part}.demoted", f"is {value!r}, and must be a list of policy edits")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 0:
            _refuse(f"{part}.{name}", f"is {value!r}, and must be a whole number from 0")
    if kind is LossScale and "scale" not in saved:
        _refuse(part, "has no scale")


def remember_optimizer(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that gives an optimizer groups and state back as they are now. Loading replaces both."""
    kept: dict[str, Any] = {k: v for k, v in vars(optimizer).items() if k in ("state", "param_groups")}

    def put_back() -> None:
        optimizer.__dict__.update(kept)

    return put_back
