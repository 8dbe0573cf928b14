"""Closures: optimizers that evaluate the loss themselves, and overflows that are tried again."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tests.messages import message_of
from tests.step.step_models import INF, OPTIMIZERS, Net, assert_same, batch, everything, mse, prepared, twin
from torch import Tensor, nn

import mezzo
from mezzo.errors import LossScaleExhausted, StepError


class SAM(torch.optim.SGD):
    """Sharpness-aware minimisation: climbs along the gradient that is there, evaluates again, steps from where it was.

    Source: Foret et al. 2021, algorithm 1.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        assert closure is not None
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        before = [p.clone() for p in params]
        for p in params:
            p.add_(p.grad, alpha=0.05 / float(norm))
        with torch.enable_grad():
            closure()
        for p, old in zip(params, before, strict=True):
            p.copy_(old)
        super().step()


def lbfgs(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params, lr=0.5, max_iter=5, line_search_fn="strong_wolfe")


def plain_closure(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        return loss

    return closure


def closure_of(amp: mezzo.Stepper, loss_fn: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        amp.zero_grad()
        loss = loss_fn()
        amp.backward(loss)
        return loss

    return closure


def amp_closure(amp: mezzo.Stepper, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    return closure_of(amp, lambda: mse(amp.model(x), y))


@pytest.mark.parametrize("policy", ["fp32", "fp32, scaling.init_scale=65536"])
@pytest.mark.parametrize("name", ["lbfgs", *OPTIMIZERS])
def test_trajectory_is_that_of_torch(name: str, policy: str) -> None:
    make = {"lbfgs": lbfgs, **OPTIMIZERS}[name]
    model = Net(has_batch_norm=False)
    plain = twin(model)
    optimizer = make(plain.parameters())
    amp = mezzo.prepare(model, make(model.parameters()), policy)
    for _ in range(3):
        x, y = batch()
        optimizer.step(plain_closure(plain, optimizer, x, y))
        result = amp.step(amp_closure(amp, x, y))
        assert result.applied
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
    assert amp.counters().applied == 3


def test_sam_starts_from_gradients_that_are_there() -> None:
    model = Net(has_batch_norm=False)
    plain = twin(model)
    optimizer = SAM(plain.parameters(), lr=0.1)
    amp = mezzo.prepare(model, SAM(model.parameters(), lr=0.1), "fp32, scaling.init_scale=65536")
    for _ in range(3):
        x, y = batch()
        plain_closure(plain, optimizer, x, y)()
        optimizer.step(plain_closure(plain, optimizer, x, y))
        amp_closure(amp, x, y)()
        assert amp.step(amp_closure(amp, x, y))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("zeroes", ["closure", "optimizer"])
@pytest.mark.parametrize("scale", ["1", "1024"])
def test_sam_on_masters_takes_the_steps_of_sam_on_fp32_weights(zeroes: str, scale: str) -> None:
    """But for gradients, which are rounded to 16 bit there."""

    class Zeroing(SAM):
        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> None:
            def after_zeroing() -> None:
                self.zero_grad()
                assert closure is not None
                closure()

            super().step(after_zeroing if zeroes == "optimizer" else closure)

    model = Net(has_batch_norm=False)
    exact = {}
    for policy in ("bf16", "bf16-master"):
        torch.manual_seed(0)
        other = twin(model)
        amp = mezzo.prepare(other, Zeroing(other.parameters(), lr=0.1), f"{policy}, scaling.init_scale={scale}")

        for _ in range(3):
            x, y = batch()

            def closure(amp: mezzo.Stepper = amp, x: Tensor = x, y: Tensor = y) -> Tensor:
                if zeroes == "closure":
                    amp.zero_grad()
                loss = mse(amp.model(x).float(), y)
                amp.backward(loss)
                return loss

            closure()
            assert amp.step(closure)
            amp.zero_grad()
        exact[policy] = amp.export_weights()
    for key, weight in exact["bf16"].items():
        distance = (weight - exact["bf16-master"][key]).abs().max()
        assert distance <= 2**-8 * 0.3 * weight.abs().max()


@pytest.mark.parametrize("when", [1, 3])
@pytest.mark.parametrize("name", ["lbfgs", "adamw", "mezzo-adamw"])
def test_a_bad_evaluation_voids_the_whole_step(name: str, when: int) -> None:
    make = {"lbfgs": lbfgs, **OPTIMIZERS}[name]
    model = Net()
    amp = mezzo.prepare(model, make(model.parameters()), "fp32, scaling.init_scale=1024")
    x, y = batch()
    amp.step(amp_closure(amp, x, y))
    before, calls = everything(amp), [0]

    def closure() -> Tensor:
        calls[0] += 1
        amp.zero_grad()
        loss = mse(amp.model(x), y)
        amp.backward(loss * (INF if calls[0] == when else 1))
        return loss

    result = amp.step(closure)
    if name != "lbfgs" and when == 3:
        assert result.applied and calls == [1]
        return
    assert result.reason == "loss" and calls == [when]
    assert_same(everything(amp), before)
    assert amp.step(amp_closure(amp, x, y))


@pytest.mark.parametrize("clip", [{"max_norm": 0.1}, {"clip_value": 0.01}])
@pytest.mark.parametrize("name", ["adamw", "fused-adamw", "mezzo-adamw"])
def test_clipping(name: str, clip: dict[str, float]) -> None:
    model = Net(has_batch_norm=False)
    plain = twin(model)
    optimizer = OPTIMIZERS[name](plain.parameters())
    _, amp = prepared("fp32, scaling.init_scale=1024", name, model)
    x, y = batch()
    mse(plain(x), y).backward()
    if "max_norm" in clip:
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    else:
        nn.utils.clip_grad_value_(plain.parameters(), 0.01)
    optimizer.step()
    amp.step(amp_closure(amp, x, y), **clip)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("mode", ["fp32", "kahan", "stochastic"])
def test_masters_around_lbfgs(mode: str) -> None:
    model = Net(has_batch_norm=False)
    optimizer = mezzo.optim.MasterWeights(lbfgs(model.parameters()), mode=mode)
    amp = mezzo.prepare(model, optimizer, f"bf16-master, master={mode}, scaling.init_scale=1024")
    x, y = batch(64)
    first = mse(amp.model(x), y).item()
    for _ in range(3):
        assert amp.step(amp_closure(amp, x, y))
    assert mse(amp.model(x), y).item() < first / 2


class TestRetry:
    RETRY = "fp16, output=fp32, guard.on_overflow=retry, scaling.init_scale=65536"

    def too_large(self, policy: str, name: str) -> tuple[mezzo.Stepper, Callable[[], Tensor]]:
        """A loss whose gradient fp16 holds at scale 128 and not above."""
        model = nn.Linear(4, 1, bias=False)
        amp = mezzo.prepare(model, OPTIMIZERS[name](model.parameters()), policy)
        return amp, closure_of(amp, lambda: (amp.model(torch.ones(1, 4)) * 500).sum())

    @pytest.mark.parametrize("name", ["adamw", "fused-adamw", "mezzo-adamw"])
    def test_the_batch_is_not_lost(self, name: str) -> None:
        amp, closure = self.too_large(self.RETRY, name)
        result = amp.step(closure)
        assert result.applied and result.scale == 128.0 and result.grad_norm == 1000.0
        counters = amp.counters()
        assert (counters.seen, counters.applied, counters.skipped) == (10, 1, 9)

    def test_the_gradients_of_a_try_are_dropped_before_the_next_one(self) -> None:
        amp, _ = self.too_large(self.RETRY, "adamw")

        def closure() -> Tensor:  # without amp.zero_grad(), which the loop calls before the step
            loss = (amp.model(torch.ones(1, 4)) * 500).sum()
            amp.backward(loss)
            return loss

        result = amp.step(closure)
        assert result.applied and result.grad_norm == 1000.0

    def test_it_ends_at_the_floor(self) -> None:
        amp, closure = self.too_large(self.RETRY + ", scaling.min_scale=256", "adamw")
        with pytest.raises(LossScaleExhausted, match="floor 256"):
            amp.step(closure)

    def test_without_the_guard_it_ends_after_patience_tries(self) -> None:
        amp, _ = self.too_large(self.RETRY + ", guard.enabled=false, guard.patience=4", "adamw")
        calls = []

        def loss_fn() -> Tensor:
            calls.append(1)
            loss = amp.model(torch.ones(1, 4)).sum()
            loss.register_hook(lambda grad: grad * math.nan)
            return loss

        assert not amp.step(closure_of(amp, loss_fn)).applied and len(calls) == 4

    def test_a_bad_loss_is_not_tried_again(self) -> None:
        amp, _ = self.too_large(self.RETRY, "adamw")
        calls = []

        def loss_fn() -> Tensor:
            calls.append(1)
            return amp.model(torch.ones(1, 4)).sum() * INF

        assert amp.step(closure_of(amp, loss_fn)).reason == "loss" and calls == [1]

    def test_it_needs_a_closure(self) -> None:
        amp, closure = self.too_large(self.RETRY, "adamw")
        closure()
        assert message_of(StepError, amp.step) == (
            "step() was called without a closure, and the policy declares guard.on_overflow=retry, which computes the "
            "loss again. Write amp.step(closure), or guard.on_overflow=skip."
        )


def test_several_optimizers_need_a_name() -> None:
    model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
    amp = mezzo.prepare(model, [OPTIMIZERS["sgd"](m.parameters()) for m in model], "fp32")
    closure = closure_of(amp, lambda: model[1](torch.ones(1, 4)).sum())
    assert message_of(StepError, amp.step, closure) == (
        "step(closure) was given a closure for 2 optimizers, which would evaluate it once each. Write "
        "amp.step(closure, optimizer=...)."
    )
    assert amp.step(closure, optimizer=amp.optimizers[1])


def test_an_optimizer_that_ignores_its_closure() -> None:
    class Deaf(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    model = Net()
    amp = mezzo.prepare(model, Deaf(model.parameters()), "fp32")
    with pytest.raises(StepError, match=r"Deaf\.step\(closure\) never called the closure"):
        amp.step(amp_closure(amp, *batch()))


@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
def test_a_step_without_the_closure_that_an_optimizer_needs_says_so_and_changes_nothing(policy: str) -> None:
    model = nn.Linear(4, 1)
    amp = mezzo.prepare(model, lbfgs(model.parameters()), policy)
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    amp.backward(mse(model(x), y))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(StepError, match=r"without a closure, and LBFGS computes .* Write amp.step\(closure\)"):
        amp.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert amp.step(amp_closure(amp, x, y)).applied


@pytest.mark.parametrize("policy", ["fp32", "bf16-master"])
@pytest.mark.parametrize(
    ("goes_backward", "sentence"),
    [
        (
            True,
            "step(closure): the closure returned None, and the optimizer reads its loss. Write in it amp.zero_grad()",
        ),
        (False, "step(closure): the closure ended without amp.backward(loss). Write in it amp.zero_grad()"),
    ],
)
def test_a_closure_that_leaves_something_out_is_told_what(policy: str, goes_backward: bool, sentence: str) -> None:
    model, (x, y) = Net(has_batch_norm=False), batch()
    amp = mezzo.prepare(model, lbfgs(model.parameters()), policy)
    before = [p.detach().clone() for p in model.parameters()]

    def closure() -> Any:
        amp.zero_grad()
        loss = mse(model(x), y)
        if not goes_backward:
            return loss
        amp.backward(loss)
        return None

    with pytest.raises(StepError, match=re.escape(sentence)):
        amp.step(closure)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert amp.step(amp_closure(amp, x, y)).applied


class Fails(torch.optim.SGD):
    """Raises when weights and state have moved."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        assert closure is not None
        closure()
        super().step()
        raise ValueError("no disk")


def test_a_step_that_fails_inside_the_optimizer_leaves_weights_and_state() -> None:
    model, (x, y) = Net(has_batch_norm=False), batch()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), "fp32")
    amp.step(amp_closure(amp, x, y))
    amp.optimizers[0].__class__ = Fails
    before = everything(amp)
    with pytest.raises(ValueError, match="no disk"):
        amp.step(amp_closure(amp, x, y))
    assert_same(everything(amp), before)


def test_a_first_step_that_is_taken_back_is_called_no_loaded_state(caplog: pytest.LogCaptureFixture) -> None:
    model, (x, y) = Net(has_batch_norm=False), batch()
    amp = mezzo.prepare(model, lbfgs(model.parameters()), "bf16-master")
    assert amp.step(closure_of(amp, lambda: mse(amp.model(x), y) * INF)).reason == "loss"
    assert not any("begins anew" in message for message in caplog.messages)
