"""Healthy objectives of many fields: infinities that choose, zeros that are guarded, gradients of gradients."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import FP16, FP32, Run
from tests.zoo.strangers import amp, fit, healthy, mlp
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint


@healthy()
def boxes_of_positive_anchors_only(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        head = m(x).float()
        gt = torch.tensor([[0.0, 0, 3, 3], [2, 2, 2, 5], [1, 1, 4, 3]]).repeat(3, 1)[:8]
        wh = gt[:, 2:] - gt[:, :2]
        positive = (wh > 0).all(-1)
        target = torch.log(wh / 4)
        box = F.smooth_l1_loss(head[positive][:, :2], target[positive], reduction="sum") / positive.sum().clamp(min=1)
        empty = head[positive & ~positive]
        return box + empty.sum() / max(1, len(empty)) + F.binary_cross_entropy_with_logits(head[:, 2], positive.float())

    return lambda: fit(mlp(), dtype, loss)


@healthy(FP32)
def adaptation_through_two_inner_steps(dtype: torch.dtype) -> Run:
    def run():
        net = mlp()
        meta = torch.optim.Adam(net.parameters(), 1e-3)
        for _ in range(2):
            fast = dict(net.named_parameters())
            for _ in range(2):
                inner = F.cross_entropy(functional_call(net, fast, (torch.randn(5, 8),)), torch.randint(4, (5,)))
                grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {k: w - 0.1 * g for (k, w), g in zip(fast.items(), grads, strict=True)}
            outer = F.cross_entropy(functional_call(net, fast, (torch.randn(5, 8),)), torch.randint(4, (5,)))
            meta.zero_grad()
            outer.backward()
            meta.step()

    return run


@healthy()
def prototypes_by_distance(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        z = m(torch.cat([x, x[:4]])).float()
        protos = z[:8].reshape(4, 2, -1).mean(1)
        return F.cross_entropy(-torch.cdist(z[8:], protos).square(), torch.arange(4))

    return lambda: fit(mlp(), dtype, loss)


@healthy()
def hardest_pairs_by_infinite_masks(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        z = F.normalize(m(x).float(), dim=-1)
        d = torch.cdist(z, z)
        same = (y[:, None] == y[None]) & ~torch.eye(8, dtype=torch.bool)
        hardest = d.masked_fill(~same, -math.inf).amax(1)
        nearest = d.masked_fill(same | torch.eye(8, dtype=torch.bool), math.inf).amin(1)
        valid = same.any(1) & nearest.isfinite()
        return F.relu(hardest[valid] - nearest[valid] + 0.3).sum() / valid.sum().clamp(min=1)

    return lambda: fit(mlp(), dtype, loss)


@healthy()
def accumulated_with_the_default_scale(dtype: torch.dtype) -> Run:
    def run():
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=dtype is FP16)
        for i in range(4):
            with amp(dtype):
                loss = (
                    F.cross_entropy(model(torch.randn(4, 8)).float(), torch.randint(4, (4,)), label_smoothing=0.1) / 2
                )
            scaler.scale(loss).backward()
            if (i + 1) % 2 == 0:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()

    return run


@healthy(FP32)
def critic_with_a_penalty(dtype: torch.dtype) -> Run:
    def run():
        g, d = mlp(8), mlp(1)
        og, od = torch.optim.RMSprop(g.parameters(), 5e-5), torch.optim.RMSprop(d.parameters(), 5e-5)
        for _ in range(2):
            real, fake = torch.randn(8, 8), g(torch.randn(8, 8))
            mix = torch.lerp(real, fake.detach(), torch.rand(8, 1)).requires_grad_()
            (grad,) = torch.autograd.grad(d(mix).sum(), mix, create_graph=True)
            penalty = ((grad.square().sum(1) + 1e-12).sqrt() - 1).square().mean()
            loss = d(fake.detach()).mean() - d(real).mean() + 10 * penalty
            od.zero_grad()
            loss.backward()
            od.step()
            og.zero_grad()
            (-d(fake).mean()).backward()
            og.step()

    return run


@healthy()
def coupling_layers(dtype: torch.dtype) -> Run:
    class Coupling(nn.Module):
        def __init__(self, flip):
            super().__init__()
            self.flip, self.net = flip, nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))

        def forward(self, x):
            a, b = x.chunk(2, -1)[:: -1 if self.flip else 1]
            s, t = self.net(a).float().chunk(2, -1)
            s = 2 * torch.tanh(s / 2)
            return torch.cat([a.float(), b.float() * s.exp() + t], -1), s.sum(-1)

    flow = nn.ModuleList([Coupling(False), Coupling(True)])

    def loss(m, x, y):
        total = 0
        for layer in m:
            x, logdet = layer(x)
            total = total + logdet
        return (0.5 * x.square().sum(-1) + 4 * math.log(2 * math.pi) - total).mean()

    return lambda: fit(flow, dtype, loss)


@healthy(FP32)
def orbit_by_runge_kutta(dtype: torch.dtype) -> Run:
    def run():
        f = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        opt = torch.optim.Adam(f.parameters(), 1e-2)
        for _ in range(2):
            x, h = torch.rand(4, 2), 0.1
            for _ in range(3):
                k1 = f(x)
                k2 = f(x + h / 2 * k1)
                k3 = f(x + h / 2 * k2)
                x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + f(x + h * k3))
            opt.zero_grad()
            (x - 1).abs().mean().backward()
            opt.step()

    return run


@healthy(FP32)
def kernel_regression_with_jitter(dtype: torch.dtype) -> Run:
    def run():
        x = torch.linspace(0, 1, 8)[:, None]
        y, raw = torch.sin(6 * x[:, 0]), nn.Parameter(torch.zeros(3))
        opt = torch.optim.Adam([raw], 0.1)
        for _ in range(3):
            length, scale, noise = F.softplus(raw)
            k = scale * torch.exp(-0.5 * (x - x.T).square() / length**2) + (noise + 1e-4) * torch.eye(8)
            chol = torch.linalg.cholesky(k)
            alpha = torch.cholesky_solve(y[:, None], chol)[:, 0]
            loss = 0.5 * y @ alpha + chol.diagonal().log().sum()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy()
def language_model_with_carried_state(dtype: torch.dtype) -> Run:
    class LM(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.rnn, self.out = nn.Embedding(16, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 16)

        def forward(self, ids, state):
            h, state = self.rnn(self.emb(ids), state)
            return self.out(h).float(), tuple(s.detach() for s in state)

    def run():
        model, state = LM(), (torch.zeros(1, 2, 8), torch.zeros(1, 2, 8))
        opt, total = torch.optim.SGD(model.parameters(), 0.5), 0.0
        for _ in range(2):
            ids = torch.randint(16, (2, 7))
            with amp(FP32 if dtype is FP16 else dtype):
                logits, state = model(ids[:, :-1], state)
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            opt.step()
            total += loss.item()
            math.exp(min(total, 20))

    return run


@healthy()
def tasks_that_are_absent(dtype: torch.dtype) -> Run:
    class Multi(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.heads = mlp(8), nn.ModuleList(nn.Linear(8, 1) for _ in range(3))

    def loss(m, x, y):
        labels = torch.full((8, 3), float("nan"))
        labels[:5, 0], labels[6:, 1] = 1.0, -1.0
        h, losses = m.body(x), []
        for i, head in enumerate(m.heads):
            known = ~labels[:, i].isnan()
            if known.any():
                losses.append((head(h[known]).float().squeeze(-1) - labels[known, i]).abs().mean())
        return torch.stack(losses).sum()

    return lambda: fit(Multi(), dtype, loss)


@healthy()
def routed_experts(dtype: torch.dtype) -> Run:
    class MoE(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 4) for _ in range(4))

        def forward(self, x):
            logits = self.gate(x).float()
            top, index = logits.topk(2)
            weights = torch.full_like(logits, -math.inf).scatter(1, index, top).softmax(-1)
            out = torch.stack([e(x) for e in self.experts], 1).float()
            load = weights.mean(0)
            return (weights[..., None] * out).sum(1), (load * logits.softmax(-1).mean(0)).sum() * 4

    def loss(m, x, y):
        out, aux = m(x)
        return F.cross_entropy(out, y) + 0.01 * aux

    return lambda: fit(MoE(), dtype, loss)


@healthy()
def norms_at_zero(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        z = m(x).float()
        still = z - z.detach()
        return z.square().mean() + still.norm(dim=-1).sum() + torch.linalg.vector_norm(still) + still.abs().sum()

    return lambda: fit(mlp(), dtype, loss)


@healthy()
def roots_guarded_twice(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        z = F.relu(m(x).float())
        safe = torch.where(z > 0, z, 1.0)
        root = torch.where(z > 0, safe.sqrt(), 0.0)
        sinc = torch.where(z > 0, safe.sin() / safe, 1.0)
        return (root + sinc).mean()

    return lambda: fit(mlp(), dtype, loss)


@healthy()
def search_with_legal_moves(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.pi, self.v = nn.Linear(9, 32), nn.Linear(32, 9), nn.Linear(32, 1)

        def forward(self, board):
            h = F.relu(self.body(board))
            logits = self.pi(h).masked_fill(board != 0, torch.finfo(h.dtype).min)
            return logits, torch.tanh(self.v(h))

    def loss(m, x, y):
        logits, value = m(x)
        pi = F.one_hot((x == 0).float().argmax(-1), 9).float()
        return F.mse_loss(value.float().squeeze(-1), y) - (pi * logits.float().log_softmax(-1)).sum(-1).mean()

    board = torch.tensor([[1.0, -1, 0, 0, 1, 0, 0, -1, 0], [0, 0, 1, 0, -1, 0, 1, 0, -1]])
    return lambda: fit(Net(), dtype, loss, data=[(board, torch.tensor([1.0, -1.0]))])


@healthy(FP32)
def compiled_loop(dtype: torch.dtype) -> Run:
    def run():
        torch._dynamo.reset()
        model = torch.compile(mlp(), backend="eager")
        fit(model, dtype, lambda m, x, y: F.cross_entropy(m(x).float(), y), steps=2)

    return run


@healthy()
def tags_by_forward_algorithm(dtype: torch.dtype) -> Run:
    class CRF(nn.Module):
        def __init__(self):
            super().__init__()
            self.emit, self.transition = nn.Linear(8, 4), nn.Parameter(torch.randn(4, 4))

        def forward(self, x, tags):
            with torch.no_grad():
                self.transition[:, 0], self.transition[3] = -10000.0, -10000.0
            e = self.emit(x).float()
            alpha = torch.full((4,), -10000.0)
            alpha[0] = 0.0
            for row in e:
                alpha = torch.logsumexp(alpha[None] + self.transition, -1) + row
            gold = sum(self.transition[tags[i + 1], tags[i]] + e[i, tags[i + 1]] for i in range(len(x) - 1))
            return torch.logsumexp(alpha, 0) - gold

    data = [(torch.randn(5, 8), torch.tensor([1, 2, 1, 1, 2]))]
    return lambda: fit(CRF(), dtype, lambda m, x, y: m(x, y), data=data)


@healthy()
def blocks_recomputed(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(3)
            )
            self.out = nn.Linear(8, 4)

        def forward(self, x):
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return self.out(x)

    return lambda: fit(Net(), dtype, lambda m, x, y: F.cross_entropy(m(x).float(), y))


@healthy()
def headings_of_robots_that_stand(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        v = m(x).float()[:, :2] * (torch.arange(8) % 3 > 0)[:, None]
        return torch.atan2(v[:, 1], v[:, 0]).square().mean()

    return lambda: fit(mlp(), dtype, loss)


@healthy()
def cube_of_a_hand_written_gelu(dtype: torch.dtype) -> Run:
    class NewGELU(nn.Module):
        def forward(self, x):
            return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * (x * x * x))))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.ModuleDict({"fc": nn.Linear(8, 16), "act": NewGELU(), "proj": nn.Linear(16, 8)})
            nn.init.constant_(self.mlp["fc"].bias, -60.0)
            self.ln = nn.LayerNorm(8)

        def forward(self, x):
            return self.ln(x + self.mlp["proj"](self.mlp["act"](self.mlp["fc"](x))))

    def loss(m, x, y):
        return (m(x).float() - 1).square().mean()

    return lambda: fit(Block(), dtype, loss)
