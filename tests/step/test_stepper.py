"""The stepper: one order, true gradients, skipped steps that leave no trace, several optimizers."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.step.step_models import (
    CALM,
    INF,
    NAN,
    OPTIMIZERS,
    Net,
    assert_same,
    batch,
    everything,
    mse,
    prepared,
    run,
    twin,
)
from torch import nn

import mezzo
from mezzo.errors import LossScaleExhausted, NonFiniteStep


class TestTheReference:
    """With fp32 compute every optimizer goes the way it goes without mezzo, whatever the loss scale."""

    @pytest.mark.parametrize("scaling", ["", ", scaling.growth_interval=3"])
    @pytest.mark.parametrize("name", OPTIMIZERS)
    @pytest.mark.parametrize("max_norm", [None, 0.5])
    def test_same_trajectory(self, name: str, scaling: str, max_norm: float | None) -> None:
        # Before a batch norm a bias has no gradient but rounding noise, which Adam would blow up.
        model = Net(has_batch_norm=max_norm is None)
        plain = twin(model)
        optimizer = OPTIMIZERS[name](plain.parameters())
        _, amp = prepared(f"fp32{scaling}", name, model)
        for _ in range(8):
            x, y = batch()
            optimizer.zero_grad()
            mse(plain(x), y).backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), INF if max_norm is None else max_norm)
            optimizer.step()
            result = run(amp, x, y, max_norm=max_norm)
            assert result.applied and result.reason is None and not result.nonfinite
            assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            if max_norm is None:
                assert torch.equal(p, q)
            else:  # the coefficient is rounded once more
                torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)

    def test_clip_value(self) -> None:
        model = Net()
        plain = twin(model)
        optimizer = OPTIMIZERS["adamw"](plain.parameters())
        _, amp = prepared("fp32, scaling.init_scale=65536", "adamw", model)
        for _ in range(4):
            x, y = batch()
            optimizer.zero_grad()
            mse(plain(x), y).backward()
            nn.utils.clip_grad_value_(plain.parameters(), 0.01)
            optimizer.step()
            assert run(amp, x, y, clip_value=0.01)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q)

    @pytest.mark.parametrize(
        "policy", ["fp32", CALM, "fp16-master, scaling.init_scale=256", "bf16-master, scaling.init_scale=65536"]
    )
    def test_micro_batches(self, policy: str) -> None:
        """Accumulated gradients are the sum of the true ones."""
        name = "adamw" if "master" not in policy else "none"
        model = Net(has_batch_norm=False)
        plain = twin(model)
        if name == "none":
            master = "fp32" if "fp16" in policy else "split"
            amp = mezzo.prepare(model, mezzo.optim.SGD(model.parameters(), master=master), policy)
        else:
            _, amp = prepared(policy, name, model)
        batches = [batch() for _ in range(4)]
        for x, y in batches:
            amp.backward(mse(amp.model(x), y) / len(batches))
            (mse(plain(x), y) / len(batches)).backward()
        eps = max(torch.finfo(p.dtype).eps for p in model.parameters())
        eps = max(eps, torch.finfo(amp.policy.compute).eps)
        with amp.unscaled_grads() as grads:
            total = torch.stack([p.grad.norm() for p in plain.parameters()]).norm()
            for (_, got), p in zip(grads.items(), plain.parameters(), strict=True):
                assert (got.double() - p.grad.double()).norm() <= 16 * eps * total

    def test_retained_graph_and_several_losses(self) -> None:
        model, amp = prepared("fp32, scaling.init_scale=65536")
        plain = twin(model)
        x, y = batch()
        out, want = amp.model(x), plain(x)
        amp.backward(mse(out, y), retain_graph=True)
        amp.backward(out.square().mean())
        (mse(want, y) + want.square().mean()).backward()
        with amp.unscaled_grads() as grads:
            for got, p in zip(grads.values(), plain.parameters(), strict=True):
                torch.testing.assert_close(got, p.grad, rtol=1e-5, atol=1e-6)


FAULTS = ("input", "loss", "gradient")


def faulty_step(amp: mezzo.Stepper, fault: str, **options: Any) -> mezzo.StepResult:
    x, y = batch()
    x = x * INF if fault == "input" else x
    amp.zero_grad()
    loss = mse(amp.model(x), y)
    amp.backward(loss * INF if fault == "loss" else loss)
    if fault == "gradient":
        with amp.unscaled_grads() as grads:
            grads["outer.weight"][0, 0] = NAN
    return amp.step(**options)


# At half and a quarter of this scale no gradient is subnormal in fp16 yet, so a smaller scale rounds nothing.
POLICIES = ("fp32", "bf16", "fp16, scaling.init_scale=2048")
SKIPPED = [
    pytest.param(
        name, policy, fault, marks=[] if (i + j + k) % len(FAULTS) == 0 or name == "adamw" else pytest.mark.slow
    )
    for i, name in enumerate(OPTIMIZERS)
    for j, policy in enumerate(POLICIES)
    for k, fault in enumerate(FAULTS)
]
"""Each optimizer under each policy meets one fault in the quick suite, and AdamW all of them."""


@pytest.mark.parametrize(("name", "policy", "fault"), SKIPPED)
class TestASkippedStep:
    def test_leaves_no_trace(self, name: str, policy: str, fault: str) -> None:
        _, amp = prepared(policy, name)
        if name not in ("fused-momentum",):
            run(amp, *batch())
        before = everything(amp)
        result = faulty_step(amp, fault)
        assert not result.applied and result.skipped_in_a_row == 1
        assert result.reason == ("gradients" if fault == "gradient" else "loss")
        now = everything(amp)
        assert_same({k: v for k, v in now.items() if k in before}, before)
        assert all(v.isfinite().all() for v in now.values())

    def test_is_as_if_it_had_not_been(self, name: str, policy: str, fault: str) -> None:
        model, amp = prepared(policy, name)
        _, other = prepared(policy, name, twin(Net()))
        other.model.load_state_dict(model.state_dict())
        batches = [batch() for _ in range(4)]
        for index, (x, y) in enumerate(batches):
            if index in (0, 2):
                state = torch.random.get_rng_state()
                faulty_step(amp, fault, max_norm=1.0)
                torch.random.set_rng_state(state)
            run(amp, x, y, max_norm=1.0)
            run(other, x, y, max_norm=1.0)
        assert_same(everything(amp), everything(other))
        assert amp.counters().applied == 4 and amp.counters().skipped == 2


class TestTheScale:
    def test_only_gradients_move_it(self) -> None:
        _, amp = prepared("fp16, scaling.init_scale=1024")
        assert amp.scale == 1024
        for fault, want in (("input", 1024), ("loss", 1024), ("gradient", 512)):
            assert not faulty_step(amp, fault)
            assert amp.scale == want

    def test_an_overflow_backs_off_until_it_fits(self) -> None:
        """A gradient that fp16 can hold at scale 2^6 and not above."""
        model = nn.Linear(4, 1, bias=False)
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-6), "fp16, output=fp32")
        scales = []
        for _ in range(16):
            amp.zero_grad()
            amp.backward((amp.model(torch.ones(1, 4)) * 500).sum())
            result = amp.step()
            scales.append(result.scale)
            if result:
                break
        assert scales == [2.0**k for k in range(16, 16 - len(scales), -1)]
        assert scales[-1] * 500 <= 65504 < scales[-2] * 500

    def test_growth_uses_the_captured_scale(self) -> None:
        """S22: the divisor is the scale of backward, not the one after growth."""
        model = nn.Linear(1, 1, bias=False)
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), "fp32, scaling.growth_interval=1")
        for k in range(5):
            amp.zero_grad()
            amp.backward(amp.model(torch.full((1, 1), 3.0)).sum())
            result = amp.step()
            assert result.grad_norm == 3.0 and result.scale == 65536.0 * 2**k

    @pytest.mark.slow  # tests/laws has its twins
    def test_200_overflows_change_nothing(self) -> None:
        for name in ("adamw", "fused-adamw", "mezzo-adamw"):
            _, amp = prepared("fp16, guard.patience=1000, scaling.min_scale=1", name)
            run(amp, *batch())
            before = everything(amp)
            errors = 0
            for _ in range(200):
                try:
                    faulty_step(amp, "gradient")
                except LossScaleExhausted:
                    errors += 1
                    amp.zero_grad()
            assert errors > 90 and amp.scale == 1.0
            assert_same(everything(amp), before)
            while not amp.counters().skipped_in_a_row == 0:
                try:
                    result = run(amp, *batch())
                except LossScaleExhausted:
                    continue
            assert result.applied and result.scale == 1.0

    def test_loss_beyond_what_it_can_be_multiplied_by(self) -> None:
        """The loss is finite, the scaled loss is not: the scale is to blame."""
        model = nn.Linear(1, 1, bias=False)
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), "fp32, scaling.init_scale=65536")
        amp.backward(amp.model(torch.full((1, 1), 1e36)).sum())
        assert amp.step().reason == "gradients"
        assert amp.scale == 32768


class TestErrorsOfTheGuard:
    def test_non_finite_parameters_are_named(self) -> None:
        model, amp = prepared(CALM, "adamw")
        with torch.no_grad():
            model.outer.weight[0, :3] = NAN
        with pytest.raises(NonFiniteStep, match=r"inf or NaN in 1 parameter: outer.weight \(3\)"):
            run(amp, *batch())
        assert amp.scale == 256.0

    def test_non_finite_buffers_are_named(self) -> None:
        model, amp = prepared("fp32", "adamw")
        model.stats.running_mean[1] = INF
        with pytest.raises(NonFiniteStep, match=r"1 buffer: stats.running_mean \(1\)"):
            run(amp, *batch())

    def test_a_mask_of_minus_infinity_is_meant(self) -> None:
        model = Net()
        model.register_buffer("mask", torch.full((3,), -INF))
        _, amp = prepared("fp32", "adamw", model)
        assert faulty_step(amp, "loss").reason == "loss"

    def test_on_the_device_it_comes_one_step_late(self) -> None:
        model, amp = prepared("fp32, guard.check_every=0", "fused-adamw")
        with torch.no_grad():
            model.outer.weight[0, 0] = NAN
        assert not run(amp, *batch())
        with pytest.raises(NonFiniteStep, match=r"outer\.weight"):
            run(amp, *batch())

    @pytest.mark.parametrize("name", ["adamw", "mezzo-adamw"])
    def test_patience(self, name: str) -> None:
        _, amp = prepared("bf16, guard.patience=3", name)
        with pytest.raises(NonFiniteStep, match=r"3 steps in a row were skipped \(guard.patience=3\): the loss"):
            for _ in range(4):
                faulty_step(amp, "loss")
        assert amp.counters().skipped == 3

    @pytest.mark.parametrize("name", ["adamw", "mezzo-adamw"])
    def test_the_floor_names_gradients_and_counts(self, name: str) -> None:
        _, amp = prepared("fp16, scaling.init_scale=4", name)
        with pytest.raises(LossScaleExhausted) as error:
            for _ in range(4):
                faulty_step(amp, "gradient")
        assert str(error.value) == (
            "3 steps in a row were skipped, the last at loss scale 1 (floor 1): inf or NaN in 1 gradient: outer.weight (1). "
            "A smaller scale does not help; mezzo.diagnose.trace(model) names the op, and a rule such as 'NAME=fp32' "
            "for its module fixes an fp16 overflow."
        )

    def test_the_log_is_rate_limited(self, caplog: pytest.LogCaptureFixture) -> None:
        _, amp = prepared("bf16, guard.patience=100", "adamw")
        for _ in range(20):
            faulty_step(amp, "loss")
        skips = [message for message in caplog.messages if " skipped (" in message]
        assert len(skips) == 5  # the 1st, 2nd, 4th, 8th and 16th
        assert len(caplog.messages) == 6  # and why, once
        assert skips[0] == "step 0 skipped (1 in a row, 1 in all): loss not finite; loss scale 1"


class TestTheResult:
    def test_fields(self) -> None:
        _, amp = prepared("fp16, scaling.init_scale=8", "adamw")
        result = run(amp, *batch())
        assert (result.applied, result.reason, result.scale, result.skipped_in_a_row) == (True, None, 8.0, 0)
        assert bool(result) and dict(result.nonfinite) == {} and result.optimizers == (True,)
        bad = faulty_step(amp, "gradient")
        assert not bad and dict(bad.nonfinite) == {"outer.weight": 1} and bad.skipped_in_a_row == 1
        assert repr(bad).startswith("StepResult(skipped: gradients not finite, scale=8,")
        assert result.skipped_in_a_row == 0

    def test_counts_asked_late(self) -> None:
        _, amp = prepared("bf16", "fused-adamw")
        first = faulty_step(amp, "gradient")
        amp.zero_grad()
        gc.collect()
        assert dict(first.nonfinite) == {"outer.weight": None}
        second = faulty_step(amp, "gradient")
        third = faulty_step(amp, "gradient")
        assert dict(second.nonfinite) == {"outer.weight": 1} == dict(third.nonfinite)

    def test_holds_no_gradients(self) -> None:
        model, amp = prepared("bf16", "fused-adamw")
        result = run(amp, *batch())
        grad = weakref.ref(model.inner.weight.grad)
        amp.zero_grad()
        assert grad() is None and result.applied

    @pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-master", CALM])
    def test_all_is_freed_with_its_last_name(self, policy: str) -> None:
        model, amp = prepared(policy, "fused-adamw")
        run(amp, *batch())  # torch's first step of a process leaves cycles of its own
        gc.collect()
        gc.disable()
        try:
            model, amp = prepared(policy, "fused-adamw")
            run(amp, *batch())
            held = [weakref.ref(x) for x in (model, model.inner.weight, amp, amp.optimizers[0])]
            del model, amp
            assert [ref() for ref in held] == [None] * 4
        finally:
            gc.enable()

    @pytest.mark.parametrize("name", ["adamw", "fused-adamw", "mezzo-adamw"])
    def test_on_applied(self, name: str) -> None:
        _, amp = prepared(CALM, name)
        scheduler = torch.optim.lr_scheduler.StepLR(amp.optimizers[0], step_size=1, gamma=0.5)
        calls: list[int] = []
        amp.on_applied(scheduler.step)
        assert amp.on_applied(lambda: calls.append(1)) is not None
        for index in range(5):
            faulty_step(amp, "gradient") if index in (0, 3) else run(amp, *batch())
        assert calls == [1, 1, 1]
        assert amp.optimizers[0].param_groups[0]["lr"] == 0.01 * 0.5**3

    @pytest.mark.parametrize("name", ["adamw", "fused-adamw", "mezzo-adamw"])
    def test_hooks_run_after_real_steps_only(self, name: str) -> None:
        _, amp = prepared(CALM, name)
        calls: list[int] = []
        amp.optimizers[0].register_step_post_hook(lambda *a: calls.append(1))
        for index in range(4):
            faulty_step(amp, "gradient") if index == 1 else run(amp, *batch())
        assert calls == [1, 1, 1]
