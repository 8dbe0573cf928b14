"""Numbers that enter a scaler from outside: its state_dict (torch's five entries, and ours), and a new scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError, PolicyError, ScalerError
from ..formats import describe
from ..policy import ScalingConfig
from .state import LossScale

_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class Saved(NamedTuple):
    """What a scaler must remember over a restart: how the scale moves, and where it stands, in numbers."""

    config: ScalingConfig
    patience: int | None
    state: LossScale


def pack(saved: Saved) -> dict[str, Any]:
    """Return plain numbers under torch's keys and ours; torch's scaler loads them and ignores ours."""
    config, patience, state = saved
    return {
        "scale": state.scale,
        "growth_factor": config.growth_factor,
        "backoff_factor": config.backoff_factor,
        "growth_interval": config.growth_interval,
        "_growth_tracker": state.growth_tracker,
        "min_scale": config.min_scale,
        "max_scale": config.max_scale,
        "hysteresis": config.hysteresis,
        "patience": patience,
        "_skipped_in_a_row": state.skipped_in_a_row,
    }


def unpack(entries: Mapping[str, Any], own: Saved) -> Saved:
    """Return what a state_dict says; what torch's has no entry for stays as it is in `own`.

    Raises:
        CheckpointError: empty, incomplete, or numbers that no scaler may have.
    """
    if not entries:
        raise CheckpointError(
            "load_state_dict() got an empty dict: the checkpoint was saved with scaling disabled. Leave the call out: "
            "a fresh GradScaler is what this run starts with."
        )
    missing = [key for key in _TORCH_KEYS if key not in entries]
    if missing:
        raise CheckpointError(
            f"load_state_dict() misses {', '.join(missing)}, so this is not a scaler's state. "
            "Pass what GradScaler.state_dict() returned."
        )
    scale, floor = float(entries["scale"]), entries.get("min_scale", own.config.min_scale)
    if not (math.isfinite(scale) and scale > 0 and scale >= floor):
        raise CheckpointError(
            f"load_state_dict() got scale={scale:g}, and a scale is finite and at least min_scale={floor:g}. Below it "
            "the run that saved it had lost its gradients: start with a fresh GradScaler, or write "
            "GradScaler(min_scale=...) if so small a scale is meant."
        )
    try:
        config = ScalingConfig(
            init_scale=scale,
            growth_factor=entries["growth_factor"],
            backoff_factor=entries["backoff_factor"],
            growth_interval=entries["growth_interval"],
            min_scale=floor,
            max_scale=entries.get("max_scale", own.config.max_scale),
            hysteresis=entries.get("hysteresis", own.config.hysteresis),
        )
    except PolicyError as error:
        raise CheckpointError(f"load_state_dict() got numbers no scaler may have: {error}") from None
    state = LossScale(
        scale=scale,
        growth_tracker=entries["_growth_tracker"],
        skipped_in_a_row=entries.get("_skipped_in_a_row", 0),
    )
    return Saved(config, entries.get("patience", own.patience), state)


def given_scale(value: float | Tensor, config: ScalingConfig) -> Tensor:
    """Return a scale the caller chose, as a tensor of shape ().

    Raises:
        ScalerError: not one positive number within floor and ceiling; a tensor on an accelerator is not read.

    Syncs: no.
    """
    ceiling = math.inf if config.max_scale is None else config.max_scale
    if isinstance(value, Tensor):
        what = describe(value)
        is_valid = value.numel() == 1 and value.is_floating_point() and not value.requires_grad
        is_readable = value.device.type == "cpu"
    else:
        what = repr(value)
        is_valid = is_readable = isinstance(value, int | float) and not isinstance(value, bool)
    if is_valid and is_readable:
        number = float(value)
        what = f"{number:g}"
        is_valid = math.isfinite(number) and 0 < number and config.min_scale <= number <= ceiling
    if not is_valid:
        raise ScalerError(
            f"update() got new_scale={what}. Pass a positive number, or a floating tensor of one element without a "
            f"graph, within min_scale={config.min_scale:g} and max_scale={config.max_scale}."
        )
    return torch.as_tensor(value, dtype=torch.float32).detach().reshape(())
