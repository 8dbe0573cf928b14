"""Faulty losses and steps by hand as strangers write them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import FP16, FP32, Run
from tests.zoo.strangers import amp, case, fit, mlp
from torch import nn


@case("div", "singularity", "moe")
def experts_that_get_no_weight(dtype: torch.dtype) -> Run:
    class MoE(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(8, 4)
            self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(4))

        def forward(self, x):
            w = self.router(x).softmax(-1)
            w = torch.where(w > 0.9, w, 0.0)
            w = w / w.sum(-1, keepdim=True)  # FAULT
            return torch.einsum("be,beo->bo", w, torch.stack([e(x) for e in self.experts], 1))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = MoE()

        def forward(self, x):
            return self.moe(x)

    return lambda: fit(Net(), dtype, lambda m, x, y: F.cross_entropy(m(x), y))


@case("div", "singularity")
def percentage_error_at_zero(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        target = torch.randn(8, 4).relu()
        return ((m(x).float() - target) / target).abs().mean()  # FAULT

    return lambda: fit(mlp(), dtype, loss)


@case("div", "singularity")
def log_returns_of_a_delisted_stock(dtype: torch.dtype) -> Run:
    prices = torch.rand(9, 8) + 1
    prices[6:, 2] = 0

    def run():
        model = mlp(1)
        opt = torch.optim.SGD(model.parameters(), 0.01)
        returns = torch.log(prices[1:] / prices[:-1])  # FAULT
        for i in range(4):
            loss = model(returns[i * 2 : i * 2 + 2]).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "underflow", dtypes=(FP16,))
def adam_by_hand_in_half(dtype: torch.dtype) -> Run:
    model = mlp().half()
    m = {p: torch.zeros_like(p) for p in model.parameters()}
    v = {p: torch.zeros_like(p) for p in model.parameters()}

    def run():
        for _ in range(2):
            loss = model(torch.randn(8, 8).half()).float().square().mean() * 1e-2
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    m[p].mul_(0.9).add_(p.grad, alpha=0.1)
                    v[p].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                    p.sub_(1e-3 * m[p] / (v[p].sqrt() + 1e-8))  # FAULT

    return run


@case("div", "singularity")
def orthogonalised_update_of_no_gradient(dtype: torch.dtype) -> Run:
    def run():
        model = mlp()
        for _ in range(2):
            loss = F.relu(model(torch.randn(8, 8)) - 1e3).mean()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.ndim == 2:
                        g = p.grad / p.grad.norm()  # FAULT
                        p.add_(1.5 * g - 0.5 * g @ g.T @ g, alpha=-0.02)

    return run


@case("div", "singularity")
def bias_correction_from_step_zero(dtype: torch.dtype) -> Run:
    def run():
        model = mlp()
        opt = torch.optim.Adam(model.parameters())
        ema = torch.zeros(())
        for step in range(3):
            raw = F.cross_entropy(model(torch.randn(8, 8)), torch.randint(4, (8,)))
            ema = 0.9 * ema + 0.1 * raw.detach()
            scale = ema / (1 - 0.9**step)  # FAULT
            loss = raw / scale.detach() + 0 * scale
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("log", "singularity", "front")
def mel_of_silence(dtype: torch.dtype) -> Run:
    class Front(nn.Module):
        def forward(self, wave):
            spec = torch.stft(wave, 16, return_complex=True, window=torch.hann_window(16)).abs().pow(2)
            return torch.log(spec).mean(-1)  # FAULT

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.front, self.fc = Front(), nn.Linear(9, 4)

        def forward(self, x):
            return self.fc(self.front(x))

    wave = torch.randn(4, 64)
    wave[1] = 0
    return lambda: fit(Net(), dtype, lambda m, x, y: F.cross_entropy(m(x), y), data=[(wave, torch.randint(4, (4,)))])


@case("pow", "overflow", dtypes=(FP32,), names=("learning rate",))
def adam_at_a_thousandfold_rate(dtype: torch.dtype) -> Run:
    def run():
        torch.manual_seed(0)
        model = mlp(width=32)
        opt = torch.optim.SGD(model.parameters(), lr=30.0, momentum=0.9)
        for _ in range(6):
            with amp(dtype):
                out = model(torch.randn(16, 8))
            loss = out.float().square().mean()  # FAULT
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "singularity")
def robust_scaling_of_a_constant(dtype: torch.dtype) -> Run:
    x = torch.randn(32, 8)
    x[:, 5] = 4.0

    def run():
        model = mlp()
        opt = torch.optim.Adam(model.parameters())
        q1, q3 = torch.quantile(x, 0.25, dim=0), torch.quantile(x, 0.75, dim=0)
        z = (x - x.median(0).values) / (q3 - q1)  # FAULT
        for i in range(2):
            loss = F.cross_entropy(model(z[i * 8 : i * 8 + 8]), torch.randint(4, (8,)))
            if loss != loss:
                break
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("cumprod", "overflow", dtypes=(FP16,))
def odds_multiplied_up(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        odds = m(x).exp() + 40
        return odds.cumprod(-1).log().float().mean()  # FAULT

    return lambda: fit(mlp(), dtype, loss)


@case("addmm", "inherited", "net.0")
def weights_from_a_broken_checkpoint(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return self.net(x)  # FAULT

    model = Net()
    state = model.state_dict()
    state["net.0.weight"] = state["net.0.weight"].clone()
    state["net.0.weight"][2, 1] = math.inf
    model.load_state_dict(state)
    return lambda: fit(model, dtype, lambda m, x, y: F.cross_entropy(m(x), y))
