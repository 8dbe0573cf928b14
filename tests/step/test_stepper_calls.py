"""A stepper beside its numbers: host reads, edits, penalties, several optimizers, storage of weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.messages import message_of
from tests.step.step_models import (
    CALM,
    INF,
    ON_DEVICE,
    OPTIMIZERS,
    Net,
    assert_same,
    batch,
    everything,
    mse,
    prepared,
    run,
    twin,
    wait_for_nothing,
)
from torch import Tensor, nn

import mezzo
from mezzo.errors import MasterError, PolicyError, StepError


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
    """Here as on an accelerator; tests/device has a device that counts by itself."""

    @pytest.mark.parametrize("policy", ["fp32", "bf16", CALM])
    @pytest.mark.parametrize("name", [*ON_DEVICE, "fused-momentum"])
    def test_none_on_the_healthy_path(self, name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
        _, amp = prepared(policy, name)
        x, y = batch()
        for _ in range(3):  # the invariants of the first steps are looked at
            run(amp, x, y, max_norm=1.0)
        wait_for_nothing(monkeypatch)
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
        wait_for_nothing(monkeypatch)
        reads = HostReads(monkeypatch)
        amp.zero_grad()
        amp.backward(mse(amp.model(x), y))
        with amp.unscaled_grads() as grads:
            grads["outer.weight"].mul_(2)
        amp.backward(mse(amp.model(x), y))
        assert not amp.step().is_read
        assert reads.count == 0

    def test_where_reading_waits_for_nothing_the_result_is_known_at_once(self) -> None:
        _, amp = prepared(CALM, "fused-adamw")
        assert run(amp, *batch(), max_norm=1.0).is_read

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

    @pytest.mark.parametrize("policy", ["bf16", "bf16-master", CALM, "fp16-master, scaling.init_scale=1024"])
    def test_a_product_with_the_hessian(self, policy: str) -> None:
        """Gradients of 16-bit weights are fp32 under every policy, so that what is made of them is a loss."""
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
        params, loss = [*model.parameters()], amp.model(torch.randn(8, 4)).square().mean()
        grads = amp.grad(loss, params, create_graph=True)
        product = amp.grad(sum(g.sum() for g in grads), params, retain_graph=True)
        assert {g.dtype for g in (*grads, *product)} == {torch.float32}
        amp.backward(sum(g.square().sum() for g in grads))
        assert amp.step()

    @pytest.mark.parametrize("drops", [False, True])
    def test_a_penalty_that_overflows_is_the_scales_fault(self, drops: bool) -> None:
        model = nn.Linear(1, 1, bias=False)
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), "fp32, scaling.init_scale=65536")
        x = torch.full((1, 1), 1e36, requires_grad=True)
        out = amp.model(x).sum() * 1e-36
        (g,) = amp.grad(out * 1e34, [model.weight], create_graph=True)
        if drops:  # many loops drop gradients just before backward
            amp.zero_grad()
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

    def test_one_after_another_on_one_loss_is_said(self) -> None:
        amp = self.pair("together")
        amp.backward(amp.model["d"](amp.model["g"](torch.ones(1, 4))).sum())
        first, second = amp.optimizers
        assert amp.step(optimizer=first)
        assert message_of(StepError, amp.step, optimizer=second) == (
            "step() was called after step(optimizer=AdamW), which ended the step of this loss for the other optimizers too. "
            "Write amp.step() once, which steps all of them, amp.backward(loss) for each, or "
            "mezzo.prepare(..., skip='independent'), after which each may take its step alone."
        )
        amp.zero_grad()
        with pytest.raises(StepError, match="called before backward"):
            amp.step(optimizer=second)

    @pytest.mark.parametrize("policy", ["fp32", "fp32, scaling.init_scale=1024"])
    def test_one_after_another_on_one_loss_where_each_skips_by_itself(self, policy: str) -> None:
        """As a loop for torch steps them; a gradient is applied once, and a loss that was bad holds for all."""
        runs = []
        for by_turns in (True, False):
            torch.manual_seed(0)
            model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})
            both = [
                torch.optim.AdamW(model["g"].parameters(), lr=0.1),
                torch.optim.SGD(model["d"].parameters(), lr=0.1),
            ]
            amp = mezzo.prepare(model, both, policy, skip="independent")
            for factor in (1.0, INF, 1.0):
                amp.zero_grad()
                amp.backward(model["d"](model["g"](torch.ones(1, 4))).sum() * factor)
                results = [amp.step(optimizer=one) for one in both] if by_turns else [amp.step()]
                assert all(bool(one) is (factor == 1) for one in results)
                if by_turns:
                    with pytest.raises(StepError, match="before backward"):
                        amp.step(optimizer=both[0])
            with pytest.raises(StepError, match="zero_grad"):
                amp.backward(model["d"](model["g"](torch.ones(1, 4))).sum())
            runs.append([p.detach().clone() for p in model.parameters()])
        assert all(map(torch.equal, *runs))

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

    def test_a_plain_optimizer_takes_the_policys_masters(self) -> None:
        model = Net()
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters()), "bf16-master")
        assert model.inner.weight.dtype is torch.bfloat16 and isinstance(amp.optimizers[0], torch.optim.SGD)

    @pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
    @pytest.mark.parametrize(("low", "masters"), [(torch.bfloat16, "bf16-master"), (torch.float16, "fp16-master")])
    def test_low_trainable_weights_without_masters_are_refused(self, low: torch.dtype, masters: str, kind: Any) -> None:
        """S3; either advice is followed."""
        model = Net().to(low)
        optimizer = kind(model.parameters())
        assert message_of(MasterError, mezzo.prepare, model, optimizer, "bf16") == (
            "8 of 8 trainable parameters are 16 bit (inner.weight, inner.bias, stats.weight and 5 more), and policy=bf16 "
            "keeps no masters of them: updates smaller than half their spacing vanish. "
            f"Write policy='{masters}', or model.float() before prepare, to keep trainable weights in fp32."
        )
        amp = mezzo.prepare(model, optimizer, f"{masters}, scaling=none")
        assert run(amp, *batch())
        amp.release()
        assert run(mezzo.prepare(model.float(), optimizer, "bf16"), *batch())

    def test_an_optimizer_that_got_masters_is_still_known_by_what_was_given(self) -> None:
        model = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        first, second = (torch.optim.RMSprop(part.parameters()) for part in model)
        amp = mezzo.prepare(model, [first, second], "bf16-master")
        called: list[int] = []
        amp.on_applied(lambda: called.append(1), first)
        before = [part.weight.clone() for part in model]
        amp.backward(model[0](torch.ones(2, 4)).square().mean() + model[1](torch.ones(2, 4)).square().mean())
        assert torch.equal(amp.grad_norm(first), amp.grad_norm(amp.optimizers[0]))
        assert amp.step(optimizer=first) and called == [1]
        assert not torch.equal(model[0].weight, before[0]) and torch.equal(model[1].weight, before[1])
        amp.zero_grad()
        amp.backward(model[1](torch.ones(2, 4)).square().mean())
        with pytest.raises(
            StepError, match=r"given SGD, .* one of amp\.optimizers: \[0\] MasterWeights, \[1\] MasterWeights"
        ):
            amp.step(optimizer=torch.optim.SGD(model.parameters()))
        assert amp.step(optimizer=second)

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
