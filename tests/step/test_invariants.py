"""Each of the six invariants can fail: one planted fault for each, and none on a healthy run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.distributed.ranks import run as run_ranks
from tests.step.step_models import INF, OPTIMIZERS, Largest, Net, batch, mse, prepared, wait_for_nothing
from torch import Tensor, nn

import mezzo
from mezzo.errors import DistributedError, InvariantError
from mezzo.kernels.weights import CHUNK_NUMEL
from mezzo.step import engine, gradients
from mezzo.step.invariants import Invariants, _has_nonfinite


def run(amp: mezzo.Stepper, fault: float = 1.0) -> mezzo.StepResult:
    x, y = batch()
    amp.zero_grad()
    amp.backward(mse(amp.model(x), y) * fault)
    return amp.step()


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16, scaling.init_scale=256"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_healthy_run_passes(name: str, policy: str) -> None:
    _, amp = prepared(policy + ", guard.check_every=1", name)
    for index in range(6):
        run(amp, INF if index in (1, 4) else 1.0)


class TestPlantedFaults:
    def test_1_gradients_divided_by_something_else(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """S22, S23: the divisor is not what the loss was multiplied by."""
        honest = gradients.grads_of
        monkeypatch.setattr(gradients, "grads_of", lambda chosen, inv: honest(chosen, inv / 2))
        _, amp = prepared("fp32, scaling.init_scale=1024")
        with pytest.raises(
            InvariantError, match="they were divided by something else than what the loss was multiplied"
        ):
            run(amp)

    def test_2_steps_that_move_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        class Idle(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                pass

        model = Net()
        amp = mezzo.prepare(model, Idle(model.parameters(), lr=0.1), "fp32, guard.check_every=100")
        run(amp)
        assert "changed none of the 8 parameters of Idle" in caplog.text
        with pytest.raises(InvariantError, match=r"100 steps .* changed none of the 8 parameters of Idle"):
            for _ in range(99):
                run(amp)

    def test_2_an_optimizer_whose_gradients_are_zero_has_nothing_to_move(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = Net()
        first, *others = model.parameters()
        optimizers = [torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.1)]
        amp = mezzo.prepare(model, optimizers, "fp32, guard.check_every=1")
        x, y = batch()
        for _ in range(101):
            amp.zero_grad()
            amp.backward(mse(model(x), y) + 0 * first.sum())
            with amp.unscaled_grads() as grads:
                next(iter(grads.values())).zero_()
            amp.step()
        assert "changed none" not in caplog.text

    def test_2_a_learning_rate_of_zero_is_meant(self) -> None:
        model = Net()
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), "fp32")
        assert run(amp)

    def test_2_lost_updates_are_said(self, caplog: pytest.LogCaptureFixture) -> None:
        """S3: fp32 weights near 1, updates below half their spacing."""
        model = nn.Linear(64, 1)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-9), "fp32")
        amp.backward(amp.model(torch.ones(2, 64)).mean())
        amp.step()
        assert len(caplog.messages) == 1
        assert "98% of the updates looked at were smaller than the spacing of their weights" in caplog.messages[0]
        assert "(weight)" in caplog.messages[0]

    def test_2_split_masters_lose_none_of_them(self, caplog: pytest.LogCaptureFixture) -> None:
        model = nn.Linear(64, 1)
        nn.init.ones_(model.weight)
        optimizer = mezzo.optim.SGD(model.parameters(), lr=1e-6, master="split")
        amp = mezzo.prepare(model, optimizer, "bf16-master, output=fp32")
        before = model.weight.clone()
        amp.backward(amp.model(torch.ones(2, 64)).mean())
        amp.step()
        assert torch.equal(model.weight, before) and not caplog.messages

    @pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-master", "bf16-master, master=kahan"])
    def test_2_what_is_advised_against_lost_updates_is_not_there_yet(
        self, policy: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = nn.Linear(64, 1)
        nn.init.ones_(model.weight)
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-12), policy)
        amp.backward(model(torch.ones(2, 64)).mean())
        amp.step()
        assert len(caplog.messages) == 2 and all("aise the learning rate" in said for said in caplog.messages)
        assert not any("masters" in said for said in caplog.messages)

    def test_2_updates_that_are_rounded_by_chance_are_not_lost(self, caplog: pytest.LogCaptureFixture) -> None:
        model = nn.Linear(64, 64)
        amp = mezzo.prepare(
            model, torch.optim.SGD(model.parameters(), lr=1e-3), "bf16-master, master=stochastic, output=fp32"
        )
        before = model.weight.clone()
        amp.backward(model(torch.ones(2, 64)).mean())
        amp.step()
        assert 0.0 < (model.weight != before).float().mean() < 0.5 and not caplog.messages

    @pytest.mark.parametrize("what", ["weights", "state"])
    def test_3_a_skipped_step_that_changes_something(self, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """S30: an optimizer that claims to heed found_inf and does not, where the host does not decide."""
        wait_for_nothing(monkeypatch)

        class Deaf(torch.optim.AdamW):
            _step_supports_amp_scaling = True

            @torch.no_grad()
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                p = self.param_groups[0]["params"][0]
                state = self.state[p].setdefault("exp_avg", torch.zeros(()))
                (p if what == "weights" or not bool(self.found_inf) else state).add_(1)

        model = Net()
        optimizer = Deaf(model.parameters())
        amp = mezzo.prepare(model, optimizer, "fp32")
        run(amp)
        with pytest.raises(
            InvariantError, match=r"a skipped step changed inner\.weight" + (r"\.exp_avg" if what == "state" else r"\.")
        ):
            run(amp, INF)

    def test_3_a_scheduler_that_moves_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, amp = prepared("fp32")
        honest = engine.update_

        def with_scheduler(*args: Any) -> None:
            honest(*args)
            amp.optimizers[0].param_groups[0]["lr"] *= 0.5

        monkeypatch.setattr(engine, "update_", with_scheduler)
        with pytest.raises(
            InvariantError, match=r"a skipped step changed the learning rates from \[0.05\] to \[0.025\]"
        ):
            run(amp, INF)

    def test_4_observed_dtypes(self) -> None:
        """S25, S37: weights cast behind the policy's back."""
        model, amp = prepared("fp32")
        for p in model.norm.parameters():
            p.data = p.data.bfloat16()
        with pytest.raises(
            InvariantError, match=r"weights are declared fp32, and 2 are not \(norm\.weight, norm\.bias\)"
        ):
            amp.report(strict=True)

    def test_4_observed_buffers(self) -> None:
        model, amp = prepared("fp32")
        model.stats.running_mean = model.stats.running_mean.double()
        with pytest.raises(InvariantError, match=r"buffers are declared fp32, and 1 are not \(stats\.running_mean\)"):
            amp.report(strict=True)

    def test_6_non_finite_state(self) -> None:
        class Poison(torch.optim.SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                super().step(closure)
                p = self.param_groups[0]["params"][0]
                self.state[p]["momentum_buffer"] = torch.full_like(p, INF)

        model = Net()
        amp = mezzo.prepare(model, Poison(model.parameters(), lr=0.1, momentum=0.9), "fp32")
        with pytest.raises(InvariantError, match=r"after the step inner\.weight\.momentum_buffer hold inf or NaN"):
            run(amp)


def _drift(rank: int, world: int) -> str:
    torch.manual_seed(0)
    model = Net(has_batch_norm=False)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    amp = mezzo.prepare(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), "fp32")
    if rank == 1:
        with torch.no_grad():
            model.outer.bias.add_(1)
    x, y = batch()
    amp.backward(mse(ddp(x), y))
    try:
        amp.step()
    except DistributedError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_5_ranks_that_drifted_apart() -> None:
    for message in run_ranks(2, _drift):
        assert "the checksum of parameter 'module.outer.bias'" in message


