"""The random state of the CPU and of every accelerator of this process, of whatever kind it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor


class RandomState(NamedTuple):
    """States of the CPU's generator, and of each accelerator's by its number: empty where none was used yet."""

    cpu: Tensor
    accelerators: tuple[Tensor, ...]


def accelerator_in_use() -> torch.device | None:
    """Return the kind of accelerator, None where there is none or it was not used yet. Host only."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    is_used = module.is_initialized if hasattr(module, "is_initialized") else torch.accelerator.is_available
    return accelerator if is_used() else None


def _in_use() -> ModuleType | None:
    accelerator = accelerator_in_use()
    return None if accelerator is None else torch.get_device_module(accelerator)


def get() -> RandomState:
    """Return what the generators will draw from next. Syncs: no."""
    module = _in_use()
    if module is None:
        return RandomState(torch.get_rng_state(), ())
    has_several = hasattr(module, "get_rng_state_all")  # Apple's GPU is alone
    states = module.get_rng_state_all() if has_several else [module.get_rng_state()]
    return RandomState(torch.get_rng_state(), tuple(states))


def set_(state: RandomState) -> None:
    """Have the generators draw again from where they were. Writes: their states. Syncs: no."""
    torch.set_rng_state(state.cpu)
    module = _in_use()
    if module is None or not state.accelerators:
        return
    if hasattr(module, "set_rng_state_all"):
        module.set_rng_state_all(state.accelerators)
    else:
        module.set_rng_state(state.accelerators[0])


@contextmanager
def kept() -> Iterator[None]:
    """Give random state back after the block. Writes: it. Syncs: no."""
    state = get()
    try:
        yield
    finally:
        set_(state)
