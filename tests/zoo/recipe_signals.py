"""Faulty recipes for what is measured: sound, series, ratings, boxes, rays, graphs, images, poses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import BF16, FP16, Run
from tests.zoo.strangers import amp, case, fit, mlp
from torch import nn


@case("log10", "singularity", "loudness")
def loudness_of_a_silent_clip(dtype: torch.dtype) -> Run:
    class Loudness(nn.Module):
        def forward(self, wav):
            power = wav.unfold(-1, 16, 8).pow(2).mean(-1)
            return -0.691 + 10 * torch.log10(power)  # FAULT

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.loudness, self.rnn, self.out = Loudness(), nn.GRU(1, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, wav):
            h, _ = self.rnn(self.loudness(wav).unsqueeze(-1))
            return self.out(h[:, -1])

    def run():
        model = Tagger()
        opt = torch.optim.Adam(model.parameters())
        for step in range(2):
            wav = 0.1 * torch.randn(3, 64)
            wav[step, 20:] = 0.0
            loss = F.cross_entropy(model(wav), torch.randint(3, (3,)))
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("log", "singularity", phase="backward")
def transducer_lattice_by_hand(dtype: torch.dtype) -> Run:
    """The forward variables of RNN-T, in the log domain, without logaddexp."""

    def rnnt(blank, emit):
        T, U = blank.shape
        neg = torch.tensor(float("-inf"))
        row = [torch.zeros(())] + [neg] * (U - 1)
        for t in range(T):
            new = []
            for u in range(U):
                stay = row[u] + blank[t - 1, u] if t else row[u]
                move = new[u - 1] + emit[t, u - 1] if u else neg
                new.append(torch.log(torch.exp(stay) + torch.exp(move)))  # FAULT
            row = [neg, *new[1:]] if t == 0 else new
        return -(row[-1] + blank[-1, -1])

    def run():
        joint = nn.Linear(8, 2)
        opt = torch.optim.Adam(joint.parameters())
        for _ in range(2):
            logp = joint(torch.randn(3, 3, 8)).log_softmax(-1)
            loss = rnnt(logp[..., 0], logp[..., 1])
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "singularity", "revin")
def reversible_norm_with_a_zero_weight(dtype: torch.dtype) -> Run:
    class RevIN(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))
            nn.init.zeros_(self.weight[:1])

        def forward(self, x, mode):
            if mode == "norm":
                self.mean, self.std = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
                return (x - self.mean) / self.std * self.weight + self.bias
            x = (x - self.bias) / self.weight  # FAULT
            return x * self.std + self.mean

    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.revin, self.mix = RevIN(3), nn.Linear(12, 4)

        def forward(self, x):
            h = self.revin(x, "norm")
            return self.revin(self.mix(h.transpose(1, 2)).transpose(1, 2), "denorm")

    def run():
        model = Forecaster()
        opt = torch.optim.AdamW(model.parameters(), 1e-4)
        for _ in range(2):
            loss = F.mse_loss(model(torch.randn(2, 12, 3)), torch.randn(2, 4, 3))
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("pow", "singularity")
def tweedie_of_a_dead_output(dtype: torch.dtype) -> Run:
    def loss(model, x, y, p=1.5):
        mu = torch.relu(model(x)[:, 0] - 4)
        return (-y * mu.pow(1 - p) / (1 - p) + mu.pow(2 - p) / (2 - p)).mean()  # FAULT

    return lambda: fit(mlp(), dtype, loss)


@case("log", "underflow", dtypes=(FP16,))
def ranking_by_the_log_of_a_sigmoid(dtype: torch.dtype) -> Run:
    class TwoTower(nn.Module):
        def __init__(self):
            super().__init__()
            self.users, self.items = nn.Embedding(10, 8), nn.Embedding(20, 8)
            self.project = nn.Linear(8, 8)

        def forward(self, u, i):
            return (self.project(self.users(u))[:, None] @ self.project(self.items(i))[:, :, None]).flatten()

    def run():
        model = TwoTower()
        with torch.no_grad():
            model.project.weight.copy_(torch.eye(8))
            model.project.bias.zero_()
            model.users.weight.fill_(1.0)
            model.items.weight.fill_(0.5)
            model.items.weight[7] = 3.5
        opt = torch.optim.Adagrad(model.parameters(), 0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(2):
            u, pos, neg = torch.randint(10, (6,)), torch.randint(5, (6,)), torch.tensor([8, 9, 7, 12, 13, 14])
            with amp(dtype):
                gap = model(u, pos) - model(u, neg)
                loss = -torch.log(torch.sigmoid(gap)).mean()  # FAULT
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    return run


@case("reciprocal", "singularity")
def class_that_was_never_seen(dtype: torch.dtype) -> Run:
    def run():
        labels = torch.tensor([0, 0, 1, 1, 3, 3, 0, 1])
        counts = torch.bincount(labels, minlength=4)
        weights = 1.0 / counts  # FAULT
        criterion = nn.CrossEntropyLoss(weight=weights / weights.sum() * 4)
        model = mlp()
        opt = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            loss = criterion(model(torch.randn(8, 8)), labels)
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("log", "underflow", dtypes=(BF16,))
def focal_loss_of_a_confident_anchor(dtype: torch.dtype) -> Run:
    def run():
        head = nn.Conv2d(4, 3, 1)
        nn.init.constant_(head.bias, 9.0)
        opt = torch.optim.SGD(head.parameters(), 0.01, momentum=0.9)
        for _ in range(2):
            with amp(dtype):
                p = torch.sigmoid(head(0.1 * torch.randn(2, 4, 4, 4)))
                target = torch.zeros_like(p)
                ce = -(target * torch.log(p) + (1 - target) * torch.log(1 - p))  # FAULT
                loss = (0.75 * p**2 * ce).sum() / 32
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "singularity")
def ray_that_hits_nothing(dtype: torch.dtype) -> Run:
    """NeRF's disparity map, as first published."""

    def raw2outputs(raw, z):
        dists = torch.cat([z[:, 1:] - z[:, :-1], torch.full_like(z[:, :1], 1e10)], -1)
        alpha = 1.0 - torch.exp(-F.relu(raw[..., 3]) * dists)
        trans = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
        weights = alpha * trans
        rgb = (weights[..., None] * raw[..., :3].sigmoid()).sum(-2)
        depth = (weights * z).sum(-1)
        disp = 1.0 / torch.max(1e-10 * torch.ones_like(depth), depth / weights.sum(-1))  # FAULT
        return rgb, disp

    def run():
        net = mlp(4)
        nn.init.constant_(net[2].bias, -9.0)
        opt = torch.optim.Adam(net.parameters(), 5e-4)
        for _ in range(2):
            rgb, disp = raw2outputs(net(torch.randn(5, 6, 8)), torch.linspace(2, 6, 6).expand(5, 6))
            loss = (rgb - 0.5).square().mean() + 1e-3 * disp.mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("sqrt", "singularity", "conv", phase="backward")