class TestWhen:
    def looks(self, every: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        found: list[int] = []
        _, amp = prepared(f"fp32, guard.check_every={every}")
        index = [0]
        honest = Invariants.look

        def look(*given: Any, **named: Any) -> Any:
            found.append(index[0])
            return honest(*given, **named)

        monkeypatch.setattr(Invariants, "look", look)
        for index[0] in range(1, steps + 1):
            run(amp)
        return found

    def test_the_first_three_and_every_nth(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.looks(5, 11, monkeypatch) == [1, 2, 3, 5, 10]

    def test_never(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.looks(0, 5, monkeypatch) == []


class TestReport:
    @pytest.mark.parametrize(
        ("policy", "options", "per_parameter"),
        [
            ("fp32", {}, 16),
            ("bf16", {}, 16),
            ("bf16-master", {"master": "split"}, 14 - 2),
            ("bf16-master, state=bf16", {"master": "split", "state_dtype": torch.bfloat16}, 10 - 2),
            ("bf16-master, master=fp32", {"master": "fp32"}, 16),
            ("bf16-master, master=stochastic", {"master": "stochastic"}, 12),
        ],
    )
    def test_bytes_per_parameter(self, policy: str, options: dict[str, Any], per_parameter: int) -> None:
        """Weight, gradient, two moments and what lies beside, counted from the tensors: split is 2 + 2 + 8 + 2."""
        model = nn.Linear(16, 16)
        amp = mezzo.prepare(model, mezzo.optim.AdamW(model.parameters(), **options), policy + ", output=fp32")
        amp.backward(amp.model(torch.ones(2, 16)).square().mean())
        amp.step()
        report = amp.report(strict=True)
        held: list[Tensor] = [t for p in model.parameters() for t in (p, p.grad)]  # type: ignore[misc]
        held += [v for e in amp.optimizers[0].state.values() for k, v in e.items() if k != "step"]
        assert report.bytes_per_parameter == sum(t.nbytes for t in held) / report.num_parameters
        assert report.num_parameters == 272
        assert report.bytes_per_parameter == per_parameter + (2 if "split" in str(options) else 0)

    def test_printed(self) -> None:
        model = nn.Linear(4, 4)
        amp = mezzo.prepare(model, mezzo.optim.AdamW(model.parameters(), master="split"), "bf16-master, output=fp32")
        amp.backward(amp.model(torch.ones(2, 4)).square().mean())
        amp.step()
        assert str(amp.report()) == (
            "policy: bf16-master\n"
            "                    declared  observed  bytes\n"
            "weights of low ops  bf16      bf16 x2   40\n"
            "gradients           bf16      bf16 x2   40\n"
            "moments             fp32      fp32 x4   160\n"
            "masters             split     split x2  40\n"
            "14.00 bytes for each of 20 parameters"
        )

    def test_before_the_first_step(self) -> None:
        _, amp = prepared("bf16")
        assert [row.what for row in amp.report(strict=True).rows] == ["weights", "gradients", "buffers"]

    def test_frozen_weights_are_as_loaded(self) -> None:
        model = nn.ModuleList([nn.Linear(4, 4).half().requires_grad_(False), nn.Linear(4, 4)])
        amp = mezzo.prepare(model, torch.optim.SGD(model[1].parameters()), "fp16")
        frozen = next(row for row in amp.report(strict=True).rows if row.what == "frozen weights")
        assert (frozen.declared, frozen.observed) == ("as loaded", (("fp16", 2),))


@pytest.mark.parametrize("policy", ["bf16-master", "bf16-master, master=kahan"])
def test_preparing_and_looking_take_little_memory(policy: str) -> None:
    """Nothing wider than a 16-bit weight is made: no whole master, no gradient in fp64, no bits in int64."""
    model = nn.Linear(2048, 2048, bias=False)
    narrow = 2048 * 2048 * 2
    rules = mezzo.Policy.parse(policy)
    optimizer = mezzo.optim.SGD(model.parameters(), lr=0.1, master=rules.master)
    with Largest() as preparing:
        amp = mezzo.prepare(model, optimizer, rules)
    amp.backward(model(torch.ones(1, 2048)).float().mean())
    with Largest() as stepping:
        amp.step()
    assert preparing.nbytes == narrow
    assert stepping.nbytes < narrow


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.11 and 2.12
def test_a_look_makes_no_copy_of_what_it_looks_at() -> None:
    """What is freed between results that stay left holes in the heap: two thirds of a step of 1e8 parameters."""

    def allocated(every: int) -> int:
        model = nn.Linear(2**11, 2**11, bias=False)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        amp = mezzo.prepare(model, optimizer, f"bf16, guard.check_every={every}")
        x = torch.ones(1, 2**11)
        for step in range(2):
            amp.zero_grad()
            amp.backward(amp.model(x).square().mean())
            if step:
                with torch.profiler.profile(profile_memory=True) as profile:
                    amp.step()
                return sum(max(0, event.self_cpu_memory_usage) for event in profile.key_averages())
            amp.step()
        raise AssertionError

    assert allocated(1) - allocated(0) < 2**22 * 4 / 4


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_what_is_not_finite_is_seen_wherever_it_is(dtype: torch.dtype, value: float) -> None:
    tensor = torch.randn(CHUNK_NUMEL // 8, 9).to(dtype)
    assert not _has_nonfinite(tensor)
    assert not _has_nonfinite(tensor[:0])
    for at in (0, 31, tensor.numel() - 1):
        spoiled = tensor.clone()
        spoiled.view(-1)[at] = value
        assert _has_nonfinite(spoiled)
        assert _has_nonfinite(spoiled.t())
