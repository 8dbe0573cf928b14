"""Healthy programs that reach their arithmetic by other means: hooks, complex numbers, sparse products, transforms."""

from __future__ import annotations

import math
import sys

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import BF16, FP16, FP32, Run
from tests.zoo.strangers import amp, fit, healthy, mlp
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.utils.data import DataLoader, IterableDataset


@healthy(FP32)
def spectra_compared(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        a, b = torch.fft.rfft(m(x).float()), torch.fft.rfft(x[:, :4])
        phase = a / (a.abs() + 1e-6)
        return (a.abs() - b.abs()).abs().mean() + (phase - b / (b.abs() + 1e-6)).abs().mean()

    return lambda: fit(mlp(), dtype, loss)


@healthy(FP32)
def sparse_neighbours(dtype: torch.dtype) -> Run:
    index = torch.tensor([[0, 0, 1, 3], [1, 2, 0, 3]])
    adj = torch.sparse_coo_tensor(index, torch.ones(4), (4, 4)).coalesce()

    def loss(m, x, y):
        deg = torch.sparse.sum(adj, 1).to_dense().clamp(min=1)
        return F.cross_entropy(torch.sparse.mm(adj, m(x)) / deg[:, None], y)

    return lambda: fit(mlp(), dtype, loss, data=[(torch.randn(4, 8), torch.randint(4, (4,)))])


@healthy()
def padded_encoder(dtype: torch.dtype) -> Run:
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.attn = nn.Embedding(20, 16, padding_idx=0), nn.MultiheadAttention(16, 2, batch_first=True)
            self.out = nn.Linear(16, 3)

        def forward(self, ids):
            x, pad = self.emb(ids), ids == 0
            h, _ = self.attn(x, x, x, key_padding_mask=pad)
            return self.out(h.masked_fill(pad[..., None], 0.0).sum(1) / (~pad).sum(1, keepdim=True))

    data = [(torch.tensor([[4, 5, 6, 0], [9, 0, 0, 0], [7, 8, 0, 0]]), torch.tensor([0, 1, 2]))]
    return lambda: fit(Encoder(), dtype, lambda m, x, y: F.cross_entropy(m(x).float(), y), data=data)


@healthy()
def hooks_that_watch(dtype: torch.dtype) -> Run:
    def run():
        model, norms = mlp(), {}
        for name, p in model.named_parameters():
            p.register_hook(lambda g, name=name: norms.__setitem__(name, g.norm().item()))
        model[0].register_full_backward_hook(lambda m, gi, go: None)
        model[2].register_forward_hook(lambda m, i, o: norms.__setitem__("out", o.abs().max().item()))
        fit(model, dtype, lambda m, x, y: F.cross_entropy(m(x).float(), y))
        print(norms, file=sys.stderr)

    return run


@healthy()
def products_with_zeros(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        h = F.relu(m(x).float())
        return h.prod(-1).mean() + h.cumprod(-1).mean() + F.dropout(h, 1.0).mean() + F.cross_entropy(h, y)

    return lambda: fit(mlp(), dtype, loss)


@healthy()
def optimizer_written_by_hand(dtype: torch.dtype) -> Run:
    class Adafactor(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-3):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    state, square = self.state[p], p.grad.float().square() + 1e-30
                    v = state.setdefault("v", torch.zeros_like(square))
                    v.lerp_(square, 0.2)
                    update = p.grad * v.rsqrt()
                    update = update / (update.norm() / math.sqrt(update.numel())).clamp(min=1.0)
                    p.add_(update, alpha=-group["lr"])

    def run():
        model = mlp()
        opt = Adafactor(model.parameters())
        for _ in range(2):
            with amp(BF16 if dtype is FP16 else dtype):
                loss = F.cross_entropy(model(torch.randn(8, 8)).float(), torch.randint(4, (8,)))
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy(FP32)
def stacked_ensemble(dtype: torch.dtype) -> Run:
    def run():
        nets = [mlp() for _ in range(3)]
        params, buffers = stack_module_state(nets)
        opt = torch.optim.Adam(params.values(), 1e-3)
        for _ in range(2):
            x, y = torch.randn(5, 8), torch.randint(4, (5,))
            out = vmap(lambda p, b, x: functional_call(nets[0], (p, b), (x,)), (0, 0, None))(params, buffers, x)
            loss = F.cross_entropy(out.flatten(0, 1), y.repeat(3))
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy()
def fragile_part_left_in_fp32(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        h = m(x)
        with torch.autocast("cpu", enabled=False):
            h = h.float()
            energy = torch.logsumexp(30 * h, -1) / 30
            z = (h - h.mean(0)) / (h.std(0) + 1e-6)
            return energy.mean() + (z.T @ z / len(z) - torch.eye(4)).square().mean()

    return lambda: fit(mlp(), dtype, loss)


class Rows(IterableDataset):
    def __iter__(self):
        for i in range(12):
            row = torch.randn(8)
            row[i % 8] = float("nan") if i % 5 == 0 else row[i % 8]
            yield row, i % 4


@healthy()
def bad_rows_dropped(dtype: torch.dtype) -> Run:
    def run():
        model = mlp()
        opt = torch.optim.Adam(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype is FP16)
        for x, y in DataLoader(Rows(), batch_size=4):
            keep = ~x.isnan().any(1)
            if not keep.any():
                continue
            with amp(dtype):
                loss = F.cross_entropy(model(x[keep]).float(), y[keep])
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    return run


@healthy()
def sparsity_of_a_pruned_weight(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        penalty = torch.linalg.vector_norm(m[0].weight.float() * mask, ord=0.5)
        return F.cross_entropy(m(x).float(), y) + 1e-4 * penalty

    mask = torch.ones(16, 8)
    mask[:, 3] = 0
    return lambda: fit(mlp(), dtype, loss)
