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
        for index, p in enumerate(self.parameters()):
            p.data = dyadic(*p.shape, seed=index).to(dtype)

    def forward(self, x: Tensor, use_spare: bool = False) -> Tensor:
        hidden = self.first(x)
        return self.last(hidden) + self.spare(hidden) if use_spare else self.last(hidden)


class Block(nn.Module):
    """A transformer layer: attention reads its projection without calling it, norms are under a rule of their own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Language(nn.Module):
    """A small language model with everything that makes sharding hard: a bare parameter, an embedding, perhaps tied."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.position = nn.Parameter(torch.randn(5, 8))
        self.layers = nn.ModuleList([Block(8) for _ in range(2)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 12, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
