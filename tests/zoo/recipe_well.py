"""Healthy recipes for signals and frameworks, near the faults of others: the diagnosis must say nothing."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import BF16, FP16, FP32, Run
from tests.zoo.strangers import amp, fit, healthy, mlp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@healthy(FP32, BF16)
def spectrogram_with_silence(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("window", torch.hann_window(16))
            self.scale, self.out = nn.Parameter(torch.ones(())), nn.Linear(9, 4)

        def forward(self, wav):
            spec = torch.stft(wav * self.scale, 16, 8, window=self.window, return_complex=True).abs()
            return self.out(torch.log1p(100 * spec).mean(-1))

    def run():
        net = Net()
        opt = torch.optim.Adam(net.parameters())
        for _ in range(2):
            wav = torch.randn(3, 64)
            wav[1] = 0
            with amp(dtype):
                loss = F.cross_entropy(net(wav).float(), torch.tensor([0, 1, 2]))
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy(FP32)
def transducer_lattice(dtype: torch.dtype) -> Run:
    def run():
        joint = nn.Linear(8, 2)
        opt = torch.optim.Adam(joint.parameters())
        for _ in range(2):
            logp = joint(torch.randn(3, 3, 8)).log_softmax(-1)
            blank, emit = logp.unbind(-1)
            row = [torch.zeros(())]
            for u in range(1, 3):
                row.append(row[-1] + emit[0, u - 1])
            for t in range(1, 3):
                new = [row[0] + blank[t - 1, 0]]
                for u in range(1, 3):
                    new.append(torch.logaddexp(row[u] + blank[t - 1, u], new[-1] + emit[t, u - 1]))
                row = new
            loss = -(row[-1] + blank[-1, -1])
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy()
def reversible_norm(dtype: torch.dtype) -> Run:
    class Forecaster(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
            self.mix = nn.Linear(12, 4)

        def forward(self, x):
            mean, std = x.mean(1, keepdim=True), torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5)
            h = self.mix(((x - mean) / std * self.weight + self.bias).transpose(1, 2)).transpose(1, 2)
            return (h - self.bias) / (self.weight + 1e-10) * std + mean

    def run():
        model = Forecaster()
        opt, scaler = (
            torch.optim.AdamW(model.parameters()),
            torch.amp.GradScaler("cpu", init_scale=64.0, enabled=dtype is FP16),
        )
        for _ in range(2):
            x = torch.randn(2, 12, 3)
            x[0, :, 1] = 5.0
            with amp(dtype):
                loss = F.mse_loss(model(x).float(), torch.randn(2, 4, 3))
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()

    return run


@healthy(FP32)
def tweedie_with_a_link(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        mu = model(x)[:, 0].exp()
        return (-y * mu.pow(-0.5) / -0.5 + mu.pow(0.5) / 0.5).mean()

    return lambda: fit(mlp(), dtype, loss)


@healthy()
def pairwise_ranking(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        out = model(x)
        return -F.logsigmoid((out[:, 0] - 4 * out[:, 1]).float()).mean()

    return lambda: fit(mlp(), dtype, loss, scale=64.0)


@healthy()
def focal_loss_with_logits(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        logits, target = 8 * model(x), F.one_hot(y, 4).float()
        ce = F.binary_cross_entropy_with_logits(logits.float(), target, reduction="none")
        pt = torch.exp(-ce)
        return (0.25 * (1 - pt) ** 2 * ce).sum() / target.sum().clamp(min=1)

    return lambda: fit(mlp(), dtype, loss, scale=16.0)


@healthy(FP32)
def rays_over_a_white_background(dtype: torch.dtype) -> Run:
    def run():
        net = mlp(4)
        nn.init.constant_(net[2].bias, -4.0)
        opt = torch.optim.Adam(net.parameters(), 5e-4)
        for _ in range(2):
            raw, z = net(torch.randn(5, 6, 8)), torch.linspace(2, 6, 6).expand(5, 6)
            dists = torch.cat([z[:, 1:] - z[:, :-1], torch.full_like(z[:, :1], 1e10)], -1)
            alpha = 1 - torch.exp(-F.relu(raw[..., 3]) * dists)
            trans = torch.cumprod(torch.cat([torch.ones(5, 1), 1 - alpha + 1e-10], -1), -1)[:, :-1]
            w = alpha * trans
            rgb = (w[..., None] * raw[..., :3].sigmoid()).sum(-2) + (1 - w.sum(-1, keepdim=True))
            loss = (rgb - 0.5).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            with torch.no_grad():
                _psnr = -10 * torch.log10(loss)

    return run


@healthy(FP32)
def attention_over_segments(dtype: torch.dtype) -> Run:
    def run():
        lin, att = nn.Linear(8, 4), nn.Linear(8, 1)
        opt = torch.optim.Adam([*lin.parameters(), *att.parameters()])
        src, dst = torch.tensor([0, 1, 2, 0]), torch.tensor([1, 1, 2, 3])
        for _ in range(2):
            h = lin(torch.randn(5, 8))
            e = F.leaky_relu(att(torch.cat([h[src], h[dst]], -1)).squeeze(-1), 0.2)
            top = torch.full((5,), float("-inf")).scatter_reduce(0, dst, e, "amax")
            w = torch.exp(e - top[dst])
            total = torch.zeros(5).index_add(0, dst, w)
            out = torch.zeros(5, 4).index_add(0, dst, (w / total[dst])[:, None] * h[src])
            loss = out.square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    return run


@healthy(FP32)
def supervised_contrast_of_those_that_have_partners(dtype: torch.dtype) -> Run:
    def loss(model, x, y):
        z = F.normalize(model(x), dim=-1)
        labels, eye = torch.tensor([0, 0, 1, 1, 2, 3, 3, 0]), torch.eye(8, dtype=torch.bool)
        logp = (z @ z.T / 0.1).masked_fill(eye, float("-inf")).log_softmax(-1)
        positives = (labels[:, None] == labels[None]) & ~eye
        has = positives.any(1)
        per = logp.masked_fill(~positives, 0).sum(1) / positives.sum(1)
        return -per[has].mean()

    return lambda: fit(mlp(), dtype, loss)


@healthy(FP32)
def lightning_with_a_monitor(dtype: torch.dtype) -> Run:
    def run():
        import lightning as L

        class Lit(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.net, self.best = mlp(), float("inf")

            def training_step(self, batch, batch_idx):
                x, y = batch
                loss = F.cross_entropy(self.net(x), y)
                self.log("train_loss", loss)
                return loss

            def validation_step(self, batch, batch_idx):
                x, y = batch
                value = F.cross_entropy(self.net(x), y)
                self.best = min(self.best, value.item())
                self.log("val_loss", value)

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-3)

        data = TensorDataset(torch.randn(12, 8), torch.randint(4, (12,)))
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(max_epochs=1, accelerator="cpu", enable_checkpointing=False, gradient_clip_val=1.0, **quiet)
        trainer.fit(Lit(), DataLoader(data, batch_size=4), DataLoader(data, batch_size=6))

    return run


@healthy(FP32)
def accelerated_accumulation(dtype: torch.dtype) -> Run:
    def run():
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 2))
        loader = DataLoader(TensorDataset(torch.randn(16, 8), torch.randint(4, (16,))), batch_size=4)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        losses = []
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather_for_metrics(loss.detach()[None]))
        assert math.isfinite(torch.cat(losses).mean().item())

    return run


@healthy(FP32, FP16)
def encoder_with_an_empty_text(dtype: torch.dtype) -> Run:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    config = DistilBertConfig(vocab_size=50, dim=16, n_layers=1, n_heads=2, hidden_dim=32, num_labels=3)
    config._attn_implementation = "eager"
    model = DistilBertForSequenceClassification(config)

    def run():
        opt, scaler = (
            torch.optim.AdamW(model.parameters(), 5e-5),
            torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype is FP16),
        )
        for _ in range(2):
            mask = torch.ones(3, 8, dtype=torch.long)
            mask[1, 1:] = 0
            with amp(dtype):
                out = model(torch.randint(50, (3, 8)), attention_mask=mask, labels=torch.tensor([0, 1, 2]))
            scaler.scale(out.loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

    return run
