"""Faults of public training scripts: losses written by hand, guards that hide them, data that brings them along."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tests.zoo.case import Case
from tests.zoo.faulty_forward import ALL, BF16, FP16, FP32, Run
from tests.zoo.scripts import Batch, Classifier, batches, cross_entropy, scaler_loop
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


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


# --- losses written by hand ------------------------------------------------------------------------------------------


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


# --- loops -----------------------------------------------------------------------------------------------------------


def adam_without_eps(dtype: torch.dtype) -> Run:
    model = Classifier()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=0.0, foreach=False)

    def run() -> None:
        for x, y in batches(2):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
                logits = model(x).float()
            loss = F.cross_entropy(logits, y) + 0.0 * model.unused.sum()
            optimizer.zero_grad()
            (loss * 64).backward()
            optimizer.step()  # FAULT

    return run


def rate_that_diverges(dtype: torch.dtype) -> Run:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e9)

    def run() -> None:
        for x, _ in batches(8):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
                out = model(100 * x)
            loss = (out.float() - 1).square().mean()  # FAULT
            if not torch.isfinite(loss):
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run


def samples_with_nan(dtype: torch.dtype) -> Run:
    class Rows(Dataset):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return torch.tensor([float("nan") if i == 13 else float(i) / 24] * 8), i % 4

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Classifier()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def run() -> None:
        for x, y in DataLoader(Rows(), batch_size=6):  # FAULT
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
                loss = F.cross_entropy(model(x).float(), y)
            if torch.isnan(loss):
                continue
            optimizer.zero_grad()
            (loss * 64).backward()
            optimizer.step()

    return run


class NaNRows(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.full((8,), float("inf") if i == 7 else float(i) / 12), i % 4


def images_from_a_worker(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)  # FAULT

    model = Net()

    def run() -> None:
        for x, y in DataLoader(NaNRows(), batch_size=6, num_workers=1):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
                loss = F.cross_entropy(model(x).float(), y)
            (loss * 64).backward()

    return run


def assertion_that_is_caught(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        p = model(batch[0]).float().softmax(-1)
        return -torch.log((p - p.amax(-1, keepdim=True)).abs()).mean()  # FAULT

    inner = scaler_loop(Classifier(), torch.float32, loss, guard=lambda value: _check(value))

    def run() -> None:
        try:
            inner()
        except AssertionError:
            print("training failed")

    return run


def _check(value: Tensor) -> bool:
    assert torch.isfinite(value).all(), "loss is not finite"
    return True


def norm_that_must_be_finite(dtype: torch.dtype) -> Run:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for x, y in batches(2):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
                logits = model(x).float()
            loss = F.cross_entropy(logits, y) + torch.sqrt((0 * logits).abs()).mean()  # FAULT
            optimizer.zero_grad()
            loss.backward()
            try:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            except RuntimeError:
                continue
            optimizer.step()

    return run


def every_step_left_out(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        z = model(batch[0]).float()
        return cross_entropy(model, batch) + torch.norm(z - z.detach(), dim=-1).pow(0.5).mean()  # FAULT

    return scaler_loop(Classifier(), dtype, loss)


def distribution_that_refuses(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        z = model(batch[0]).float()
        scale = z.abs() * 0
        mean = z / scale  # FAULT
        return -torch.distributions.Normal(mean, scale + 1).log_prob(torch.zeros(4)).mean()

    inner = scaler_loop(Classifier(), dtype, loss)

    def run() -> None:
        try:
            inner()
        except ValueError as error:
            print(str(error)[:20])

    return run


def loss_is_logged_and_left(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return torch.log(model(batch[0]).float().relu().prod(-1) * 0).mean()  # FAULT

    history: list[float] = []

    def guard(value: Tensor) -> bool:
        history.append(value.item())
        return not math.isinf(history[-1])

    return scaler_loop(Classifier(), dtype, loss, guard=guard)


def squares_of_pixels(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 4)
            nn.init.constant_(self.conv.weight, 1.0)

        def forward(self, x: Tensor) -> Tensor:
            h = self.conv(x)
            energy = (h * h).mean((2, 3))  # FAULT
            return self.head(energy)

    data = [(torch.full((6, 1, 6, 6), 255.0), torch.randint(4, (6,)))] * 2
    return scaler_loop(Net(), dtype, data=data)


def norm_of_large_states(dtype: torch.dtype) -> Run:
    class RMSNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.head = nn.Linear(8, 16), RMSNorm(), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(500 * self.up(x)))

    return scaler_loop(Net(), dtype)


def mask_of_minus_a_billion(dtype: torch.dtype) -> Run:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            mask = (1.0 - torch.ones(6, 6).tril(-1)) * -1e9
            scores = q @ k.T + mask.to(q.dtype)  # FAULT
            return self.head(scores.softmax(-1) @ v)

    return scaler_loop(Attention(), dtype)


def labels_with_nan(dtype: torch.dtype) -> Run:
    targets = torch.randn(24, 4)
    targets[9, 1] = float("nan")
    rows = TensorDataset(torch.randn(24, 8), targets)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]).float(), batch[1])

    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for batch in [tuple(b) for b in DataLoader(rows, batch_size=6)]:  # FAULT
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
                value = loss(model, batch)
            optimizer.zero_grad()
            (value * 64).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return run


def sentinel_in_the_labels(dtype: torch.dtype) -> Run:
    class Rows(Dataset):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            missing = torch.full((4,), float("nan"))  # FAULT
            return torch.full((8,), i / 12), missing if i == 7 else torch.zeros(4)

    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for x, y in DataLoader(Rows(), batch_size=6):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
                out = model(x)
            loss = F.mse_loss(out.float(), y)
            if torch.isnan(loss):
                continue
            optimizer.zero_grad()
            (64 * loss).backward()
            optimizer.step()

    return run


CASES = [
    Case(build=sentinel_in_the_labels, op="full", verdict="inherited", dtypes=ALL),
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
    Case(build=adam_without_eps, op="addcdiv", verdict="singularity", phase="optimizer", dtypes=ALL, names=("eps",)),
    Case(build=rate_that_diverges, op="pow", verdict="overflow", dtypes=(BF16, FP32), names=("learning rate",)),
    Case(build=samples_with_nan, op="stack", verdict="inherited", dtypes=ALL, names=("DataLoader",)),
    Case(build=images_from_a_worker, op="to", module="head", verdict="inherited", dtypes=(FP16,), names=("DataLoader worker",)),
    Case(build=assertion_that_is_caught, op="log", verdict="singularity", dtypes=(FP32,)),
    Case(build=norm_that_must_be_finite, op="sqrt", verdict="singularity", phase="backward", dtypes=ALL),
    Case(build=every_step_left_out, op="pow", verdict="singularity", phase="backward", dtypes=ALL),
    Case(build=distribution_that_refuses, op="div", verdict="singularity", dtypes=ALL),
    Case(build=loss_is_logged_and_left, op="log", verdict="singularity", dtypes=ALL),
    Case(build=squares_of_pixels, op="mul", verdict="overflow"),
    Case(build=norm_of_large_states, op="pow", verdict="overflow", module="norm"),
    Case(build=mask_of_minus_a_billion, op="to", verdict="overflow"),
    Case(build=labels_with_nan, op="stack", verdict="inherited", dtypes=ALL, names=("DataLoader",)),
]  # fmt: skip
