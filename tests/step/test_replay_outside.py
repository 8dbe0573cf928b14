"""A loss that is computed outside of the model: it is followed in the last steps, and its op is named."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.step.replay_models import FeedForward
from tests.step.step_models import assert_same, batch, everything, mse, prepared
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _global_forward_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode

import mezzo
from mezzo.errors import LossScaleExhausted, NonFiniteStep


def after_a_bad_step() -> tuple[mezzo.Stepper, Tensor, Tensor]:
    """Return a run that follows its next step, and a batch."""
    _, amp = prepared("fp32, guard.patience=2", "adamw")
    x, y = batch()
    amp.backward(mse(amp.model(x), y) * torch.inf)
    amp.step()
    amp.zero_grad()
    return amp, x, y


class TestALossOutsideTheModel:
    def run(self, amp: mezzo.Stepper, loss: Callable[[Tensor], Tensor], steps: int = 40) -> BaseException:
        x, _ = batch()
        with pytest.raises((NonFiniteStep, LossScaleExhausted)) as caught:
            for _ in range(steps):
                amp.zero_grad()
                amp.backward(loss(amp.model(x)))
                amp.step()
        assert _get_current_dispatch_mode() is None and not _get_current_function_mode_stack()
        assert not _global_forward_hooks and amp._engine.replay.following is None
        return caught.value

    @pytest.mark.parametrize("name", ["adamw", "fused-adamw", "mezzo-adamw"])
    @pytest.mark.parametrize("patience", [2, 3, 6])
    def test_its_op_and_line_are_named(self, name: str, patience: int) -> None:
        _, amp = prepared(f"fp32, guard.patience={patience}, guard.check_every=0", name)
        error = self.run(amp, lambda out: (out * 0).log().mean())
        first = error.report.faults[0]
        assert (first.verdict, first.op, first.phase) == ("singularity", "log", "forward")
        assert f"{__file__}:{first.frame.line} (error = self.run(amp, lambda out: (out * 0).log().mean()))" in str(
            error
        )
        assert "log(x.clamp(min=" in str(error)

    def test_an_overflow_of_it_is_mended_by_the_outputs_dtype(self) -> None:
        _, amp = prepared("fp16, output=none, guard.patience=3", "adamw", nn.Linear(4, 1))
        error = self.run(amp, lambda out: ((out + 300.0) * 300.0).float().mean())
        assert error.report.faults[0].verdict == "overflow"
        assert str(error).endswith("Add 'output=fp32' to the policy, or write output.float() before the loss.")
        _, amp = prepared("fp16, scaling.init_scale=16", "adamw", nn.Linear(4, 1))
        amp.backward(((amp.model(batch()[0]) + 300.0) * 300.0).float().mean())
        assert amp.step()

    def test_gradients_dropped_between_forward_and_backward(self) -> None:
        _, amp = prepared("fp32, guard.patience=3", "adamw")
        x, _ = batch()
        with pytest.raises(NonFiniteStep) as caught:
            for _ in range(4):
                loss = (amp.model(x) * 0).log().mean()
                amp.zero_grad()
                amp.backward(loss)
                amp.step()
        assert (caught.value.report.faults[0].op, amp._engine.replay.following) == ("log", None)

    def test_a_gradient_of_it(self) -> None:
        _, amp = prepared("fp16, scaling.init_scale=8", "adamw")
        error = self.run(amp, lambda out: (out * 0).float().sqrt().mean())
        assert isinstance(error, LossScaleExhausted)
        first = error.report.faults[0]
        assert (first.verdict, first.op, first.phase) == ("singularity", "sqrt", "backward")

    def test_without_a_chance_it_is_said_to_lie_there(self) -> None:
        _, amp = prepared("fp32, guard.patience=1", "adamw")
        error = self.run(amp, lambda out: (out * 0).log().mean())
        assert "finite outputs: the inf or NaN is made after them, between the model and" in str(error)

    def test_what_it_computes_is_what_it_was(self) -> None:
        """Following the loss moves no bit: the same run with a patience that never runs out."""
        found = []
        for patience in (3, 1000):
            torch.manual_seed(3)
            _, amp = prepared(f"fp16, guard.patience={patience}, scaling.init_scale=4096", "adamw", FeedForward(1.0))
            x, y = batch()
            for size in (1e38, 1e38, 1.0, 1.0):
                amp.zero_grad()
                amp.backward(F.dropout(mse(amp.model(x).float(), y), 0.5) * size)
                amp.step()
            found.append(everything(amp))
        assert_same(*found)

    def test_an_error_in_the_loss_leaves_no_mode_for_long(self) -> None:
        amp, x, y = after_a_bad_step()
        with pytest.raises(KeyError):
            raise KeyError(str(amp.model(x).shape))
        assert amp._engine.replay.following is not None
        amp.zero_grad()
        amp.backward(mse(amp.model(x), y))
        assert _get_current_dispatch_mode() is None and not _get_current_function_mode_stack()

    def test_a_side_thread_is_left_alone(self) -> None:
        amp, x, y = after_a_bad_step()
        with ThreadPoolExecutor(1) as pool:
            out = pool.submit(amp.model, x).result()
        assert amp._engine.replay.following is None and not _global_forward_hooks
        amp.backward(mse(out, y))
        assert amp.step()

    def test_a_mode_of_the_users_is_left_alone(self) -> None:
        amp, x, y = after_a_bad_step()
        with torch.device("cpu"):
            out = amp.model(x)
            assert amp._engine.replay.following is None
        amp.backward(mse(out, y))
        assert amp.step()
        assert not _get_current_function_mode_stack()
