"""Precision or arithmetic: decided by fp32 values carried from the inputs, for any op."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
import mezzo.diagnose as diagnose

FP16, BF16 = torch.float16, torch.bfloat16
Function = Callable[[Tensor], Tensor]


class Body(nn.Module):
    def __init__(self, compute: Function) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x)


def first(compute: Function, dtype: torch.dtype, x: Tensor) -> diagnose.Finding | None:
    x = x.to(dtype).requires_grad_()
    with diagnose.trace() as t:
        Body(compute)(x).float().mean().backward()
    return next(iter(t.report.findings), None)


PRECISION: dict[str, tuple[Function, torch.dtype, Tensor, str]] = {
    "cumprod": (lambda x: x.cumprod(0).log(), FP16, torch.full((8,), 1e-2), "cumprod flushed"),
    "bmm": (lambda x: torch.bmm(x, x).log(), FP16, torch.full((1, 2, 2), 1e-5), "bmm flushed"),
    "1-tanh": (lambda x: (1 - x.tanh()).log(), FP16, torch.full((4,), 5.0), "rsub gives exactly 0"),
    "softplus": (lambda x: F.softplus(x).log(), FP16, torch.full((4,), -20.0), "softplus flushed"),
    "erfc": (lambda x: torch.erfc(x).log(), FP16, torch.full((4,), 4.0), "erfc flushed"),
    "exp2": (lambda x: torch.exp2(x).log(), FP16, torch.full((4,), -30.0), "exp2 flushed"),
    "sigmoid rounds to 1": (
        lambda x: torch.where(x > 0, 1 - x.sigmoid(), x.sigmoid()).log(), BF16, torch.tensor([8.0, 9.0, -3.0]),
        "rsub gives exactly 0",
    ),
    "eps": (lambda x: 1 / (x * 1e-3 + 1e-9), FP16, torch.full((4,), 1e-7), "the constant 1e-09 rounds to 0"),
    "eps behind a 0 of 16 bit": (
        lambda x: (0.5 * (1 + torch.erf(x)) + 1e-8).log(), FP16, torch.full((4,), -2.6), "add gives exactly 0",
    ),
    "a difference": (
        lambda x: ((x + 0.001).square() - x.square()).rsqrt(), BF16, torch.full((4,), 1.0), "gives exactly 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PRECISION)
def test_what_only_16_bit_makes_is_underflow(name: str) -> None:
    compute, dtype, x, words = PRECISION[name]
    found = first(compute, dtype, x)
    assert found is not None and found.verdict == "underflow" and words in found.why


@pytest.mark.parametrize("name", PRECISION)
def test_the_same_in_fp32_is_finite(name: str) -> None:
    compute, dtype, x, _ = PRECISION[name]
    assert compute(x.to(dtype).float()).isfinite().all()


ARITHMETIC: dict[str, Function] = {
    "log of 0": lambda x: (x - x).log(),
    "division by 0": lambda x: x / (x * 0),
    "flushed beside a true 0": lambda x: (x * torch.tensor([0.0, 1.0], dtype=x.dtype)).log(),
    "root of 0": lambda x: (x * 0).sqrt(),
}


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_what_fp32_has_too_is_no_underflow(name: str, dtype: torch.dtype) -> None:
    found = first(ARITHMETIC[name], dtype, torch.tensor([0.5, 2.0]))
    assert found is not None and found.verdict == "singularity"


def gradients(factor: float, dtype: torch.dtype = FP16, scale: float = 1.0) -> diagnose.TraceReport:
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers)
    with diagnose.trace(model) as t:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not torch.float32):
            y = model(torch.randn(16, 64))
        (y.float().square().mean() * factor * scale).backward()
    return t.report


@pytest.mark.parametrize("factor", [1e-4, 1e-6, 1e-9])
def test_gradients_that_fp16_flushes_are_underflow(factor: float) -> None:
    report = gradients(factor)
    [found] = report.faults
    assert (found.verdict, found.phase, found.op) == ("underflow", "backward", "to")
    assert "GradScaler" in found.fix.advice and found.flush is not None and found.flush.share > 0.5


def test_one_result_of_several_that_is_flushed_is_told() -> None:
    """A convolution's backward hands out three gradients: here the input's are below fp16, the weight's and bias's are not."""
    before, conv = nn.Linear(6, 6), nn.Conv2d(4, 4, 3, padding=1)
    with torch.no_grad():
        conv.weight.mul_(1e-6)
    with diagnose.trace(before) as t:
        with torch.autocast("cpu", FP16):
            out = conv(before(torch.randn(8, 4, 6, 6) * 100))
        (out.float() * 1e-2).sum().backward()
    (found,) = t.report.findings
    assert (found.verdict, found.phase, found.op) == ("underflow", "backward", "convolution")


@pytest.mark.parametrize("factor", [1e-4, 1e-6])
def test_the_scale_that_is_named_keeps_them(factor: float) -> None:
    [found] = gradients(factor).faults
    scale = float(found.fix.advice.split("a loss scale of ")[1].split(" ")[0])
    assert gradients(factor, scale=scale).answer == "healthy"


def test_gradients_of_many_shapes_are_clipped_at_once() -> None:
    """Clipping multiplies all gradients in one op; each is held against its own fp32 values."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 2)).to(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-8)
    with diagnose.trace() as t:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 8, dtype=BF16)).float().square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
            optimizer.step()
    assert t.report.findings[0].verdict == "lost-update" and t.record.updates == 2


