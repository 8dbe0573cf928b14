"""Faulty recipes for models that generate: diffusion, flows, autoencoders, adversaries, energies."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import FP16, Run
from tests.zoo.strangers import amp, case, fit, mlp
from torch import nn
from torch.distributions import Normal, kl_divergence


@case("div", "singularity")
def score_at_time_zero(dtype: torch.dtype) -> Run:
    class VPSDE:
        beta_min, beta_max = 0.1, 20.0

        def marginal(self, x, t):
            c = -0.25 * t**2 * (self.beta_max - self.beta_min) - 0.5 * t * self.beta_min
            return torch.exp(c)[:, None] * x, torch.sqrt(1.0 - torch.exp(2.0 * c))

    def run():
        net, sde = mlp(8), VPSDE()
        opt = torch.optim.Adam(net.parameters(), 2e-4)
        for _ in range(2):
            x, t = torch.randn(4, 8), torch.tensor([0.7, 0.0, 0.3, 1.0])
            mean, std = sde.marginal(x, t)
            z = torch.randn_like(x)
            score = -net(mean + std[:, None] * z) / std[:, None]  # FAULT
            loss = (score * std[:, None] + z).square().sum(-1).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "singularity")
def velocity_at_the_end_of_the_path(dtype: torch.dtype) -> Run:
    def run():
        net = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 2))
        opt = torch.optim.Adam(net.parameters(), 1e-3)
        for _ in range(2):
            x0, x1 = torch.randn(5, 2), torch.rand(5, 2)
            t = torch.linspace(0, 1, 5)[:, None]
            xt = (1 - t) * x0 + t * x1
            target = (x1 - xt) / (1 - t)  # FAULT
            loss = (net(torch.cat([xt, t], -1)) - target).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("sqrt", "singularity", "transform")
def spline_whose_root_is_imaginary(dtype: torch.dtype) -> Run:
    class Quadratic(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 12)

        def forward(self, y, context):
            a, b, c = self.net(context).unflatten(-1, (4, 3)).unbind(-1)
            a, c = a.abs() + 1.0, c.abs() + y.abs() + 0.5
            root = torch.sqrt(b.pow(2) - 4 * a * c)  # FAULT
            return (-b + root) / (2 * a), (a.log() + root).sum(-1)

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.transform = Quadratic()

        def log_prob(self, y, context):
            return self(y, context)

        def forward(self, y, context):
            x, logdet = self.transform(y, context)
            return -0.5 * x.pow(2).sum(-1) + logdet

    def run():
        flow = Flow()
        opt = torch.optim.Adam(flow.parameters())
        for _ in range(2):
            loss = -flow.log_prob(torch.rand(6, 4), torch.randn(6, 4)).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("linalg_slogdet", "singularity", "steps.1")
def permutation_that_lost_its_rank(dtype: torch.dtype) -> Run:
    class InvConv(nn.Module):
        def __init__(self, c, rank):
            super().__init__()
            w = torch.linalg.qr(torch.randn(c, c))[0]
            w[rank:] = 0.0
            self.weight = nn.Parameter(w)

        def forward(self, x):
            logdet = torch.slogdet(self.weight)[1] * x.shape[-1]  # FAULT
            return torch.einsum("oc,bct->bot", self.weight, x), logdet

    class Glow(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = nn.ModuleList([InvConv(4, 4), InvConv(4, 3)])

        def forward(self, x):
            total = x.new_zeros(())
            for step in self.steps:
                x, logdet = step(x)
                total = total + logdet
            return x, total

    def run():
        glow = Glow()
        opt = torch.optim.Adam(glow.parameters(), 1e-4)
        for _ in range(2):
            z, logdet = glow(torch.randn(2, 4, 6))
            loss = (0.5 * z.pow(2).sum() - logdet) / z.numel()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "singularity", "quantizer")
def codes_that_nobody_uses(dtype: torch.dtype) -> Run:
    class EMAQuantizer(nn.Module):
        def __init__(self, n=8, d=4, decay=0.0):
            super().__init__()
            self.decay = decay
            self.register_buffer("embed", torch.randn(n, d))
            self.register_buffer("cluster_size", torch.zeros(n))
            self.register_buffer("embed_sum", torch.zeros(n, d))

        def forward(self, z):
            index = torch.cdist(z, self.embed).argmin(-1)
            onehot = F.one_hot(index, len(self.embed)).type(z.dtype)
            if self.training:
                with torch.no_grad():
                    self.cluster_size.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
                    self.embed_sum.mul_(self.decay).add_(onehot.T @ z, alpha=1 - self.decay)
                    self.embed.copy_(self.embed_sum / self.cluster_size[:, None])  # FAULT
            q = F.embedding(index, self.embed)
            return z + (q - z).detach(), F.mse_loss(z, q.detach())

    class VQVAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.quantizer, self.dec = nn.Linear(8, 4), EMAQuantizer(), nn.Linear(4, 8)

        def forward(self, x):
            z, commit = self.quantizer(self.enc(x))
            return self.dec(z), commit

    def run():
        model = VQVAE()
        opt = torch.optim.Adam(model.parameters())
        for _ in range(3):
            x = torch.randn(3, 8)
            recon, commit = model(x)
            loss = F.mse_loss(recon, x) + 0.25 * commit
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "singularity", "1")
def power_iteration_on_a_zero_layer(dtype: torch.dtype) -> Run:
    class SNLinear(nn.Linear):
        def __init__(self, i, o):
            super().__init__(i, o)
            self.register_buffer("u", torch.randn(o))

        def forward(self, x):
            with torch.no_grad():
                v = self.weight.t().mv(self.u)
                v = v / v.norm()  # FAULT
                self.u.copy_(self.weight.mv(v))
            return F.linear(x, self.weight / torch.dot(self.u, self.weight.mv(v)), self.bias)

    def run():
        disc = nn.Sequential(SNLinear(8, 8), SNLinear(8, 1))
        nn.init.zeros_(disc[1].weight)
        opt = torch.optim.Adam(disc.parameters(), 2e-4, betas=(0.0, 0.9))
        for _ in range(2):
            real, fake = disc(torch.cat([torch.randn(4, 8), torch.rand(4, 8)])).chunk(2)
            loss = F.relu(1 - real).mean() + F.relu(1 + fake).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("pow", "overflow", dtypes=(FP16,))
def divergence_of_a_wide_posterior(dtype: torch.dtype) -> Run:
    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.dec = nn.Linear(8, 8), nn.Linear(4, 8)
            with torch.no_grad():
                self.enc.bias[4:] = 6.0

        def forward(self, x):
            mu, log_sigma = self.enc(x).chunk(2, -1)
            q = Normal(mu, log_sigma.exp())
            return self.dec(q.rsample()), q

    def run():
        model = VAE()
        opt, scaler = torch.optim.Adam(model.parameters()), torch.amp.GradScaler("cpu", init_scale=1.0)
        for _ in range(2):
            x = torch.randn(4, 8)
            with amp(dtype):
                recon, q = model(x)
                kl = kl_divergence(q, Normal(torch.zeros_like(q.loc), torch.ones_like(q.loc)))  # FAULT
                loss = F.mse_loss(torch.tanh(recon).float(), x) + 1e-3 * kl.float().sum(-1).mean()
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    return run


@case("div", "underflow", dtypes=(FP16,))
def signal_to_noise_of_a_halved_schedule(dtype: torch.dtype) -> Run:
    def run():
        unet = nn.Conv2d(1, 1, 3, padding=1).to(dtype)
        alphas_cumprod = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)
        acp = alphas_cumprod.to(dtype)
        opt = torch.optim.SGD(unet.parameters(), 1e-4)
        for t in ([50, 80], [0, 30]):
            x, noise = torch.rand(2, 1, 4, 4, dtype=dtype), torch.randn(2, 1, 4, 4, dtype=dtype)
            a = acp[t].view(-1, 1, 1, 1)
            snr = a / (1 - a)  # FAULT
            pred = unet(a.sqrt() * x + (1 - a).sqrt() * noise)
            loss = (snr * (pred - noise).pow(2)).float().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("log", "singularity")
def logistic_bin_in_the_far_tail(dtype: torch.dtype) -> Run:
    def discretized_logistic(x, mean, log_scale):
        inv = torch.exp(-log_scale)
        upper, lower = torch.sigmoid(inv * (x + 1 / 255 - mean)), torch.sigmoid(inv * (x - 1 / 255 - mean))
        return torch.log(upper - lower)  # FAULT

    def loss(model, x, y):
        mean, log_scale = model(x).chunk(2, -1)
        return -discretized_logistic(torch.rand(8, 2), mean - 40, log_scale - 4).mean()

    return lambda: fit(mlp(), dtype, loss, steps=2)


@case("pow", "overflow")
def langevin_steps_that_are_too_long(dtype: torch.dtype) -> Run:
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 8)

        def forward(self, x):
            return self.net(x).square().sum(-1) + x.pow(4).sum(-1)  # FAULT

    def run():
        energy = Energy()
        opt = torch.optim.Adam(energy.parameters(), 1e-4)
        for _ in range(2):
            x = torch.full((4, 2), 3.0)
            for _k in range(8):
                x = x.detach().requires_grad_()
                (g,) = torch.autograd.grad(energy(x).sum(), x)
                x = x - 0.5 * g + 0.01 * torch.randn_like(x)
            loss = energy(torch.randn(4, 2)).mean() - energy(x.detach()).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run
