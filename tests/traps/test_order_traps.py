"""Silent traps of the order of calls: S4, S5, S8 to S12, S30."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.traps.scalers import Scaler, our_scaler, prepared, sgd, stock_scaler
from torch import Tensor, nn

import mezzo
from mezzo.errors import ScalerError, StepError

INF = math.inf


def clipped_while_scaled(scaler: Scaler) -> tuple[float, float]:
    p = nn.Parameter(torch.zeros(4))
    optimizer = sgd(p)
    scaler.scale((p * 0.5).sum()).backward()
    norm = nn.utils.clip_grad_norm_([p], 1.0)
    scaler.step(optimizer)
    return float(norm), float(p[0].detach())


def test_s4_stock_clipping_before_unscale_shrinks_the_update() -> None:
    norm, update = clipped_while_scaled(stock_scaler())
    assert norm == 65536 and abs(update) < 1e-3


def test_s4_ours_the_scaler_refuses_and_the_stepper_clips_true_gradients() -> None:
    with pytest.raises(ScalerError, match="multiplied by the loss scale"):
        clipped_while_scaled(our_scaler())
    model, amp = prepared(torch.zeros(4))
    amp.backward((model[0] * 0.5).sum())
    assert amp.step(max_norm=1.0).grad_norm == 1.0
    torch.testing.assert_close(model[0].detach(), torch.full((4,), -0.5), rtol=1e-5, atol=0)


def test_s4_ours_the_stepper_refuses_clipping_by_hand() -> None:
    model, amp = prepared(torch.zeros(4))
    amp.backward((model[0] * 0.5).sum())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(StepError, match="while they carry the loss scale"):
        amp.step()


def overflow_clamped(scaler: Scaler) -> float:
    p = nn.Parameter(torch.ones(2))
    optimizer = sgd(p)
    scaler.scale((p * torch.tensor([INF, 1.0])).sum()).backward()
    nn.utils.clip_grad_value_([p], 1.0)
    scaler.step(optimizer)
    scaler.update()
    return float(scaler.get_scale())


def test_s5_stock_clamping_hides_the_overflow() -> None:
    assert overflow_clamped(stock_scaler()) == 65536.0


def test_s5_ours_an_overflow_cannot_be_clamped_away() -> None:
    with pytest.raises(ScalerError):
        overflow_clamped(our_scaler())
    model, amp = prepared(torch.ones(2))
    amp.backward((model[0] * 1e37).sum())
    with amp.unscaled_grads():
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
    assert amp.step().reason == "gradients" and amp.scale == 32768.0
    assert torch.equal(model[0].detach(), torch.ones(2))


def backward_after_unscale(scaler: Scaler) -> float:
    p = nn.Parameter(torch.ones(1))
    optimizer = sgd(p, lr=0.0)
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    assert p.grad is not None
    return p.grad.item()


def test_s8_stock_scaled_and_unscaled_gradients_mix() -> None:
    assert backward_after_unscale(stock_scaler()) == 65537.0


def test_s8_ours_the_scaler_refuses_and_the_stepper_adds_like_to_like() -> None:
    with pytest.raises(ScalerError):
        backward_after_unscale(our_scaler())
    model, amp = prepared(torch.ones(1))
    amp.backward(model[0].sum())
    with amp.unscaled_grads():
        pass
    amp.backward(model[0].sum())
    assert amp.step().grad_norm == 2.0


def trained(scaler: Scaler | None, forget: bool, direct: bool) -> float:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    x = torch.randn(64, 8)
    y = x.sum(1, keepdim=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(40):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        (loss if forget else scaler.scale(loss)).backward()
        if direct:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return loss.item()


def test_s9_stock_a_loss_that_was_not_scaled_trains_nothing() -> None:
    scaler = stock_scaler()
    scaler.scale(torch.ones(()))
    assert trained(scaler, forget=True, direct=False) > 100 * trained(stock_scaler(), forget=False, direct=False)


def test_s9_stock_a_direct_step_takes_scaled_gradients() -> None:
    assert not trained(stock_scaler(), forget=False, direct=True) < 1e3


def test_s9_ours_both_are_refused() -> None:
    scaler = our_scaler()
    scaler.scale(torch.ones(()))
    with pytest.raises(ScalerError):
        trained(scaler, forget=True, direct=False)
    with pytest.raises(ScalerError):
        trained(our_scaler(), forget=False, direct=True)
    model, amp = prepared(torch.ones(2))
    amp.backward(model[0].sum())
    with pytest.raises(StepError, match=r"was called directly.*Write amp\.step"):
        amp.optimizers[0].step()
    amp.zero_grad()
    model[0].sum().backward()
    with pytest.raises(StepError, match=r"Write amp\.backward"):
        amp.backward(model[0].sum())


def unscaled_by_two(scaler: Scaler) -> float:
    p = nn.Parameter(torch.ones(1))
    one, two = sgd(p, lr=0.0), sgd(p, lr=0.0)
    scaler.scale(p.sum()).backward()
    scaler.unscale_(one)
    scaler.unscale_(two)
    assert p.grad is not None
    return p.grad.item()


def test_s10_stock_shared_parameters_are_unscaled_twice() -> None:
    assert unscaled_by_two(stock_scaler()) == 2.0**-16


@pytest.mark.parametrize("fused", [False, True])
def test_s10_ours_the_scaler_refuses_and_the_stepper_divides_once(fused: bool) -> None:
    with pytest.raises(ScalerError):
        unscaled_by_two(our_scaler())
    model = nn.ParameterList([nn.Parameter(torch.zeros(1))])
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0, fused=fused) for _ in range(2)]
    amp = mezzo.prepare(model, optimizers, "fp32, scaling.init_scale=65536")
    amp.backward(model[0].sum())
    amp.step()
    assert model[0].item() == -2.0


def with_closure(scaler: Scaler) -> float:
    p = nn.Parameter(torch.ones(2))
    optimizer = sgd(p, lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p**2).sum()
        scaler.scale(loss).backward()
        return loss

    closure()
    scaler.step(optimizer, closure)
    return float(p[0].detach())


def test_s11_stock_a_positional_closure_steps_on_scaled_gradients() -> None:
    assert abs(with_closure(stock_scaler())) > 1000


def test_s11_ours_the_scaler_refuses_and_the_stepper_takes_closures() -> None:
    with pytest.raises(ScalerError):
        with_closure(our_scaler())
    model, amp = prepared(torch.ones(2), lr=0.1)

    def closure() -> Tensor:
        amp.zero_grad()
        loss = (model[0] ** 2).sum()
        amp.backward(loss)
        return loss

    assert amp.step(closure)
    assert torch.equal(model[0].detach(), torch.full((2,), 1 - 0.1 * 2))


def hook_calls(fused: bool) -> tuple[int, list[object]]:
    p = nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.AdamW([p], lr=0.1, fused=fused), stock_scaler()
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    returned = []
    for place in range(3):
        optimizer.zero_grad()
        scaler.scale((p * (INF if place == 1 else 1.0)).sum()).backward()
        returned.append(scaler.step(optimizer))
        scaler.update()
    return len(calls), returned


def test_s12_stock_a_skipped_step_cannot_be_told_from_a_real_one() -> None:
    assert hook_calls(fused=False) == (2, [None] * 3)
    assert hook_calls(fused=True) == (3, [None] * 3)


@pytest.mark.parametrize("fused", [False, True])
def test_s12_ours_the_result_says_so_and_hooks_run_after_real_steps(fused: bool) -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(3))])
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters(), fused=fused), "fp32")
    hooks: list[int] = []
    applied: list[int] = []
    amp.optimizers[0].register_step_post_hook(lambda *_: hooks.append(1))
    amp.on_applied(lambda: applied.append(1))
    taken = []
    for place in range(3):
        amp.zero_grad()
        amp.backward((model[0] * (INF if place == 1 else 1.0)).sum())
        taken.append(bool(amp.step()))
    assert taken == [True, False, True] and len(hooks) == len(applied) == 2


def skipped_first_step() -> Tensor:
    """Let torch's fused SGD skip the step that makes its momentum, with fresh memory filled with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        p = nn.Parameter(torch.ones(8))
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9, fused=True)
        scaler = stock_scaler()
        for factor in (INF, 1.0):
            optimizer.zero_grad()
            scaler.scale((p * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return p.detach()
    finally:
        torch.use_deterministic_algorithms(False)


def test_s30_stock_fused_sgd_takes_unwritten_memory_for_momentum() -> None:
    assert skipped_first_step().isnan().all()


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p),
    "fused adam": lambda p: torch.optim.Adam(p, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "fused adagrad": lambda p: torch.optim.Adagrad(p, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "mezzo adamw": lambda p: mezzo.optim.AdamW(p, amsgrad=True),
    "mezzo sgd": lambda p: mezzo.optim.SGD(p, lr=0.1, momentum=0.9),
    "masters": lambda p: mezzo.optim.MasterWeights(torch.optim.Adam(p)),
    "masters, fused": lambda p: mezzo.optim.MasterWeights(torch.optim.Adam(p, fused=True)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_s30_ours_no_optimizer_applies_a_bad_gradient(name: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for factors in ((INF, 1.0, INF, 2.0), (1.0, 2.0)):
            model = nn.ParameterList([nn.Parameter(torch.ones(8))])
            amp = mezzo.prepare(model, OPTIMIZERS[name](model.parameters()), "fp32")
            for factor in factors:
                amp.zero_grad()
                amp.backward((model[0] * factor).sum())
                amp.step()
            runs.append(model[0].detach())
        assert torch.equal(runs[0], runs[1]) and runs[0].isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)
