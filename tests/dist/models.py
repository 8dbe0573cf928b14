"""Small models and data whose sums are exact in fp32, so that runs on different numbers of ranks can be equal bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def dyadic(*shape: int, seed: int, steps: int = 8) -> Tensor:
    """Return multiples of 1/8 in [-1, 1): sums of their products are exact in fp32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-steps, steps, shape, generator=generator).float() / steps


class Bare(nn.Module):
    """Two linear layers, one of which only some calls use."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.last = nn.Linear(5, 1)
        self.spare = nn.Linear(5, 1)
        for place, p in enumerate(self.parameters()):
            p.data = dyadic(*p.shape, seed=place).to(dtype)

    def forward(self, x: Tensor, use_spare: bool = False) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden) + self.spare(hidden) if use_spare else self.last(hidden)
