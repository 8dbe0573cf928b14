"""Programs that write and sum at indices, and others whose ops refuse two dtypes: sparse matrices, weighted bags, quantisation."""

from __future__ import annotations

import torch
from tests.loops.swap import Prepare, adam, program, trained
from torch import Tensor, nn
from torch.nn import functional as F


class Experts(nn.Module):
    """A mixture of experts as it is mostly written: rows of each expert are gathered, computed, and added back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == i)
            out.index_add_(0, rows, weights[rows, slots, None] * expert(x[rows]))
        return out


@program
def experts(prepare: Prepare, steps: int) -> list[float]:
    """A mixture of experts: sums at indices into a buffer of fp32."""
    model = Experts()

    def loss_fn() -> Tensor:
        x = torch.randn(32, 8)
        return F.mse_loss(model(x), x.roll(1, dims=1))

    return trained(prepare, model, adam(model, lr=1e-2), steps, loss_fn)


class Molecules(nn.Module):
    """Messages summed over edges into zeros, and nodes over graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update, self.read = nn.Linear(16, 8), nn.GRUCell(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        for _ in range(2):
            message = F.relu(self.message(torch.cat([x[edges[0]], x[edges[1]]], dim=-1)))
            total = torch.zeros(len(x), 8).scatter_add_(0, edges[1, :, None].expand(-1, 8), message)
            x = self.update(total, x)
        pooled = torch.zeros(int(graph.max()) + 1, 8).index_add_(0, graph, x)
        return self.read(pooled).squeeze(-1)


@program
def molecules(prepare: Prepare, steps: int) -> list[float]:
    """A graph network: sums over edges and nodes into buffers of fp32."""
    model = Molecules()
    x, graph = torch.randn(24, 8), torch.arange(24) // 4
    edges = torch.stack([torch.arange(24), (torch.arange(24) // 4) * 4 + (torch.arange(24) + 1) % 4])
    y = x.view(6, 4, 8).mean((1, 2))
    return trained(prepare, model, adam(model, lr=1e-2), steps, lambda: F.mse_loss(model(x, edges, graph), y))


class Masked(nn.Module):
    """A masked autoencoder: a learned token in place of hidden rows, visible ones written back in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.decode = nn.Linear(8, 16), nn.Linear(16, 8)
        self.token = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        h = self.embed(x)
        h[hidden] = self.token
        full = torch.zeros(*x.shape[:2], 8)
        full[~hidden] = self.decode(h[~hidden])
        return full.masked_scatter_(hidden[..., None], self.decode(h.mean(1, keepdim=True).expand_as(h)[hidden]))


@program
def masked(prepare: Prepare, steps: int) -> list[float]:
    """A masked autoencoder: writes at masks, in both directions."""
    model = Masked()

    def loss_fn() -> Tensor:
        x = torch.randn(8, 1, 8) + 0.1 * torch.randn(8, 6, 8)
        return F.mse_loss(model(x, torch.rand(8, 6) < 0.3), x)

    return trained(prepare, model, adam(model, lr=1e-2), steps, loss_fn)


class Convolutions(nn.Module):
    """A graph convolution: products with a sparse matrix of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return edges.to_sparse_csr() @ self.second(F.relu(torch.sparse.mm(edges, self.first(x))))


@program
def sparse_graph(prepare: Prepare, steps: int) -> list[float]:
    """One graph, its normalised edges in fp32, a loss over its nodes."""
    model = Convolutions()
    x, pairs = torch.randn(12, 6), torch.randint(0, 12, (2, 40))
    edges = torch.sparse_coo_tensor(pairs, torch.full((40,), 1 / 3), (12, 12)).coalesce()
    return trained(
        prepare, model, adam(model, lr=1e-2), steps, lambda: F.cross_entropy(model(x, edges), torch.arange(12) % 3)
    )


class Bag(nn.Module):
    """Words weighed by a layer, and summed."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.weigh, self.head = nn.EmbeddingBag(30, 16, mode="sum"), nn.Linear(1, 1), nn.Linear(16, 3)

    def forward(self, words: Tensor, counts: Tensor) -> Tensor:
        return self.head(self.table(words, per_sample_weights=self.weigh(counts[..., None])[..., 0]))


@program
def weighted_words(prepare: Prepare, steps: int) -> list[float]:
    """A bag of embeddings whose weights a layer computes."""
    model = Bag()

    def loss_fn() -> Tensor:
        words = torch.randint(0, 30, (16, 5))
        return F.cross_entropy(model(words, torch.rand(16, 5)), words[:, 0] % 3)

    return trained(prepare, model, adam(model, lr=1e-2), steps, loss_fn)


@program
def quantised_in_training(prepare: Prepare, steps: int) -> list[float]:
    """Weights and activations rounded to 8 bits in forward, ranges observed in buffers."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    torch.ao.quantization.prepare_qat(model, inplace=True)

    def loss_fn() -> Tensor:
        x = torch.randn(32, 8)
        return F.mse_loss(model(x), x.roll(1, dims=1))

    return trained(prepare, model, adam(model, lr=1e-2), steps, loss_fn)
