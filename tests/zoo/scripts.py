"""Programs in the style of public training scripts: guards around the loss, try and except, scaler loops, workers, metrics."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tests.zoo.case import Case
from tests.zoo.faulty_forward import BF16, FP16, FP32, Run
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

BOTH = (FP16, BF16)
Batch = tuple[Tensor, Tensor]
LossFn = Callable[[nn.Module, Batch], Tensor]
Guard = Callable[[Tensor], bool]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def batches(num: int = 4) -> list[Batch]:
    return [(torch.randn(6, 8), torch.randint(4, (6,))) for _ in range(num)]


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def scaler_loop(
    model: nn.Module,
    dtype: torch.dtype,
    loss_fn: LossFn = cross_entropy,
    *,
    data: list[Batch] | None = None,
    guard: Guard = lambda loss: True,
    scale: float = 256.0,
    accumulate: int = 1,
    clip: float | None = 1.0,
    evaluate: bool = True,
) -> Run:
    """The loop of torch's documentation, with what scripts add to it."""
    data = batches() if data is None else data
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is FP16, init_scale=scale)

    def run() -> None:
        model.train()
        total, seen, best = 0.0, 0, math.inf
        for i, batch in enumerate(data):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
                loss = loss_fn(model, batch) / accumulate
            if not guard(loss):
                optimizer.zero_grad(set_to_none=True)
                continue
            total += loss.item()
            seen += len(batch[0])
            best = min(best, float(loss.detach()))
            scaler.scale(loss).backward()
            if (i + 1) % accumulate:
                continue
            if clip is not None:
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
                assert norm.item() >= 0 or math.isnan(norm.item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
        model.eval()
        if not evaluate:
            return
        with torch.no_grad():
            hits = sum(int((model(x).argmax(-1) == y).sum()) for x, y in data)
        assert 0 <= hits <= seen or not seen

    return run


# --- healthy ---------------------------------------------------------------------------------------------------------


def plain(dtype: torch.dtype) -> Run:
    return scaler_loop(Classifier(), dtype)


def guarded_by_isfinite(dtype: torch.dtype) -> Run:
    return scaler_loop(Classifier(), dtype, guard=lambda loss: bool(torch.isfinite(loss)))


def guarded_by_math(dtype: torch.dtype) -> Run:
    return scaler_loop(Classifier(), dtype, guard=lambda loss: not math.isnan(loss.item()) and loss.item() < 1e4)


def guarded_by_numpy(dtype: torch.dtype) -> Run:
    return scaler_loop(Classifier(), dtype, guard=lambda loss: math.isfinite(loss.detach().numpy()))


def accumulated(dtype: torch.dtype) -> Run:
    return scaler_loop(Classifier(), dtype, accumulate=2)


def long_batches_left_out(dtype: torch.dtype) -> Run:
    return scaler_loop(Classifier(), dtype, guard=lambda loss: loss.item() < 10)


def from_a_loader(dtype: torch.dtype) -> Run:
    rows = TensorDataset(torch.randn(24, 8), torch.randint(4, (24,)))
    return scaler_loop(Classifier(), dtype, data=[tuple(b) for b in DataLoader(rows, batch_size=6, shuffle=True)])


def scaler_that_starts_high(dtype: torch.dtype) -> Run:
    return scaler_loop(Classifier(), dtype, scale=2.0**10, data=batches(8))


def focal(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0]).float()
    ce = F.cross_entropy(logits, batch[1], reduction="none")
    return ((1 - torch.exp(-ce)).square() * ce).mean()


def focal_loss(dtype: torch.dtype) -> Run:
    return scaler_loop(Classifier(), dtype, focal)


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    z = F.normalize(model(batch[0]).float(), dim=-1)
    scores = (z @ z.T) / 0.2
    scores = scores.masked_fill(torch.eye(len(z), dtype=torch.bool), -math.inf)
    return F.cross_entropy(scores, torch.arange(len(z)).roll(1))


def contrastive_with_masked_self(dtype: torch.dtype) -> Run:
    return scaler_loop(Classifier(), dtype, contrastive)


