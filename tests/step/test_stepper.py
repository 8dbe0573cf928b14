"""The stepper: one order, true gradients, skipped steps that leave no trace, several optimizers."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tests.step.step_models import (
    INF,
    NAN,
    ON_DEVICE,
    OPTIMIZERS,
    Net,
    assert_same,
    batch,
    everything,
    mse,
    prepared,
    twin,
)
from torch import Tensor, nn

import mezzo
from mezzo.errors import LossScaleExhausted, MasterError, NonFiniteStep, PolicyError, StepError

CALM = "fp16, scaling.init_scale=256"
"""fp16 with a scale at which the small models here do not overflow."""


def run(amp: mezzo.Stepper, x: Tensor, y: Tensor, **options: Any) -> mezzo.StepResult:
    amp.zero_grad()
    amp.backward(mse(amp.model(x), y))
    return amp.step(**options)


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


@pytest.mark.parametrize("fault", FAULTS)
# At half and a quarter of this scale no gradient is subnormal in fp16 yet, so a smaller scale rounds nothing.
@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16, scaling.init_scale=2048"])
@pytest.mark.parametrize("name", OPTIMIZERS)
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
            "for its module mends an fp16 overflow."
        )

    def test_the_log_is_rate_limited(self, caplog: pytest.LogCaptureFixture) -> None:
        _, amp = prepared("bf16, guard.patience=100", "adamw")
        for _ in range(20):
            faulty_step(amp, "loss")
        skips = [message for message in caplog.messages if " skipped (" in message]
        assert len(skips) == 5  # the 1st, 2nd, 4th, 8th and 16th
        assert len(caplog.messages) == 6  # and why, once
        assert skips[0] == "step 1 skipped (1 in a row, 1 in all): loss not finite; loss scale 1"


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
        grad = __import__("weakref").ref(model.inner.weight.grad)
        amp.zero_grad()
        assert grad() is None and result.applied

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


class HostReads:
    """Counts every way in which the host reads a tensor."""

    METHODS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "nonzero")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in self.METHODS:
            monkeypatch.setattr(Tensor, name, self._counted(getattr(Tensor, name)))

    def _counted(self, method: Any) -> Any:
        def read(tensor: Tensor, *args: Any) -> Any:
            self.count += 1
            return method(tensor, *args)

        return read


class TestHostReads:
    @pytest.mark.parametrize("policy", ["fp32", "bf16", CALM])
    @pytest.mark.parametrize("name", [*ON_DEVICE, "fused-momentum"])
    def test_none_on_the_healthy_path(self, name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
        _, amp = prepared(policy, name)
        x, y = batch()
        for _ in range(3):  # the invariants of the first steps are looked at
            run(amp, x, y, max_norm=1.0)
        reads = HostReads(monkeypatch)
        for _ in range(3):
            for clip in ({"max_norm": 1.0}, {"clip_value": 1.0}, {}):
                result = run(amp, x, y, **clip)
                assert not result.is_read
        assert reads.count == 0
        assert result.applied and result.is_read

    def test_none_with_micro_batches_and_edits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, amp = prepared(CALM, "mezzo-adamw")
        x, y = batch()
        for _ in range(3):
            run(amp, x, y)
        reads = HostReads(monkeypatch)
        amp.zero_grad()
        amp.backward(mse(amp.model(x), y))
        with amp.unscaled_grads() as grads:
            grads["outer.weight"].mul_(2)
        amp.backward(mse(amp.model(x), y))
        assert not amp.step().is_read
        assert reads.count == 0

    def test_the_counter_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reads = HostReads(monkeypatch)
        x = torch.ones(())
        assert bool(x) and float(x) and x.item()
        assert reads.count == 3


class TestEditing:
    @pytest.mark.parametrize("policy", ["fp32, scaling.init_scale=65536", CALM, "fp16-master, scaling.init_scale=256"])
    def test_edits_count(self, policy: str) -> None:
        model = nn.Linear(4, 1, bias=False)
        make = mezzo.optim.SGD(model.parameters(), lr=1.0, master="fp32" if "master" in policy else "none")
        amp = mezzo.prepare(model, make, policy + ", output=fp32")
        before = make.master(model.weight).clone()
        amp.backward(amp.model(torch.ones(1, 4)).sum())
        with amp.unscaled_grads() as grads:
            assert torch.equal(grads["weight"], torch.ones(1, 4))
            assert model.weight.grad is grads["weight"]
            grads["weight"][0, 0] = 0.25
        amp.backward(amp.model(torch.ones(1, 4)).sum())
        amp.step()
        after = make.master(model.weight)
        assert torch.equal(before - after, torch.tensor([[1.25, 2, 2, 2]]).to(before)) or torch.allclose(
            before - after, torch.tensor([[1.25, 2.0, 2.0, 2.0]]), rtol=0, atol=4 * torch.finfo(torch.float32).eps
        )

    def test_an_overflow_cannot_be_edited_away(self) -> None:
        """S5: clamping inf gives a finite gradient, and the step is void all the same."""
        _, amp = prepared(CALM, "adamw")
        before = everything(amp)
        x, y = batch()
        amp.backward(mse(amp.model(x), y) * 1e33)
        with amp.unscaled_grads() as grads:
            for grad in grads.values():
                grad.nan_to_num_(0.0, 0.0, 0.0)
        result = amp.step()
        assert not result and result.reason == "gradients"
        assert_same({k: v for k, v in everything(amp).items() if k in before}, before)

    def test_small_fp16_gradients_survive(self) -> None:
        model = nn.Linear(1, 1, bias=False)
        amp = mezzo.prepare(
            model, mezzo.optim.SGD(model.parameters(), master="fp32"), "fp16-master, output=fp32, guard.check_every=0"
        )
        amp.backward((amp.model(torch.ones(1, 1)) * 2.0**-30).sum())
        with amp.unscaled_grads() as grads:
            assert grads["weight"].dtype is torch.float32 and grads["weight"].item() == 2.0**-30
        assert model.weight.grad.dtype is torch.float16 and model.weight.grad.item() == 2.0**-14
        assert amp.step().grad_norm == 2.0**-30

    def test_an_exception_inside_restores_the_scale(self) -> None:
        model, amp = prepared("fp32, scaling.init_scale=65536")
        amp.backward(mse(amp.model(batch()[0]), batch()[1]))
        want = model.inner.weight.grad.clone()
        with pytest.raises(KeyError), amp.unscaled_grads():
            raise KeyError
        assert torch.equal(model.inner.weight.grad, want)
        assert amp.step()


class TestPenalty:
    @pytest.mark.parametrize("policy", ["fp32", "fp32, scaling.init_scale=65536", CALM])
    def test_gradient_penalty(self, policy: str) -> None:
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        plain = twin(model).double()
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), f"{policy}, output=fp32")
        x = torch.randn(8, 4)
        a, b = x.clone().requires_grad_(), x.double().requires_grad_()
        (g,) = amp.grad(amp.model(a).sum(), a, create_graph=True)
        (h,) = torch.autograd.grad(plain(b).sum(), b, create_graph=True)
        eps = 32 * torch.finfo(amp.policy.compute).eps
        torch.testing.assert_close(g.double(), h, rtol=eps, atol=eps)
        amp.backward((g.norm(dim=1) - 1).square().mean())
        (h.norm(dim=1) - 1).square().mean().backward()
        with amp.unscaled_grads() as grads:
            for got, p in zip(grads.values(), (p for p in plain.parameters() if p.grad is not None), strict=True):
                torch.testing.assert_close(got.double(), p.grad, rtol=eps, atol=eps)

    def test_a_penalty_that_overflows_is_the_scales_fault(self) -> None:
        model = nn.Linear(1, 1, bias=False)
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), "fp32, scaling.init_scale=65536")
        x = torch.full((1, 1), 1e36, requires_grad=True)
        out = amp.model(x).sum() * 1e-36
        (g,) = amp.grad(out * 1e34, [model.weight], create_graph=True)
        amp.backward(out + g.sum() * 0)
        assert amp.step().reason == "gradients"
        assert amp.scale == 32768.0


class TestSeveralOptimizers:
    def pair(
        self, skip: str, names: tuple[str, str] = ("adamw", "adamw"), policy: str = "fp32, scaling.init_scale=65536"
    ) -> mezzo.Stepper:
        model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})
        optimizers = [OPTIMIZERS[n](model[k].parameters()) for n, k in zip(names, "gd", strict=True)]
        return mezzo.prepare(model, optimizers, policy, skip=skip)

    @pytest.mark.parametrize("names", [("adamw", "adamw"), ("fused-adamw", "mezzo-adamw"), ("adamw", "mezzo-adamw")])
    @pytest.mark.parametrize("skip", ["together", "independent"])
    def test_who_skips(self, skip: str, names: tuple[str, str]) -> None:
        amp = self.pair(skip, names)
        before = {k: v.clone() for k, v in amp.model.state_dict().items()}
        amp.backward(amp.model["g"](torch.ones(1, 4)).sum())
        amp.backward(amp.model["d"](torch.full((1, 4), 1e38)).sum() * 1e-2)
        result = amp.step()
        assert not result.applied
        assert result.optimizers == ((False, False) if skip == "together" else (True, False))
        after = amp.model.state_dict()
        assert torch.equal(before["g.weight"], after["g.weight"]) is (skip == "together")
        assert torch.equal(before["d.weight"], after["d.weight"])

    def test_stepping_one_of_them(self) -> None:
        amp = self.pair("together")
        calls: list[str] = []
        amp.on_applied(lambda: calls.append("d"), amp.optimizers[1])
        amp.on_applied(lambda: calls.append("g"), amp.optimizers[0])
        before = {k: v.clone() for k, v in amp.model.state_dict().items()}
        amp.backward(amp.model["d"](amp.model["g"](torch.ones(1, 4))).sum())
        amp.step(optimizer=amp.optimizers[0])
        after = amp.model.state_dict()
        assert not torch.equal(before["g.weight"], after["g.weight"])
        assert torch.equal(before["d.weight"], after["d.weight"])
        assert calls == ["g"]

    def test_one_without_gradients_sits_out(self) -> None:
        amp = self.pair("together")
        amp.backward(amp.model["g"](torch.ones(1, 4)).sum())
        assert amp.step().optimizers == (True,)
        assert amp.optimizers[1].state == {}

    @pytest.mark.parametrize("names", [("sgd", "sgd"), ("fused-adamw", "fused-adamw"), ("mezzo-sgd", "mezzo-sgd")])
    def test_shared_parameters_are_unscaled_once(self, names: tuple[str, str]) -> None:
        """S10."""
        model = nn.Linear(1, 1, bias=False)
        amp = mezzo.prepare(model, [OPTIMIZERS[n](model.parameters()) for n in names], "fp32, scaling.init_scale=65536")
        plain = twin(model)
        others = [OPTIMIZERS[n](plain.parameters()) for n in names]
        for _ in range(3):
            amp.zero_grad()
            plain.zero_grad()
            amp.backward(amp.model(torch.ones(1, 1)).sum())
            plain(torch.ones(1, 1)).sum().backward()
            assert amp.step().grad_norm == 1.0
            for other in others:
                other.step()
        assert torch.equal(model.weight, plain.weight)

    def test_shared_parameters_cannot_skip_independently(self) -> None:
        model = nn.Linear(1, 1)
        with pytest.raises(StepError, match="share parameters"):
            mezzo.prepare(model, [OPTIMIZERS["sgd"](model.parameters()) for _ in range(2)], skip="independent")


class TestStorage:
    @pytest.mark.parametrize(
        ("policy", "master"),
        [("bf16-master", "split"), ("fp16-master", "fp32"), ("bf16-master, master=kahan", "kahan")],
    )
    def test_masters_start_from_the_fp32_weights(self, policy: str, master: str) -> None:
        model = Net()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = mezzo.optim.AdamW(model.parameters(), master=master)
        amp = mezzo.prepare(model, optimizer, policy)
        low = amp.policy.params
        dtypes = {name: p.dtype for name, p in model.named_parameters()}
        assert dtypes == {n: low if n.split(".")[0] in ("inner", "outer") else torch.float32 for n in dtypes}
        for name, p in model.named_parameters():
            kept = optimizer.master(p)
            if master == "kahan":
                torch.testing.assert_close(kept, before[name], rtol=2.0**-16, atol=0)
            else:
                assert torch.equal(kept, before[name])

    @pytest.mark.parametrize("mode", ["fp32", "kahan", "stochastic"])
    def test_master_weights_around_any_optimizer(self, mode: str) -> None:
        model = Net()
        optimizer = mezzo.optim.MasterWeights(torch.optim.RMSprop(model.parameters()), mode=mode)
        amp = mezzo.prepare(model, optimizer, f"bf16-master, master={mode}")
        assert model.inner.weight.dtype is torch.bfloat16
        assert run(amp, *batch())

    def test_a_plain_optimizer_cannot_hold_masters(self) -> None:
        model = Net()
        with pytest.raises(MasterError, match=r"SGD keeps no masters\. Write mezzo\.optim\.SGD"):
            mezzo.prepare(model, torch.optim.SGD(model.parameters()), "bf16-master")
        assert model.inner.weight.dtype is torch.float32

    def test_low_trainable_weights_without_masters_are_refused(self) -> None:
        """S3."""
        model = Net().to(torch.bfloat16)
        with pytest.raises(MasterError) as error:
            mezzo.prepare(model, torch.optim.AdamW(model.parameters()), "bf16")
        assert str(error.value) == (
            "8 of 8 trainable parameters are 16 bit (inner.weight, inner.bias, stats.weight and 5 more), and AdamW keeps "
            "no master of them: updates smaller than half their spacing vanish. Write mezzo.optim.AdamW(..., "
            "master='split'), or mezzo.optim.MasterWeights(AdamW(...), mode='kahan'), or keep trainable weights in fp32: "
            "policy params=fp32 and p.data = p.data.float() for each."
        )

    def test_adapters_on_a_frozen_16_bit_base(self) -> None:
        model = nn.ModuleDict(
            {"base": nn.Linear(4, 4).to(torch.float16).requires_grad_(False), "adapter": nn.Linear(4, 4)}
        )
        amp = mezzo.prepare(model, torch.optim.AdamW(model["adapter"].parameters()), CALM)
        out = model["base"](torch.ones(2, 4)) + model["adapter"](torch.ones(2, 4))
        amp.backward(out.float().square().mean())
        assert amp.step() and model["base"].weight.dtype is torch.float16

    def test_contradictions_between_policy_and_optimizer(self) -> None:
        model = Net()
        with pytest.raises(PolicyError, match="declares master=split, and the optimizer was made with master='fp32'"):
            mezzo.prepare(model, mezzo.optim.AdamW(model.parameters(), master="fp32"), "bf16-master")
        with pytest.raises(PolicyError, match="declares state=fp32, and the optimizer stores moments in bf16"):
            mezzo.prepare(model, mezzo.optim.AdamW(model.parameters(), state_dtype=torch.bfloat16), "bf16")
        with pytest.raises(PolicyError, match="declares state=bf16, and AdamW stores moments in the dtype"):
            mezzo.prepare(model, torch.optim.AdamW(model.parameters()), "bf16, state=bf16")
        with pytest.raises(PolicyError, match="params=bf16 with compute=fp32"):
            mezzo.prepare(
                model, mezzo.optim.AdamW(model.parameters(), master="split"), "fp32, params=bf16, master=split"
            )

    def test_fp64_weights_would_not_be_cast(self) -> None:
        """S19."""
        with pytest.raises(PolicyError, match="8 of 8 parameters are fp64"):
            prepared("bf16", model=Net().double())

    def test_gradients_accumulate_in_the_declared_dtype(self) -> None:
        model = nn.Linear(4, 1, bias=False)
        optimizer = mezzo.optim.SGD(model.parameters(), lr=0.0, master="split")
        amp = mezzo.prepare(model, optimizer, "bf16-master, grads=fp32, output=fp32")
        for _ in range(300):
            amp.backward(amp.model(torch.ones(1, 4)).sum())
        assert model.weight.dtype is torch.bfloat16 and model.weight.grad.dtype is torch.float32
        assert torch.equal(model.weight.grad, torch.full((1, 4), 300.0))

    def test_inference_stores_all_weights_low(self) -> None:
        model = Net().requires_grad_(False)
        amp = mezzo.prepare(model, None, "bf16-master")
        assert model.inner.weight.dtype is torch.bfloat16 and model.norm.weight.dtype is torch.float32
        assert amp.model(torch.ones(2, 4)).isfinite().all()
