"""Where a run takes place."""

from __future__ import annotations

import torch

from .. import random_state
from ..errors import ConfigError
from ..kernels import mix


def seed_rounding(*numbers: int) -> None:
    """Make what dropout draws next a function of some numbers. Writes: the random state of the CPU and the accelerators."""
    seed = 0
    for number in numbers:
        seed = mix((seed + number) & 0xFFFFFFFF)
    random_state.seed_(seed)


def choose_device(name: str) -> torch.device:
    """Return the device a name stands for; "auto" is the accelerator where there is one.

    Raises:
        ConfigError: no such device here.
    """
    if name == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts
        reason = str(error).split("\n", 1)[0].rstrip(".")
        raise ConfigError(f"device={name!r} cannot be used here: {reason}. Write cpu or auto.") from None
    return device
