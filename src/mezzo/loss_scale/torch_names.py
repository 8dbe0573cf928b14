"""The protected names of torch.amp.GradScaler, by which frameworks and subclasses read and write its state."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import ScalerError
from ..policy import ScalingConfig
from .saved import floor_under, with_floor
from .state import ScaleState


def _number(name: str) -> Any:
    return property(
        lambda self: getattr(self._config, name),
        lambda self, value: setattr(self, "_config", replace(self._config, **{name: value})),
    )


_NEVER_CALLED = ("_check_scale_growth_tracker", "_get_scale_async", "_get_growth_tracker", "_found_inf_per_device")
"""What torch's own methods call, and a subclass of torch's scaler may override."""


class TorchNames(torch.amp.GradScaler):
    """torch's scaler with its state kept as mezzo keeps it, under torch's names."""

    _config: ScalingConfig
    _live: ScaleState

    _growth_factor = _number("growth_factor")
    _backoff_factor = _number("backoff_factor")
    _growth_interval = _number("growth_interval")

    @property
    def _scale(self) -> Tensor | None:
        return self._live.tensor

    @_scale.setter
    def _scale(self, value: Tensor | None) -> None:
        self._config = with_floor(self._config, floor_under(math.nan, self._config.min_scale))
        self._live.assign("scale", value, self._config.init_scale)

    @property
    def _growth_tracker(self) -> Tensor | None:
        tracker = self._live.state.growth_tracker
        return tracker if isinstance(tracker, Tensor) else None

    @_growth_tracker.setter
    def _growth_tracker(self, value: Tensor | None) -> None:
        self._live.assign("growth_tracker", value, self._config.init_scale)

    @property
    def _init_scale(self) -> float:
        return self._config.init_scale

    @_init_scale.setter
    def _init_scale(self, value: float) -> None:
        self._config = replace(self._config, init_scale=value, min_scale=floor_under(value, self._config.min_scale))
        if self._scale is None:
            self._live.move(replace(self._live.state, scale=value))

    @property
    def _init_growth_tracker(self) -> int:
        return self._first_tracker

    @_init_growth_tracker.setter
    def _init_growth_tracker(self, value: int) -> None:
        self._first_tracker = value
        if self._scale is None:
            self._live.move(replace(self._live.state, growth_tracker=value))

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._live.to(dev)

    def _get_growth_tracker(self) -> int:
        return int(self._live.state.growth_tracker) if self._enabled else 0

    def _require_scale(self, call: str) -> None:
        if self._scale is None:
            raise ScalerError(
                f"{call}() was called before scale(): this scaler has scaled no loss yet. Write scaler.scale(loss).backward() first."
            )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dead = [name for name in _NEVER_CALLED if name in cls.__dict__ and cls.__module__.partition(".")[0] != "mezzo"]
        if dead:
            raise ScalerError(
                f"{cls.__name__} overrides GradScaler.{dead[0]}, which mezzo's scaler never calls. Override the public "
                "methods, _unscale_grads_, _maybe_opt_step or _lazy_init_scale_growth_tracker, or derive from torch.amp.GradScaler."
            )
