"""What steppers say of themselves, and advice that works when it is followed."""

from __future__ import annotations

import pytest
import torch
from tests.step.step_models import Net, batch, mse
from torch import nn

import mezzo
from mezzo.errors import StepError


def test_a_released_stepper_says_so() -> None:
    amp = mezzo.prepare(nn.Linear(1, 1), None, "bf16")
    amp.release()
    assert repr(amp) == "Stepper(released)" and "released" in amp._repr_html_()


@pytest.mark.parametrize("policy", ["bf16", "fp16, scaling.init_scale=256", "fp32"])
@pytest.mark.parametrize("kind", [mezzo.GradScaler, torch.amp.GradScaler])
class TestAScalerLeftBeside:
    """One sentence, and following it trains."""

    WORDS = r"prepare there is no GradScaler.*amp\.backward\(loss\).*amp\.step\(\)"

    def test_scaled_loss(self, kind: type[torch.amp.GradScaler], policy: str) -> None:
        model = Net()
        amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), policy)
        scaler = kind("cpu", init_scale=1024.0)
        x, y = batch()
        with pytest.raises(StepError, match=self.WORDS):
            amp.backward(scaler.scale(mse(model(x), y)))
        amp.backward(mse(model(x), y))
        assert amp.step()

    def test_scaler_step(self, kind: type[torch.amp.GradScaler], policy: str) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        amp = mezzo.prepare(model, optimizer, policy)
        scaler = kind("cpu", init_scale=1024.0)
        x, y = batch()
        with pytest.raises(StepError, match=self.WORDS):
            scaler.scale(mse(model(x), y)).backward()
            scaler.step(optimizer)
        amp.zero_grad()
        amp.backward(mse(model(x), y))
        assert amp.step()


def test_a_weighted_loss_is_no_scaled_loss() -> None:
    model = Net()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), "bf16")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    for factor in (torch.tensor(65536.0), 65536.0, torch.tensor(0.5)):
        amp.zero_grad()
        x, y = batch()
        amp.backward(mse(model(x), y) * factor)
        assert amp.step()
