"""Faults of public training loops: optimizers, rates, data, guards that catch or skip what they find."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tests.zoo.case import Case
from tests.zoo.faulty_forward import ALL, BF16, FP16, FP32, Run
from tests.zoo.scripts import Batch, Classifier, batches, cross_entropy, scaler_loop
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


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
            return torch.tensor([float("nan") if i == 13 else float(i) / 24] * 8), i % 4  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Classifier()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def run() -> None:
        for x, y in DataLoader(Rows(), batch_size=6):
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
            return self.head(x)

    model = Net()

    def run() -> None:
        for x, y in DataLoader(NaNRows(), batch_size=6, num_workers=1):  # FAULT
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
