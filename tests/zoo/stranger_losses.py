"""Faulty losses, layers and data as strangers write them."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import BF16, FP16, Run
from tests.zoo.strangers import case, fit, mlp
from torch import nn
from torch.utils.data import DataLoader, Dataset


@case("log", "singularity", "mix")
def invertible_convolution_of_rank_one(dtype: torch.dtype) -> Run:
    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, 3))

        def forward(self, x):
            logdet = torch.log(torch.abs(torch.det(self.w)))  # FAULT
            return x @ self.w, logdet

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = Mix()

        def forward(self, x):
            return self.mix(x)

    def nll(m, x, y):
        z, ld = m(x[:, :3])
        return (0.5 * z.square().sum(-1) - ld).mean()

    return lambda: fit(Flow(), dtype, nll)


@case("log", "singularity")
def gan_with_a_sure_discriminator(dtype: torch.dtype) -> Run:
    gen, disc = mlp(8), nn.Sequential(nn.Linear(8, 1), nn.Sigmoid())
    nn.init.constant_(disc[0].bias, -120.0)

    def run():
        opt_g, opt_d = torch.optim.Adam(gen.parameters(), 2e-4), torch.optim.Adam(disc.parameters(), 2e-4)
        for _ in range(1):
            real, fake = torch.randn(4, 8), gen(torch.randn(4, 8))
            d_loss = F.binary_cross_entropy(disc(real), torch.ones(4, 1)) + F.binary_cross_entropy(
                disc(fake.detach()), torch.zeros(4, 1)
            )
            opt_d.zero_grad()
            d_loss.backward()
            opt_d.step()
            g_loss = -torch.log(disc(fake)).mean()  # FAULT
            opt_g.zero_grad()
            g_loss.backward()
            opt_g.step()

    return run


@case("div", "singularity")
def advantages_of_equal_rewards(dtype: torch.dtype) -> Run:
    policy = nn.Linear(4, 2)

    def run():
        opt = torch.optim.Adam(policy.parameters(), 1e-2)
        for _episode in range(2):
            states, actions = torch.randn(10, 4), torch.randint(2, (10,))
            returns = torch.full((10,), 1.0)
            adv = (returns - returns.mean()) / returns.std()  # FAULT
            logp = F.log_softmax(policy(states), -1).gather(1, actions[:, None]).squeeze(1)
            loss = -(logp * adv).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("log", "singularity")
def sac_with_saturated_actions(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        mean, log_std = m(x).chunk(2, -1)
        action = torch.tanh(mean * 50 + 20)
        logp = -log_std - torch.log(1 - action.pow(2))  # FAULT
        return (0.2 * logp).mean()

    return lambda: fit(mlp(), dtype, loss)


@case("log", "underflow", dtypes=(BF16,))
def sac_in_bf16(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        mean, log_std = m(x).chunk(2, -1)
        action = torch.tanh(mean * 0.01 + 4)
        logp = -log_std - torch.log(1 - action.pow(2))  # FAULT
        return (0.2 * logp).float().mean()

    return lambda: fit(mlp(), dtype, loss)


@case("nll_loss", "singularity")
def class_weights_of_zero(dtype: torch.dtype) -> Run:
    weight = torch.tensor([0.0, 1.0, 1.0, 1.0])

    def run():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        criterion = nn.CrossEntropyLoss(weight=weight)
        for y in (torch.tensor([0, 1, 2, 3]), torch.tensor([0, 0, 0, 0])):
            loss = criterion(model(torch.randn(4, 8)), y)  # FAULT
            if not math.isfinite(loss.item()):
                raise SystemExit(f"Loss is {loss.item()}, stopping training")
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "singularity", "proj")
def normalised_without_eps(dtype: torch.dtype) -> Run:
    class Proj(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 16)

        def forward(self, x):
            z = F.relu(self.fc(x) - 100)
            return F.normalize(z, dim=-1, eps=0.0)  # FAULT

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = Proj()

        def forward(self, a, b):
            return self.proj(a) @ self.proj(b).T

    return lambda: fit(Net(), dtype, lambda m, x, y: F.cross_entropy(m(x, x) / 0.07, torch.arange(8)))


@case("pow", "singularity", "pool")
def gem_of_negative_features(dtype: torch.dtype) -> Run:
    class GeM(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.tensor(3.2))

        def forward(self, x):
            return x.pow(self.p).mean((2, 3)).pow(1 / self.p)  # FAULT

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.pool, self.fc = nn.Conv2d(3, 8, 3), GeM(), nn.Linear(8, 4)

        def forward(self, x):
            return self.fc(self.pool(self.conv(x)))

    return lambda: fit(
        Net(), dtype, lambda m, x, y: F.cross_entropy(m(x), y), data=[(torch.randn(4, 3, 8, 8), torch.randint(4, (4,)))]
    )


@case("atanh", "singularity", "ball")
def poincare_at_the_border(dtype: torch.dtype) -> Run:
    class Ball(nn.Module):
        def forward(self, v):
            r = v.norm(dim=-1).clamp(max=1.0)
            return torch.atanh(r)  # FAULT

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.ball = nn.Embedding(10, 8), Ball()

        def forward(self, i):
            return self.ball(self.emb(i) * 3)

    return lambda: fit(Net(), dtype, lambda m, x, y: m(x).mean(), data=[(torch.arange(10), None)])


@case("div", "singularity")
def dataset_that_divides_by_its_range(dtype: torch.dtype) -> Run:
    class Sensors(Dataset):
        def __init__(self):
            self.x = torch.randn(16, 8)
            self.x[5] = 2.0

        def __len__(self):
            return 16

        def __getitem__(self, i):
            row = self.x[i]
            row = (row - row.min()) / (row.max() - row.min())  # FAULT
            return row, i % 4

    def run():
        model = mlp()
        opt = torch.optim.Adam(model.parameters())
        for x, y in DataLoader(Sensors(), batch_size=4):
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("addmm", "inherited", "fc1")
def logarithms_from_numpy(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 1)

        def forward(self, x):
            return self.fc2(F.relu(self.fc1(x)))  # FAULT

    counts = np.random.default_rng(0).integers(1, 9, (12, 8)).astype(np.float32)
    counts[7, 2] = 0
    with np.errstate(divide="ignore"):
        features = np.log(counts)

    def run():
        model = Net()
        opt = torch.optim.SGD(model.parameters(), lr=0.01)
        for start in range(0, 12, 4):
            x = torch.from_numpy(features[start : start + 4])
            loss = model(x).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("mse_loss", "overflow", names=("learning rate",))
def gradient_descent_that_runs_away(dtype: torch.dtype) -> Run:
    def run():
        torch.manual_seed(1)
        model = nn.Linear(8, 1)
        x, y = torch.randn(64, 8) * 3, torch.randn(64, 1)
        opt = torch.optim.SGD(model.parameters(), lr=10.0)
        for _epoch in range(40):
            loss = F.mse_loss(model(x), y)  # FAULT
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("addcdiv", "underflow", "0", phase="optimizer", dtypes=(FP16,))
def rmsprop_on_half_weights(dtype: torch.dtype) -> Run:
    def run():
        model = mlp().half()
        opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
        for _ in range(2):
            x = torch.randn(8, 8).half()
            x[:, 3] = 0
            loss = model(x).float().square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()  # FAULT

    return run


@case("step", "lost-update", "0", phase="optimizer", dtypes=(BF16,))
def adamw_on_bf16_weights(dtype: torch.dtype) -> Run:
    def run():
        model = mlp(width=64).to(dtype)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0)
        for _ in range(3):
            loss = F.cross_entropy(model(torch.randn(8, 8, dtype=dtype)).float(), torch.randint(4, (8,)))
            opt.zero_grad()
            loss.backward()
            opt.step()  # FAULT

    return run


@case("div", "singularity", "quant")
def fake_quantisation_of_zeros(dtype: torch.dtype) -> Run:
    class FakeQuant(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            scale = x.abs().max() / 127
            return (x / scale).round().clamp(-127, 127) * scale  # FAULT

        @staticmethod
        def backward(ctx, g):
            return g

    class Quant(nn.Module):
        def forward(self, x):
            return FakeQuant.apply(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.quant, self.out = nn.Linear(8, 8), Quant(), nn.Linear(8, 4)
            nn.init.constant_(self.fc.bias, -50.0)

        def forward(self, x):
            return self.out(self.quant(F.relu(self.fc(x))))

    return lambda: fit(Net(), dtype, lambda m, x, y: F.cross_entropy(m(x), y))


@case("div", "singularity", "attn")
def renormalised_sparse_attention(dtype: torch.dtype) -> Run:
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            a = (self.q(x) @ self.k(x).transpose(-1, -2)).softmax(-1)
            a = F.threshold(a, 0.9, 0.0)
            a.div_(a.sum(-1, keepdim=True))  # FAULT
            return a @ self.v(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.fc = Sparse(), nn.Linear(8, 4)

        def forward(self, x):
            return self.fc(self.attn(x).mean(1))

    return lambda: fit(
        Net(), dtype, lambda m, x, y: F.cross_entropy(m(x), y), data=[(torch.randn(2, 5, 8), torch.randint(4, (2,)))]
    )


@case("reciprocal", "singularity", "mixer")
def linear_attention_of_dead_features(dtype: torch.dtype) -> Run:
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            q, k = F.relu(q - 50), F.relu(k)
            z = 1.0 / torch.einsum("bnd,bd->bn", q, k.sum(1))  # FAULT
            return torch.einsum("bnd,bde,bn->bne", q, torch.einsum("bnd,bne->bde", k, v), z)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer, self.fc = Linear(), nn.Linear(8, 4)

        def forward(self, x):
            return self.fc(self.mixer(x).mean(1))

    return lambda: fit(
        Net(), dtype, lambda m, x, y: F.cross_entropy(m(x), y), data=[(torch.randn(2, 5, 8), torch.randint(4, (2,)))]
    )
