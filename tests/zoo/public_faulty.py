"""Faults of public training scripts: losses written by hand, guards that hide them, data that brings them along."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tests.zoo.case import Case
from tests.zoo.faulty_forward import ALL, Run
from tests.zoo.scripts import Batch, Classifier, scaler_loop
from torch import Tensor, nn


def finite(loss: Tensor) -> bool:
    return bool(torch.isfinite(loss))


def loop(loss_fn: Callable[[nn.Module, Batch], Tensor], **options: object) -> Callable[[torch.dtype], Run]:
    return lambda dtype: scaler_loop(Classifier(), dtype, loss_fn, **options)


def caught(run: Run) -> Run:
    """A script that goes on to the next experiment when one fails."""

    def guarded() -> None:
        try:
            run()
        except RuntimeError as error:
            assert "linalg" in str(error)

    return guarded


def vae_with_a_large_variance(dtype: torch.dtype) -> Run:
    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mu, self.logvar, self.decoder = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 8)
            nn.init.constant_(self.logvar.bias, 30.0)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mu, logvar = self.mu(x), self.logvar(x)
            std = torch.exp(0.5 * logvar)  # FAULT
            return self.decoder(mu + std * torch.randn_like(std)), mu, logvar

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        recon, mu, logvar = model(batch[0])
        kl = -0.5 * (1 + logvar.float() - mu.float().square() - (logvar.float() / 4).exp()).mean()
        return F.mse_loss(recon.float(), batch[0]) + kl

    return scaler_loop(VAE(), dtype, loss, evaluate=False)


def contrastive_at_a_low_temperature(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        z = model(batch[0])
        scores = z @ z.T
        scores = 200 * scores / 0.0005  # FAULT
        return F.cross_entropy(scores.float(), torch.arange(len(z)))

    return scaler_loop(Classifier(), dtype, loss, guard=finite)


def contrastive_without_logsumexp(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        z = F.normalize(model(batch[0]).float(), dim=-1)
        scores = torch.exp(z @ z.T / 0.01)  # FAULT
        return -torch.log(scores.diagonal() / scores.sum(-1)).mean()

    return scaler_loop(Classifier(), dtype, loss)


def policy_ratio_far_from_one(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        new = model(batch[0]).float().log_softmax(-1).gather(1, batch[1][:, None])
        old = torch.full_like(new, -120.0)
        ratio = torch.exp(new - old)  # FAULT
        return -torch.min(ratio * 2.0, ratio.clamp(0.8, 1.2) * -1.0).mean()

    return scaler_loop(Classifier(), dtype, loss, guard=lambda value: not torch.isinf(value))


def dice_of_an_empty_mask(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        p = model(batch[0]).float().relu() * 0.0
        t = torch.zeros_like(p)
        dice = 2 * (p * t).sum(-1) / (p.sum(-1) + t.sum(-1))  # FAULT
        return 1 - dice.mean()

    return scaler_loop(Classifier(), dtype, loss, guard=lambda value: value.item() == value.item())


def union_of_degenerate_boxes(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        box = model(batch[0]).float()
        low, high = box[:, :2], box[:, :2] + box[:, 2:].relu() * 0
        area = (high - low).prod(-1)
        overlap = (high.min(dim=0).values - low.max(dim=0).values).clamp(min=0).prod()
        iou = overlap / (area + area - area)  # FAULT
        return (1 - iou).mean()

    return scaler_loop(Classifier(), dtype, loss)


def unit_vector_of_nothing(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        z = model(batch[0]).float() * (batch[1] > 9)[:, None]
        unit = z / z.norm(dim=-1, keepdim=True)  # FAULT
        return unit.square().mean()

    return scaler_loop(Classifier(), dtype, loss)


def distance_of_a_perfect_prediction(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        z = model(batch[0]).float()
        return (z - z.detach()).pow(2).sum(-1).pow(0.5).mean()  # FAULT

    return scaler_loop(Classifier(), dtype, loss)


def triplet_of_equal_anchors(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        a = model(batch[0]).float()
        near = torch.sqrt(((a - a[0:1]) ** 2).sum(-1))  # FAULT
        return F.relu(near - 0.1).mean() + near.mean()

    return scaler_loop(Classifier(), dtype, loss)


def features_standardised_by_hand(dtype: torch.dtype) -> Run:
    x, y = torch.randn(6, 8), torch.randint(4, (6,))
    x[:, 3] = 1.0

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x = batch[0]
        x = (x - x.mean(0)) / x.std(0)  # FAULT
        return F.cross_entropy(model(x).float(), batch[1])

    return scaler_loop(Classifier(), dtype, loss, data=[(x, y)] * 2)


def advantages_of_one_step(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        reward = torch.ones(1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-8)  # FAULT
        return -(model(batch[0]).float().log_softmax(-1)[:, 0] * advantage).mean()

    return scaler_loop(Classifier(), dtype, loss, guard=finite)


def softmax_then_log(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        p = F.softmax(400 * model(batch[0]).float(), dim=-1)
        return F.nll_loss(torch.log(p), p.argmin(-1))  # FAULT

    return scaler_loop(Classifier(), dtype, loss)


def cross_entropy_of_a_saturated_sigmoid(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        p = torch.sigmoid(model(batch[0]).float().abs() + 90)
        y = torch.zeros_like(p)
        return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()  # FAULT

    return scaler_loop(Classifier(), dtype, loss, guard=lambda value: value < 1e4)


def variance_as_a_difference(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        h = model(batch[0]).float() * 1e-4 + 3000.0
        var = h.square().mean(-1) - h.mean(-1).square() - 0.5
        return torch.sqrt(var).mean()  # FAULT

    return scaler_loop(Classifier(), dtype, loss)


def divergence_with_empty_bins(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        q = model(batch[0]).float().softmax(-1)
        p = F.one_hot(batch[1], 4).float()
        return (p * (torch.log(p) - torch.log(q))).sum(-1).mean()  # FAULT

    return scaler_loop(Classifier(), dtype, loss)


def gumbel_of_a_rounded_uniform(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        u = torch.linspace(0, 1, 24).reshape(6, 4)
        inner = -torch.log(u + 1e-9)
        gumbel = -torch.log(inner * (u < 1))  # FAULT
        return (model(batch[0]).float() + gumbel).softmax(-1)[:, 0].mean()

    return scaler_loop(Classifier(), dtype, loss)


def poisson_rate_too_high(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        rate = model(batch[0]).float() + 95
        return F.poisson_nll_loss(rate, batch[1][:, None].float())  # FAULT

    return scaler_loop(Classifier(), dtype, loss, guard=finite)


def pooled_over_no_token(dtype: torch.dtype) -> Run:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 4)

        def forward(self, ids: Tensor) -> Tensor:
            mask = (ids > 0).unsqueeze(-1).float()
            pooled = (self.embed(ids) * mask).sum(1) / mask.sum(1)  # FAULT
            return self.head(pooled)

    ids = torch.randint(1, 20, (6, 5))
    ids[2] = 0
    return scaler_loop(Encoder(), dtype, data=[(ids, torch.randint(4, (6,)))] * 2)


def angle_between_equal_vectors(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        z = F.normalize(model(batch[0]).float(), dim=-1)
        cosine = (z * z).sum(-1) * (1 + 1e-6)
        return torch.acos(cosine).mean()  # FAULT

    return scaler_loop(Classifier(), dtype, loss, guard=lambda value: not math.isnan(value.item()))


def focal_with_a_small_gamma(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        ce = F.cross_entropy(60 * model(batch[0]).float(), batch[1], reduction="none")
        weight = (1 - torch.exp(-ce * 0)) ** 0.5  # FAULT
        return (weight * ce).mean()

    return scaler_loop(Classifier(), dtype, loss)


def masked_attention_row(dtype: torch.dtype) -> Run:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            mask = torch.zeros(6, dtype=torch.bool)
            weights = (q @ k.T).masked_fill(~mask, float("-inf")).softmax(-1)  # FAULT
            return self.head(weights @ v)

    return scaler_loop(Attention(), dtype, guard=finite)


def targets_longer_than_their_inputs(dtype: torch.dtype) -> Run:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).float().log_softmax(-1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        log_p = model(batch[0])[:, None].expand(6, 2, 5)
        targets, lengths = torch.ones(2, 5, dtype=torch.long), torch.full((2,), 6)
        return F.ctc_loss(log_p, targets, lengths, torch.full((2,), 5))  # FAULT

    return scaler_loop(Speech(), dtype, loss, guard=finite)


def gradient_of_equal_singular_values(dtype: torch.dtype) -> Run:
    class Whitening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(8))

        def forward(self, x: Tensor) -> Tensor:
            u, _, v = torch.linalg.svd(self.weight)  # FAULT
            return x.float() @ (u + v.T)[:, :4]

    return caught(scaler_loop(Whitening(), dtype))


def gradient_of_equal_eigenvalues(dtype: torch.dtype) -> Run:
    class Covariance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(8))

        def forward(self, x: Tensor) -> Tensor:
            _, vectors = torch.linalg.eigh(self.weight)  # FAULT
            return x.float() @ vectors[:, :4]

    return caught(scaler_loop(Covariance(), dtype))


CASES = [
    Case(build=vae_with_a_large_variance, op="exp", verdict="overflow"),
    Case(build=contrastive_at_a_low_temperature, op="div", verdict="overflow"),
    Case(build=contrastive_without_logsumexp, op="exp", verdict="overflow", dtypes=ALL, names=("logsumexp",)),
    Case(build=policy_ratio_far_from_one, op="exp", verdict="overflow", dtypes=ALL),
    Case(build=dice_of_an_empty_mask, op="div", verdict="singularity", dtypes=ALL),
    Case(build=union_of_degenerate_boxes, op="div", verdict="singularity", dtypes=ALL),
    Case(build=unit_vector_of_nothing, op="div", verdict="singularity", dtypes=ALL, names=("clamp",)),
    Case(build=distance_of_a_perfect_prediction, op="pow", verdict="singularity", phase="backward", dtypes=ALL, names=("clamp",)),
    Case(build=triplet_of_equal_anchors, op="sqrt", verdict="singularity", phase="backward", dtypes=ALL, names=("clamp",)),
    Case(build=features_standardised_by_hand, op="div", verdict="singularity", dtypes=ALL, names=("column 3",)),
    Case(build=advantages_of_one_step, op="std", verdict="singularity", dtypes=ALL),
    Case(build=softmax_then_log, op="log", verdict="singularity", dtypes=ALL, names=("log_softmax",)),
    Case(build=cross_entropy_of_a_saturated_sigmoid, op="log", verdict="singularity", dtypes=ALL),
    Case(build=variance_as_a_difference, op="sqrt", verdict="singularity", dtypes=ALL, names=("difference",)),
    Case(build=divergence_with_empty_bins, op="log", verdict="singularity", dtypes=ALL),
    Case(build=gumbel_of_a_rounded_uniform, op="log", verdict="singularity", dtypes=ALL),
    Case(build=poisson_rate_too_high, op="exp", verdict="overflow", dtypes=ALL),
    Case(build=pooled_over_no_token, op="div", verdict="singularity", dtypes=ALL, names=("clamp(min=1)",)),
    Case(build=angle_between_equal_vectors, op="acos", verdict="singularity", dtypes=ALL, names=("clamp",)),
    Case(build=focal_with_a_small_gamma, op="pow", verdict="singularity", phase="backward", dtypes=ALL),
    Case(build=masked_attention_row, op="softmax", verdict="singularity", dtypes=ALL, names=("keep one entry",)),
    Case(build=targets_longer_than_their_inputs, op="ctc_loss", verdict="singularity", dtypes=ALL, names=("longer",)),
    Case(build=gradient_of_equal_singular_values, op="linalg_svd", verdict="singularity", phase="backward", dtypes=ALL, names=("equal singular values",)),
    Case(build=gradient_of_equal_eigenvalues, op="linalg_eigh", verdict="singularity", phase="backward", dtypes=ALL, names=("equal eigenvalues",)),
]  # fmt: skip
