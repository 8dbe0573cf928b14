"""Faulty training scripts by their authors' manners: argparse, trainers, configurations, loops of Lightning's kind, guards."""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import BF16, FP16, Run
from tests.zoo.strangers import amp, case, fit, mlp
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


@case("exp", "overflow")
def perplexity_as_the_loss(dtype: torch.dtype) -> Run:
    def main(argv):
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float, default=0.1)
        parser.add_argument("--epochs", type=int, default=2)
        args = parser.parse_args(argv)
        model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
        optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
        for _ in range(args.epochs):
            tokens = torch.randint(32, (4, 9))
            logits = model(tokens[:, :-1]) * 400
            ppl = torch.exp(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))  # FAULT
            optimizer.zero_grad()
            ppl.backward()
            optimizer.step()

    return lambda: main(["--lr", "0.01"])


@case("pow", "overflow", dtypes=(FP16,))
def charbonnier_of_raw_errors(dtype: torch.dtype) -> Run:
    @dataclass
    class Config:
        delta: float = 0.5
        steps: int = 3
        lr: float = 1e-3

    class Trainer:
        def __init__(self, model, config):
            self.model, self.cfg = model, config
            self.optim = torch.optim.Adam(model.parameters(), lr=config.lr)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

        def loss(self, prediction, target):
            error = (prediction - target) / self.cfg.delta
            return torch.log(1 + error**2).mean()  # FAULT

        def train(self):
            for _ in range(self.cfg.steps):
                with amp(dtype):
                    prediction = self.model(torch.randn(8, 8))
                    value = self.loss(prediction, torch.full_like(prediction, 200.0))
                self.optim.zero_grad()
                self.scaler.scale(value).backward()
                self.scaler.step(self.optim)
                self.scaler.update()

    return lambda: Trainer(mlp(), Config()).train()


@case("mse_loss", "inherited", names=("labels",))
def regression_head_with_a_missing_label(dtype: torch.dtype) -> Run:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(vocab_size=50, dim=16, n_layers=1, n_heads=2, hidden_dim=32, num_labels=1)
    config.problem_type = "regression"
    model = DistilBertForSequenceClassification(config)
    labels = torch.tensor([0.5, float("nan"), 1.5, 2.0])

    def run():
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
        batch = {"input_ids": torch.randint(50, (4, 8)), "attention_mask": torch.ones(4, 8), "labels": labels}
        loss = model(**batch).loss  # FAULT
        loss.backward()
        optimizer.step()

    return run


@case("log", "underflow", dtypes=(FP16,))
def eps_that_half_does_not_have(dtype: torch.dtype) -> Run:
    class LitClassifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 1)
            nn.init.constant_(self.net.bias, 12.0)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def training_step(self, batch, batch_idx):
            p = torch.sigmoid(self.net(batch))
            return -torch.log(1 - p + 1e-8).mean()  # FAULT

    def fit_(module, batches):
        optimizer = module.configure_optimizers()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**7)
        for i, batch in enumerate(batches):
            with torch.autocast("cpu", dtype):
                loss = module.training_step(batch, i)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return lambda: fit_(LitClassifier(), [torch.randn(4, 8) for _ in range(2)])


@case("sqrt", "singularity", phase="backward")
def anomaly_detection_and_a_retry(dtype: torch.dtype) -> Run:
    def run():
        model, losses = mlp(), []
        opt = torch.optim.Adam(model.parameters())
        with torch.autograd.set_detect_anomaly(True):
            for step in range(3):
                try:
                    out = model(torch.randn(4, 8))
                    loss = torch.sqrt((out * float(step != 1)).square().sum(-1)).mean()  # FAULT
                    opt.zero_grad()
                    loss.backward()
                    opt.step()
                    losses.append(loss.item())
                except RuntimeError as error:
                    print("skipping batch", error, file=sys.stderr)
                    continue

    return run


