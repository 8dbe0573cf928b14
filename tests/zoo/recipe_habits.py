"""Healthy scripts by habit: averages, gaps, workers, functions of their own, patience; the diagnosis must say nothing."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import BF16, FP16, FP32, Run
from tests.zoo.strangers import amp, fit, healthy, mlp
from torch import nn
from torch.utils.data import DataLoader, Dataset


@healthy()
def weights_averaged_and_validated(dtype: torch.dtype) -> Run:
    def run():
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        ema, best = copy.deepcopy(model).eval().requires_grad_(False), float("inf")
        opt, scaler = (
            torch.optim.SGD(model.parameters(), 0.05, momentum=0.9),
            torch.amp.GradScaler("cpu", init_scale=128.0, enabled=dtype is FP16),
        )
        for _ in range(3):
            x, y = torch.randn(8, 8), torch.randint(4, (8,))
            with amp(dtype):
                loss = F.cross_entropy(model(x).float(), y)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            with torch.no_grad():
                for a, b in zip(ema.state_dict().values(), model.state_dict().values(), strict=True):
                    a.lerp_(b, 0.1) if a.is_floating_point() else a.copy_(b)
                best = min(best, float(F.cross_entropy(ema(x), y)))

    return run


@healthy(FP32)
def targets_with_gaps(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        target = torch.randn(8, 4)
        target[torch.rand(8, 4) < 0.3] = float("nan")
        known = ~torch.isnan(target)
        out = model(x)
        return (out[known] - target[known]).square().mean()

    return lambda: fit(mlp(), dtype, loss)


class Gappy(Dataset):
    """Rows in which missing values are written as NaN, repaired before they are handed out."""

    def __init__(self):
        self.rows = torch.randn(12, 8)
        self.rows[3, 2] = self.rows[7, 5] = float("nan")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        missing = torch.isnan(row)
        return torch.where(missing, torch.zeros(()), row), i % 4


@healthy(FP32)
def gaps_filled_by_the_dataset(dtype: torch.dtype) -> Run:
    def run():
        model = mlp()
        opt = torch.optim.Adam(model.parameters())
        for x, y in DataLoader(Gappy(), batch_size=4):
            loss = F.cross_entropy(model(x), y)
            if not torch.isfinite(loss):
                raise FloatingPointError("loss")
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy(FP32)
def gaps_filled_in_a_worker(dtype: torch.dtype) -> Run:
    def run():
        model = mlp()
        opt = torch.optim.Adam(model.parameters())
        for x, y in DataLoader(Gappy(), batch_size=6, num_workers=1):
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy()
def binary_weights_straight_through(dtype: torch.dtype) -> Run:
    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            ctx.save_for_backward(w)
            return torch.where(w >= 0, torch.ones_like(w), -torch.ones_like(w))

        @staticmethod
        def backward(ctx, grad):
            (w,) = ctx.saved_tensors
            return grad * (w.abs() <= 1)

    class BinaryLinear(nn.Linear):
        def forward(self, x):
            return F.linear(x, Sign.apply(self.weight) * self.weight.abs().mean(), self.bias)

    return lambda: fit(
        nn.Sequential(BinaryLinear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        dtype,
        lambda m, x, y: F.cross_entropy(m(x).float(), y),
        scale=64.0,
    )


@healthy(FP32)
def quantiles_and_crossings(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        q = torch.tensor([0.1, 0.5, 0.9])
        pred = model(x)[:, :3].sort(-1).values
        err = y[:, None].float() - pred
        return torch.maximum(q * err, (q - 1) * err).mean() + 0.1 * F.relu(pred[:, :-1] - pred[:, 1:]).mean()

    return lambda: fit(mlp(), dtype, loss)


@healthy(FP32)
def patience_that_runs_out(dtype: torch.dtype) -> Run:
    def run():
        model, best, left = mlp(1), math.inf, 1
        opt = torch.optim.SGD(model.parameters(), 1e-3)
        for _epoch in range(5):
            loss = F.huber_loss(model(torch.randn(8, 8)), torch.randn(8, 1))
            opt.zero_grad()
            loss.backward()
            opt.step()
            best, left = (loss.item(), 1) if loss.item() < best - 0.05 else (best, left - 1)
            if left < 0:
                break

    return run


@healthy(FP32, BF16)
def student_of_a_sharp_teacher(dtype: torch.dtype) -> Run:
    def run():
        student, teacher = mlp(), mlp().requires_grad_(False)
        opt = torch.optim.AdamW(student.parameters())
        for _ in range(2):
            x = torch.randn(8, 8)
            with amp(dtype):
                s, t = student(x), teacher(x)
            loss = F.kl_div((s.float() / 2).log_softmax(-1), (400 * t.float()).softmax(-1), reduction="batchmean") * 4
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy(FP16)
def timestamps_normalised_before_half(dtype: torch.dtype) -> Run:
    def run():
        model = mlp(1)
        stamps = 1_700_000_000 + 60 * torch.arange(16)
        x = ((stamps - stamps[0]) / (stamps[-1] - stamps[0])).half()
        opt, scaler = torch.optim.SGD(model.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=256.0)
        for rows in x.view(2, 8).split(1):
            with amp(dtype):
                out = model(rows)
            loss = out.float().square().mean()
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    return run


@healthy(FP32)
def flow_with_bounded_scales(dtype: torch.dtype) -> Run:
    class Coupling(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(8, 16)
            self.inner = nn.Linear(4, 8)

        def forward(self, x):
            a, b = x.chunk(2, -1)
            s, t = self.inner(a).chunk(2, -1)
            s = 2 * torch.tanh(s / 2)
            return torch.cat([b * s.exp() + t, a], -1), s.sum(-1)

    def run():
        layers = nn.ModuleList([Coupling(), Coupling()])
        opt = torch.optim.Adam([p for c in layers for p in c.inner.parameters()])
        for _ in range(2):
            x, logdet = torch.randn(6, 8), 0.0
            for layer in layers:
                x, d = layer(x)
                logdet = logdet + d
            loss = (0.5 * x.square().sum(-1) - logdet).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy(FP32)
def scores_of_absent_classes_in_the_log(dtype: torch.dtype) -> Run:
    def run():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            x, y = torch.randn(8, 8), torch.tensor([0, 1, 0, 1, 0, 1, 0, 1])
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            with torch.no_grad():
                hit = torch.bincount(y[logits.argmax(-1) == y], minlength=4)
                recall = hit / torch.bincount(y, minlength=4)
                print({"recall": recall.tolist(), "mean": recall.nanmean().item()})

    return run


@healthy(FP32, BF16)
def transport_by_logsumexp(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        a = model(x).float()
        C = torch.cdist(a, torch.ones(6, 4)) ** 2
        f, g = torch.zeros(8), torch.zeros(6)
        for _ in range(4):
            f = -0.05 * torch.logsumexp((g[None] - C) / 0.05 - 1.79, 1)
            g = -0.05 * torch.logsumexp((f[:, None] - C) / 0.05 - 2.08, 0)
        return f.mean() + g.mean()

    return lambda: fit(mlp(), dtype, loss)
