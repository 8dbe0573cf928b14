"""Healthy programs as strangers write them: loops by hand, distances, sampling."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import Run
from tests.zoo.scripts import Batch, scaler_loop
from tests.zoo.strangers import amp, fit, healthy, mlp
from torch import Tensor, nn


@healthy()
def arcface_clamped(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        cos = F.normalize(m(x).float(), dim=-1).clamp(-1 + 1e-6, 1 - 1e-6)
        return F.cross_entropy(30 * torch.cos(torch.acos(cos) + 0.1), y)

    return lambda: fit(mlp(), dtype, loss)


@healthy()
def complete_iou_with_eps(dtype: torch.dtype) -> Run:
    def loss(m, x, y):
        b = m(x).float().sigmoid()
        w, h = b[:, 2], b[:, 3] * 0
        return ((4 / math.pi**2) * (torch.atan(w / (h + 1e-6)) - math.pi / 4).pow(2)).mean()

    return lambda: fit(mlp(), dtype, loss)


@healthy()
def alibi_and_causal_mask(dtype: torch.dtype) -> Run:
    class Attn(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 4)
            bias = -torch.arange(6.0)[None].sub(torch.arange(6.0)[:, None]).abs()
            self.register_buffer("bias", bias.masked_fill(torch.ones(6, 6).triu(1).bool(), -math.inf))

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            a = (q @ k.transpose(-1, -2) / 4 + self.bias).softmax(-1)
            return self.out(a.to(v.dtype) @ v).mean(1)

    return lambda: fit(
        Attn(),
        dtype,
        lambda m, x, y: F.cross_entropy(m(x).float(), y),
        data=[(torch.randn(4, 6, 16), torch.randint(4, (4,)))],
    )


@healthy()
def adam_by_hand(dtype: torch.dtype) -> Run:
    def run():
        model = mlp()
        m = {p: torch.zeros_like(p) for p in model.parameters()}
        v = {p: torch.zeros_like(p) for p in model.parameters()}
        for t in range(1, 4):
            with amp(dtype):
                out = model(torch.randn(8, 8))
            loss = F.cross_entropy(out.float(), torch.randint(4, (8,))) * 64
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    g = p.grad / 64
                    m[p].lerp_(g, 0.1)
                    v[p].lerp_(g * g, 0.001)
                    p.sub_(1e-3 * (m[p] / (1 - 0.9**t)) / ((v[p] / (1 - 0.999**t)).sqrt() + 1e-8))

    return run


@healthy()
def t5_from_config(dtype: torch.dtype) -> Run:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0)
    )
    ids = torch.randint(1, 64, (2, 8))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return lambda: fit(
        model,
        dtype,
        lambda m, x, y: m(**x, labels=y).loss,
        data=[(dict(input_ids=ids, attention_mask=mask), ids[:, :5].contiguous())],
        steps=2,
    )


@healthy()
def log_mel_with_a_floor(dtype: torch.dtype) -> Run:
    class Front(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(9, 4)

        def forward(self, wave):
            spec = torch.stft(wave, 16, return_complex=True, window=torch.hann_window(16)).abs().pow(2)
            return self.fc(torch.log10(spec.clamp(min=1e-10)).mean(-1))

    wave = torch.randn(4, 64)
    wave[1] = 0
    return lambda: fit(
        Front(), dtype, lambda m, x, y: F.cross_entropy(m(x).float(), y), data=[(wave, torch.randint(4, (4,)))]
    )


@healthy()
def gathered_metrics_with_empty_classes(dtype: torch.dtype) -> Run:
    def run():
        model = mlp()
        fit(model, dtype, lambda m, x, y: F.cross_entropy(m(x).float(), y))
        with torch.no_grad():
            pred, y = model(torch.randn(8, 8)).argmax(-1), torch.zeros(8, dtype=torch.long)
            conf = torch.zeros(4, 4)
            for a, b in zip(y, pred, strict=False):
                conf[a, b] += 1
            recall = conf.diag() / conf.sum(1)
            iou = conf.diag() / (conf.sum(0) + conf.sum(1) - conf.diag())
            print(f"recall {recall.nanmean():.2f} iou {iou[~iou.isnan()].mean():.2f}")

    return run


@healthy()
def weight_decay_and_ema_by_hand(dtype: torch.dtype) -> Run:
    def run():
        model = mlp()
        ema = [p.detach().clone() for p in model.parameters()]
        best = float("inf")
        opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True)
        for _ in range(3):
            with amp(dtype):
                loss = F.smooth_l1_loss(model(torch.randn(8, 8)).float(), torch.randn(8, 4)) * 128
            opt.zero_grad()
            loss.backward()
            for p in model.parameters():
                p.grad.div_(128)
            opt.step()
            with torch.no_grad():
                for e, p in zip(ema, model.parameters(), strict=False):
                    p.mul_(1 - 1e-4)
                    e.lerp_(p, 0.01)
            best = min(best, loss.item())

    return run


@healthy()
def quantised_codes(dtype: torch.dtype) -> Run:
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder, self.codes = nn.Linear(8, 4), nn.Linear(4, 8), nn.Embedding(16, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            z = self.encoder(x).float()
            nearest = torch.cdist(z, self.codes.weight).argmin(-1)
            code = self.codes(nearest)
            return self.decoder(z + (code - z).detach()), z, code

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        recon, z, code = model(batch[0])
        return F.mse_loss(recon.float(), batch[0]) + F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())

    return scaler_loop(Codes(), dtype, loss, evaluate=False)