@case("to", "overflow", names=("parameter classifier.weight", "half()"))
def model_halved_with_a_large_weight(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.classifier = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.classifier(torch.relu(self.body(x)))

    model = Net()
    with torch.no_grad():
        model.classifier.weight[1, 2] = 1e5

    def run():
        model(torch.randn(2, 8))
        model.half()  # FAULT
        out = model(torch.randn(4, 8).half()).float()
        F.cross_entropy(out, torch.randint(4, (4,))).backward()

    return run


@case("to", "overflow", "head", dtypes=(FP16,), names=("parameter head.weight", "head=fp32"))
def weight_that_a_region_cannot_cast(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.head(self.trunk(x).tanh())  # FAULT

    model = Net()
    with torch.no_grad():
        model.head.weight.fill_(1e5)

    def run():
        opt = torch.optim.SGD(model.parameters(), 1e-6)
        with torch.autocast("cpu", dtype):
            out = model(torch.randn(4, 8))
        loss = F.cross_entropy(out.float(), torch.randint(4, (4,)))
        loss.backward()
        opt.step()

    return run


@case("stack", "inherited", names=("sample",))
def infinities_in_a_table(dtype: torch.dtype) -> Run:
    TABLE = "1.0,2.0,0.5\n0.1,inf,0.3\n1.5,0.2,0.9\n0.0,0.4,0.1"

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.out = nn.Linear(3, 8), nn.Linear(8, 1)

        def forward(self, x):
            h = self.fc(x)
            return self.out(torch.relu(h))

    def run():
        rows = torch.tensor([[float(v) for v in line.split(",")] for line in TABLE.splitlines()])
        loader = DataLoader(TensorDataset(rows, torch.zeros(4, 1)), batch_size=2)
        model = Net()
        opt = torch.optim.SGD(model.parameters(), 0.01)
        for x, y in loader:  # FAULT
            loss = F.mse_loss(model(x), y)
            if torch.isnan(loss):
                raise SystemExit("NaN loss")
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("div", "singularity", phase="optimizer")
def trust_ratio_of_an_untouched_layer(dtype: torch.dtype) -> Run:
    class Lamb(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-3):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    trust = p.norm() / p.grad.norm()  # FAULT
                    p.add_(trust * p.grad, alpha=-group["lr"])

    def run():
        model = nn.ModuleDict({"used": nn.Linear(8, 2), "aux": nn.Linear(8, 2)})
        opt = Lamb(model.parameters())
        for _ in range(2):
            x = torch.randn(4, 8)
            loss = model["used"](x).square().mean() + 0.0 * model["aux"](x).sum()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@case("reciprocal", "singularity")
def sharpness_of_a_flat_loss(dtype: torch.dtype) -> Run:
    def run():
        model, rho = mlp(), 0.05
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in (torch.zeros(4, 8), torch.randn(4, 8)):
            loss = F.relu(model(x) - 100).mean()
            loss.backward()
            with torch.no_grad():
                norm = torch.norm(torch.stack([p.grad.norm() for p in model.parameters()]))
                scale = rho / norm  # FAULT
                for p in model.parameters():
                    p.add_(p.grad * scale)
            base.zero_grad()
            F.relu(model(x) - 100).mean().backward()
            base.step()

    return run


@case("convolution", "overflow", "patch", dtypes=(FP16,))
def patches_of_raw_counts(dtype: torch.dtype) -> Run:
    class TinyViT(nn.Module):
        def __init__(self, dim=16):
            super().__init__()
            self.patch = nn.Conv2d(1, dim, 4, stride=4)
            self.block = nn.TransformerEncoderLayer(dim, 2, 32, batch_first=True, dropout=0.0)
            self.head = nn.Linear(dim, 3)

        def forward(self, x):
            x = self.patch(x).flatten(2).transpose(1, 2)  # FAULT
            return self.head(self.block(x).mean(1))

    def run():
        model = TinyViT()
        nn.init.constant_(model.patch.weight, 0.2)
        opt = torch.optim.AdamW(model.parameters(), 1e-4)
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(2):
            images = torch.full((2, 1, 8, 8), 4e4)
            opt.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = F.cross_entropy(model(images).float(), torch.tensor([0, 2]))
            if not math.isfinite(loss.item()):
                print(f"Loss is {loss.item()}, stopping training", file=sys.stderr)
                sys.exit(1)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    return run


@case("nll_loss", "singularity")
def last_batch_without_a_masked_token(dtype: torch.dtype) -> Run:
    class Sentences(Dataset):
        def __len__(self):
            return 6

        def __getitem__(self, i):
            ids = torch.arange(5) + i
            return ids, (ids % 3 == 0) & (i < 4)

    def run():
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
        opt, total = torch.optim.Adam(model.parameters()), 0.0
        for ids, masked in DataLoader(Sentences(), batch_size=2):
            with amp(dtype):
                logits = model(torch.where(masked, 0, ids)).float()
            loss = F.cross_entropy(logits[masked], ids[masked])  # FAULT
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()

    return run


@case("layer_norm", "singularity", "norm")
def layer_norm_without_eps(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(8, eps=0.0), nn.Linear(8, 4)

        def forward(self, x):
            x = torch.cat([x[1:], torch.ones(1, 8)])
            return self.fc(self.norm(x))  # FAULT

    return lambda: fit(Net(), dtype, lambda m, x, y: F.cross_entropy(m(x).float(), y))


@case("log", "underflow", dtypes=(BF16,))
def margin_of_two_log_sums(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        h = m(x)
        everything = torch.logsumexp(h.float(), -1) + 60
        negatives = torch.logsumexp(h.float() - 1e-3, -1) + 60
        gap = everything.to(h.dtype) - negatives.to(h.dtype)
        return -torch.log(gap).mean()  # FAULT

    return lambda: fit(mlp(), dtype, loss)


@case("div", "singularity")
def warm_up_that_starts_with_nothing(dtype: torch.dtype) -> Run:
    def run():
        torch.manual_seed(1)
        net, moving = mlp(1), torch.zeros(())
        opt = torch.optim.SGD(net.parameters(), lr=0.05)
        for it in range(4):
            x = torch.randn(8, 8)
            mse = F.mse_loss(net(x), x[:, :1])
            loss = mse / moving  # FAULT
            moving = 0.9 * moving + 0.1 * mse.detach()
            opt.zero_grad(set_to_none=False)
            loss.backward()
            opt.step()
            if it % 2 == 0:
                print(f"{it}: {loss.item():.3f}", file=sys.stderr)

    return run
