"""What the models of generated programs are made of: blocks that take and give a tensor of shape (batch, WIDTH).

Keys of attention, and what goes into a batch norm, have no bias: its true gradient is zero, and rounding alone would move it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Residual(nn.Module):
    """Adds what another module makes of its input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Convolution(nn.Module):
    """A convolution over a small picture, with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x.view(-1, 2, 2, 2))).relu().flatten(1)


class Recurrent(nn.Module):
    """A recurrent net over a short sequence."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(2, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x.view(-1, 4, 2))[0][:, -1]


class Attention(nn.Module):
    """Attention of four tokens, with its own projections."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(2, 12, bias=False), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.view(-1, 4, 2)).chunk(3, dim=-1)
        return self.out(functional.scaled_dot_product_attention(q, k, v)).flatten(1)


class Tokens(nn.Module):
    """An embedding of the signs of its input, added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        ids = 2 * torch.arange(WIDTH, device=x.device) + (x > 0).long()
        return x + self.table(ids).mean(1)


class Bag(nn.Module):
    """Means over some rows of a table, and a sum over the neighbours of each row of the batch by index."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(2 * torch.arange(WIDTH, device=x.device) + (x > 0).long())
        return x + h + torch.zeros_like(h).index_add_(0, torch.arange(len(h), device=h.device).roll(1), h)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x).tanh())


class Checkpointed(nn.Module):
    """A block that backward computes again."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.GELU())
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.inner(x)
        if self.use_reentrant and not x.requires_grad:
            x = x.detach().requires_grad_()  # else it gives no gradients
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Twice(nn.Module):
    """A module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).relu())


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()),
    "residual": lambda: Residual(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU())),
    "conv": Convolution,
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "group norm": lambda: nn.GroupNorm(2, WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "cumulative norm": lambda: nn.BatchNorm1d(WIDTH, momentum=None),
    "attention": Attention,
    "transformer": lambda: nn.Sequential(
        nn.Unflatten(1, (1, WIDTH)),
        nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, norm_first=True, bias=False),
        nn.Flatten(),
    ),
    "embedding": Tokens,
    "bag": Bag,
    "tied": Tied,
    "twice": Twice,
    "dropout": lambda: nn.Dropout(0.25),
    "checkpoint": lambda: Checkpointed(use_reentrant=False),
    "reentrant": lambda: Checkpointed(use_reentrant=True),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
}


class Network(nn.Module):
    """Blocks, an adapter that an optimizer may get later, and a head that may be replaced."""

    def __init__(self, blocks: tuple[str, ...]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(BLOCKS[name]() for name in blocks))
        self.late = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return self.head(x + 0.5 * self.late(x).tanh())


def network(blocks: tuple[str, ...], seed: int) -> Network:
    """Return a model with the weights of a seed."""
    torch.manual_seed(seed)
    return Network(blocks)
