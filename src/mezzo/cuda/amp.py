"""The names and signatures of `torch.cuda.amp`, by position: an older program changes its import and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .. import casting, loss_scale

F = TypeVar("F", bound=Callable[..., Any])


class autocast(casting.autocast):  # the name torch gives it
    """`mezzo.autocast("cuda", ...)` with the arguments of `torch.cuda.amp.autocast`. Syncs: no."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("cuda", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(loss_scale.GradScaler):
    """`mezzo.GradScaler("cuda", ...)` with the arguments of `torch.cuda.amp.GradScaler`."""

    def __init__(
        self,
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__("cuda", init_scale, growth_factor, backoff_factor, growth_interval, enabled)


def custom_fwd(fwd: F | None = None, *, cast_inputs: torch.dtype | None = None) -> Any:
    """`mezzo.custom_fwd` for tensors on CUDA devices, bare or called. Syncs: no."""
    return casting.custom_fwd(fwd, device_type="cuda", cast_inputs=cast_inputs)


def custom_bwd(bwd: F) -> F:
    """`mezzo.custom_bwd` for tensors on CUDA devices. Syncs: no."""
    return casting.custom_bwd(bwd, device_type="cuda")
