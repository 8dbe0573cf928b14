"""Healthy scripts of many fields: what their authors write around missing values, empty sets and extremes holds."""

from __future__ import annotations

import argparse
import io
import math
import sys

import numpy as np
import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import FP16, FP32, Run
from tests.zoo.strangers import amp, fit, healthy, mlp
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


@healthy()
def digits_by_argparse(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
            self.drop, self.fc = nn.Dropout(0.25), nn.Linear(128, 10)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 3)
            return F.log_softmax(self.fc(self.drop(x.flatten(1))).float(), dim=1)

    def train(args, model, loader, optimizer, scaler):
        model.train()
        for idx, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            with amp(dtype):
                loss = F.nll_loss(model(data), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if idx % args.log_interval == 0:
                print(f"{idx} {loss.item():.4f}", file=sys.stderr)

    @torch.no_grad()
    def test(model, loader):
        model.eval()
        return sum(model(x).argmax(1).eq(y).sum().item() for x, y in loader)

    def main(argv):
        parser = argparse.ArgumentParser()
        parser.add_argument("--gamma", type=float, default=0.7)
        parser.add_argument("--log-interval", type=int, default=1)
        args = parser.parse_args(argv)
        model = Net()
        loader = DataLoader(TensorDataset(torch.rand(8, 1, 16, 16), torch.randint(10, (8,))), batch_size=4)
        optimizer = torch.optim.Adadelta(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=args.gamma)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=dtype is FP16)
        for _ in range(2):
            train(args, model, loader, optimizer, scaler)
            test(model, loader)
            scheduler.step()

    return lambda: main([])


@healthy()
def trainer_that_resumes(dtype: torch.dtype) -> Run:
    class Trainer:
        def __init__(self):
            self.model = mlp()
            self.opt = torch.optim.AdamW(self.model.parameters(), 1e-3)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype is FP16)
            self.best = float("inf")

        def step(self, x, y):
            with amp(dtype):
                loss = F.cross_entropy(self.model(x), y)
            self.opt.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
            if not np.isfinite(loss.item()):
                raise FloatingPointError
            self.best = min(self.best, loss.item())

        def state(self):
            return {"model": self.model.state_dict(), "opt": self.opt.state_dict(), "scaler": self.scaler.state_dict()}

    def run():
        first, file = Trainer(), io.BytesIO()
        first.step(torch.randn(8, 8), torch.randint(4, (8,)))
        torch.save(first.state(), file)
        file.seek(0)
        state, second = torch.load(file, weights_only=True), Trainer()
        second.model.load_state_dict(state["model"])
        second.opt.load_state_dict(state["opt"])
        for _ in range(2):
            second.step(torch.randn(8, 8), torch.randint(4, (8,)))

    return run


@healthy(FP32)
def sentence_pairs_with_padding(dtype: torch.dtype) -> Run:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification, get_linear_schedule_with_warmup

    model = DistilBertForSequenceClassification(
        DistilBertConfig(vocab_size=50, dim=16, n_layers=1, n_heads=2, hidden_dim=32, num_labels=3)
    )

    def run():
        opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
        schedule = get_linear_schedule_with_warmup(opt, 1, 3)
        for n in (8, 3):
            ids, mask = torch.randint(50, (4, 8)), (torch.arange(8) < n).long().expand(4, 8)
            with amp(dtype):
                loss = model(input_ids=ids, attention_mask=mask, labels=torch.randint(3, (4,))).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            schedule.step()
            opt.zero_grad()

    return run