def distillation(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        target = model(batch[0]).float().softmax(-1)
    return F.kl_div(model(batch[0]).float().log_softmax(-1), target, reduction="batchmean")


def self_distillation(dtype: torch.dtype) -> Run:
    return scaler_loop(Classifier(), dtype, distillation)


def rollouts_and_updates(dtype: torch.dtype) -> Run:
    """A policy gradient loop: rollouts in train mode without a backward, then one update."""
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def run() -> None:
        for _ in range(2):
            states, actions, olds = [], [], []
            for _ in range(5):
                x = torch.randn(8)
                dist = torch.distributions.Categorical(logits=model(x).float())
                action = dist.sample()
                states.append(x)
                actions.append(action)
                olds.append(dist.log_prob(action).detach())
            returns = torch.arange(5.0)
            advantage = (returns - returns.mean()) / (returns.std() + 1e-8)
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
                logits = model(torch.stack(states))
            dist = torch.distributions.Categorical(logits=logits.float())
            ratio = torch.exp(dist.log_prob(torch.stack(actions)) - torch.stack(olds))
            loss = (
                -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean() - 0.01 * dist.entropy().mean()
            )
            optimizer.zero_grad()
            (loss * 64).backward()
            optimizer.step()

    return run


def metrics_that_are_not_numbers(dtype: torch.dtype) -> Run:
    """Precision and recall of a class that nobody predicted are 0/0, and printed so."""
    inner = scaler_loop(Classifier(), dtype)

    def run() -> None:
        inner()
        predicted, right = torch.zeros(4), torch.zeros(4)
        precision = right / predicted
        assert str(precision[0].item()) == "nan"
        assert torch.isnan(precision.mean())

    return run


def early_stopping(dtype: torch.dtype) -> Run:
    inner = scaler_loop(Classifier(), dtype)

    def run() -> None:
        inner()
        best, patience = torch.tensor(float("inf")), 0
        for value in (torch.tensor(0.5), torch.tensor(0.7), torch.tensor(0.6)):
            if value < best:
                best, patience = value, 0
            else:
                patience += 1
        assert patience == 2 and best.item() == 0.5

    return run


def try_and_except(dtype: torch.dtype) -> Run:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for x, y in batches():
            try:
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
                    loss = F.cross_entropy(model(x).float(), y)
                (loss * 64).backward()
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad /= 64
                optimizer.step()
            except RuntimeError as error:
                if "out of memory" not in str(error):
                    raise
            optimizer.zero_grad()

    return run


HEALTHY = [
    plain, guarded_by_isfinite, guarded_by_math, guarded_by_numpy, accumulated, long_batches_left_out, from_a_loader,
    scaler_that_starts_high, focal_loss, contrastive_with_masked_self, self_distillation, rollouts_and_updates,
    metrics_that_are_not_numbers, early_stopping, try_and_except,
]  # fmt: skip


# --- faulty ----------------------------------------------------------------------------------------------------------


def entropy_of_rounded_probabilities(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        p = (30 * model(batch[0])).softmax(-1).to(dtype)
        return -(p * torch.log(p)).sum(-1).mean().float()  # FAULT

    return scaler_loop(Classifier(), dtype, loss, guard=lambda value: bool(torch.isfinite(value)))


def log_of_zero_that_is_skipped(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        p = model(batch[0]).float().relu()
        return -torch.log(p[:, 0] * 0).mean()  # FAULT

    return scaler_loop(Classifier(), dtype, loss, guard=lambda value: bool(torch.isfinite(value)))


def division_by_an_empty_mask(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        ce = F.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")
        keep = (batch[1] > 9).float()
        return (ce * keep).sum() / keep.sum()  # FAULT

    return scaler_loop(Classifier(), dtype, loss, guard=lambda value: not math.isnan(value.item()))


def focal_on_a_rounded_sigmoid(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        p = torch.sigmoid(model(batch[0]).to(dtype).abs() / 2 + 9)
        return -torch.log(1 - p).float().mean()  # FAULT

    return scaler_loop(Classifier(), dtype, loss)


def eps_lost_in_a_sum(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        h = model(batch[0]).to(dtype).relu() * 0
        return (h.sum(-1) / (h.sum(-1) + 1e-9)).float().mean()  # FAULT

    return scaler_loop(Classifier(), dtype, loss)


def gradient_of_a_root_at_zero(dtype: torch.dtype) -> Run:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        z = model(batch[0]).float()
        return torch.sqrt((z - z.detach()).square().sum(-1)).mean()  # FAULT

    return scaler_loop(Classifier(), dtype, loss)


def scores_too_large_for_fp16(dtype: torch.dtype) -> Run:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(6, 4)
            nn.init.constant_(self.q.weight, 40.0)
            nn.init.constant_(self.k.weight, 40.0)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.q(x.abs() + 1) @ self.k(x.abs() + 1).T  # FAULT
            return self.head(scores.softmax(-1))

    return scaler_loop(Attention(), dtype, guard=lambda value: bool(torch.isfinite(value)))


def gradients_without_a_scaler(dtype: torch.dtype) -> Run:
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.Tanh())])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for _ in range(2):
            with torch.autocast("cpu", dtype=dtype):
                y = model(torch.randn(8, 32))
            loss = y.float().square().mean() * 1e-6  # FAULT
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run


CASES = [
    Case(build=entropy_of_rounded_probabilities, op="log", verdict="underflow"),
    Case(build=log_of_zero_that_is_skipped, op="log", verdict="singularity", dtypes=(FP16, BF16, FP32)),
    Case(
        build=division_by_an_empty_mask,
        op="div",
        verdict="singularity",
        dtypes=(FP16, BF16, FP32),
        names=("clamp(min=1)",),
    ),
    Case(build=focal_on_a_rounded_sigmoid, op="log", verdict="underflow", dtypes=BOTH, names=("op:sigmoid=fp32",)),
    Case(build=eps_lost_in_a_sum, op="div", verdict="underflow", names=("1e-09", "op:add=fp32, op:div=fp32")),
    Case(
        build=gradient_of_a_root_at_zero, op="sqrt", verdict="singularity", phase="backward", dtypes=(FP16, BF16, FP32)
    ),
    Case(build=scores_too_large_for_fp16, op="mm", verdict="overflow"),
    Case(build=gradients_without_a_scaler, op="to", verdict="underflow", phase="backward", names=("GradScaler",)),
]
