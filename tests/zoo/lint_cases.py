"""Habits that lose numbers while everything is still finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tests.zoo.case import Case
from tests.zoo.faulty_forward import BF16, FP16, Run, functional
from tests.zoo.lint_amplified import bins_in_16_bit, cosine_from_one, weights_exchanged_inside_the_region
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class LintCase(Case):
    """A program with one rule; `verdict` is the lint's rule."""

    op: str = ""


def scaled_step(model: nn.Module, dtype: torch.dtype, loss_of: Callable[[], Tensor]) -> Run:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype is FP16)

    def run() -> None:
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of()
        scaler.scale(loss.float()).backward()

    return run


def rotary_phases(dtype: torch.dtype) -> Run:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))

        def forward(self, x: Tensor) -> Tensor:
            positions = torch.arange(x.shape[1]).float()
            phases = positions[:, None] @ self.inv_freq[None]  # FAULT
            return x * phases.float().sin().repeat(1, 2)

    model, x = nn.Sequential(nn.Linear(8, 8), Rotary()), torch.randn(1, 4096, 8)
    return scaled_step(model, dtype, lambda: model(x).float().square().mean())


def positions_cast_by_hand(dtype: torch.dtype) -> Run:
    model, x = nn.Linear(8, 8), torch.randn(1, 3000, 8)

    def loss() -> Tensor:
        y = model(x)
        position = torch.arange(3000).to(y.dtype)  # FAULT
        return (y * position[:, None] / 3000).float().square().mean()

    return scaled_step(model, dtype, loss)


def ids_cast_with_the_batch(dtype: torch.dtype) -> Run:
    table, head = nn.Embedding(5000, 8), nn.Linear(9, 1)
    batch = {"user": torch.arange(4001, 4033), "price": torch.rand(32, 1)}

    def loss() -> Tensor:
        user, price = (column.to(dtype) for column in batch.values())  # FAULT
        return head(torch.cat([table(user.long()), price.float()], dim=1)).float().square().mean()

    return scaled_step(nn.ModuleList([table, head]), dtype, loss)


def positions_made_in_16_bit(dtype: torch.dtype) -> Run:
    model, x = nn.Linear(8, 8), torch.randn(1, 3000, 8)

    def loss() -> Tensor:
        y = model(x)
        position = torch.arange(3000, dtype=y.dtype)  # FAULT
        return (y * (position / 3000)[:, None]).float().square().mean()

    return scaled_step(model, dtype, loss)