def spread_over_a_single_neighbour(dtype: torch.dtype) -> Run:
    class PNAConv(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(12, 4)

        def forward(self, x, edge, deg):
            msg = x[edge[0]]
            add = lambda m: torch.zeros_like(x).index_add_(0, edge[1], m) / deg  # noqa: E731
            mean, mean_sq = add(msg), add(msg * msg)
            std = torch.sqrt((mean_sq - mean * mean).clamp(min=0))  # FAULT
            return self.lin(torch.cat([x, mean, std], -1))

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.conv = nn.Linear(8, 4), PNAConv()

        def forward(self, x, edge, deg):
            return self.conv(self.emb(x), edge, deg)

    def run():
        net = Net()
        opt = torch.optim.Adam(net.parameters())
        edge = torch.tensor([[0, 1, 2, 3, 0], [1, 0, 0, 2, 3]])
        deg = torch.bincount(edge[1], minlength=4).clamp(min=1)[:, None]
        for _ in range(2):
            loss = F.cross_entropy(net(torch.randn(4, 8), edge, deg), torch.tensor([0, 1, 2, 3]))
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "singularity", "pool", names=("clamp(min=1)",))
def graph_without_nodes_in_the_batch(dtype: torch.dtype) -> Run:
    class MeanPool(nn.Module):
        def forward(self, x, batch, n):
            out = x.new_zeros(n, x.shape[1]).index_add_(0, batch, x)
            return out / torch.bincount(batch, minlength=n)[:, None]  # FAULT

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.pool, self.out = nn.Linear(8, 4), MeanPool(), nn.Linear(4, 1)

        def forward(self, x, batch, n):
            return self.out(self.pool(self.enc(x), batch, n))

    def run():
        net = Net()
        opt = torch.optim.Adam(net.parameters())
        for batch in ([0, 0, 1, 1, 2], [0, 0, 2, 2, 2]):
            loss = net(torch.randn(5, 8), torch.tensor(batch), 3).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("var", "singularity", "norm")
