"""The random numbers of torch's dropout on the CPU, drawn by `cpu.cpp`."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ...backends.cpp.build import Kernel
from ...operands import addresses_of

_kernel = Kernel("dropout", draw="PPqQIi")
_STATE_BYTES = 8 * (3 + 624)
"""Of struct State in cpu.cpp."""


def noise(like: Tensor, p: float) -> Tensor:
    """Return what dropout multiplies with: 0 with probability p, else 1 / (1 - p), rounded as torch rounds it; shape, dtype and layout of `like`.

    Writes: the state of torch's default generator, as `torch.dropout` leaves it. Syncs: no.
    """
    out = torch.empty_like(like, requires_grad=False)
    kept = _kept(p, like.dtype)
    while True:
        before = torch.default_generator.get_state()
        after = before.clone()
        _draw(after, out, 1 - p, kept)
        if torch.equal(torch.default_generator.get_state(), before):  # no other thread has drawn meanwhile
            torch.default_generator.set_state(after)
            return out


@functools.cache
def is_faster() -> bool:
    """Whether torch draws one number after the other here, and these are those: on processors of Intel it has another way. Host only."""
    generator = torch.Generator().manual_seed(1)
    wanted, found = [torch.empty(1000, dtype=torch.float32, device="cpu") for _ in range(2)]
    state = generator.get_state()
    if state.nbytes < _STATE_BYTES:
        return False
    wanted.bernoulli_(0.7, generator=generator)
    _draw(state, found, 0.7, _bits(torch.ones((), dtype=torch.float32, device="cpu")))
    return torch.equal(found, wanted) and torch.equal(state, generator.get_state())


def _draw(state: Tensor, out: Tensor, chance: float, kept: int) -> None:
    limit = math.ceil(chance * 2**53)
    _kernel.draw(*addresses_of([state, out]), out.numel(), limit, kept, out.element_size())


@functools.lru_cache(maxsize=64)
def _kept(p: float, dtype: torch.dtype) -> int:
    return _bits(torch.ones((), dtype=dtype, device="cpu").div_(1 - p))


def _bits(value: Tensor) -> int:
    return int(value.view(torch.int32 if value.element_size() == 4 else torch.int16)) & 0xFFFFFFFF
