"""A run that stops says why: its last batch is run again op by op, and nothing else is changed by that."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from tests.step import replay_models
from tests.step.replay_models import FeedForward, LogOfZero, Root, fail
from tests.step.step_models import Net, assert_same, batch, everything, mse, prepared
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _get_current_dispatch_mode

import mezzo
from mezzo.diagnose import TraceReport
from mezzo.errors import LossScaleExhausted, NonFiniteStep


@pytest.mark.parametrize("name", ["adamw", "fused-adamw", "mezzo-adamw"])
@pytest.mark.parametrize("patience", [1, 2, 4])
def test_the_error_names_op_module_line_verdict_and_edit(name: str, patience: int) -> None:
    _, amp = prepared(f"fp16, output=fp32, guard.patience={patience}, guard.check_every=0", name, FeedForward())
    error = fail(amp, *batch())
    assert isinstance(error.report, TraceReport)
    first = error.report.faults[0]
    assert (first.verdict, first.op, first.phase, first.module) == ("overflow", "addmm", "forward", "down")
    assert first.frame is not None and first.frame.file == replay_models.__file__
    text = str(error)
    row = f"{patience} steps in a row were skipped" if patience > 1 else "the step was skipped"
    assert text.startswith(f"{row} (guard.patience={patience}): ")
    for part in (
        "overflow in addmm, forward, module down",
        f"{replay_models.__file__}:{first.frame.line}",
        "Add 'module:down=fp32' to the",
    ):
        assert part in text, text


def test_a_first_skip_at_the_floor_is_explained() -> None:
    _, amp = prepared("fp16, output=fp32, scaling.init_scale=1, guard.check_every=0", "adamw", FeedForward())
    told = "the step was skipped, the last at loss scale 1 .*Run again op by op, the last batch shows overflow in to, backward"
    with pytest.raises(LossScaleExhausted, match=told):
        for factor in (1e-4, 1e-4, 1e6, 1e6):
            amp.zero_grad()
            amp.backward(amp.model(1e-4 * batch()[0]).sum() * factor)
            amp.step()


def test_the_edit_it_names_mends_it() -> None:
    _, amp = prepared("fp16, output=fp32, guard.patience=2", "adamw", FeedForward())
    edit = fail(amp, *batch()).report.faults[0].fix.edit
    _, mended = prepared(f"fp16, output=fp32, {edit}", "adamw", FeedForward())
    x, y = batch()
    for _ in range(4):
        mended.zero_grad()
        mended.backward(mse(mended.model(x), y))
        result = mended.step()
    assert result


@pytest.mark.parametrize("name", ["fused-adamw", "mezzo-adamw"])
def test_a_loss_that_is_not_finite_twice_in_a_row_is_explained_long_before_the_end(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, amp = prepared("bf16, output=fp32, guard.patience=20, guard.check_every=0", name, LogOfZero())
    x, _ = batch()
    for _ in range(6):
        amp.zero_grad()
        amp.backward(amp.model(x).mean())
        amp.step()
    said = [record.getMessage() for record in caplog.records if "why:" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("step 1: the loss is inf or NaN again; why: ")
    assert "singularity in log, forward" in said[0]
    assert f"{replay_models.__file__}:" in said[0]
    assert amp.counters().skipped_in_a_row == 6


def test_a_step_has_one_number_from_0_in_the_log_and_in_the_report(caplog: pytest.LogCaptureFixture) -> None:
    """So `mezzo replay --step` of what the log says runs that step."""
    _, amp = prepared("fp16, output=fp32, scaling.init_scale=1, guard.patience=1", "adamw", FeedForward())
    x, y = batch()
    with pytest.raises(NonFiniteStep) as caught:
        for given in (0 * x, 0 * x, x):
            amp.zero_grad()
            amp.backward(mse(amp.model(given), y))
            amp.step()
    assert caught.value.report is not None
    assert [message.split(" (")[0] for message in caplog.messages] == ["step 2 skipped"]
    assert [fault.step for fault in caught.value.report.faults] == [2]


def test_it_leaves_everything_as_it_was() -> None:
    _, amp = prepared("fp16, output=fp32, guard.patience=3", "adamw", FeedForward())
    x, y = batch()
    for _ in range(2):
        amp.zero_grad()
        amp.backward(mse(amp.model(x), y))
        amp.step()
    before = everything(amp)
    amp.zero_grad()
    amp.backward(mse(amp.model(x), y))
    random = torch.get_rng_state()
    objects = {name: id(b) for name, b in amp.model.named_buffers()}
    with pytest.raises(NonFiniteStep) as caught:
        amp.step()
    assert caught.value.report is not None
    assert_same(everything(amp), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert {name: id(b) for name, b in amp.model.named_buffers()} == objects
    assert amp.model.training
    assert not amp.model._forward_hooks and _get_current_dispatch_mode() is None
    assert all(not p._post_accumulate_grad_hooks for p in amp.model.parameters())


def test_the_draws_are_those_of_the_batch() -> None:
    """Only one draw in four overflows, so a replay with other draws would find nothing."""

    class Chance(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            rare = (torch.rand(()) < 0.25).to(x.dtype)
            return self.lin(x) * 0 + (self.lin(x).exp() + 1) * rare * 7e4

    found = 0
    for seed in range(8):
        torch.manual_seed(seed)
        _, amp = prepared("fp16, guard.patience=1", "adamw", Chance())
        try:
            amp.backward(amp.model(batch()[0].half()).float().mean())
            amp.step()
        except NonFiniteStep as error:
            assert error.report is not None and error.report.faults, error
            found += 1
        except LossScaleExhausted:
            pass
    assert found


@pytest.mark.parametrize("name", ["adamw", "mezzo-adamw"])
def test_a_gradient_is_found_in_backward(name: str) -> None:
    _, amp = prepared("fp16, output=fp32, scaling.init_scale=4, guard.check_every=0", name, Root())
    x = torch.zeros(3, 4)
    error = fail(amp, x, torch.ones(3, 4))
    assert isinstance(error, LossScaleExhausted)
    first = error.report.faults[0]
    assert (first.verdict, first.op, first.phase) == ("singularity", "sqrt", "backward")
    assert "its derivative at 0 is infinite" in str(error)


def test_log_of_zero_is_a_singularity() -> None:
    _, amp = prepared("bf16, output=fp32, guard.patience=2", "adamw", LogOfZero())
    error = fail(amp, batch()[0], torch.ones(16, 4))
    assert (error.report.faults[0].verdict, error.report.faults[0].op) == ("singularity", "log")


def test_a_bad_batch_is_the_inputs_fault() -> None:
    _, amp = prepared("fp32, guard.patience=2", "adamw")
    x, y = batch()
    x[3, 1] = float("nan")
    first = fail(amp, x, y).report.faults[0]
    assert first.verdict == "inherited" and "input" in first.why


def test_a_closure_is_run_again_whole() -> None:
    model = Net(has_batch_norm=False)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32, guard.patience=2")
    x, _ = batch()

    def closure() -> Tensor:
        amp.zero_grad()
        loss = (amp.model(x) * 0).log().mean()
        amp.backward(loss)
        return loss

    with pytest.raises(NonFiniteStep) as caught:
        for _ in range(4):
            amp.step(closure)
    first = caught.value.report.faults[0]
    assert (first.verdict, first.op) == ("singularity", "log")
    assert "(amp.model(x) * 0).log().mean()" in str(caught.value)
    assert amp.counters().seen == 2


def test_micro_batches_are_all_run_again() -> None:
    _, amp = prepared("fp16, output=fp32, guard.patience=2", "adamw", nn.Linear(4, 1))
    x, y = batch()
    with pytest.raises(NonFiniteStep) as caught:
        for _ in range(4):
            amp.zero_grad()
            for size in (1.0, 1e7, 1.0):
                amp.backward(mse(amp.model(x * size), y))
            amp.step()
    assert caught.value.report.faults[0].verdict == "overflow"


def test_forwards_that_lead_nowhere_do_not_pile_up() -> None:
    _, amp = prepared("fp16, output=fp32, guard.patience=2", "adamw", FeedForward())
    x, y = batch()
    with pytest.raises(NonFiniteStep) as caught:
        for _ in range(2):
            out = amp.model(x)
            for _ in range(100):
                amp.model(x[:2])
            amp.zero_grad()
            amp.backward(mse(amp.model(x) + 0 * out, y))
            assert len(amp._engine.replay._now.calls) <= 64
            amp.step()
    assert caught.value.report.faults[0].module == "down"


@pytest.mark.parametrize("sick", ["g", "d"])
def test_modules_that_are_called_without_the_root(sick: str) -> None:
    model = nn.ModuleDict({"g": nn.Linear(4, 4), "d": nn.Linear(4, 1)})
    nn.init.constant_(model[sick].weight, 5e4)
    _, amp = prepared("fp16, output=fp32, guard.patience=2", "sgd", model)
    with pytest.raises(NonFiniteStep) as caught:
        for _ in range(4):
            amp.zero_grad()
            amp.backward(model["d"](model["g"](torch.full((2, 4), 4.0))).float().mean())
            amp.step()
    first = caught.value.report.faults[0]
    assert (first.verdict, first.module) == ("overflow", sick)


def test_bad_weights_need_no_batch() -> None:
    model, amp = prepared("fp32, guard.patience=1", "adamw")
    with torch.no_grad():
        model.outer.weight[0, 0] = float("nan")
    error = fail(amp, *batch())
    assert error.report is None and "outer.weight (1)" in str(error)


def test_a_batch_that_was_written_since_is_not_run_again() -> None:
    _, amp = prepared("fp16, output=fp32, guard.patience=1", "adamw", FeedForward())
    x, y = batch()
    amp.backward(mse(amp.model(x), y))
    x.zero_()
    with pytest.raises(NonFiniteStep, match=r"mezzo\.diagnose\.trace\(model\) names the op") as caught:
        amp.step()
    assert caught.value.report is None


def test_nothing_is_kept_while_all_is_well() -> None:
    _, amp = prepared("fp16, output=fp32, scaling.init_scale=256", "adamw")
    x, y = batch()
    given = weakref.ref(x)
    amp.backward(mse(amp.model(x), y))
    del x
    assert given() is None
    amp.step()
    amp.zero_grad()
    assert not amp.model._forward_hooks


@pytest.mark.usefixtures("one_rank")
def test_a_model_inside_ddp_is_run_again_without_its_wrapper() -> None:
    model = FeedForward()
    _, amp = prepared("fp16, output=fp32, guard.patience=2", "adamw", model)
    wrapped = DistributedDataParallel(model)
    x, y = batch()
    with pytest.raises(NonFiniteStep) as caught:
        for _ in range(4):
            amp.zero_grad()
            amp.backward(mse(wrapped(x), y))
            amp.step()
    assert amp.consensus is not None
    assert caught.value.report.faults[0].module == "down"


def test_the_batch_is_let_go_once_a_step_is_taken() -> None:
    _, amp = prepared("fp16, output=fp32, scaling.init_scale=256", "adamw")
    x, y = batch()
    idle: list[bool] = []
    for size in (1e38, 1.0, 1.0):
        amp.zero_grad()
        amp.backward(mse(amp.model(x), y) * size)
        amp.step()
        idle.append(amp._engine.replay.is_idle)
    assert idle[-1]


def test_a_replay_that_fails_hides_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.count = nn.Linear(4, 1), 0

        def forward(self, x: Tensor) -> Any:
            self.count += 1
            if self.count > 1:
                raise KeyError("only once")
            return self.lin(x) * torch.inf

    _, amp = prepared("fp32, guard.patience=1", "adamw", Once())
    amp.backward(amp.model(batch()[0]).sum())
    with pytest.raises(NonFiniteStep, match="the step was skipped"):
        amp.step()
    assert "the last batch could not be run again: KeyError" in caplog.text


def test_layers_of_torch_alone_are_named_by_the_line_that_called_the_model() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4))
    with torch.no_grad():
        model[0].weight.mul_(1e6)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), "fp16, guard.patience=2")
    with pytest.raises(NonFiniteStep) as error:
        for _ in range(3):
            amp.zero_grad()
            out = model(torch.ones(8, 16))
            amp.backward(out.square().mean())
            amp.step()
    assert f"{__file__}:" in str(error.value) and "(out = model(torch.ones(8, 16)))" in str(error.value)


def test_a_fixed_scale_that_is_too_high_is_said_as_that_and_what_it_says_trains() -> None:
    def run(policy: str) -> mezzo.Stepper:
        torch.manual_seed(0)
        model = nn.Linear(16, 4)
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
        for _ in range(24):
            amp.zero_grad()
            amp.backward((model(torch.randn(8, 16)) - 1).square().mean())
            amp.step()
        return amp

    with pytest.raises(LossScaleExhausted) as error:
        run("fp16, scaling=4294967296, guard.patience=4")
    text = str(error.value)
    assert "finite at scale" in text and "write scaling=dynamic" in text and "does not help" not in text
    assert run("fp16, scaling=4294967296, guard.patience=4, scaling=dynamic").counters().applied > 20


def test_outputs_of_one_op_that_the_loss_leaves_out_do_not_stop_a_run_after_a_bad_step() -> None:
    """Torch calls the hooks of all outputs of a node, without a gradient for those that no loss took."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.layer(x).unbind(-1)

    model = Halves()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "fp32")
    for factor in (1.0, float("nan"), 1.0):
        amp.zero_grad()
        amp.backward(model(torch.ones(2, 4))[0].square().mean() * factor)
        amp.step()
    assert amp.counters().applied == 2
