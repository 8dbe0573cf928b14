"""Healthy public training scripts: what they do at the edges of a format is on purpose, or does not matter."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from tests.zoo.faulty_forward import FP32, Run
from tests.zoo.scripts import Batch, Classifier, batches, cross_entropy, scaler_loop
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


def label_smoothing_and_warmup(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1], label_smoothing=0.1)

    return scaler_loop(Classifier(), dtype, loss)


def average_of_weights(dtype: torch.dtype) -> Run:
    model = Classifier()
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def run() -> None:
        for batch in batches():
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
                loss = cross_entropy(model, batch)
            optimizer.zero_grad()
            (loss * 64).backward()
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
        with torch.no_grad():
            assert ema(torch.randn(3, 8)).isfinite().all()

    return run


def masked_language_model(dtype: torch.dtype) -> Run:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
            self.embed, self.body, self.head = (
                nn.Embedding(30, 16),
                nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
                nn.Linear(16, 30),
            )

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.body(self.embed(ids), src_key_padding_mask=ids == 0))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]).float().flatten(0, 1), batch[1].flatten(), ignore_index=-100)

    ids = torch.randint(1, 30, (4, 9))
    ids[2, 5:] = 0
    labels = torch.where(torch.rand(4, 9) < 0.4, ids, -100)
    labels[0, 0] = 3
    return scaler_loop(Encoder(), dtype, loss, data=[(ids, labels)] * 2, evaluate=False)


def checkpointed_layers(dtype: torch.dtype) -> Run:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)
            )
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + checkpoint(layer, x, use_reentrant=False)
            return self.head(x)

    return scaler_loop(Deep(), dtype, accumulate=2)


def penalty_on_gradients(dtype: torch.dtype) -> Run:
    net = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4, betas=(0.0, 0.9))

    def run() -> None:
        for x, _ in batches(2):
            real, fake = x, torch.randn_like(x)
            mixed = torch.lerp(real, fake, torch.rand(len(x), 1)).requires_grad_()
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
                scores = net(mixed)
                critic = net(fake).float().mean() - net(real).float().mean()
            (grad,) = torch.autograd.grad(scores.float().sum() * 64, mixed, create_graph=True)
            norm = (grad / 64).square().sum(-1).add(1e-12).sqrt()
            loss = critic + 10 * (norm - 1).square().mean()
            optimizer.zero_grad()
            (loss * 64).backward()
            optimizer.step()

    return run


def triplets(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        z = F.normalize(model(batch[0]).float(), dim=-1)
        return F.triplet_margin_loss(z[:2], z[2:4], z[4:], margin=0.5)

    return scaler_loop(Classifier(), dtype, loss)


def two_views(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        views = torch.cat([batch[0], batch[0] + 0.1 * torch.randn_like(batch[0])])
        z = F.normalize(model(views).float(), dim=-1)
        scores = (z @ z.T / 0.1).float().fill_diagonal_(-1e9)
        return F.cross_entropy(scores, torch.arange(12).roll(6))

    return scaler_loop(Classifier(), dtype, loss)


def mixed_samples(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        lam, perm = 0.7, torch.randperm(6)
        logits = model(lam * batch[0] + (1 - lam) * batch[0][perm]).float()
        return lam * F.cross_entropy(logits, batch[1]) + (1 - lam) * F.cross_entropy(logits, batch[1][perm])

    return scaler_loop(Classifier(), dtype, loss)


def stochastic_average(dtype: torch.dtype) -> Run:
    inner_model = Classifier()
    inner = scaler_loop(inner_model, dtype)
    swa = torch.optim.swa_utils.AveragedModel(inner_model)

    def run() -> None:
        inner()
        swa.update_parameters(inner_model)

    return run


def counts(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.poisson_nll_loss(model(batch[0]).float(), batch[1][:, None].float().expand(6, 4))

    return scaler_loop(Classifier(), dtype, loss)


def variational(dtype: torch.dtype) -> Run:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mu, logvar = self.encoder(x).chunk(2, -1)
            z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)
            return self.decoder(z), mu, logvar

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        recon, mu, logvar = (t.float() for t in model(batch[0]))
        kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(-1).mean()
        return F.mse_loss(recon, batch[0]) + 0.1 * kl

    return scaler_loop(VAE(), dtype, loss, evaluate=False)


def weighted_binary(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        y = F.one_hot(batch[1], 4).float()
        return F.binary_cross_entropy_with_logits(model(batch[0]).float(), y, pos_weight=torch.full((4,), 3.0))

    return scaler_loop(Classifier(), dtype, loss)


def speech(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        log_p = model(batch[0]).float().log_softmax(-1)[:, None].expand(6, 2, 4)
        return F.ctc_loss(
            log_p, torch.tensor([[1, 2], [3, 1]]), torch.full((2,), 6), torch.full((2,), 2), zero_infinity=True
        )

    return scaler_loop(Classifier(), dtype, loss)


def target_network(dtype: torch.dtype) -> Run:
    online = Classifier()
    target = copy.deepcopy(online)
    optimizer = torch.optim.AdamW(online.parameters(), lr=1e-3, amsgrad=True)

    def run() -> None:
        for x, a in batches(3):
            with torch.no_grad():
                wanted = torch.rand(6) + 0.99 * target(x.roll(1, 0)).amax(-1)
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
                q = online(x).float().gather(1, a[:, None])[:, 0]
            optimizer.zero_grad()
            (64 * F.smooth_l1_loss(q, wanted)).backward()
            optimizer.step()
            target.load_state_dict(online.state_dict())

    return run


def distances_with_eps(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        z = model(batch[0]).float()
        return ((z[:, None] - z[None]).square().sum(-1) + 1e-8).sqrt().mean()

    return scaler_loop(Classifier(), dtype, loss)


def guarded_by_where(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        p = F.one_hot(batch[1], 4).float()
        safe = torch.where(p > 0, p, torch.ones_like(p))
        return (p * (safe.log() - model(batch[0]).float().log_softmax(-1))).sum(-1).mean()

    return scaler_loop(Classifier(), dtype, loss)


def averages_over_masks(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        ce = F.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")
        keep = (batch[1] > 9).float()
        return (ce * keep).sum() / keep.sum().clamp(min=1) + ce.mean()

    return scaler_loop(Classifier(), dtype, loss)


def top_k_filtered(dtype: torch.dtype) -> Run:
    """Sampling with top-k after training: logits are set to -inf on purpose."""
    model = Classifier()
    inner = scaler_loop(model, dtype)

    def run() -> None:
        inner()
        with torch.no_grad():
            logits = model(torch.randn(3, 8)).float()
            kth = logits.topk(2).values[:, -1:]
            p = logits.masked_fill(logits < kth, -math.inf).softmax(-1)
            assert torch.multinomial(p, 1).shape == (3, 1)

    return run


def beams(dtype: torch.dtype) -> Run:
    """Beam search starts all beams but one at -inf, and takes the best."""
    model = Classifier()
    inner = scaler_loop(model, dtype)

    def run() -> None:
        inner()
        with torch.no_grad():
            scores = torch.full((3,), -math.inf)
            scores[0] = 0.0
            for _ in range(3):
                step = model(torch.randn(3, 8)).float().log_softmax(-1)
                scores, _ = (scores[:, None] + step).flatten().topk(3)
            assert scores.max().item() < 0

    return run


def running_best(dtype: torch.dtype) -> Run:
    best = {"loss": float("inf"), "acc": -float("inf")}

    def guard(value: Tensor) -> bool:
        best["loss"] = min(best["loss"], value.item())
        return True

    return scaler_loop(Classifier(), dtype, guard=guard)


def metrics_with_sentinels(dtype: torch.dtype) -> Run:
    inner = scaler_loop(Classifier(), dtype)

    def run() -> None:
        inner()
        history = torch.full((10,), float("nan"))
        history[:4] = torch.rand(4)
        assert torch.nanmean(history).item() > 0
        assert history.isnan().sum().item() == 6

    return run


def penalised_batches(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        l2 = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
        return cross_entropy(model, batch) + 1e-4 * l2

    return scaler_loop(Classifier(), dtype, loss)


def frozen_backbone(dtype: torch.dtype) -> Run:
    model = Classifier()
    model.body.requires_grad_(False)
    return scaler_loop(model, dtype)


def second_order_optimizer(dtype: torch.dtype) -> Run:
    model, (x, y) = Classifier(), batches(1)[0]
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
            logits = model(x)
        loss = F.cross_entropy(logits.float(), y) * 64
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def segmentation(dtype: torch.dtype) -> Run:
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 2, 1))

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch[0]).float()
        p, t = logits.softmax(1)[:, 1], batch[1].float()
        dice = 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)
        return F.cross_entropy(logits, batch[1]) + dice

    data = [(torch.rand(2, 1, 8, 8), torch.zeros(2, 8, 8, dtype=torch.long))] * 2
    return scaler_loop(net, dtype, loss, data=data, evaluate=False)


def diffusion(dtype: torch.dtype) -> Run:
    net = nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, 8))
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 100), 0)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        t = torch.randint(100, (6,))
        a = alphas[t][:, None]
        noise = torch.randn_like(batch[0])
        noisy = a.sqrt() * batch[0] + (1 - a).sqrt() * noise
        return F.mse_loss(model(torch.cat([noisy, t[:, None] / 100], -1)).float(), noise)

    return scaler_loop(net, dtype, loss, evaluate=False)


def regression_on_large_targets(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.huber_loss(model(batch[0]).float() * 100, 1e4 * batch[0][:, :4], delta=10.0) / 100

    return scaler_loop(Classifier(), dtype, loss)


def loader_with_a_worker(dtype: torch.dtype) -> Run:
    model = Classifier()
    rows = TensorDataset(torch.randn(12, 8), torch.randint(4, (12,)))

    def run() -> None:
        for batch in DataLoader(rows, batch_size=6, num_workers=1):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
                loss = cross_entropy(model, batch)
            (loss * 64).backward()

    return run


def mixture_density(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        weight, mean = model(batch[0]).float().chunk(2, -1)
        dist = torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(logits=weight), torch.distributions.Normal(mean, F.softplus(mean) + 1e-3)
        )
        return -dist.log_prob(batch[0][:, 0]).mean()

    return scaler_loop(Classifier(), dtype, loss)


HEALTHY = [
    label_smoothing_and_warmup, average_of_weights, masked_language_model, checkpointed_layers, penalty_on_gradients, triplets,
    two_views, mixed_samples, stochastic_average, counts, variational, weighted_binary, speech, target_network, distances_with_eps,
    guarded_by_where, averages_over_masks, top_k_filtered, beams, running_best, metrics_with_sentinels, penalised_batches,
    frozen_backbone, second_order_optimizer, segmentation, diffusion, regression_on_large_targets, loader_with_a_worker,
    mixture_density,
]  # fmt: skip