def eps_that_rounds_to_zero(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return x / (x.abs().amax(-1, keepdim=True) + 1e-8)  # FAULT

    return functional(compute, dtype, torch.randn(4, 8), scale=256.0)


def clamp_that_rounds_to_zero(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return x.clamp(min=1e-12).float().log()  # FAULT

    return functional(compute, dtype, torch.rand(4, 8) + 0.1, scale=256.0)


def mask_beyond_the_format(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        keep = torch.ones_like(x).tril()
        return (x + (1 - keep) * -1e9).softmax(-1)  # FAULT

    return functional(compute, dtype, torch.randn(4, 4), scale=256.0)


def squares_close_to_overflow(dtype: torch.dtype) -> Run:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = 150 * x.tanh()
            return x * (x.pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt()  # FAULT

    model, x = nn.Sequential(nn.Linear(8, 8), Norm()), 9 * torch.randn(4, 8)
    return scaled_step(model, dtype, lambda: model(x).float().square().mean())


def product_with_itself(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return (x * x).float().sum(-1).sqrt()  # FAULT

    return functional(compute, dtype, torch.linspace(1, 200, 16), scale=256.0)


def log_of_one_plus_little(dtype: torch.dtype) -> Run:
    return functional(lambda x: torch.log(1 + 1e-4 * x.square()), dtype, torch.rand(4, 8), scale=256.0)  # FAULT


def difference_of_two_forwards(dtype: torch.dtype) -> Run:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.rand(4, 8)
    return scaled_step(model, dtype, lambda: ((model(x + 1e-4) - model(x)) / 1e-4).float().square().mean())  # FAULT


def fully_masked_row(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        keep = torch.tensor([[True] * 4, [False] * 4])
        return x.masked_fill(~keep, -math.inf).softmax(-1)  # FAULT

    return functional(compute, dtype, torch.randn(2, 4), scale=256.0)


def rotary_buffer_cast_with_the_model(dtype: torch.dtype) -> Run:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))

        def forward(self, x: Tensor) -> Tensor:
            phases = torch.arange(x.shape[1]).float()[:, None] @ self.inv_freq.float()[None]
            return x * phases.cos().repeat(1, 2).to(x.dtype)  # FAULT

    model, x = Rotary().to(dtype), torch.randn(1, 16384, 8, dtype=dtype)

    def run() -> None:
        model(x)

    return run


def running_sum_of_losses(dtype: torch.dtype) -> Run:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)

    def run() -> None:
        total = torch.zeros((), dtype=dtype)
        for _ in range(3):
            with torch.autocast("cpu", dtype=dtype), torch.no_grad():
                total += model(x).float().square().mean()  # FAULT

    return run


def backward_inside_the_region(dtype: torch.dtype) -> Run:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def run() -> None:
        with torch.autocast("cpu", dtype=dtype):
            loss = model(x).float().square().mean()
            scaler.scale(loss).backward()  # FAULT

    return run


def half_in_region(dtype: torch.dtype) -> Run:
    model, x = nn.Linear(8, 8).to(dtype), torch.randn(4, 8)

    def run() -> None:
        with torch.autocast("cpu", dtype=dtype):
            loss = model(x).float().square().mean()  # FAULT
        (loss * 256.0).backward()

    return run


def loss_in_16_bit(dtype: torch.dtype) -> Run:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)

    def run() -> None:
        with torch.autocast("cpu", dtype=dtype):
            loss = model(x).mean()
        (loss * 256.0).backward()  # FAULT

    return run


def clipped_before_unscaled(dtype: torch.dtype) -> Run:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def run() -> None:
        with torch.autocast("cpu", dtype=dtype):
            loss = F.mse_loss(model(x).float(), x)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # FAULT
        scaler.step(optimizer)
        scaler.update()

    return run


def stepped_past_the_scaler(dtype: torch.dtype) -> Run:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def run() -> None:
        with torch.autocast("cpu", dtype=dtype):
            loss = F.mse_loss(model(x).float(), x)
        scaler.scale(loss).backward()
        optimizer.step()  # FAULT

    return run


def unscaled_fp16(dtype: torch.dtype) -> Run:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)

    def run() -> None:
        with torch.autocast("cpu", dtype=dtype):
            loss = F.mse_loss(model(x).float(), x)
        loss.backward()  # FAULT

    return run


def cleared_before_the_step(dtype: torch.dtype) -> Run:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step = scaled_step(model, dtype, lambda: model(x).float().square().mean())

    def run() -> None:
        step()
        model.zero_grad()  # FAULT
        optimizer.step()

    return run


def head_of_before(dtype: torch.dtype) -> Run:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=1e-3)
    model[1] = nn.Linear(8, 2)
    step = scaled_step(model, dtype, lambda: model(x).float().square().mean())

    def run() -> None:
        for _ in range(40):
            model.zero_grad()
            step()
            optimizer.step()  # FAULT

    return run


def whole_model_of_before(dtype: torch.dtype) -> Run:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model[1] = nn.Linear(8, 2)
    step = scaled_step(model, dtype, lambda: model(x).float().square().mean())

    def run() -> None:
        for _ in range(40):
            model.zero_grad()
            step()
            optimizer.step()  # FAULT

    return run


