"""B8: dynamic scaling keeps fp16 gradients from flushing to zero, measured on real fp16 backward passes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mezzo.formats import FORMATS
from mezzo.loss_scale import GradScaler

SMALL_LOSS = 1e-3
SMALLEST = FORMATS["fp16"].smallest


def deep_net() -> nn.Module:
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def gradients(
    model: nn.Module, scaler: GradScaler, low: bool = True, optimizer: torch.optim.Optimizer | None = None
) -> Tensor:
    """Return the true gradients of a small loss as one vector."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(512, 256), torch.randint(0, 10, (512,))
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16, enabled=low):
        outputs = model(inputs)
    loss = nn.functional.cross_entropy(outputs.float(), targets) * SMALL_LOSS
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    return torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])


@pytest.fixture(scope="module")
def measured() -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = deep_net()
    off = GradScaler("cpu", enabled=False)
    return {
        "fp32": gradients(model, off, low=False),
        "fp16": gradients(model, off),
        "scaled": gradients(model, GradScaler("cpu")),
    }


def flushed(run: dict[str, Tensor], name: str) -> float:
    """Return the share of gradients that are zero although they are not in fp32."""
    alive = run["fp32"] != 0
    return float((run[name][alive] == 0).float().mean())


def below(run: dict[str, Tensor], scale: float, limit: float) -> float:
    """Return the share of gradients whose scaled magnitude is below a limit."""
    return float((run["fp32"].abs() * scale < limit).float().mean())


def test_without_scaling_a_large_share_of_gradients_is_zero(measured: dict[str, Tensor]) -> None:
    """S17: at least those that fp16 cannot hold, and what they would have added to the layers before."""
    assert flushed(measured, "fp16") >= below(measured, 1.0, SMALLEST / 2) > 0.2


def test_with_scaling_only_those_are_that_no_scale_of_65536_can_lift(measured: dict[str, Tensor]) -> None:
    assert flushed(measured, "scaled") <= below(measured, 65536.0, SMALLEST) < flushed(measured, "fp16") / 10_000
    assert measured["scaled"].isfinite().all()


def test_scaled_gradients_are_those_of_fp32_to_the_precision_of_fp16(measured: dict[str, Tensor]) -> None:
    errors = {name: float((measured[name] - measured["fp32"]).norm()) for name in ("fp16", "scaled")}
    size = float(measured["fp32"].norm())
    assert errors["scaled"] < FORMATS["fp16"].eps * size < size < errors["fp16"]


def test_the_scaler_finds_the_scale_that_fits_by_itself() -> None:
    """From far too high a scale it backs off to one that overflows nothing and still flushes hardly anything."""
    torch.manual_seed(0)
    model = deep_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler, skipped = GradScaler("cpu", init_scale=2.0**32), 0
    fp32 = gradients(model, GradScaler("cpu", enabled=False), low=False)
    for _ in range(20):
        found = gradients(model, scaler, optimizer=optimizer)
        scaler.step(optimizer)
        is_applied = scaler.last_step.applied
        scaler.update()
        if is_applied:
            break
        skipped += 1
    assert 0 < skipped < 20 and scaler.get_scale() == 2.0 ** (32 - skipped)
    run = {"fp32": fp32, "found": found}
    assert flushed(run, "found") <= below(run, scaler.get_scale(), SMALLEST)


def test_every_fp16_value_flushed_unscaled_survives_scaled() -> None:
    """All fp32 magnitudes from the flushed range down to 2^-16 of it: lost unscaled, kept scaled by 65536."""
    true = SMALLEST / 4 * 2.0 ** -torch.arange(0, 14, dtype=torch.float32)
    assert (true.half() == 0).all()
    assert torch.equal((true * 65536.0).half().float() / 65536.0, true)
