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


@pytest.mark.parametrize(
    ("model", "optimizer", "words"),
    [
        (None, None, "nn.Module as its model, and got NoneType"),
        (nn.Linear, None, "nn.Module as its model, and got the class Linear"),
        (torch.optim.SGD([torch.ones(1)]), nn.Linear(1, 1), "got SGD. The model comes first"),
        (nn.Linear(1, 1), torch.optim.SGD, "optimizer that was made, or a list of them, and got the class SGD"),
        (nn.Linear(1, 1), {"a": 1}, "optimizer that was made, or a list of them, and got str"),
        (nn.Linear(1, 1), "AdamW", "optimizer that was made, or a list of them, and got str"),
    ],
)
def test_what_is_no_model_and_no_optimizer(model: object, optimizer: object, words: str) -> None:
    with pytest.raises(StepError, match=words):
        mezzo.prepare(model, optimizer, "bf16")


def test_bounds_that_are_no_numbers() -> None:
    model = Net()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), "bf16")
    x, y = batch()
    amp.backward(mse(model(x), y))
    with pytest.raises(StepError, match=r"step\(1.0\): what comes first is a closure. Write step\(max_norm="):
        amp.step(1.0)
    with pytest.raises(StepError, match=r"step\(max_norm='1'\)"):
        amp.step(max_norm="1")
    assert amp.step(max_norm=torch.tensor(1.0))


@pytest.mark.filterwarnings("ignore")  # tracing is deprecated, and torch traces a batch norm with a warning
@pytest.mark.parametrize("compute", ["bf16", "fp16, scaling.init_scale=16"])
def test_a_model_with_scripted_parts_trains(compute: str) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x).relu()

    model = nn.Sequential(nn.Linear(4, 4), torch.jit.trace(Norm(), torch.randn(3, 4)), nn.Linear(4, 1))
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), compute)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    amp.backward(model(torch.full((3, 4), float("nan"))).square().mean())
    assert not amp.step()
    torch.testing.assert_close(dict(model.named_buffers()), before, rtol=0, atol=0)
    amp.zero_grad()
    amp.backward(model(torch.randn(3, 4)).square().mean())
    assert amp.step()
