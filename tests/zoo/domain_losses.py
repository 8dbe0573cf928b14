"""Faulty losses of one field each: reinforcement learning, diffusion, audio, graphs, time series, detection, physics."""

from __future__ import annotations

import math
import sys

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import FP16, Run
from tests.zoo.strangers import amp, case, fit, mlp
from torch import nn
from torch.func import functional_call


@case("pow", "singularity")
def replay_weights_of_a_new_transition(dtype: torch.dtype) -> Run:
    class PrioritizedReplay:
        def __init__(self, n=16, alpha=0.6, beta=0.4):
            self.priority, self.alpha, self.beta = torch.ones(n), alpha, beta
            self.data = torch.randn(n, 8)
            self.priority[5] = 0.0

        def sample(self, idx):
            probs = self.priority**self.alpha / (self.priority**self.alpha).sum()
            weights = (len(probs) * probs[idx]) ** (-self.beta)  # FAULT
            return self.data[idx], weights / weights.max()

    def run():
        q, target = mlp(2), mlp(2)
        opt, replay = torch.optim.Adam(q.parameters()), PrioritizedReplay()
        for _ in range(2):
            obs, weights = replay.sample(torch.tensor([1, 5, 9, 3]))
            with torch.no_grad():
                goal = 1 + 0.99 * target(obs).amax(-1)
            td = q(obs)[:, 0] - goal
            loss = (weights * td.pow(2)).mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(q.parameters(), 10.0)
            opt.step()

    return run


@case("div", "singularity")
def observations_normalised_from_one_sample(dtype: torch.dtype) -> Run:
    class RunningMeanStd:
        def __init__(self):
            self.n, self.mean, self.m2 = 0, torch.zeros(8), torch.zeros(8)

        def update(self, x):
            for row in x:
                self.n += 1
                delta = row - self.mean
                self.mean = self.mean + delta / self.n
                self.m2 = self.m2 + delta * (row - self.mean)

        def __call__(self, x):
            var = self.m2 / (self.n - 1)  # FAULT
            return (x - self.mean) / (var.sqrt() + 1e-8)

    def run():
        policy, rms = mlp(), RunningMeanStd()
        opt = torch.optim.Adam(policy.parameters())
        for _ in range(2):
            obs = torch.randn(1, 8)
            rms.update(obs)
            logp = policy(rms(obs)).log_softmax(-1)
            loss = -(logp[:, 0] * 1.5).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "singularity")
def clean_image_at_the_last_noise_level(dtype: torch.dtype) -> Run:
    def run():
        betas = torch.linspace(1e-4, 1.0, 20)
        abar = torch.cumprod(1 - betas, 0)
        net = nn.Conv2d(1, 1, 3, padding=1)
        opt = torch.optim.AdamW(net.parameters(), 1e-4)
        for t in (3, 19):
            x0, eps = torch.rand(2, 1, 8, 8), torch.randn(2, 1, 8, 8)
            xt = abar[t].sqrt() * x0 + (1 - abar[t]).sqrt() * eps
            predicted = (xt - (1 - abar[t]).sqrt() * net(xt)) / abar[t].sqrt()  # FAULT
            loss = F.l1_loss(predicted, x0)
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "singularity")
def separation_ratio_of_a_silent_source(dtype: torch.dtype) -> Run:
    def si_snr(estimate, reference):
        estimate = estimate - estimate.mean(-1, keepdim=True)
        reference = reference - reference.mean(-1, keepdim=True)
        dot = (estimate * reference).sum(-1, keepdim=True)
        projection = dot * reference / reference.pow(2).sum(-1, keepdim=True)  # FAULT
        noise = estimate - projection
        return 10 * torch.log10(projection.pow(2).sum(-1) / noise.pow(2).sum(-1) + 1e-8)

    def run():
        net = nn.Conv1d(1, 2, 9, padding=4)
        opt = torch.optim.Adam(net.parameters())
        for silent in (False, True):
            sources = torch.randn(2, 2, 64)
            sources[1, 1] *= 0.0 if silent else 1.0
            with amp(dtype):
                out = net(sources.sum(1, keepdim=True))
            loss = -si_snr(out.float(), sources).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("log", "singularity")
