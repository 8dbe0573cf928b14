"""Numbers that enter a scaler from outside: its state_dict (torch's five entries, and ours), and a new scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError, PolicyError, ScalerError, shown
from ..formats import SMALLEST, describe, is_count, is_number, number_of
from ..policy import ScalingConfig
from .state import LossScale

_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_DEFAULT_FLOOR = 1.0


class Saved(NamedTuple):
    """What a scaler must remember over a restart: how the scale moves, and where it stands, in numbers."""

    config: ScalingConfig
    patience: int | None
    state: LossScale


def floor_under(scale: float, floor: float) -> float:
    """Return the floor for a scale that was asked for: the default one gives way to a scale below it, or unknown.

    Below 1 only patience stops a run, as no scale there is more wrong than another.

    >>> floor_under(8.0, 1.0), floor_under(0.5, 1.0), floor_under(0.5, 0.25)
    (1.0, 0.0, 0.25)
    """
    if not isinstance(scale, float | int):
        return floor  # whoever makes the config refuses it
    return 0.0 if is_number(floor) and floor == _DEFAULT_FLOOR and not (scale >= floor or scale <= 0) else floor


def checked(config: ScalingConfig, patience: int | None, state: LossScale) -> Saved:
    """Return what a scaler must remember; a PolicyError names a patience or counter that no scaler may have."""
    if patience is not None and not is_number(patience, 1, math.inf):
        raise PolicyError(f"patience={shown(patience)} must be > 0, or None.")
    for name in ("growth_tracker", "skipped_in_a_row"):
        if not is_count(count := getattr(state, name), bits=31):
            raise PolicyError(f"{name}={shown(count)} must be a whole number from 0 to 2**31 - 1.")
    return Saved(config, patience, state)


def pack(saved: Saved) -> dict[str, Any]:
    """Return plain numbers under torch's keys and ours; torch's scaler loads them and ignores ours."""
    config, patience, state = saved
    moves = {one.name: getattr(config, one.name) for one in fields(config) if one.name != "init_scale"}
    counts = {"_growth_tracker": state.growth_tracker, "_skipped_in_a_row": state.skipped_in_a_row}
    return {"scale": state.scale, "patience": patience, **moves, **counts}


def unpack(entries: Mapping[str, Any], own: Saved) -> Saved:
    """Return what a state_dict says; what torch's has no entry for stays as it is in `own`. One that no scaler may have is a CheckpointError."""
    if entries is not None and not isinstance(entries, Mapping):
        raise CheckpointError(
            f"load_state_dict() got {type(entries).__name__}, and a scaler's state is a dict. Pass what GradScaler.state_dict() returned."
        )
    if not entries:
        raise CheckpointError(
            "load_state_dict() got an empty dict: the checkpoint was saved with scaling disabled. Leave the call out: "
            "a fresh GradScaler is what this run starts with."
        )
    missing = [key for key in _TORCH_KEYS if key not in entries]
    if missing:
        raise CheckpointError(
            f"load_state_dict() misses {', '.join(missing)}, so this is not a scaler's state. Pass what GradScaler.state_dict() returned."
        )
    try:
        scale = float(entries["scale"])
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last by a tensor
        raise CheckpointError(f"load_state_dict() got scale={shown(entries['scale'])}, which is no number.") from None
    floor = entries.get("min_scale", own.config.min_scale)
    floor = floor_under(scale, floor) if math.isfinite(scale) and is_number(floor) else floor
    if is_number(floor) and not (math.isfinite(scale) and scale > 0 and scale >= floor):
        raise CheckpointError(
            f"load_state_dict() got scale={scale:g}, and a scale is finite and at least min_scale={floor:g}. Below it "
            "the run that saved it had lost its gradients: start with a fresh GradScaler, or write GradScaler(min_scale=...) if so small a scale is meant."
        )
    try:
        kept = {one.name: entries.get(one.name, getattr(own.config, one.name)) for one in fields(ScalingConfig)}
        config = ScalingConfig(**{**kept, "init_scale": scale, "min_scale": floor})
        counts = {"growth_tracker": entries["_growth_tracker"], "skipped_in_a_row": entries.get("_skipped_in_a_row", 0)}
        return checked(config, entries.get("patience", own.patience), LossScale(scale=scale, **counts))
    except PolicyError as error:
        raise CheckpointError(f"load_state_dict() got numbers no scaler may have: {error}") from None


def given_scale(value: float | Tensor, config: ScalingConfig) -> tuple[Tensor, ScalingConfig]:
    """Return a scale the caller chose, as a tensor of shape (), and how it moves from there. Syncs: no.

    A ScalerError unless it is one positive number within floor and ceiling; a tensor on an accelerator is not read.
    """
    is_one = is_readable = not isinstance(value, Tensor)
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested:
        is_one = value.numel() == 1 and value.is_floating_point() and not value.requires_grad
        is_readable = is_one and value.device.type in ("cpu", "meta")
    number = number_of(value) if is_readable and not isinstance(value, bool) else math.nan
    floor = floor_under(number, config.min_scale)
    ceiling = math.inf if config.max_scale is None else config.max_scale
    is_in_range = is_number(number, SMALLEST) and floor <= number <= ceiling
    if not is_one or (is_readable and not is_in_range):
        what = f"{number:g}" if is_number(number, -math.inf, math.inf) else describe(value)
        raise ScalerError(
            f"update() got new_scale={what}. Pass a positive number, or a floating tensor of one element without a "
            f"graph, within min_scale={config.min_scale:g} and max_scale={config.max_scale}."
        )
    return torch.as_tensor(value, dtype=torch.float32).detach().reshape(()), with_floor(config, floor)


def with_floor(config: ScalingConfig, floor: float) -> ScalingConfig:
    """Return a config with another floor; its first scale, which is past, follows."""
    if floor == config.min_scale:
        return config
    return replace(config, min_scale=floor, init_scale=max(config.init_scale, floor))
