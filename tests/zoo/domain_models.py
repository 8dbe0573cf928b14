"""Faulty models and objectives of one field each: style, restoration, flows, segmentation, kernels, physics, language."""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import BF16, FP16, Run
from tests.zoo.strangers import amp, case, fit, mlp
from torch import nn


@case("bmm", "overflow", dtypes=(FP16,))
def style_by_gram_matrices(dtype: torch.dtype) -> Run:
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
            nn.init.constant_(self.conv2.bias, 20.0)

        def forward(self, x):
            return self.conv2(F.relu(self.conv1(x)))

    def gram(features):
        b, c, h, w = features.shape
        flat = features.reshape(b, c, h * w)
        return torch.bmm(flat, flat.transpose(1, 2)) / (c * h * w)  # FAULT

    def run():
        encoder = Encoder().requires_grad_(False)
        image = torch.rand(1, 3, 24, 24).requires_grad_()
        opt = torch.optim.Adam([image], lr=0.02)
        with torch.autocast("cpu", dtype):
            want = encoder(torch.rand(1, 3, 24, 24)).mean((2, 3))
        for _ in range(2):
            with torch.autocast("cpu", dtype):
                loss = (gram(encoder(image)).float() - want.float()).square().mean()
            opt.zero_grad()
            (loss * 128).backward()
            opt.step()

    return run


