"""Healthy programs of a later batch, each the remedied twin of a fault: the diagnosis must say nothing."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import BF16, FP16, FP32, Run
from tests.zoo.strangers import amp, fit, healthy, mlp
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


@healthy(FP32)
def pitch_of_voiced_frames(dtype: torch.dtype) -> Run:
    def run():
        net = nn.Linear(8, 1)
        opt = torch.optim.Adam(net.parameters())
        f0 = torch.tensor([[110.0, 112.0, 0.0, 220.0], [98.0, 99.0, 101.0, 100.0]])
        for _ in range(2):
            voiced = f0 > 0
            cents = 12 * torch.log2(f0[voiced] / 55.0)
            loss = F.l1_loss(net(torch.randn(2, 4, 8)).squeeze(-1)[voiced], cents)
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy()
def log_cosh_by_softplus(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        error = model(x).float() - 400.0 * (y == 0).float()[:, None]
        return (error.abs() + F.softplus(-2 * error.abs()) - math.log(2)).mean()

    return lambda: fit(mlp(), dtype, loss, scale=16.0)


@healthy(FP32)
def truncated_normal_inside_its_ends(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        mu, sigma = model(x)[:, :2].unbind(-1)
        u = torch.rand(8).clamp(1e-5, 1 - 1e-5)
        return (mu + F.softplus(sigma) * 2**0.5 * torch.erfinv(2 * u - 1)).square().mean()

    return lambda: fit(mlp(), dtype, loss)


@healthy(FP32, BF16)
def preferences_against_a_reference(dtype: torch.dtype) -> Run:
    def run():
        policy, reference = nn.Linear(8, 12), nn.Linear(8, 12).requires_grad_(False)
        opt = torch.optim.AdamW(policy.parameters(), 1e-5)

        def logps(model, states, tokens, mask):
            with amp(dtype):
                logits = model(states)
            return (logits.float().log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1) * mask).sum(-1)

        for _ in range(2):
            states, tokens = torch.randn(4, 6, 8), torch.randint(12, (4, 6))
            mask = (torch.arange(6)[None] < torch.tensor([6, 3, 0, 5])[:, None]).float()
            with torch.no_grad():
                ref = logps(reference, states, tokens, mask)
            pi = logps(policy, states, tokens, mask)
            margin = 0.1 * ((pi - ref)[:2] - (pi - ref)[2:])
            loss = -F.logsigmoid(margin).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy()
def exponential_gate_with_a_stabiliser(dtype: torch.dtype) -> Run:
    class XCell(nn.Module):
        def __init__(self, d=8):
            super().__init__()
            self.gates = nn.Linear(2 * d, 4 * d)
            with torch.no_grad():
                self.gates.bias[:d] = 12.0

        def forward(self, x, h, c, n, m):
            i, f, z, o = self.gates(torch.cat([x, h], -1)).float().chunk(4, -1)
            f = F.logsigmoid(f)
            new = torch.maximum(f + m, i)
            i, f = torch.exp(i - new), torch.exp(f + m - new)
            c, n = f * c + i * torch.tanh(z), f * n + i
            return torch.sigmoid(o) * c / n, c, n, new

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = XCell(), nn.Linear(8, 3)

        def forward(self, x):
            h = c = n = torch.zeros(len(x), 8)
            m = torch.full((len(x), 8), float("-inf"))
            for t in range(x.shape[1]):
                h, c, n, m = self.cell(x[:, t], h, c, n, m)
            return self.out(h)

    def run():
        net = Net()
        opt, scaler = (
            torch.optim.AdamW(net.parameters()),
            torch.amp.GradScaler("cpu", init_scale=64.0, enabled=dtype is FP16),
        )
        for _ in range(2):
            with amp(dtype):
                loss = F.cross_entropy(net(torch.randn(4, 5, 8)).float(), torch.tensor([0, 1, 2, 0]))
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    return run


@healthy(FP32, BF16)
def scan_by_segment_sums(dtype: torch.dtype) -> Run:
    class Scan(nn.Module):
        def __init__(self):
            super().__init__()
            self.dt, self.proj, self.out = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 1)

        def forward(self, x):
            steps = -F.softplus(self.dt(x).float()).transpose(1, 2)
            total = steps.cumsum(-1)
            segments = total[..., :, None] - total[..., None, :]
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            decay = segments.masked_fill(~mask, float("-inf")).exp()
            return self.out((decay @ self.proj(x).float().transpose(1, 2)[..., None]).squeeze(-1).transpose(1, 2))

    def run():
        net = Scan()
        opt = torch.optim.AdamW(net.parameters())
        for _ in range(2):
            with amp(dtype):
                loss = net(torch.randn(2, 6, 8)).float().square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy(FP32)
def factored_moments_with_eps(dtype: torch.dtype) -> Run:
    class Factored(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-3):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None or p.dim() < 2:
                        continue
                    square = p.grad.square() + 1e-30
                    rows, cols = square.mean(1), square.mean(0)
                    update = p.grad * (rows / rows.mean()).rsqrt()[:, None] * cols.rsqrt()[None]
                    update = update / torch.clamp(update.square().mean().sqrt(), min=1.0)
                    p.add_(update, alpha=-group["lr"])

    def run():
        net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
        nn.init.constant_(net[0].bias, -40.0)
        opt = Factored(net.parameters())
        for _ in range(2):
            loss = F.cross_entropy(net(torch.randn(4, 8)), torch.tensor([0, 1, 0, 1]))
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy(FP32)
def masked_autoencoder_of_flat_patches(dtype: torch.dtype) -> Run:
    def run():
        decoder = nn.Linear(8, 16)
        opt = torch.optim.AdamW(decoder.parameters(), 1.5e-4)
        for _ in range(2):
            images = torch.rand(2, 1, 8, 8)
            images[1, :, :4, :4] = 1.0
            target = F.unfold(images, 4, stride=4).transpose(1, 2)
            target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6) ** 0.5
            mask = torch.rand(2, 4) < 0.75
            mask[0, 0] = True
            loss = ((decoder(torch.randn(2, 4, 8)) - target).square().mean(-1) * mask).sum() / mask.sum()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy(FP32, FP16)
def contrast_of_equal_embeddings(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        z = model(torch.cat([x[:4], x[:4]])).float()
        d = torch.cdist(z, z)
        same = torch.eye(8, dtype=torch.bool)
        return (d[~same].clamp(max=1) - 1).square().mean() + F.pairwise_distance(z[:4], z[4:]).mean()

    return lambda: fit(mlp(), dtype, loss, scale=16.0)


@healthy(FP32)
def table_with_a_largest_norm(dtype: torch.dtype) -> Run:
    def run():
        table, out = nn.Embedding(8, 4, padding_idx=0, max_norm=1.0), nn.Linear(4, 3)
        opt = torch.optim.Adagrad([*table.parameters(), *out.parameters()], 0.05)
        for _ in range(3):
            ids = torch.tensor([[1, 2, 0], [3, 0, 0], [0, 0, 0]])
            mask = (ids > 0).float()
            bag = (table(ids) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
            loss = F.cross_entropy(out(bag), torch.tensor([0, 1, 2]))
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy(BF16)
def accelerated_loop_with_logits(dtype: torch.dtype) -> Run:
    def run():
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        model = nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        loader = DataLoader(TensorDataset(torch.randn(8, 8), torch.arange(8.0) % 2), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            with accelerator.autocast():
                loss = F.binary_cross_entropy_with_logits(model(x).squeeze(-1), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        AcceleratorState._reset_state()

    return run


@healthy(FP32)
def metrics_kept_by_torchmetrics(dtype: torch.dtype) -> Run:
    def run():
        import torchmetrics

        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.05)
        f1, mean = torchmetrics.F1Score("multiclass", num_classes=4, average="macro"), torchmetrics.MeanMetric()
        best, wait = np.inf, 0
        for _ in range(3):
            x, y = torch.randn(8, 8), torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            f1.update(logits.detach(), y)
            mean.update(loss.detach())
            value = mean.compute().item()
            best, wait = (value, 0) if value < best else (best, wait + 1)
        f1.compute()

    return run


@healthy(FP32)
def root_guarded_on_both_sides(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        gap = torch.relu(model(x) - model(x).detach())
        is_zero = gap == 0
        root = torch.where(is_zero, torch.zeros(()), torch.sqrt(torch.where(is_zero, torch.ones(()), gap)))
        return root.mean() + F.cross_entropy(model(x), y)

    return lambda: fit(mlp(), dtype, loss)


class Rainfall(Dataset):
    """Rows in which -999 stands for a broken gauge."""

    def __init__(self):
        self.rows = torch.rand(12, 8) * 30
        self.rows[7, 3] = -999.0

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        return torch.log1p(row.masked_fill(row < 0, 0.0)), (row >= 0).float(), i % 4


@healthy(FP32, BF16)
def gauges_with_a_mask(dtype: torch.dtype) -> Run:
    def run():
        model = nn.Linear(16, 4)
        opt = torch.optim.Adam(model.parameters())
        for x, known, y in DataLoader(Rainfall(), batch_size=4, shuffle=True):
            with amp(dtype):
                loss = F.cross_entropy(model(torch.cat([x, known], -1)).float(), y)
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy(FP16)
def depth_as_a_share_of_its_range(dtype: torch.dtype) -> Run:
    def run():
        net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(32, 1))
        opt, scaler = torch.optim.SGD(net.parameters(), 1e-5), torch.amp.GradScaler("cpu", init_scale=256.0)
        depth = torch.randint(400, 65536, (6, 1, 4, 4), dtype=torch.int32)
        for (image,) in DataLoader(TensorDataset(depth), batch_size=3):
            with amp(dtype):
                out = net((image / 65536).to(dtype))
            loss = out.float().square().mean()
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    return run


@healthy()
def rows_of_padding_alone_set_to_zero(dtype: torch.dtype) -> Run:
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x, keep):
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(~keep[:, None], float("-inf"))
            return scores.softmax(-1).nan_to_num(0.0) @ v

    def loss(model, x, y):
        return model(torch.randn(3, 5, 8), torch.arange(5) < torch.tensor([[5], [2], [0]])).float().square().mean()

    return lambda: fit(Attention(), dtype, loss)


@healthy()
def mask_of_minus_ten_thousand(dtype: torch.dtype) -> Run:
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x, mask):
            q, k, v = self.qkv(x).chunk(3, -1)
            bias = ((1.0 - mask[:, None].float()) * -10001.0).to(dtype)
            return (q @ k.transpose(1, 2) / 8**0.5 + bias).softmax(-1) @ v

    def loss(model, x, y):
        return model(torch.randn(2, 5, 8), torch.tensor([[1, 1, 1, 0, 0], [1] * 5])).float().square().mean()

    return lambda: fit(Attention(), dtype, loss)