def warm_up_in_whole_numbers(dtype: torch.dtype) -> Run:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step // 100)

    def run() -> None:
        for _ in range(4):
            with torch.autocast("cpu", dtype=dtype):
                loss = F.mse_loss(model(x).float(), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # FAULT
            schedule.step()

    return run


def gradients_without_end(dtype: torch.dtype) -> Run:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def run() -> None:
        for _ in range(10):
            with torch.autocast("cpu", dtype=dtype):
                loss = F.mse_loss(model(x).float(), x)
            loss.backward()
            optimizer.step()  # FAULT

    return run


def codes_of_signs(dtype: torch.dtype) -> Run:
    encoder, reader, x = nn.Linear(8, 4), nn.Linear(4, 8), torch.randn(4, 8)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *reader.parameters()], lr=1e-3)

    def run() -> None:
        for _ in range(40):
            with torch.autocast("cpu", dtype=dtype):
                code = torch.sign(encoder(x))  # FAULT
                loss = F.mse_loss(reader(code).float(), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run


def moments_set_back(dtype: torch.dtype) -> Run:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def run() -> None:
        for step in range(4):
            with torch.autocast("cpu", dtype=dtype):
                loss = F.mse_loss(model(x).float(), x)
            optimizer.zero_grad()
            (loss if step < 3 else 0 * loss).backward()
            if step == 3:
                for state in optimizer.state.values():
                    state["exp_avg_sq"].zero_()
            optimizer.step()  # FAULT

    return run


def rollout_without_a_bound(dtype: torch.dtype) -> Run:
    weight, x = nn.Parameter(100.0 * torch.eye(8)), torch.ones(4, 8)

    def run() -> None:
        state = x
        with torch.autocast("cpu", dtype=dtype):
            for _ in range(20):
                state = state @ weight  # FAULT
        state.float().sum().backward()

    return run


BOTH = (FP16, BF16)
LINTS = [
    LintCase(build=rotary_phases, module="1", verdict="integers-in-16-bit", dtypes=BOTH, names=("4095",)),
    LintCase(build=positions_cast_by_hand, verdict="integers-in-16-bit", dtypes=BOTH, names=("2999",)),
    LintCase(build=positions_made_in_16_bit, verdict="integers-in-16-bit", dtypes=BOTH),
    LintCase(build=ids_cast_with_the_batch, verdict="ids-in-16-bit", dtypes=BOTH, names=("came back as",)),
    LintCase(build=eps_that_rounds_to_zero, module="body", verdict="constant-lost", names=("1e-08 is 0 in fp16",)),
    LintCase(build=clamp_that_rounds_to_zero, module="body", verdict="constant-lost", names=("1e-12 is 0 in fp16",)),
    LintCase(build=mask_beyond_the_format, module="body", verdict="constant-lost", names=("-1e+09 is inf in fp16",)),
    LintCase(build=squares_close_to_overflow, module="1", verdict="squares-near-overflow"),
    LintCase(build=product_with_itself, module="body", verdict="squares-near-overflow"),
    LintCase(build=log_of_one_plus_little, module="body", verdict="log-of-one-plus", dtypes=BOTH, names=("off by",)),
    LintCase(build=difference_of_two_forwards, verdict="finite-difference", dtypes=BOTH, names=("its step, 0.0001",)),
    LintCase(build=cosine_from_one, module="body", verdict="amplified-rounding", dtypes=BOTH, names=("sub makes",)),
    LintCase(build=bins_in_16_bit, module="body", verdict="rounded-index", dtypes=BOTH, names=("fp32 picks others",)),
    LintCase(build=fully_masked_row, module="body", verdict="masked-row", dtypes=BOTH, names=("1 row",)),
    LintCase(
        build=rotary_buffer_cast_with_the_model, verdict="buffer-in-16-bit", dtypes=BOTH, names=("buffer inv_freq",)
    ),
    LintCase(build=running_sum_of_losses, verdict="half-accumulator", dtypes=BOTH),
    LintCase(build=backward_inside_the_region, verdict="backward-in-region", dtypes=BOTH),
    LintCase(build=half_in_region, verdict="half-weights-in-region", dtypes=BOTH, names=("2 trainable parameters",)),
    LintCase(build=loss_in_16_bit, verdict="loss-in-16-bit", dtypes=BOTH),
    LintCase(build=clipped_before_unscaled, verdict="clip-before-unscale", dtypes=BOTH, names=("256",)),
    LintCase(build=stepped_past_the_scaler, verdict="scaled-step", dtypes=BOTH, names=("multiplied by 256",)),
    LintCase(build=warm_up_in_whole_numbers, verdict="zero-learning-rate", dtypes=(BF16,), names=("4 steps of AdamW",)),
    LintCase(build=cleared_before_the_step, verdict="cleared-gradients", dtypes=BOTH, names=("SGD.step",)),
    LintCase(build=gradients_without_end, verdict="uncleared-gradients", dtypes=(BF16,), names=("each of 9 took",)),
    LintCase(build=codes_of_signs, verdict="zero-gradients", dtypes=(BF16,), names=("each of 40 backward",)),
    LintCase(build=head_of_before, verdict="no-gradients", dtypes=(BF16,), names=("none of the parameters of AdamW",)),
    LintCase(build=whole_model_of_before, verdict="no-gradients", dtypes=(BF16,), names=("1.weight, 1.bias",)),
    LintCase(build=moments_set_back, verdict="exploding-step", dtypes=(BF16,), names=("one step of Adam",)),
    LintCase(build=rollout_without_a_bound, verdict="exploding-loop", dtypes=(BF16,), names=("19 times",)),
    LintCase(build=weights_exchanged_inside_the_region, verdict="stale-cast", dtypes=BOTH, names=("parameter weight",)),
    LintCase(build=unscaled_fp16, verdict="no-loss-scale"),
]