@case("sqrt", "underflow", phase="backward", dtypes=(FP16,))
def charbonnier_of_a_perfect_pixel(dtype: torch.dtype) -> Run:
    class CharbonnierLoss(nn.Module):
        def __init__(self, eps=1e-6):
            super().__init__()
            self.eps = eps

        def forward(self, x, y):
            diff = x - y
            return torch.sqrt(diff * diff + self.eps**2).mean()  # FAULT

    def run():
        net, criterion = nn.Conv2d(1, 1, 3, padding=1, bias=False), CharbonnierLoss()
        opt = torch.optim.Adam(net.parameters(), 2e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
        image = torch.rand(2, 1, 8, 8)
        image[:, :, :4] = 0.0
        for _ in range(2):
            with torch.autocast("cpu", dtype):
                out = net(image)
                loss = criterion(out, image.to(out.dtype))
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    return run


@case("log", "singularity", "flows.0")
def actnorm_of_a_constant_channel(dtype: torch.dtype) -> Run:
    class ActNorm(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.loc, self.log_scale = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
            self.initialised = False

        def forward(self, x):
            if not self.initialised:
                self.initialised = True
                with torch.no_grad():
                    self.loc.copy_(x.mean(0))
                    self.log_scale.copy_(-torch.log(x.std(0)))  # FAULT
            return (x - self.loc) * self.log_scale.exp(), self.log_scale.sum().expand(len(x))

    class Glow(nn.Module):
        def __init__(self):
            super().__init__()
            self.flows = nn.ModuleList([ActNorm(8), ActNorm(8)])

        def forward(self, x):
            total = 0
            for flow in self.flows:
                x, logdet = flow(x)
                total = total + logdet
            return (total - 0.5 * x.square().sum(-1)).mean()

    x = torch.randn(16, 8)
    x[:, 3] = 1.0
    return lambda: fit(Glow(), dtype, lambda m, x, y: -m(x), data=[(x, None)])


@case("div", "singularity")
def overlap_by_class_without_the_class(dtype: torch.dtype) -> Run:
    def miou_loss(logits, target):
        p = logits.float().softmax(1)
        onehot = F.one_hot(target, 4).permute(0, 3, 1, 2).float()
        present = onehot * (p.detach() > 0)
        inter = (p * present).sum((0, 2, 3))
        union = present.sum((0, 2, 3))
        return 1 - (inter / union).mean()  # FAULT

    data = [(torch.rand(2, 3, 8, 8), torch.randint(3, (2, 8, 8)))]
    return lambda: fit(nn.Conv2d(3, 4, 1), dtype, lambda m, x, y: miou_loss(m(x), y), data=data)


@case("logdet", "singularity")
def likelihood_of_an_indefinite_kernel(dtype: torch.dtype) -> Run:
    def run():
        x = torch.linspace(0, 1, 4)[:, None]
        length, noise = nn.Parameter(torch.tensor(0.0)), nn.Parameter(torch.tensor(-1.0))
        opt = torch.optim.Adam([length, noise], lr=0.1)
        for _ in range(2):
            k = torch.exp(-((x - x.T).abs() / length.exp()))
            k = k + noise * torch.eye(4)
            loss = torch.logdet(k)  # FAULT
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("log", "singularity")
def field_of_a_charge_at_its_place(dtype: torch.dtype) -> Run:
    class PINN(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

        def forward(self, xy):
            return self.net(xy).squeeze(-1)

    def run():
        u = PINN()
        opt = torch.optim.Adam(u.parameters(), 1e-3)
        grid = torch.tensor(list(itertools.product([-1.0, 0.0, 1.0], repeat=2)), requires_grad=True)
        for _ in range(2):
            (du,) = torch.autograd.grad(u(grid).sum(), grid, create_graph=True)
            r = (grid**2).sum(-1).detach()
            exact = -0.5 * torch.log(r)  # FAULT
            loss = du.square().mean() + (u(grid) - exact).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("log", "underflow", dtypes=(FP16,))
def likelihood_as_a_product(dtype: torch.dtype) -> Run:
    def run():
        model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8)).half()
        opt = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(2):
            ids = torch.randint(8, (2, 16))
            p = model(ids).softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
            loss = -torch.log(p.prod(-1)).mean()  # FAULT
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("log", "singularity")
def teacher_of_hard_labels(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        teacher = torch.log(F.one_hot(y, 4).float())  # FAULT
        return F.kl_div(m(x).float().log_softmax(-1), teacher, log_target=True, reduction="batchmean")

    return lambda: fit(mlp(), dtype, loss)


@case("div", "singularity", phase="backward")
def sinc_at_its_centre(dtype: torch.dtype) -> Run:
    class SincConv(nn.Module):
        def __init__(self):
            super().__init__()
            self.cutoff = nn.Parameter(torch.tensor([0.1, 0.3]))
            self.register_buffer("n", torch.arange(-4.0, 5.0))

        def forward(self, x):
            arg = self.cutoff[:, None] * self.n
            kernel = torch.where(arg == 0, 1.0, torch.sin(arg) / arg)  # FAULT
            return F.conv1d(x, kernel[:, None].to(x.dtype))

    data = [(torch.randn(2, 1, 32), torch.randn(2, 2, 24))]
    return lambda: fit(SincConv(), dtype, lambda m, x, y: F.mse_loss(m(x).float(), y), data=data)


@case("log", "singularity")
def gap_between_tied_experts(dtype: torch.dtype) -> Run:
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(8, 4, bias=False)
            self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(4))
            nn.init.zeros_(self.gate.weight)

        def forward(self, x):
            top, index = self.gate(x).float().softmax(-1).topk(2)
            aux = -torch.log(top[:, 0] - top[:, 1]).mean()  # FAULT
            chosen = torch.stack([e(x) for e in self.experts], 1)[torch.arange(len(x))[:, None], index]
            return (chosen * top[..., None].to(chosen.dtype)).sum(1), aux

    def loss(m, x, y):
        out, aux = m(x)
        return F.cross_entropy(out.float(), y) + 0.01 * aux

    return lambda: fit(Router(), dtype, loss)


@case("div", "singularity")
def contrast_normalised_over_flat_images(dtype: torch.dtype) -> Run:
    class LocalContrast(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(
                nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
            )

        def forward(self, x):
            mean, std = x.mean((2, 3), keepdim=True), x.std((2, 3), keepdim=True)
            x = (x - mean) / std  # FAULT
            return self.net(x)

    images = torch.rand(4, 1, 8, 8)
    images[2] = 0.25
    data = [(images, torch.tensor([0, 1, 1, 0]))]
    return lambda: fit(LocalContrast(), dtype, lambda m, x, y: F.cross_entropy(m(x).float(), y), data=data)


@case("div", "underflow", dtypes=(BF16, FP16))
def time_step_rounded_away(dtype: torch.dtype) -> Run:
    class Derivative(nn.Module):
        def __init__(self):
            super().__init__()
            self.field = nn.Linear(4, 4)

        def forward(self, x, t):
            t0 = self.field(x).mul(0).add(t)
            t1 = t0 + 1e-4
            return (t1 * x - t0 * x) / (t1 - t0)  # FAULT

    def run():
        model = Derivative()
        opt = torch.optim.SGD(model.parameters(), 1e-3)
        with amp(dtype):
            out = model(torch.randn(3, 4), 1.0)
        loss = out.float().square().mean()
        opt.zero_grad()
        (64 * loss).backward()
        opt.step()

    return run


@case("mul", "singularity", "attn")
def mask_multiplied_by_infinity(dtype: torch.dtype) -> Run:
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x, keep):
            q, k, v = self.qkv(x).chunk(3, -1)
            score = q @ k.mT / math.sqrt(8)
            score = score + (1.0 - keep)[:, None, :] * float("-inf")  # FAULT
            return score.softmax(-1) @ v

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.out = Attention(), nn.Linear(8, 2)

        def forward(self, x, keep):
            return self.out(self.attn(x, keep)[:, 0])

    def run():
        net = Net()
        opt = torch.optim.AdamW(net.parameters())
        keep = torch.tensor([[1.0, 1, 1, 0], [1, 1, 0, 0]])
        loss = F.cross_entropy(net(torch.randn(2, 4, 8), keep), torch.tensor([0, 1]))
        opt.zero_grad()
        loss.backward()
        opt.step()

    return run


@case("bmm", "overflow", "blocks.1.attn", dtypes=(FP16,))
def scores_by_einsum(dtype: torch.dtype) -> Run:
    class Attn(nn.Module):
        def __init__(self, gain):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
            nn.init.constant_(self.q.bias, gain)
            nn.init.constant_(self.k.bias, gain)

        def forward(self, x):
            scores = torch.einsum("bid,bjd->bij", self.q(x), self.k(x))  # FAULT
            return torch.einsum("bij,bjd->bid", (scores / 4).softmax(-1), self.v(x))

    class Block(nn.Module):
        def __init__(self, gain):
            super().__init__()
            self.attn, self.ln = Attn(gain), nn.LayerNorm(16)

        def forward(self, x):
            return x + self.attn(self.ln(x))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(Block(0.0), Block(100.0))
            self.head = nn.Linear(16, 4)

        def forward(self, x):
            return self.head(self.blocks(x).mean(1))

    data = [(torch.randn(2, 5, 16), torch.randint(4, (2,)))]
    return lambda: fit(Net(), dtype, lambda m, x, y: F.cross_entropy(m(x).float(), y), data=data)