def variance_over_one_pixel(dtype: torch.dtype) -> Run:
    class AdaIN(nn.Module):
        def forward(self, x, style):
            m, v = x.mean((2, 3), keepdim=True), x.var((2, 3), keepdim=True)  # FAULT
            return (x - m) / (v + 1e-5).sqrt() * style

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.out = nn.Conv2d(1, 4, 4, stride=4), AdaIN(), nn.Linear(4, 2)

        def forward(self, x):
            return self.out(self.norm(self.conv(x), 1.5).mean((2, 3)))

    def run():
        net = Net()
        opt = torch.optim.Adam(net.parameters())
        for size in (8, 4):
            loss = F.cross_entropy(net(torch.rand(3, 1, size, size)), torch.tensor([0, 1, 0]))
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "singularity")
def anchor_without_a_positive(dtype: torch.dtype) -> Run:
    def supcon(z, y, tau=0.1):
        z = F.normalize(z, dim=-1)
        logits = z @ z.T / tau
        eye = torch.eye(len(z), dtype=torch.bool)
        logp = logits - torch.logsumexp(logits.masked_fill(eye, -1e9), 1, keepdim=True)
        positives = ((y[:, None] == y[None]) & ~eye).float()
        return -((positives * logp).sum(1) / positives.sum(1)).mean()  # FAULT

    def loss(model, x, y):
        return supcon(model(x), torch.tensor([0, 0, 1, 1, 2, 2, 3, 0]))

    return lambda: fit(mlp(), dtype, loss)


@case("log10", "singularity")
def signal_to_noise_of_a_perfect_copy(dtype: torch.dtype) -> Run:
    class Restorer(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Conv2d(1, 1, 3, padding=1)
            nn.init.zeros_(self.body.weight)
            nn.init.zeros_(self.body.bias)

        def forward(self, x):
            return x + self.body(x)

    class PSNRLoss(nn.Module):
        def forward(self, pred, target):
            mse = (pred - target).square().mean((1, 2, 3))
            return 10 * torch.log10(mse).mean()  # FAULT

    def run():
        net, criterion = Restorer(), PSNRLoss()
        opt = torch.optim.AdamW(net.parameters(), 1e-3)
        for _ in range(2):
            clean = torch.rand(2, 1, 6, 6)
            noisy = clean.clone()
            noisy[1] += 0.1 * torch.randn(1, 6, 6)
            loss = criterion(net(noisy), clean)
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "singularity", "camera")
def point_in_the_plane_of_the_camera(dtype: torch.dtype) -> Run:
    class Pinhole(nn.Module):
        def __init__(self):
            super().__init__()
            self.focal = nn.Parameter(torch.tensor([1.2, 1.2]))

        def forward(self, points):
            return self.focal * points[..., :2] / points[..., 2:]  # FAULT

    class Adjust(nn.Module):
        def __init__(self):
            super().__init__()
            self.camera, self.offset = Pinhole(), nn.Parameter(torch.zeros(3))

        def forward(self, points):
            return self.camera(points + self.offset)

    def run():
        model = Adjust()
        opt = torch.optim.Adam(model.parameters(), 1e-2)
        points = torch.randn(6, 3)
        points[4] = torch.tensor([0.3, 0.0, 0.0])
        loss = F.huber_loss(model(points), torch.zeros(6, 2))
        opt.zero_grad()
        loss.backward()
        opt.step()

    return run
