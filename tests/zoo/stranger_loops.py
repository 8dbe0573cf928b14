"""Faulty loops and balances of losses as strangers write them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import FP16, FP32, Run
from tests.zoo.strangers import amp, case, fit, mlp
from torch import nn
from torch.func import functional_call, grad, vmap


@case("sum", "overflow", dtypes=(FP16,))
def dice_over_a_large_image(dtype: torch.dtype) -> Run:
    conv = nn.Conv2d(3, 1, 1)
    nn.init.constant_(conv.bias, 9.0)

    def dice(p, t):
        inter = (p * t).sum()  # FAULT
        return 1 - (2 * inter + 1) / (p.sum() + t.sum() + 1)

    def run():
        opt, scaler = torch.optim.SGD(conv.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=2.0**14)
        with amp(dtype):
            p = torch.sigmoid(conv(torch.randn(2, 3, 192, 192)))
            loss = dice(p, torch.ones(2, 1, 192, 192, dtype=p.dtype))
        scaler.scale(loss).backward()
        scaler.step(opt)

    return run


@case("div", "singularity")
def temperature_annealed_to_zero(dtype: torch.dtype) -> Run:
    def run():
        model = mlp()
        opt = torch.optim.Adam(model.parameters())
        for step in range(4):
            tau = max(0.0, 1.0 - step / 3)
            p = F.softmax(model(torch.randn(8, 8)) / tau, dim=-1)  # FAULT
            loss = p.var()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("sqrt", "singularity", phase="backward")
def vicreg_of_a_dead_dimension(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        z = m(x) * torch.tensor([1.0, 1.0, 1.0, 0.0])
        std = torch.sqrt(z.var(dim=0))  # FAULT
        return F.relu(1 - std).mean()

    return lambda: fit(mlp(), dtype, loss)


@case("log", "singularity")
def barrier_under_lbfgs(dtype: torch.dtype) -> Run:
    def run():
        w = nn.Parameter(torch.zeros(4))
        c, b = torch.tensor([1.0, 2.0, 3.0, 4.0]), 1.0
        opt = torch.optim.LBFGS([w], lr=1.0, max_iter=5)

        def closure():
            opt.zero_grad()
            loss = -(c * w).sum() - 0.1 * torch.log(b - w).sum()  # FAULT
            loss.backward()
            return loss

        for _ in range(3):
            opt.step(closure)

    return run


@case("sqrt", "singularity", phase="backward")
def per_sample_gradients(dtype: torch.dtype) -> Run:
    model = mlp(1)
    params = {k: v.detach() for k, v in model.named_parameters()}

    def loss(p, x, y):
        out = functional_call(model, p, (x[None],))
        return torch.sqrt((out - out.detach() - y).pow(2).sum())  # FAULT

    def run():
        per = vmap(grad(loss), in_dims=(None, 0, 0))(params, torch.randn(5, 8), torch.zeros(5))
        with torch.no_grad():
            for p, g in zip(model.parameters(), per.values(), strict=False):
                p.sub_(0.1 * g.mean(0))

    return run


@case("mm", "overflow", "model.layers.0.mlp.down_proj", dtypes=(FP16,))
def llama_in_half(dtype: torch.dtype) -> Run:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(3e4)
        model.model.layers[0].mlp.up_proj.weight.fill_(1.0)
        model.model.layers[0].mlp.gate_proj.weight.fill_(1.0)
    ids = torch.randint(0, 64, (2, 8))

    def run():
        opt = torch.optim.SGD(model.parameters(), 1e-3)
        with amp(dtype):
            loss = model(ids, labels=ids).loss  # FAULT
        loss.backward()
        opt.step()

    return run


@case("div", "singularity")
def trainer_that_catches(dtype: torch.dtype) -> Run:
    class Trainer:
        def __init__(self):
            self.model = mlp()
            self.opt = torch.optim.Adam(self.model.parameters())

        def compute_loss(self, x, mask):
            err = (self.model(x) - 1).square().mean(-1)
            return (err * mask).sum() / mask.sum()  # FAULT

        def fit(self):
            for i in range(3):
                try:
                    mask = torch.ones(8) if i < 2 else torch.zeros(8)
                    loss = self.compute_loss(torch.randn(8, 8), mask)
                    if torch.isnan(loss).any():
                        raise FloatingPointError("nan loss")
                    self.opt.zero_grad()
                    loss.backward()
                    self.opt.step()
                except FloatingPointError as e:
                    print("skipping batch", e)

    return lambda: Trainer().fit()


@case("rsqrt", "singularity")
def noise_schedule_that_starts_at_zero(dtype: torch.dtype) -> Run:
    betas = torch.linspace(0.0, 0.02, 10)
    abar = torch.cumprod(1 - betas, 0)

    def loss(m, x, y):
        t = torch.arange(8)
        noise = torch.randn_like(x)
        noisy = abar[t].sqrt()[:, None] * x + (1 - abar[t]).sqrt()[:, None] * noise
        w = torch.rsqrt(1 - abar[t])  # FAULT
        return (w * (m(noisy) - noise).square().mean(-1)).mean()

    return lambda: fit(mlp(8), dtype, loss)


@case("log", "singularity")
def poisson_of_a_dead_relu(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        rate = F.relu(m(x))
        return (rate - y[:, None] * torch.log(rate)).mean()  # FAULT

    return lambda: fit(mlp(), dtype, loss)


@case("div", "singularity")
def losses_balanced_by_their_ratio(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        out = m(x)
        main, aux = F.cross_entropy(out, y), F.relu(out - 1e3).mean()
        return main + aux * (main.detach() / aux.detach())  # FAULT

    return lambda: fit(mlp(), dtype, loss)


@case("exp", "overflow", "weights", dtypes=(FP32, FP16))
def uncertainty_weights(dtype: torch.dtype) -> Run:
    class Weights(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_var = nn.Parameter(torch.tensor([0.0, -100.0]))

        def forward(self, losses):
            return (torch.exp(-self.log_var) * losses + self.log_var).sum()  # FAULT

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.weights = mlp(), Weights()

        def forward(self, x, y):
            out = self.net(x).float()
            return self.weights(torch.stack([F.cross_entropy(out, y), out.square().mean()]))

    return lambda: fit(Net(), dtype, lambda m, x, y: m(x, y))


@case("div", "singularity", "head")
def weight_norm_of_a_zero_layer(dtype: torch.dtype) -> Run:
    class WNLinear(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.v, self.g = nn.Parameter(torch.zeros(o, i)), nn.Parameter(torch.ones(o, 1))

        def forward(self, x):
            w = self.g * self.v / self.v.norm(dim=1, keepdim=True)  # FAULT
            return F.linear(x, w)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), WNLinear(8, 4)

        def forward(self, x):
            return self.head(F.relu(self.body(x)))

    return lambda: fit(Net(), dtype, lambda m, x, y: F.cross_entropy(m(x), y))


@case("reciprocal", "singularity")
def clipping_by_hand_of_no_gradient(dtype: torch.dtype) -> Run:
    def run():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = (F.relu(model(torch.randn(8, 8)) - 1e3)).mean()
            opt.zero_grad()
            loss.backward()
            total = torch.sqrt(sum(p.grad.square().sum() for p in model.parameters()))
            coef = 1.0 / total  # FAULT
            for p in model.parameters():
                p.grad.mul_(coef)
            opt.step()

    return run


@case("to", "underflow", phase="backward", dtypes=(FP16,))
def loss_divided_by_a_huge_count(dtype: torch.dtype) -> Run:
    def run():
        model = mlp(width=32)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with amp(dtype):
                out = model(torch.randn(16, 8))
            loss = out.float().square().sum() / 1e9  # FAULT
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("exp", "overflow", "clip", dtypes=(FP16, FP32))
def clip_with_a_free_temperature(dtype: torch.dtype) -> Run:
    class Clip(nn.Module):
        def __init__(self):
            super().__init__()
            self.img, self.txt = nn.Linear(8, 8), nn.Linear(8, 8)
            self.logit_scale = nn.Parameter(torch.tensor(95.0))

        def forward(self, a, b):
            a, b = F.normalize(self.img(a), dim=-1), F.normalize(self.txt(b), dim=-1)
            return self.logit_scale.exp() * (a @ b.T).float()  # FAULT

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.clip = Clip()

        def forward(self, x):
            return self.clip(x, x)

    return lambda: fit(Net(), dtype, lambda m, x, y: F.cross_entropy(m(x), torch.arange(8)))


@case("reciprocal", "singularity")
def sinkhorn_with_a_small_eps(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        z = m(x)
        cost = torch.cdist(z, z + 10)
        k = torch.exp(-cost / 0.01)
        u = torch.ones(8)
        for _ in range(2):
            v = 1 / (k.T @ u)  # FAULT
            u = 1 / (k @ v)
        return (u[:, None] * k * v * cost).sum()

    return lambda: fit(mlp(), dtype, loss)


@case("pow", "singularity", phase="backward")
def focal_tversky(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        p = torch.sigmoid(m(x)) * 0 + F.one_hot(y, 4) * 1.0
        t = F.one_hot(y, 4).float()
        tp, fp, fn = (p * t).sum(), (p * (1 - t)).sum(), ((1 - p) * t).sum()
        tversky = tp / (tp + 0.3 * fp + 0.7 * fn)
        return (1 - tversky) ** 0.75  # FAULT

    return lambda: fit(mlp(), dtype, loss)


@case("sqrt", "singularity")
def arcface_beyond_one(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        z = m(x)
        cos = (z * z).sum(-1) / z.norm(dim=-1).square() * 1.00001
        sin = torch.sqrt(1.0 - cos * cos)  # FAULT
        return F.relu(cos * math.cos(0.5) - sin * math.sin(0.5)).mean()

    return lambda: fit(mlp(), dtype, loss)


@case("div", "singularity")
def divergence_of_gaussians_without_spread(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        mu, raw = m(x).chunk(2, -1)
        sigma = F.relu(raw - 1e3)
        return (0.5 * (1.0 + mu.square()) / sigma.square()).mean()  # FAULT

    return lambda: fit(mlp(), dtype, loss)


@case("div", "singularity", phase="backward")
def complete_iou_of_flat_boxes(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        b = m(x).sigmoid()
        w, h = b[:, 2], b[:, 3] * 0.0
        v = (4 / math.pi**2) * (torch.atan(w / h) - math.pi / 4).pow(2)  # FAULT
        return v.mean()

    return lambda: fit(mlp(), dtype, loss)


@case("log", "singularity")
def laplace_without_scale(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        loc, scale = m(x).chunk(2, -1)
        scale = scale.clamp(min=0) * 0
        return (torch.log(2 * scale) + (loc - 1).abs()).mean()  # FAULT

    return lambda: fit(mlp(), dtype, loss)


@case("log", "singularity")
def contrast_of_one_sample(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        z = F.normalize(m(x[:1]), dim=-1)
        sim = z @ z.T / 0.1
        sim = sim.masked_fill(torch.eye(len(z), dtype=torch.bool), float("-inf"))
        return torch.log(sim.exp().sum(-1)).mean()  # FAULT

    return lambda: fit(mlp(), dtype, loss)
