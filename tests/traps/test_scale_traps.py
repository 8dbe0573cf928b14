"""Silent traps of the loss scale: S6, S17, S22 to S24, S35."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tests.traps.scalers import prepared, sgd, stock_scaler
from torch import Tensor, nn

import mezzo
from mezzo.errors import LossScaleExhausted, NonFiniteStep

INF = math.inf


def test_s6_stock_the_scale_decays_to_zero_and_then_destroys_weights() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer, scaler = sgd(p, lr=0.1), stock_scaler()
    for _ in range(200):
        optimizer.zero_grad()
        scaler.scale((p * INF).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 0.0
    optimizer.zero_grad()
    scaler.scale((p * p).sum()).backward()
    scaler.step(optimizer)
    assert not p.isfinite().all()


def test_s6_ours_there_is_a_floor_and_an_error() -> None:
    before = torch.full((3,), 0.01)
    model, amp = prepared(before.clone(), lr=0.1)
    with pytest.raises(LossScaleExhausted, match="floor 1"):
        for _ in range(200):
            amp.zero_grad()
            amp.backward((model[0] * 3e38).sum())
            amp.step()
    assert torch.equal(model[0].detach(), before) and amp.scale == 1.0
    amp.zero_grad()
    amp.backward((model[0] * model[0]).sum())
    assert amp.step() and torch.allclose(model[0].detach(), before * 0.8)


def test_s6_ours_a_bad_loss_does_not_move_the_scale() -> None:
    model, amp = prepared(torch.ones(3))
    for _ in range(5):
        amp.zero_grad()
        amp.backward((model[0] * INF).sum())
        assert amp.step().reason == "loss"
    assert amp.scale == 65536.0


def deep() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(6)]
    return nn.Sequential(*layers, nn.Linear(256, 10)), torch.randn(512, 256), torch.randint(0, 10, (512,))


def share_of_zeros(model: nn.Module) -> float:
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return float(grads.eq(0).float().mean())


def test_s17_stock_fp16_without_scaling_flushes_gradients() -> None:
    model, x, y = deep()
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    (F.cross_entropy(out.float(), y) * 1e-3).backward()
    assert share_of_zeros(model) > 0.2


def test_s17_ours_an_fp16_policy_scales() -> None:
    assert mezzo.Policy.parse("fp16").scaling is not None
    model, x, y = deep()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters()), "fp16, output=fp32")
    amp.backward(F.cross_entropy(amp.model(x), y) * 1e-3)
    assert share_of_zeros(model) < 0.01


def test_s22_ours_the_divisor_is_the_scale_of_backward() -> None:
    model, amp = prepared(torch.zeros(1), lr=0.0, more=", scaling.growth_interval=1")
    for place in range(6):
        amp.zero_grad()
        amp.backward(model[0].sum() * 3)
        result = amp.step()
        assert result.grad_norm == 3.0 and result.scale == 2.0 ** (16 + place)


def test_s23_ours_bf16_has_no_scale_that_could_be_left_on() -> None:
    assert mezzo.Policy.parse("bf16").scaling is None
    model = nn.Linear(4, 1)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), "bf16, output=fp32")
    amp.backward(amp.model(torch.ones(1, 4)).sum())
    assert model.bias.grad is not None and model.bias.grad.item() == 1.0
    assert amp.step().scale == 1.0 == amp.scale


def test_s24_ours_skipping_for_ever_is_an_error_in_bf16_too(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 1)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters()), "bf16, output=fp32")
    with pytest.raises(NonFiniteStep, match=r"25 steps in a row were skipped \(guard\.patience=25\)"):
        for _ in range(100):
            amp.zero_grad()
            amp.backward(amp.model(torch.ones(1, 4)).sum() * INF)
            amp.step()
    assert amp.counters().applied == 0 and "step 0 skipped" in caplog.messages[0]


def test_s35_stock_a_loss_divided_by_the_updated_scale_is_logged_wrong() -> None:
    p = nn.Parameter(torch.ones(1))
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)
    scaled = scaler.scale(p.sum() * 3)
    scaled.backward()
    scaler.step(sgd(p, lr=0.0))
    scaler.update()
    assert scaled.item() / scaler.get_scale() == 1.5


def test_s35_ours_the_caller_never_holds_a_scaled_loss() -> None:
    model, amp = prepared(torch.ones(1), lr=0.0, more=", scaling.growth_interval=1")
    loss = model[0].sum() * 3
    assert amp.backward(loss) is None
    result = amp.step()
    assert loss.item() == 3.0 and result.grad_norm == 3.0
    assert result.scale == 65536.0 and amp.scale == 131072.0