def spectrum_of_silence(dtype: torch.dtype) -> Run:
    class LogSpectrum(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("window", torch.hann_window(32))
            self.net = nn.Linear(17, 4)

        def forward(self, wave):
            spec = torch.stft(wave, 32, 16, window=self.window, center=False, return_complex=True)
            db = 20 * torch.log(spec.abs()).transpose(1, 2)  # FAULT
            return self.net(db).mean(1)

    data = [(torch.randn(3, 128), torch.randint(4, (3,))), (torch.zeros(3, 128), torch.randint(4, (3,)))]
    return lambda: fit(LogSpectrum(), dtype, lambda m, x, y: F.cross_entropy(m(x).float(), y), data=data)


@case("pow", "singularity", "conv1")
def degree_of_an_isolated_node(dtype: torch.dtype) -> Run:
    class GCNConv(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.lin = nn.Linear(inputs, outputs, bias=False)

        def forward(self, x, edge_index):
            row, col = edge_index
            deg = torch.zeros(len(x)).scatter_add_(0, row, torch.ones(len(row)))
            inv = deg.pow(-0.5)  # FAULT
            norm = inv[:, None] * torch.ones(1, len(x)) * inv[None]
            adj = torch.zeros(len(x), len(x)).index_put_((row, col), torch.ones(len(row)))
            return (norm * adj) @ self.lin(x)

    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = GCNConv(8, 16), GCNConv(16, 4)

        def forward(self, x, edge_index):
            return self.conv2(F.relu(self.conv1(x, edge_index)), edge_index).log_softmax(-1)

    def run():
        model = GCN()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
        x, y = torch.randn(6, 8), torch.randint(4, (6,))
        edge_index = torch.tensor([[0, 1, 1, 2, 3, 4], [1, 0, 2, 1, 4, 3]])
        for _ in range(2):
            model.train()
            optimizer.zero_grad()
            F.nll_loss(model(x, edge_index)[:5], y[:5]).backward()
            optimizer.step()

    return run


@case("exp", "overflow", "gat", dtypes=(FP16,))
def edge_scores_without_their_maximum(dtype: torch.dtype) -> Run:
    class GAT(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.att = nn.Linear(8, 16), nn.Linear(32, 1)
            nn.init.constant_(self.att.bias, 12.0)

        def forward(self, x, src, dst):
            h = self.lin(x)
            e = F.leaky_relu(self.att(torch.cat([h[src], h[dst]], -1))).squeeze(-1)
            a = e.exp()  # FAULT
            total = torch.zeros(len(x), dtype=a.dtype).index_add(0, dst, a)
            return torch.zeros_like(h).index_add(0, dst, (a / total[dst])[:, None] * h[src])

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.gat, self.out = GAT(), nn.Linear(16, 3)

        def forward(self, x, src, dst):
            return self.out(self.gat(x, src, dst).relu())

    def run():
        model = Model()
        opt = torch.optim.Adam(model.parameters())
        src, dst = torch.tensor([0, 1, 2, 3, 0, 2]), torch.tensor([1, 2, 3, 0, 2, 0])
        with torch.autocast("cpu", dtype):
            out = model(torch.randn(4, 8), src, dst)
        (64 * F.cross_entropy(out.float(), torch.tensor([0, 1, 2, 0]))).backward()
        opt.step()

    return run


@case("div", "singularity")
def scaled_error_of_a_constant_series(dtype: torch.dtype) -> Run:
    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(1, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, x):
            return self.out(self.rnn(x[..., None])[0][:, -1])

    def mase(forecast, actual, history, season=2):
        naive = (history[:, season:] - history[:, :-season]).abs().mean(-1)
        return ((forecast - actual).abs().mean(-1) / naive).mean()  # FAULT

    def run():
        model = Forecaster()
        opt = torch.optim.RMSprop(model.parameters())
        history = torch.randn(4, 12)
        history[2] = 7.0
        for _ in range(2):
            with amp(dtype):
                forecast = model(history)
            loss = mase(forecast.float(), torch.randn(4, 4), history)
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("pow", "singularity")
def power_transform_of_negative_sales(dtype: torch.dtype) -> Run:
    class BoxCox(nn.Module):
        def __init__(self):
            super().__init__()
            self.lam = nn.Parameter(torch.tensor(0.5))
            self.net = mlp(1)

    def loss(m, x, y):
        z = (x.pow(m.lam) - 1) / m.lam  # FAULT
        return (m.net(z) - 1).square().mean()

    return lambda: fit(BoxCox(), dtype, loss)


@case("div", "singularity")
def user_without_a_history(dtype: torch.dtype) -> Run:
    class TwoTower(nn.Module):
        def __init__(self):
            super().__init__()
            self.users = nn.Embedding(10, 8, padding_idx=0)
            self.items = nn.Embedding(20, 8)

        def forward(self, u, i):
            u, i = self.users(u), self.items(i)
            u = u / u.norm(dim=-1, keepdim=True)  # FAULT
            i = i / i.norm(dim=-1, keepdim=True)
            return u @ i.T / 0.1

    def run():
        model = TwoTower()
        opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
        for users in (torch.tensor([3, 4, 5]), torch.tensor([3, 0, 5])):
            logits = model(users, torch.randint(20, (3,)))
            loss = F.cross_entropy(logits, torch.arange(3))
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("log1p", "singularity")
def counts_already_standardised(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        return F.mse_loss(m(torch.log1p(x * 2)), torch.zeros(8, 4))  # FAULT

    return lambda: fit(mlp(), dtype, loss)


@case("log", "singularity")
def boxes_without_a_width(dtype: torch.dtype) -> Run:
    def encode(gt, anchors):
        wh, centre = gt[:, 2:] - gt[:, :2], (gt[:, 2:] + gt[:, :2]) / 2
        awh, acentre = anchors[:, 2:] - anchors[:, :2], (anchors[:, 2:] + anchors[:, :2]) / 2
        return torch.cat([(centre - acentre) / awh, torch.log(wh / awh)], 1)  # FAULT

    def run():
        head = nn.Linear(8, 4)
        opt = torch.optim.SGD(head.parameters(), 0.02, momentum=0.9)
        anchors = torch.tensor([[0.0, 0, 4, 4], [2, 2, 6, 6], [1, 0, 5, 3]])
        for width in (3.0, 0.0):
            gt = torch.tensor([[0.0, 0, 3, 3], [2, 2, 2 + width, 5], [1, 1, 4, 3]])
            loss_dict = {"loss_box_reg": F.smooth_l1_loss(head(torch.randn(3, 8)), encode(gt, anchors))}
            losses = sum(loss_dict.values())
            if not math.isfinite(losses.item()):
                print(f"Loss is {losses.item()}, stopping training", loss_dict, file=sys.stderr)
                sys.exit(1)
            opt.zero_grad()
            losses.backward()
            opt.step()

    return run


@case("exp", "overflow", dtypes=(FP16,))
def box_sizes_decoded_in_half(dtype: torch.dtype) -> Run:
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.reg = nn.Linear(8, 4)
            nn.init.constant_(self.reg.bias, 12.0)

        def forward(self, x, anchors):
            delta = self.reg(x)
            xy = delta[:, :2] * anchors[:, 2:] + anchors[:, :2]
            wh = torch.exp(delta[:, 2:]) * anchors[:, 2:]  # FAULT
            return torch.cat([xy, wh], 1)

    def run():
        model, scaler = Head(), torch.amp.GradScaler("cpu", init_scale=2.0**8)
        opt = torch.optim.SGD(model.parameters(), 1e-6)
        for _ in range(2):
            anchors = torch.rand(4, 4).to(dtype)
            with torch.autocast("cpu", dtype):
                boxes = model(torch.randn(4, 8), anchors)
            loss = F.l1_loss(boxes.float(), torch.rand(4, 4))
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    return run


@case("sqrt", "singularity", phase="backward")
def query_that_is_its_own_support(dtype: torch.dtype) -> Run:
    def run():
        net, inner_lr = mlp(), 0.1
        meta = torch.optim.Adam(net.parameters(), lr=1e-3)
        for _ in range(2):
            support, query = torch.randn(4, 8), torch.randn(4, 8)
            query[0] = support[0]
            weights = dict(net.named_parameters())
            inner = functional_call(net, weights, (support,)).square().mean()
            grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
            fast = {k: w - inner_lr * g for (k, w), g in zip(weights.items(), grads, strict=True)}
            s, q = functional_call(net, fast, (support,)), functional_call(net, fast, (query,))
            d = torch.sqrt((q[:, None] - s[None]).pow(2).sum(-1))  # FAULT
            loss = F.cross_entropy(-d, torch.arange(4))
            meta.zero_grad()
            loss.backward()
            meta.step()

    return run


@case("xlogy", "singularity")
def beta_policy_at_its_border(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        a, b = F.softplus(m(x).float()).chunk(2, -1)
        dist = torch.distributions.Beta(a, b + 1)
        return -dist.log_prob(torch.zeros(8, 2)).mean()  # FAULT

    return lambda: fit(mlp(), dtype, loss, steps=1)
