"""Faulty programs of a later batch: norms without eps, inverse functions at their border, counts and whole numbers."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import FP16, Run
from tests.zoo.strangers import amp, case, fit, mlp
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


@case("log2", "singularity")
def pitch_of_an_unvoiced_frame(dtype: torch.dtype) -> Run:
    def run():
        net = nn.Linear(8, 1)
        opt = torch.optim.Adam(net.parameters())
        f0 = torch.tensor([[110.0, 112.0, 0.0, 220.0], [98.0, 99.0, 101.0, 100.0]])
        for _ in range(2):
            cents = 1200 * torch.log2(f0 / 55.0)  # FAULT
            loss = F.l1_loss(net(torch.randn(2, 4, 8)).squeeze(-1), cents / 1200)
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("group_norm", "singularity", "norm")
def group_of_equal_channels(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.out = nn.Conv2d(1, 4, 1), nn.GroupNorm(2, 4, eps=0.0), nn.Linear(4, 2)
            nn.init.zeros_(self.conv.weight)
            nn.init.zeros_(self.conv.bias)

        def forward(self, x):
            return self.out(self.norm(self.conv(x)).mean((2, 3)))  # FAULT

    def run():
        net = Net()
        opt = torch.optim.Adam(net.parameters())
        loss = F.cross_entropy(net(torch.rand(2, 1, 4, 4)), torch.tensor([0, 1]))
        opt.zero_grad()
        loss.backward()
        opt.step()

    return run


@case("rsqrt", "singularity", "1")
def channel_that_died(dtype: torch.dtype) -> Run:
    class BatchStandard(nn.Module):
        def forward(self, h):
            return (h - h.mean(0)) * h.var(0, unbiased=False).rsqrt()  # FAULT

    def run():
        net = nn.Sequential(nn.Linear(8, 6), BatchStandard(), nn.ReLU(), nn.Linear(6, 3))
        with torch.no_grad():
            net[0].weight[2] = 0.0
            net[0].bias[2] = 0.0
        opt = torch.optim.SGD(net.parameters(), 0.01)
        for _ in range(2):
            out = net(torch.randn(8, 8))
            loss = F.cross_entropy(out, torch.arange(8) % 3)
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "singularity")
def prototype_of_nothing(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        z = F.normalize(torch.relu(model(x) - 30), dim=-1, eps=0.0)  # FAULT
        return F.cross_entropy(z @ torch.randn(4, 4), y)

    return lambda: fit(mlp(), dtype, loss)


@case("expm1", "overflow")
def inverse_softplus_of_a_large_scale(dtype: torch.dtype) -> Run:
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.raw = nn.Parameter(torch.tensor(120.0))

        def forward(self):
            return F.softplus(self.raw)

    def run():
        scale, net = Scale(), mlp(1)
        opt = torch.optim.Adam([*scale.parameters(), *net.parameters()])
        for _ in range(2):
            prior = torch.log(torch.expm1(scale()))  # FAULT
            loss = (net(torch.randn(8, 8)) / scale()).square().mean() + 1e-3 * prior.square()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("cosh", "overflow")
def log_cosh_of_an_outlier(dtype: torch.dtype) -> Run:
    class LogCoshLoss(nn.Module):
        def forward(self, pred, target):
            return torch.log(torch.cosh(pred - target)).mean()  # FAULT

    def run():
        net, criterion = mlp(1), LogCoshLoss()
        opt = torch.optim.RMSprop(net.parameters())
        for price in (3.0, 450.0):
            target = torch.tensor([[1.0], [2.0], [price], [2.5]])
            loss = criterion(net(torch.randn(4, 8)), target)
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("erfinv", "singularity")
def truncated_normal_at_its_end(dtype: torch.dtype) -> Run:
    def run():
        net = nn.Linear(4, 2)
        opt = torch.optim.Adam(net.parameters())
        for u in (torch.tensor([0.2, 0.7, 0.4]), torch.tensor([0.5, 0.0, 0.9])):
            mu, sigma = net(torch.randn(3, 4)).unbind(-1)
            x = mu + F.softplus(sigma) * 2**0.5 * torch.erfinv(2 * u - 1)  # FAULT
            loss = x.square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("sqrt", "singularity", "stddev", phase="backward")
def minibatch_deviation_of_equal_samples(dtype: torch.dtype) -> Run:
    class MinibatchStdDev(nn.Module):
        def forward(self, x):
            return torch.cat([x, x.var(0).sqrt().mean().expand(len(x), 1)], 1)  # FAULT

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.stddev, self.out = nn.Linear(8, 4), MinibatchStdDev(), nn.Linear(5, 1)

        def forward(self, x):
            return self.out(self.stddev(torch.relu(self.body(x))))

    def run():
        critic = Critic()
        opt = torch.optim.Adam(critic.parameters())
        for noise in (1.0, 0.0):
            loss = F.softplus(critic(torch.ones(4, 8) + noise * torch.randn(4, 8))).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("log", "singularity")
def intensity_before_the_first_event(dtype: torch.dtype) -> Run:
    class Hawkes(nn.Module):
        def __init__(self):
            super().__init__()
            self.mu, self.alpha, self.beta = (nn.Parameter(torch.tensor(v)) for v in (-0.1, 0.5, 1.0))

        def forward(self, t):
            gaps = t[:, None] - t[None]
            past = torch.where(gaps > 0, torch.exp(-self.beta * gaps.clamp(min=0)), torch.zeros(()))
            rate = torch.relu(self.mu) + self.alpha * past.sum(1)
            return torch.log(rate).sum() - torch.relu(self.mu) * t[-1]  # FAULT

    def run():
        model = Hawkes()
        opt = torch.optim.Adam(model.parameters(), 0.01)
        for _ in range(2):
            loss = -model(torch.rand(6).cumsum(0))
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "singularity", phase="optimizer")
def factored_moments_of_a_frozen_row(dtype: torch.dtype) -> Run:
    class Factored(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-3):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None or p.dim() < 2:
                        continue
                    square = p.grad.square()
                    rows, cols = square.mean(1), square.mean(0)
                    v = torch.outer(rows, cols) / rows.mean()  # FAULT
                    p.add_(p.grad * v.clamp(min=1e-12).rsqrt(), alpha=-group["lr"])

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


@case("log", "singularity")
def soft_labels_with_certainty(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        labels = F.one_hot(y, 4).float()
        return F.kl_div(model(x).log_softmax(-1), labels.log(), log_target=True, reduction="batchmean")  # FAULT

    return lambda: fit(mlp(), dtype, loss)


@case("sum", "overflow", dtypes=(FP16,))
def tokens_counted_in_half(dtype: torch.dtype) -> Run:
    def run():
        net = nn.Linear(4, 1)
        opt, scaler = torch.optim.SGD(net.parameters(), 1e-2), torch.amp.GradScaler("cpu", init_scale=16.0)
        for _ in range(2):
            x, mask = torch.randn(70, 1000, 4), torch.ones(70, 1000, dtype=torch.bool)
            with amp(dtype):
                error = net(x).squeeze(-1).abs()
                loss = (error * mask).float().sum() / mask.to(error.dtype).sum()  # FAULT
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    return run


@case("to", "overflow", dtypes=(FP16,))
def depth_in_millimetres(dtype: torch.dtype) -> Run:
    def run():
        net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(32, 1)).to(dtype)
        opt = torch.optim.SGD(net.parameters(), 1e-9)
        depth = torch.randint(400, 9000, (6, 1, 4, 4), dtype=torch.int32)
        depth[4, 0, 0, 0] = 65535
        for (image,) in DataLoader(TensorDataset(depth), batch_size=3):
            out = net(image.to(dtype) / 10000)  # FAULT
            loss = out.float().square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("stack", "inherited", names=("sample", "-inf", "check the data"))
def logarithm_of_silence_in_the_data(dtype: torch.dtype) -> Run:
    class Frames(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            power = np.full(8, 0.5, dtype=np.float32)
            power[3] = 0.0 if i == 5 else 0.1
            with np.errstate(divide="ignore"):
                return torch.from_numpy(np.log(power)), i % 4  # FAULT

    return lambda: fit(
        mlp(), dtype, lambda model, x, y: F.cross_entropy(model(x), y), data=list(DataLoader(Frames(), 4))
    )
