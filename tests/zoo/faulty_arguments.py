"""Programs in which an op is given what it has no value at, or what 16 bit rounded to that: log(0), 0/0, masked rows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tests.zoo.case import Case
from tests.zoo.faulty_forward import ALL, BF16, FP32, Run, Wrapped, functional, train
from torch import Tensor, nn


def logarithm_of_zero(dtype: torch.dtype) -> Run:
    class Likelihood(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            p = x.relu().float()
            return -p.log()  # FAULT

    return train(Wrapped(Likelihood()), dtype, torch.randn(4, 8))


def logarithm_of_a_negative(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return torch.log(x)  # FAULT

    return functional(compute, dtype, torch.linspace(-1.1, 1, 16))


def empty_mask_mean(dtype: torch.dtype) -> Run:
    model = nn.Linear(8, 8)
    x, keep = torch.randn(4, 8), torch.zeros(4, 8)

    def run() -> None:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
            error = (model(x) - 1).float().square()
        loss = (error * keep).sum() / keep.sum()  # FAULT
        loss.backward()

    return run


def masked_row(dtype: torch.dtype) -> Run:
    class Attention(nn.Module):
        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            scores = (x @ x.transpose(-1, -2)).masked_fill(~keep, -math.inf)
            return scores.softmax(-1) @ x  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.attention = nn.Linear(8, 8), Attention()

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            return self.attention(self.body(x), keep)

    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    keep[2] = False
    return train(Net(), dtype, torch.randn(4, 8), keep=keep)


def masked_row_by_an_additive_mask(dtype: torch.dtype) -> Run:
    class Attention(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            scores = x @ x.transpose(-1, -2) + mask
            return scores.softmax(-1) @ x  # FAULT

    mask = torch.zeros(4, 4)
    mask[1] = -math.inf
    return train(Attention(), dtype, torch.randn(4, 8, requires_grad=True), mask)


def single_sample_spread(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.std(0) + 1e-3)  # FAULT

    return functional(compute, dtype, torch.randn(1, 8))


def every_target_ignored(dtype: torch.dtype) -> Run:
    model = nn.Linear(8, 5)
    x, target = torch.randn(4, 8), torch.full((4,), -100)

    def run() -> None:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
            loss = F.cross_entropy(model(x), target)  # FAULT
        loss.backward()

    return run


def empty_selection(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return x[x > 1e4].mean()  # FAULT

    return functional(compute, dtype, torch.randn(8))


def infinity_times_zero(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        keep = torch.ones_like(x).tril()
        mask = (1 - keep) * -math.inf  # FAULT
        return (x + mask).softmax(-1)

    return functional(compute, dtype, torch.randn(4, 4))


def reciprocal_of_zero(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return x.relu().reciprocal()  # FAULT

    return functional(compute, dtype, torch.randn(16))


def constant_row_normalised(dtype: torch.dtype) -> Run:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x - x.mean(-1, keepdim=True)
            return x / x.abs().amax(-1, keepdim=True)  # FAULT

    return train(nn.Sequential(nn.Identity(), Norm()), dtype, torch.ones(2, 4, requires_grad=True))


def divergence_with_an_empty_class(dtype: torch.dtype) -> Run:
    def compute(p: Tensor) -> Tensor:
        p = p.float().relu()
        q = torch.full_like(p, 0.25)
        return (p * (p / q).log()).sum(-1)  # FAULT

    return functional(compute, dtype, torch.tensor([[0.5, 0.5, 0.0, 0.0]]))


def rounded_probability(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        p = x.softmax(-1)
        return -p.log()  # FAULT

    return functional(compute, dtype, torch.tensor([[0.0, 30.0, 1.0]]))


def rounded_eps(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        length = x.abs().sum(-1, keepdim=True)
        return x / (length + 1e-8)  # FAULT

    return functional(compute, dtype, torch.stack([torch.zeros(8), torch.ones(8)]))


def rounded_eps_in_a_library(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)  # FAULT

    return functional(compute, dtype, torch.stack([torch.zeros(8), torch.ones(8)]))


def rounded_variance(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        spread = x.var(-1, keepdim=True)
        return x * (spread + 1e-12).rsqrt()  # FAULT

    return functional(compute, dtype, torch.stack([torch.full((8,), 2.0), torch.randn(8)]))


def infinite_mask_reaches_the_loss(dtype: torch.dtype) -> Run:
    model = nn.Linear(8, 8)
    x, hidden = torch.randn(4, 8), torch.eye(4, 8, dtype=torch.bool)

    def run() -> None:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
            logits = model(x).masked_fill(hidden, -math.inf)  # FAULT
        logits.float().mean().backward()

    return run


def fault_chosen_over_an_infinity(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        discarded = x.detach().log()
        kept = (x - 2).sqrt()  # FAULT
        return torch.where(x < 1.5, kept, discarded)

    return functional(compute, dtype, torch.tensor([0.0, 1.0, 3.0]))


def unguarded_bf16(dtype: torch.dtype) -> Run:
    class Ratio(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            top = x.amax(-1, keepdim=True)
            return (x - top) / (top - top.detach())  # FAULT

    return train(nn.Sequential(nn.Linear(8, 8), Ratio()), dtype, torch.randn(4, 8))


CASES = [
    Case(build=fault_chosen_over_an_infinity, op="sqrt", module="body", verdict="singularity", dtypes=ALL),
    Case(build=logarithm_of_zero, op="log", module="sick", verdict="singularity", dtypes=ALL, names=("self=0",)),
    Case(build=logarithm_of_a_negative, op="log", module="body", verdict="singularity", dtypes=ALL),
    Case(build=empty_mask_mean, op="div", verdict="singularity", dtypes=ALL, names=("self=0, other=0",)),
    Case(build=masked_row, op="softmax", module="attention", verdict="singularity", dtypes=ALL, names=("1 row",)),
    Case(build=masked_row_by_an_additive_mask, op="softmax", verdict="singularity", dtypes=ALL, names=("1 row",)),
    Case(build=single_sample_spread, op="std", module="body", verdict="singularity", dtypes=ALL),
    Case(build=every_target_ignored, op="nll_loss", verdict="singularity", dtypes=ALL),
    Case(build=empty_selection, op="mean", module="body", verdict="singularity", dtypes=ALL),
    Case(build=infinity_times_zero, op="mul", module="body", verdict="singularity", dtypes=ALL),
    Case(build=reciprocal_of_zero, op="reciprocal", module="body", verdict="singularity", dtypes=ALL),
    Case(build=constant_row_normalised, op="div", module="1", verdict="singularity", dtypes=ALL),
    Case(build=divergence_with_an_empty_class, op="log", module="body", verdict="singularity", dtypes=ALL),
    Case(build=rounded_probability, op="log", module="body", verdict="underflow"),
    Case(build=rounded_eps, op="div", module="body", verdict="underflow", names=("1e-08",)),
    Case(build=rounded_eps_in_a_library, op="div", module="body", verdict="underflow", names=("1e-12",)),
    Case(build=rounded_variance, op="rsqrt", module="body", verdict="underflow", names=("1e-12",)),
    Case(build=infinite_mask_reaches_the_loss, op="masked_fill", verdict="inherited", dtypes=ALL),
    Case(build=unguarded_bf16, op="div", module="1", verdict="singularity", dtypes=(BF16,)),
]