@healthy()
def module_with_validation_metrics(dtype: torch.dtype) -> Run:
    class Lit(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.logged = mlp(), {"val_loss": float("inf"), "val_f1": float("nan")}

        def training_step(self, batch):
            return F.cross_entropy(self.net(batch[0]).float(), batch[1])

        def validation_step(self, batch):
            out = self.net(batch[0]).float().argmax(-1)
            tp = torch.stack([((out == c) & (batch[1] == c)).sum() for c in range(4)]).float()
            per_class = tp / torch.stack([(out == c).sum() for c in range(4)])
            self.logged["val_f1"] = torch.nanmean(per_class).item()

    def run():
        lit = Lit()
        opt = torch.optim.Adam(lit.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype is FP16)
        for _ in range(2):
            batch = (torch.randn(8, 8), torch.randint(4, (8,)))
            with amp(dtype):
                loss = lit.training_step(batch)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            with torch.no_grad(), amp(dtype):
                lit.eval()
                lit.validation_step(batch)
                lit.train()

    return run


@healthy()
def proximal_updates_with_forbidden_actions(dtype: torch.dtype) -> Run:
    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.pi, self.v = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 1)

        def forward(self, obs, allowed):
            h = torch.tanh(self.body(obs))
            logits = self.pi(h).float().masked_fill(~allowed, -1e8)
            return torch.distributions.Categorical(logits=logits), self.v(h).float().squeeze(-1)

    def gae(rewards, values, gamma=0.99, lam=0.95):
        out, last = torch.zeros_like(rewards), 0.0
        for t in reversed(range(len(rewards))):
            following = values[t + 1] if t + 1 < len(rewards) else 0.0
            last = rewards[t] + gamma * following - values[t] + gamma * lam * last
            out[t] = last
        return out

    def run():
        net = ActorCritic()
        opt = torch.optim.Adam(net.parameters(), lr=3e-4, eps=1e-5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=dtype is FP16)
        obs, allowed = torch.randn(16, 8), torch.rand(16, 4) > 0.3
        allowed[:, 0] = True
        with torch.no_grad(), amp(dtype):
            dist, values = net(obs, allowed)
            actions = dist.sample()
            old = dist.log_prob(actions)
        adv = gae(torch.rand(16), values)
        returns, adv = adv + values, (adv - adv.mean()) / (adv.std() + 1e-8)
        for _ in range(2):
            with amp(dtype):
                dist, v = net(obs, allowed)
            ratio = (dist.log_prob(actions) - old).exp()
            pg = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            loss = pg + 0.5 * (v - returns).square().mean() - 0.01 * dist.entropy().mean()
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()

    return run


@healthy()
def denoising_with_cosine_levels(dtype: torch.dtype) -> Run:
    def run():
        t = torch.linspace(0, 1, 21)
        abar = torch.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2
        abar = (abar / abar[0]).clamp(1e-5, 1 - 1e-5)
        net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 1, 3, padding=1))
        ema = {k: v.detach().clone() for k, v in net.state_dict().items()}
        opt = torch.optim.AdamW(net.parameters(), 1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=512.0, enabled=dtype is FP16)
        for _ in range(2):
            step = torch.randint(21, (4,))
            a, x0, eps = abar[step][:, None, None, None], torch.rand(4, 1, 8, 8), torch.randn(4, 1, 8, 8)
            with amp(dtype):
                out = net(a.sqrt() * x0 + (1 - a).sqrt() * eps).float()
            snr = a / (1 - a)
            loss = (torch.clamp(snr, max=5.0) / snr * (out - eps).square()).mean()
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            for k, v in net.state_dict().items():
                ema[k].lerp_(v, 0.01)

    return run


