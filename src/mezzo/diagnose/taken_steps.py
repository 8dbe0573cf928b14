"""Whether a step was meant to move anything, and was taken: asked on the device, where it is decided."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import move


def has_rate(optimizers: Sequence[torch.optim.Optimizer]) -> Tensor:
    """Say whether a learning rate of any group is not 0: shape (), bool. Syncs: no."""
    rates = [group.get("lr", 1.0) for optimizer in optimizers for group in optimizer.param_groups]
    there = [rate for rate in rates if isinstance(rate, Tensor) and rate.device.type != "cpu"]
    home = there[0].device if there else torch.device("cpu")
    here = any(float(rate) != 0 for rate in rates if not any(rate is one for one in there))
    found = torch.full((), here, dtype=torch.bool, device=home)
    for rate in there:
        found = found | move(rate.detach().reshape(()) != 0, home)
    return found


def is_taken(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Say whether a step that just ran was not skipped on the device; None where nobody could skip it there. Syncs: no."""
    found = getattr(optimizer, "found_inf", None)
    return (found == 0).all() if isinstance(found, Tensor) else None
