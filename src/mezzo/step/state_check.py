"""What a checkpoint must be before a bit of it is written: every part is read, and named if it does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import PolicyError, did_you_mean, listed
from ..loss_scale import LossScale
from ..optim import check_mapping, check_saved, check_tensor, refuse
from ..policy import Policy
from .guard import Counters


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
        check_saved(f"optimizers[{index}]", entry, optimizer)


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
            refuse("counters.demoted", f"has {edit!r}: {error}")


def _check_policy(saved: Any) -> None:
    if saved is None:
        return
    check_mapping("policy", saved)
    try:
        Policy.from_dict(saved)
    except PolicyError as error:
        refuse("policy", f"cannot be read: {error}")


def _check_weights(saved: Any, wanted: Mapping[str, Any]) -> None:
    check_mapping("model", saved)
    missing = [name for name in wanted if name not in saved]
    unknown = [name for name in saved if name not in wanted]
    if missing or unknown:
        parts = [
            f"{word} {len(names)} ({listed(names)})"
            for word, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        refuse("model", f"has other names: {' and '.join(parts)}")
    for name, own in wanted.items():
        if isinstance(own, Tensor):
            check_tensor(f"model[{name!r}]", saved[name], own)


def _check_numbers(part: str, saved: Any, kind: type[LossScale] | type[Counters]) -> None:
    """Refuse numbers that no run could have saved."""
    if saved is None:
        return
    check_mapping(part, saved)
    names = [field.name for field in fields(kind)]
    for name, value in saved.items():
        if name not in names:
            refuse(part, f"has an unknown number {name!r}.{did_you_mean(name, names)}")
        if name == "scale":
            if not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
                refuse(f"{part}.scale", f"is {value!r}, and must be a finite number above 0")
        elif name == "demoted":
            if not isinstance(value, (list, tuple)) or not all(isinstance(edit, str) for edit in value):
                refuse(f"{part}.demoted", f"is {value!r}, and must be a list of policy edits")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 0:
            refuse(f"{part}.{name}", f"is {value!r}, and must be a whole number from 0")
    if kind is LossScale and "scale" not in saved:
        refuse(part, "has no scale")


def remember_optimizer(optimizer: Optimizer) -> Callable[[], None]:
    """Return a function that gives an optimizer groups and state back as they are now. Loading replaces both."""
    kept: dict[str, Any] = {k: v for k, v in vars(optimizer).items() if k in ("state", "param_groups")}

    def put_back() -> None:
        optimizer.__dict__.update(kept)

    return put_back