@healthy()
def transcripts_of_many_lengths(dtype: torch.dtype) -> Run:
    class Acoustic(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.rnn, self.out = (
                nn.Conv1d(8, 16, 3, padding=1),
                nn.GRU(16, 16, batch_first=True),
                nn.Linear(16, 6),
            )

        def forward(self, x):
            h = F.gelu(self.conv(x.mT)).mT.float()
            return self.out(self.rnn(h)[0]).float().log_softmax(-1)

    criterion = nn.CTCLoss(blank=0, zero_infinity=True)

    def loss(m, x, y):
        return criterion(m(x).transpose(0, 1), y, torch.tensor([12, 9, 2]), torch.tensor([4, 3, 4]))

    data = [(torch.randn(3, 12, 8), torch.randint(1, 6, (3, 4)))]
    return lambda: fit(Acoustic(), FP32 if dtype is FP16 else dtype, loss, data=data)


@healthy()
def graph_convolution_with_an_isolated_node(dtype: torch.dtype) -> Run:
    class GCN(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1, self.l2 = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x, row, col):
            deg = torch.zeros(len(x)).scatter_add_(0, row, torch.ones(len(row)))
            inv = deg.pow(-0.5)
            inv.masked_fill_(inv == float("inf"), 0)
            weight = inv[row] * inv[col]
            for i, layer in enumerate((self.l1, self.l2)):
                h = layer(x)
                x = torch.zeros_like(h).index_add(0, row, weight[:, None].to(h.dtype) * h[col])
                x = F.relu(x) if i == 0 else x
            return x.float().log_softmax(-1)

    row, col = torch.tensor([0, 1, 1, 2, 3, 4]), torch.tensor([1, 0, 2, 1, 4, 3])
    data = [(torch.randn(6, 8), torch.randint(4, (6,)))]
    return lambda: fit(GCN(), dtype, lambda m, x, y: F.nll_loss(m(x, row, col), y), data=data)


@healthy()
def edge_softmax_by_scatter(dtype: torch.dtype) -> Run:
    class GAT(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.att = nn.Linear(8, 8), nn.Linear(16, 1)

        def forward(self, x, src, dst):
            h = self.lin(x).float()
            e = F.leaky_relu(self.att(torch.cat([h[src], h[dst]], -1))).squeeze(-1).float()
            top = torch.full((len(x),), float("-inf")).scatter_reduce(0, dst, e.detach(), "amax")
            a = (e - top[dst]).exp()
            total = torch.zeros(len(x)).index_add(0, dst, a)
            return torch.zeros_like(h).index_add(0, dst, (a / (total[dst] + 1e-16))[:, None] * h[src])

    src, dst = torch.tensor([0, 1, 2, 3, 0, 2]), torch.tensor([1, 2, 3, 0, 2, 0])
    data = [(torch.randn(5, 8), torch.randint(4, (5,)))]
    return lambda: fit(GAT(), dtype, lambda m, x, y: F.cross_entropy(m(x, src, dst), y), data=data)


@healthy()
def sensors_with_gaps(dtype: torch.dtype) -> Run:
    series, target = torch.randn(4, 12, 3), torch.randn(4, 4)
    series[1, 3:6], series[2, :, 1], target[0, 2] = float("nan"), float("nan"), float("nan")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.out = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 4)

        def forward(self, x):
            seen = ~torch.isnan(x)
            x = torch.cat([torch.nan_to_num(x, nan=0.0), seen.float()], -1)
            return self.out(self.rnn(x)[0][:, -1])

    def loss(m, x, y):
        known = ~torch.isnan(y)
        error = torch.where(known, m(x).float() - torch.nan_to_num(y), 0.0)
        return error.square().sum() / known.sum().clamp(min=1)

    return lambda: fit(Net(), FP32 if dtype is FP16 else dtype, loss, data=[(series, target)])


@healthy()
def ratings_that_were_not_given(dtype: torch.dtype) -> Run:
    class Factors(nn.Module):
        def __init__(self):
            super().__init__()
            self.u, self.i = nn.Embedding(6, 8, padding_idx=0), nn.EmbeddingBag(9, 8, mode="mean")

        def forward(self, users, bags, offsets):
            return (F.normalize(self.u(users), dim=-1) * self.i(bags, offsets)).sum(-1)

    def run():
        model = Factors()
        opt = torch.optim.Adagrad(model.parameters(), 0.1)
        for _ in range(2):
            users, bags, offsets = torch.tensor([0, 3, 5]), torch.randint(9, (5,)), torch.tensor([0, 2, 5])
            with amp(dtype):
                out = model(users, bags, offsets).float()
            rating = torch.tensor([4.0, float("nan"), 2.0])
            known = ~rating.isnan()
            loss = F.mse_loss(out[known], rating[known]) - F.logsigmoid(out[0] - out[1])
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


class NoisyImages(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        image = torch.rand(1, 8, 8)
        return (image - image.mean()) / image.std().clamp(min=1e-3), i % 4


@healthy(FP32)
def images_from_two_workers(dtype: torch.dtype) -> Run:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))

    def run():
        opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True)
        for x, y in DataLoader(NoisyImages(), batch_size=4, num_workers=2, shuffle=True):
            with amp(dtype):
                loss = F.cross_entropy(net(x).float(), y)
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run