@pytest.mark.parametrize(
    ("factors", "answer"),
    [
        ([1.0, 1e-9, 1.0, 1.0], "healthy"),
        ([1.0, 1e-9, 1e-9, 1e-9], "faulty"),
        ([1e-9], "faulty"),
        ([1.0, 1e-9], "healthy"),
    ],
)
def test_gradients_that_flush_in_one_step_of_many_are_no_fault(factors: list[float], answer: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with diagnose.trace(model) as t:
        for factor in factors:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=FP16):
                y = model(torch.randn(16, 64))
            (y.float().square().mean() * 256 * factor).backward()
            optimizer.step()
    assert t.report.answer == answer


class OwnSgd(torch.optim.Optimizer):
    """Gradient descent of 16-bit weights; a way of keeping what they cannot hold."""

    def __init__(self, params: Iterable[Tensor], way: str) -> None:
        super().__init__(params, {"lr": 1e-5})
        self.way = way
        weights = [p for g in self.param_groups for p in g["params"]]
        self.flat = torch.cat([p.detach().float().flatten() for p in weights])
        self.masters = [
            x.view_as(p) for x, p in zip(self.flat.split([p.numel() for p in weights]), weights, strict=True)
        ]
        self.remainders = [torch.zeros_like(p) for p in weights]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        weights = [p for g in self.param_groups for p in g["params"]]
        updates = [-1e-5 * p.grad for p in weights]
        match self.way:
            case "masters":
                torch._foreach_add_(self.masters, updates)
                for p, master in zip(weights, self.masters, strict=True):
                    p.copy_(master)
            case "masters, all at once":
                torch._foreach_add_(self.masters, updates)
                torch._foreach_copy_(weights, self.masters)
            case "compensated":  # Kahan 1965
                for p, update, remainder in zip(weights, updates, self.remainders, strict=True):
                    remainder.add_(update)
                    before = p.clone()
                    p.add_(remainder)
                    remainder.add_(before.sub_(p))
            case "widened for a moment":
                for p, update in zip(weights, updates, strict=True):
                    p.copy_(p.float() + update)
            case "added":
                torch._foreach_add_(weights, updates)
            case "gradients cleared in the step":
                for p in weights:
                    p.add_(p.grad, alpha=-1e-5)
                    p.grad.zero_()


@pytest.mark.parametrize(
    ("way", "is_lost"),
    [
        ("masters", False),
        ("masters, all at once", False),
        ("compensated", False),
        ("widened for a moment", True),
        ("added", True),
        ("gradients cleared in the step", True),
    ],
)
def test_updates_that_live_on_beside_a_weight_are_not_lost(way: str, is_lost: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(BF16)
    optimizer = OwnSgd(model.parameters(), way)
    with diagnose.trace(model) as t:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8, dtype=BF16)).float().square().mean().backward()
            optimizer.step()
    assert [f.verdict for f in t.report.findings][:1] == ["lost-update"] * is_lost


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_formats_with_the_range_of_fp32_do_not_flush(dtype: torch.dtype) -> None:
    assert gradients(1e-6, dtype).answer == "healthy"


def test_zeros_that_fp32_has_too_are_no_fault() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)  # every unit is off: the gradient of the first layer is 0 in any format
    with diagnose.trace(model) as t:
        with torch.autocast("cpu", dtype=FP16):
            y = model(torch.randn(4, 8))
        (y.float().mean() * 64).backward()
    assert t.report.answer == "healthy"


