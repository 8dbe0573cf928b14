"""The update by itself: who is handed what, and what is said when an optimizer raises."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mezzo
from mezzo.errors import ConfigError, StepError
from mezzo.loss_scale.fused import StepScaling
from mezzo.step.grad_passes import drop
from mezzo.step.update import Clip, bare_step, decides_on_device, true_grads_for

from .step_models import INF, NAN, OPTIMIZERS, Net, batch, mse, wait_for_nothing

SCALE = torch.tensor(8.0)


def param(value: float = 1.0) -> nn.Parameter:
    p = nn.Parameter(torch.full((3,), value))
    p.grad = torch.full((3,), 4.0)
    return p


class Seen(torch.optim.SGD):
    """Keeps what it was handed, and its gradient, when it steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        names = ("grad_scale", "clip_coef", "found_inf")
        self.seen = {name: getattr(self, name, None) for name in names}
        self.grad = self.param_groups[0]["params"][0].grad.clone()


class Fused(Seen):
    _step_supports_amp_scaling = True


def handed(kind: type[Seen], **scaling: Tensor) -> Seen:
    p = param()
    optimizer = kind([p], lr=0.1)
    with true_grads_for(optimizer, [p.grad], StepScaling(**scaling)):
        optimizer.step()
    assert not [name for name in optimizer.seen if hasattr(optimizer, name)]  # gone again
    return optimizer


class TestHanding:
    def test_a_plain_optimizer_finds_true_gradients(self) -> None:
        plain = handed(Seen, grad_scale=SCALE, clip_coef=torch.tensor(0.5))
        assert plain.grad.tolist() == [0.25] * 3 and set(plain.seen.values()) == {None}

    def test_a_fused_one_divides_and_skips_by_itself(self) -> None:
        found = torch.ones(())
        fused = handed(Fused, grad_scale=SCALE, found_inf=found)
        assert fused.grad.tolist() == [4.0] * 3
        assert fused.seen["grad_scale"] is SCALE and fused.seen["found_inf"] is found

    @pytest.mark.parametrize(("scale", "divisor"), [(SCALE, 16.0), (None, 2.0)])
    def test_torchs_fused_ones_know_one_divisor(self, scale: Tensor | None, divisor: float) -> None:
        given = {} if scale is None else {"grad_scale": scale}
        fused = handed(Fused, clip_coef=torch.tensor(0.5), **given)
        assert float(fused.seen["grad_scale"]) == divisor and fused.seen["clip_coef"] is None

    def test_a_scale_the_caller_put_there_multiplies(self) -> None:
        p = param()
        optimizer = Fused([p], lr=0.1)
        optimizer.grad_scale = torch.tensor(2.0)  # type: ignore[attr-defined]
        with true_grads_for(optimizer, [p.grad], StepScaling(grad_scale=SCALE)):
            optimizer.step()
        assert float(optimizer.seen["grad_scale"]) == 16.0

    def test_nothing_is_left_behind_when_the_step_raises(self) -> None:
        p = param()
        optimizer = Fused([p], lr=0.1)
        with pytest.raises(ZeroDivisionError), true_grads_for(optimizer, [p.grad], StepScaling(grad_scale=SCALE)):
            raise ZeroDivisionError
        assert not hasattr(optimizer, "grad_scale")


class TestClip:
    def test_the_coefficient_is_torchs(self) -> None:
        p, q = param(), param()
        norm = nn.utils.clip_grad_norm_([p], 1.0)
        coefficient = Clip(max_norm=1.0).coefficient(norm)
        assert coefficient is not None and torch.equal(q.grad * coefficient, p.grad)
        assert Clip().coefficient(norm) is None

    @pytest.mark.parametrize("bound", [0.0, -1.0, float("nan"), 1e-45, 10**400])
    @pytest.mark.parametrize("name", ["max_norm", "value"])
    def test_bounds_that_leave_nothing_are_refused(self, name: str, bound: float) -> None:
        with pytest.raises(StepError, match="clipped to a positive number that fp32 holds; write one, or None"):
            Clip(**{name: bound})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_who_leaves_out_a_step_without_the_host(name: str) -> None:
    optimizer = OPTIMIZERS[name]([param()])
    assert decides_on_device(optimizer)
    optimizer.register_step_post_hook(lambda *_: None)
    assert not decides_on_device(optimizer)


def test_a_step_that_might_not_be_undone_is_decided_by_the_host() -> None:
    own = Seen([param()], lr=0.1)
    elsewhere = torch.optim.SGD([param(), nn.Parameter(torch.ones(1, device="meta"))], lr=0.1)
    in_a_list = torch.optim.SGD([param()], lr=0.1)
    in_a_list.state[in_a_list.param_groups[0]["params"][0]] = {"sums": [torch.zeros(3)]}
    counting = mezzo.optim.MasterWeights(torch.optim.SGD([param()], lr=0.1), mode="stochastic")
    assert not any(decides_on_device(one) for one in (own, elsewhere, in_a_list, counting))


