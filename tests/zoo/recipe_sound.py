"""Healthy recipes for agents, generators and science, near the faults of others: the diagnosis must say nothing."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import BF16, FP16, FP32, Run
from tests.zoo.strangers import amp, fit, healthy, mlp
from torch import nn
from torch.distributions import Categorical, Normal
from torch.func import functional_call


@healthy(FP32)
def bandit_that_tries_each_arm_first(dtype: torch.dtype) -> Run:
    def run():
        model, counts = nn.Linear(8, 5), torch.zeros(5)
        opt = torch.optim.SGD(model.parameters(), 0.05)
        for t in range(1, 8):
            context = torch.randn(8)
            with torch.no_grad():
                bonus = torch.sqrt(2 * torch.log(torch.tensor(float(t + 1))) / counts)
                arm = int((model(context) + bonus).argmax())
            counts[arm] += 1
            loss = (model(context)[arm] - torch.rand(())).square()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy(FP32, BF16)
def masked_actor_critic(dtype: torch.dtype) -> Run:
    def run():
        net = mlp(6)
        opt = torch.optim.Adam(net.parameters(), 2.5e-4, eps=1e-5)
        for _ in range(2):
            obs, legal = torch.randn(8, 8), torch.rand(8, 5) > 0.4
            legal[:, 0] = True
            with amp(dtype):
                out = net(obs)
            logits, value = out.float().split((5, 1), -1)
            dist = Categorical(logits=logits.masked_fill(~legal, torch.finfo(logits.dtype).min))
            act = dist.sample()
            adv = torch.randn(8)
            adv = (adv - adv.mean()) / (adv.std() + 1e-8)
            ratio = torch.exp(dist.log_prob(act) - dist.log_prob(act).detach())
            pg = torch.max(-adv * ratio, -adv * ratio.clamp(0.8, 1.2)).mean()
            loss = pg + 0.5 * value.square().mean() - 0.01 * dist.entropy().mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()

    return run


@healthy(FP32)
def soft_actor_critic_with_two_critics(dtype: torch.dtype) -> Run:
    def run():
        actor, q1, q2 = mlp(4), mlp(1, 12), mlp(1, 12)
        log_alpha = torch.zeros(1, requires_grad=True)
        opts = [torch.optim.Adam(p, 3e-4) for p in (actor.parameters(), [*q1.parameters(), *q2.parameters()])]
        opt_alpha = torch.optim.Adam([log_alpha], 3e-4)
        for _ in range(2):
            obs = torch.randn(8, 8)
            mu, log_std = actor(obs).chunk(2, -1)
            dist = Normal(mu, log_std.clamp(-20, 2).exp())
            raw = dist.rsample()
            act = raw.tanh()
            logp = (dist.log_prob(raw) - 2 * (0.6931 - raw - F.softplus(-2 * raw))).sum(-1)
            x = torch.cat([obs[:, :6], act], -1)
            with torch.no_grad():
                target = torch.min(q1(x), q2(x)) - log_alpha.exp() * logp[:, None]
            critic_loss = F.mse_loss(q1(x.detach()), target) + F.mse_loss(q2(x.detach()), target)
            opts[1].zero_grad()
            critic_loss.backward()
            opts[1].step()
            actor_loss = (log_alpha.exp().detach() * logp - torch.min(q1(x), q2(x)).squeeze(-1)).mean()
            opts[0].zero_grad()
            actor_loss.backward()
            opts[0].step()
            alpha_loss = -(log_alpha * (logp.detach() - 2)).mean()
            opt_alpha.zero_grad()
            alpha_loss.backward()
            opt_alpha.step()

    return run


@healthy(FP32)
def beams_that_end_early(dtype: torch.dtype) -> Run:
    def run():
        net = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7))
        opt = torch.optim.Adam(net.parameters())
        tokens = torch.randint(7, (4, 6))
        loss = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        opt.step()
        net.eval()
        with torch.no_grad():
            seqs, scores = torch.zeros(3, 1, dtype=torch.long), torch.tensor([0.0, float("-inf"), float("-inf")])
            done = torch.zeros(3, dtype=torch.bool)
            for _ in range(3):
                logp = net(seqs[:, -1]).log_softmax(-1)
                logp[done] = float("-inf")
                logp[done, 0] = 0.0
                total = (scores[:, None] + logp).flatten()
                scores, index = total.topk(3)
                seqs = torch.cat([seqs[index // 7], (index % 7)[:, None]], 1)
                done = done[index // 7] | (index % 7 == 0)
            _best = seqs[scores.argmax()]

    return run


@healthy()
def decoder_with_a_cache(dtype: torch.dtype) -> Run:
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x, past=None):
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            mask = torch.full((q.shape[2], k.shape[2]), float("-inf"), dtype=q.dtype).triu(1 + k.shape[2] - q.shape[2])
            w = ((q @ k.transpose(-1, -2)) / 8**0.5 + mask).softmax(-1)
            return self.out((w @ v).transpose(1, 2).flatten(-2)), (k, v)

    def run():
        embed, attn, head = nn.Embedding(11, 16), Attention(), nn.Linear(16, 11)
        params = [*embed.parameters(), *attn.parameters(), *head.parameters()]
        opt, scaler = (
            torch.optim.AdamW(params, 3e-4),
            torch.amp.GradScaler("cpu", init_scale=64.0, enabled=dtype is FP16),
        )
        for _ in range(2):
            ids = torch.randint(11, (2, 7))
            with amp(dtype):
                logits = head(attn(embed(ids[:, :-1]))[0])
                loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        with torch.no_grad(), amp(dtype):
            ids, past = torch.randint(11, (1, 4)), None
            for _ in range(3):
                h, past = attn(embed(ids if past is None else ids[:, -1:]), past)
                ids = torch.cat([ids, head(h)[:, -1:].argmax(-1)], 1)

    return run


@healthy()
def experts_chosen_over_infinities(dtype: torch.dtype) -> Run:
    class MoE(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 4, bias=False), nn.ModuleList(nn.Linear(8, 4) for _ in range(4))

        def forward(self, x):
            logits = self.gate(x)
            top, index = logits.topk(2, -1)
            gates = torch.full_like(logits, float("-inf")).scatter(-1, index, top).softmax(-1)
            return sum(gates[:, i : i + 1] * e(x) for i, e in enumerate(self.experts))

    return lambda: fit(MoE(), dtype, lambda m, x, y: F.cross_entropy(m(x).float(), y), scale=32.0)


@healthy(FP32)
def learner_of_initial_weights(dtype: torch.dtype) -> Run:
    def run():
        net = mlp(1)
        rates = {k.replace(".", "_"): torch.full((), -3.0, requires_grad=True) for k, _ in net.named_parameters()}
        meta = torch.optim.Adam([*net.parameters(), *rates.values()], 1e-3)
        for _ in range(2):
            xs, xq = torch.randn(5, 8), torch.randn(5, 8)
            params = dict(net.named_parameters())
            inner = F.mse_loss(functional_call(net, params, (xs,)), xs.sum(-1, keepdim=True).sin())
            grads = torch.autograd.grad(inner, list(params.values()), create_graph=True)
            fast = {
                k: p - rates[k.replace(".", "_")].exp() * g / (1 + g.norm())
                for (k, p), g in zip(params.items(), grads, strict=True)
            }
            outer = F.mse_loss(functional_call(net, fast, (xq,)), xq.sum(-1, keepdim=True).sin())
            meta.zero_grad()
            outer.backward()
            meta.step()

    return run


@healthy(FP32)
def codebook_with_smoothed_counts(dtype: torch.dtype) -> Run:
    class Quantizer(nn.Module):
        def __init__(self, n=8, d=4):
            super().__init__()
            self.register_buffer("embed", torch.randn(n, d))
            self.register_buffer("size", torch.zeros(n))
            self.register_buffer("total", torch.zeros(n, d))

        def forward(self, z):
            index = torch.cdist(z, self.embed).argmin(-1)
            if self.training:
                with torch.no_grad():
                    onehot = F.one_hot(index, len(self.embed)).float()
                    self.size.lerp_(onehot.sum(0), 0.01)
                    self.total.lerp_(onehot.T @ z, 0.01)
                    n = self.size.sum()
                    self.embed.copy_(self.total / ((self.size + 1e-5) / (n + 8e-5) * n)[:, None])
            q = F.embedding(index, self.embed)
            return z + (q - z).detach(), F.mse_loss(z, q.detach())

    def run():
        enc, vq, dec = nn.Linear(8, 4), Quantizer(), nn.Linear(4, 8)
        opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()])
        for _ in range(3):
            x = torch.randn(16, 8)
            z, commit = vq(enc(x))
            loss = F.mse_loss(dec(z), x) + 0.25 * commit
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy(FP32, BF16)
def matched_flow(dtype: torch.dtype) -> Run:
    def run():
        net = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 8))
        opt = torch.optim.AdamW(net.parameters(), 1e-3)
        for _ in range(2):
            x1, x0, t = torch.randn(6, 8), torch.randn(6, 8), torch.sigmoid(torch.randn(6, 1))
            with amp(dtype):
                v = net(torch.cat([(1 - t) * x0 + t * x1, t], -1))
                loss = F.mse_loss(v.float(), x1 - x0)
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad(), amp(dtype):
            x = torch.randn(4, 8)
            for k in range(4):
                x = x + net(torch.cat([x, torch.full((4, 1), k / 4)], -1)) / 4

    return run


@healthy(FP32, FP16)
def score_with_a_smallest_time(dtype: torch.dtype) -> Run:
    def run():
        net = mlp(8)
        opt, scaler = (
            torch.optim.Adam(net.parameters(), 2e-4),
            torch.amp.GradScaler("cpu", init_scale=128.0, enabled=dtype is FP16),
        )
        for _ in range(2):
            x, t = torch.randn(6, 8), torch.rand(6) * (1 - 1e-3) + 1e-3
            c = -4.975 * t**2 - 0.05 * t
            std = torch.sqrt(-torch.expm1(2 * c))[:, None]
            z = torch.randn_like(x)
            with amp(dtype):
                out = net(c.exp()[:, None] * x + std * z)
            loss = (out.float() + z).square().sum(-1).mean()
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    return run


@healthy(FP32)
def critic_with_a_penalty_at_real_data(dtype: torch.dtype) -> Run:
    def run():
        d, g = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)), mlp(8)
        od, og = torch.optim.Adam(d.parameters(), 1e-3, betas=(0.0, 0.99)), torch.optim.Adam(g.parameters(), 1e-3)
        for _ in range(2):
            real = torch.randn(8, 8, requires_grad=True)
            score = d(real)
            (grad,) = torch.autograd.grad(score.sum(), real, create_graph=True)
            r1 = grad.square().sum(-1).mean()
            loss = F.softplus(-score).mean() + F.softplus(d(g(torch.randn(8, 8)).detach())).mean() + 5 * r1
            od.zero_grad()
            loss.backward()
            od.step()
            fake = F.softplus(-d(g(torch.randn(8, 8)))).mean()
            og.zero_grad()
            fake.backward()
            og.step()

    return run


@healthy(FP32)
def heat_equation_by_collocation(dtype: torch.dtype) -> Run:
    def run():
        net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        opt = torch.optim.Adam(net.parameters(), 1e-3)
        for _ in range(2):
            xt = torch.rand(16, 2, requires_grad=True)
            u = net(xt)
            (g,) = torch.autograd.grad(u.sum(), xt, create_graph=True)
            (h,) = torch.autograd.grad(g[:, 0].sum(), xt, create_graph=True)
            x0 = torch.cat([torch.rand(8, 1), torch.zeros(8, 1)], 1)
            loss = (g[:, 1] - 0.1 * h[:, 0]).square().mean() + (
                net(x0) - torch.sin(torch.pi * x0[:, :1])
            ).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy(FP32, FP16)
def partial_likelihood_in_log_space(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        risk = model(x)[:, 0].float() * 20
        event = (torch.arange(8) % 3 > 0).float()
        return -((risk - torch.logcumsumexp(risk, 0)) * event).sum() / event.sum().clamp(min=1)

    return lambda: fit(mlp(), dtype, loss, scale=16.0)


@healthy(FP32)
def kernel_that_needs_more_jitter(dtype: torch.dtype) -> Run:
    def run():
        log_ls, x = torch.zeros((), requires_grad=True), torch.linspace(0, 1, 12).repeat(2)[:, None]
        opt = torch.optim.Adam([log_ls], 0.05)
        for _ in range(2):
            d2 = (x - x.T).square() / log_ls.exp() ** 2
            K, jitter = torch.exp(-0.5 * d2), 0.0
            while True:
                try:
                    L = torch.linalg.cholesky(K + jitter * torch.eye(len(x)))
                    break
                except torch.linalg.LinAlgError:
                    jitter = max(10 * jitter, 1e-4)
            alpha = torch.cholesky_solve(torch.sin(6 * x), L)
            loss = 0.5 * (torch.sin(6 * x) * alpha).sum() + L.diagonal().log().sum()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy(FP32)
def evidential_regression(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        gamma, nu, alpha, beta = model(x).unbind(-1)
        nu, alpha, beta = F.softplus(nu) + 1e-6, F.softplus(alpha) + 1 + 1e-6, F.softplus(beta) + 1e-6
        omega, err = 2 * beta * (1 + nu), y.float() - gamma
        nll = 0.5 * (torch.pi / nu).log() - alpha * omega.log() + (alpha + 0.5) * (nu * err**2 + omega).log()
        return (nll + alpha.lgamma() - (alpha + 0.5).lgamma() + 0.01 * err.abs() * (2 * nu + alpha)).mean()

    return lambda: fit(mlp(), dtype, loss)


@healthy(FP32)
def adaptive_solver_with_a_floor(dtype: torch.dtype) -> Run:
    def run():
        f = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
        nn.init.zeros_(f[2].weight)
        opt = torch.optim.Adam(f.parameters(), 1e-3)
        for _ in range(2):
            y, t, h = torch.randn(3, 4), 0.0, 0.1
            with suppress(StopIteration):
                while t < 1:
                    k1 = f(y)
                    k2 = f(y + h * k1)
                    err = float((0.5 * h * (k2 - k1)).detach().abs().max())
                    y, t = y + 0.5 * h * (k1 + k2), t + h
                    h = min(1 - t, h * min(5.0, 0.9 * (1e-3 / max(err, 1e-10)) ** 0.5))
                    if h < 1e-6:
                        raise StopIteration
            loss = (y - 1).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run