@pytest.mark.parametrize(
    ("size", "times", "is_lost"), [(1e-3, 80, True), (1e-3, 40, False), (1e-1, 80, False), (0.0, 80, False)]
)
@pytest.mark.parametrize(
    "reset", [lambda y: y, lambda y: torch.where(y > 2, torch.ones_like(y), y), lambda y: y.clamp(max=2)]
)
def test_a_state_that_additions_do_not_move_is_told(
    size: float, times: int, is_lost: bool, reset: Callable[[Tensor], Tensor]
) -> None:
    speed = torch.full((4,), size, dtype=BF16, requires_grad=True)
    with diagnose.trace() as t:
        y = torch.ones(4, dtype=BF16)
        for _ in range(times):
            y = reset(y + speed)
        y.float().sum().backward()
    told = [(f.verdict, f.op, f.phase) for f in t.report.findings]
    assert told == [("lost-update", "add", "forward")] * is_lost


def test_a_deep_network_whose_layers_add_little_is_no_such_state() -> None:
    model = nn.ModuleList(nn.Linear(4, 4, dtype=BF16) for _ in range(48))
    for layer in model:
        nn.init.constant_(layer.weight, 1e-5)
    with diagnose.trace() as t:
        y = torch.ones(2, 4, dtype=BF16)
        for layer in model:
            y = y + layer(y) * 1e-3
        y.float().sum().backward()
    assert [f.verdict for f in t.report.findings] == []


@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("scaler_of", [torch.amp.GradScaler, mezzo.GradScaler])
def test_a_run_that_has_a_scaler_is_not_told_to_scale_the_loss(scaler_of: Callable[..., Any], scale: float) -> None:
    """The scale is too small, and what is advised says so; the one that is named keeps the gradients."""
    model = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), scaler_of("cpu", init_scale=scale)
    with diagnose.trace(model) as t:
        with torch.autocast("cpu", dtype=FP16):
            y = model(torch.randn(16, 64))
        scaler.scale(y.float().square().mean() * 1e-6).backward()
        scaler.step(optimizer)
        scaler.update()
    [found] = t.report.faults
    assert found.fix.advice.startswith("raise the loss scale: a loss scale of ")
    wanted = float(found.fix.advice.split("a loss scale of ")[1].split(" ")[0])
    assert wanted > scale and gradients(1e-6, scale=wanted).answer == "healthy"
    assert "scale the loss:" not in str(t.report) and "loss is not scaled" not in str(t.report)


DIFFERENCES: dict[str, Callable[[Function, Tensor, float], Tensor]] = {
    "forward": lambda f, x, h: (f(x + h) - f(x)) / h,
    "central": lambda f, x, h: (f(x + h) - f(x - h)) / (2 * h),
    "second": lambda f, x, h: (f(x + h) - 2 * f(x) + f(x - h)) / (h * h),
}


@pytest.mark.parametrize("name", sorted(DIFFERENCES))
@pytest.mark.parametrize("is_region", [True, False])
def test_a_difference_that_is_rounding_is_told(name: str, is_region: bool) -> None:
    def rules(h: float, kind: torch.dtype = BF16) -> list[str]:
        stored = torch.float32 if is_region else kind
        model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(stored), torch.rand(16, 8, dtype=stored)
        with diagnose.trace() as t, torch.autocast("cpu", dtype=BF16, enabled=is_region and kind is BF16):
            DIFFERENCES[name](model, x, h).float().square().mean().backward()
        return [found.rule for found in t.report.record.lints]

    assert rules(1e-4) == ["finite-difference"]
    assert rules(1e-2, torch.float32) == []
    assert name == "second" or rules(0.5) == []


def test_an_eps_beside_a_divisor_is_no_step() -> None:
    with diagnose.trace() as t:
        x = torch.rand(16, 8, dtype=BF16, requires_grad=True)
        (((x + 1e-3) / (x.abs() + 1e-3)) / 1e-3).float().mean().backward()
    assert t.report.record.lints == ()


class Ndtr(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (0.5 * (1 + torch.erf(super().forward(x) - 2)) + 1e-8).log()


def test_the_edit_for_an_eps_behind_a_0_of_16_bit_gives_what_fp32_has() -> None:
    """bf16, which keeps the eps, was proposed: it makes the same 0, and a gradient thousands of times too large."""

    def run(policy: str) -> tuple[diagnose.TraceReport, Tensor]:
        torch.manual_seed(0)
        model = Ndtr(8, 8)
        mezzo.prepare(model, None, policy)
        with diagnose.trace(model) as t:
            model(torch.randn(32, 8)).float().mean().backward()
        return t.report, model.weight.grad

    report, _ = run("fp16")
    again, grad = run(f"fp16, {report.findings[0].fix.edit}")
    wide = run("fp32")[1]
    assert again.answer == "healthy" and (grad - wide).norm() < 2.0**-5 * wide.norm()