def test_what_the_host_knows_to_be_bad_reaches_no_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU a bad step is never begun, so that nobody has to leave things as they are."""
    model = nn.Linear(4, 1)
    optimizer = Fused(model.parameters(), lr=0.1)
    amp = mezzo.prepare(model, optimizer, "bf16, output=fp32")
    amp.backward(loss(model) * float("inf"))
    assert not amp.step() and not hasattr(optimizer, "seen")
    amp.zero_grad()
    amp.backward(loss(model))
    assert amp.step() and optimizer.seen["found_inf"] is None
    wait_for_nothing(monkeypatch)
    amp.zero_grad()
    amp.backward(loss(model))
    assert amp.step() and float(optimizer.seen["found_inf"]) == 0.0


def test_a_trace_counts_a_step_whose_scale_the_device_moves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_nothing(monkeypatch)
    model = nn.Linear(4, 1)
    amp = mezzo.prepare(model, OPTIMIZERS["fused-adamw"](model.parameters()), "fp32, scaling.init_scale=1024")
    with mezzo.diagnose.trace(model) as traced:
        for _ in range(3):
            amp.zero_grad()
            amp.backward(loss(model))
            amp.step()
    record = traced.report.record
    assert (record.updates, record.skipped, record.steps) == (3, 0, 3)


def two(kind: str) -> tuple[nn.Sequential, mezzo.Stepper]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return model, mezzo.prepare(model, [OPTIMIZERS[kind](part.parameters()) for part in model], "bf16, output=fp32")


def fail(*_: object) -> None:
    raise ValueError("no disk")


def loss(model: nn.Module) -> Tensor:
    return model(torch.ones(2, 4)).square().mean()


class TestHalfway:
    """A hook raises between two optimizers: it is said which stepped, and nothing is applied twice."""

    @pytest.mark.parametrize("kind", ["sgd", "adamw", "fused-adamw", "mezzo-adamw"])
    def test_the_second_raises(self, kind: str) -> None:
        model, amp = two(kind)
        hook = amp.optimizers[1].register_step_pre_hook(fail)
        amp.backward(loss(model))
        with pytest.raises(StepError) as caught:
            amp.step()
        first, second = (f"{type(o).__name__} (optimizer {i})" for i, o in enumerate(amp.optimizers))
        assert str(caught.value) == (
            f"step() ended halfway: {first} took its step, and {second} raised ValueError: no disk. Call amp.zero_grad() "
            "and go on with the next batch, or load the last checkpoint."
        )
        assert isinstance(caught.value.__cause__, ValueError)
        hook.remove()
        before = [p.detach().clone() for p in model.parameters()]
        for call in (amp.step, lambda: amp.backward(loss(model))):
            with pytest.raises(
                StepError, match=r"after a step\(\) that ended halfway: .* took its step\. Call amp.zero_grad"
            ):
                call()
        assert all(map(torch.equal, model.parameters(), before))
        amp.zero_grad()
        amp.backward(loss(model))
        assert amp.step()

    @pytest.mark.parametrize("kind", ["fused-adamw", "mezzo-adamw"])
    def test_the_first_raises_before_anything_was_touched_and_step_may_be_called_again(self, kind: str) -> None:
        model, amp = two(kind)
        twin, other = two(kind)
        twin.load_state_dict(model.state_dict())
        hook = amp.optimizers[0].register_step_pre_hook(fail)
        for one, stepper in ((model, amp), (twin, other)):
            stepper.backward(loss(one))
        with pytest.raises(ValueError, match="no disk"):
            amp.step()
        hook.remove()
        assert amp.step() and other.step()
        assert all(map(torch.equal, model.parameters(), twin.parameters()))

    def test_gradients_that_were_divided_already_are_not_divided_again(self) -> None:
        model = nn.Linear(4, 1)
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32, scaling.init_scale=1024")
        hook = amp.optimizers[0].register_step_pre_hook(fail)
        amp.backward(loss(model))
        with pytest.raises(ValueError, match="no disk"):
            amp.step()
        hook.remove()
        with pytest.raises(StepError, match="a step\\(\\) that failed, when gradients had been divided or clipped"):
            amp.step()


class TestBareStep:
    """torch's wrapper around its own optimizers is left out where nobody would see it, and nowhere else."""

    def test_an_update_is_the_same_without_the_wrapper(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            "mezzo.step.update.is_hooked", lambda _: False
        )  # other tests leave hooks for all optimizers
        one, other = [torch.optim.AdamW([param()], fused=True) for _ in range(2)]
        assert bare_step(one) != one.step
        bare_step(one)()
        other.step()
        assert torch.equal(one.param_groups[0]["params"][0], other.param_groups[0]["params"][0])

    @pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 and 2.12
    def test_a_profile_has_the_names_of_step_and_zero_grad(self) -> None:
        optimizer = torch.optim.SGD([param()], lr=0.1)
        with torch.profiler.profile() as profile:
            bare_step(optimizer)()
            drop(optimizer, True)
        assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= {
            e.key for e in profile.key_averages()
        }

    def test_hooks_schedulers_and_steps_of_somebody_else_are_run(self) -> None:
        hooked, scheduled, patched = [torch.optim.SGD([param()], lr=0.1) for _ in range(3)]
        seen = []
        hooked.register_step_post_hook(lambda *_: seen.append("hook"))
        torch.optim.lr_scheduler.ConstantLR(scheduled)
        kind = type("Patched", (torch.optim.SGD,), {})
        patched.__class__ = kind

        @functools.wraps(torch.optim.SGD.step)
        def around(self: Any) -> None:
            seen.append("class")

        kind.step = around  # type: ignore[attr-defined]
        for one in (hooked, scheduled, patched):
            bare_step(one)()
        assert seen == ["hook", "class"] and scheduled._opt_called  # type: ignore[attr-defined]  # torch's own

    def test_gradients_are_dropped_as_the_optimizer_drops_them(self) -> None:
        class Zeroing(torch.optim.SGD):
            def zero_grad(self, set_to_none: bool = True) -> None:
                super().zero_grad(False)

        dropped, kept = torch.optim.SGD([param()]), Zeroing([param()])
        for one in (dropped, kept):
            drop(one, True)
        grads = [one.param_groups[0]["params"][0].grad for one in (dropped, kept)]
        assert grads[0] is None and grads[1].tolist() == [0.0] * 3


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16, scaling=1024", "bf16-master"])
@pytest.mark.parametrize(
    ("name", "value"), [("lr", NAN), ("lr", INF), ("weight_decay", -INF), ("eps", NAN), ("betas", (0.9, NAN))]
)
def test_options_that_would_ruin_the_weights_are_refused_in_their_step(policy: str, name: str, value: Any) -> None:
    model = Net()
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), policy)

    def backward() -> None:
        amp.zero_grad()
        x, y = batch()
        amp.backward(mse(model(x), y))

    for _ in range(4):
        backward()
        amp.step()
    group, before = amp.optimizers[0].param_groups[0], amp.export_weights()
    was, group[name] = group[name], value
    backward()
    with pytest.raises(ConfigError, match=f"a group of AdamW has {name}=.*: write .*finite number"):
        amp.step()
    assert all(torch.equal(weight, before[key]) for key, weight in amp.export_weights().items())
    group[name] = was
    assert amp.step().applied


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eps", None),
        ("eps", "1e-8"),
        ("lr", 1j),
        ("weight_decay", 2**200),
        ("betas", None),
        ("betas", (0.9,)),
        ("betas", "ab"),
    ],
)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
def test_options_that_are_no_numbers_are_refused_before_they_end_a_step_halfway(
    kind: Any, name: str, value: Any
) -> None:
    """AdamW applies its decay before it reads eps: a first weight had moved, and had a state of its own, when torch raised."""
    model = Net()
    amp = mezzo.prepare(model, kind(model.parameters(), lr=0.01), "fp16, scaling=1024")
    x, y = batch()
    amp.backward(mse(model(x), y))
    group, before = amp.optimizers[0].param_groups[0], amp.export_weights()
    was, group[name] = group[name], value
    with pytest.raises(ConfigError, match=f"a group of {kind.__name__} has {name}=.*: write .*finite number"):
        amp.step()
    assert all(torch.equal(weight, before[key]) for key, weight in amp.export_weights().items())
    assert not amp.optimizers[0].state
    group[name] = was
    assert amp.step().applied


@pytest.mark.parametrize(
    ("name", "value"), [("eps", np.float32(1e-8)), ("eps", torch.tensor(1e-8)), ("lr", 0), ("lr", True)]
)
def test_what_torch_takes_for_a_number_goes_on(name: str, value: Any) -> None:
    model = Net()
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), "bf16")
    amp.optimizers[0].param_groups[0][name] = value
    x, y = batch()
    amp.backward(mse(model(x), y))
    assert amp.step().applied


@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_they_are_refused_before_a_closure_is_called(name: str) -> None:
    model, calls = Net(), []
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), "bf16")
    amp.optimizers[0].param_groups[0][name] = NAN
    with pytest.raises(ConfigError, match=f"{name}=nan: write a finite number"):
        amp.step(lambda: calls.append(1))
    assert not calls
