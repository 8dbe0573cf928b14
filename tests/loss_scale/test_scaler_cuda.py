"""The scaler on a CUDA device: what the CPU can only imitate."""

from __future__ import annotations

import math

import pytest
import torch
from tests.cuda_waits import no_waiting
from tests.loss_scale.test_unscale import unscale_
from torch import nn

from mezzo.errors import LossScaleExhausted
from mezzo.loss_scale import GradScaler
from mezzo.loss_scale.state import AsyncFlag

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def parts() -> tuple[nn.Module, torch.optim.Optimizer, GradScaler]:
    model = nn.Linear(8, 4, device="cuda")
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), GradScaler("cuda", patience=4)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    scaler.scale(model(torch.ones(2, 8, device="cuda")).mean() * factor).backward()
    scaler.step(optimizer)
    scaler.update()


def test_a_healthy_step_never_waits_for_the_device() -> None:
    """P22."""
    with no_waiting():
        model, optimizer, scaler = parts()
        for _ in range(20):
            step(model, optimizer, scaler)


def test_exhaustion_is_raised_a_few_steps_late_with_the_weights_intact() -> None:
    model, optimizer, scaler = parts()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(LossScaleExhausted, match="patience is 4"):
        for _ in range(15):
            step(model, optimizer, scaler, math.inf)
            torch.cuda.synchronize()
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


def test_a_peek_says_what_arrived() -> None:
    peek = AsyncFlag()
    assert peek.ask(torch.tensor(True, device="cuda")) is False
    torch.cuda.synchronize()
    assert peek.ask(torch.tensor(False, device="cuda")) is True
    torch.cuda.synchronize()
    assert peek.ask(torch.tensor(False, device="cuda")) is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_every_dtype_is_divided(dtype: torch.dtype) -> None:
    """P5: torch's kernel refuses bf16 on CUDA."""
    true = torch.randn(9, dtype=dtype, device="cuda")
    grad = true * 1024.0
    assert not unscale_([grad], torch.tensor(1024.0, device="cuda"))
    assert torch.equal(grad, true)
    grad[0] = math.nan
    assert unscale_([grad], torch.tensor(1024.0, device="cuda"))


def test_replayed_graphs_follow_the_scale_and_are_not_judged() -> None:
    """P21: forward and backward captured, step and update outside, as torch's notes on CUDA graphs have it."""
    model = nn.Linear(8, 4, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = GradScaler("cuda", init_scale=8.0, growth_interval=1)
    data = torch.randn(2, 8, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(data).mean()).backward()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scaler.scale(model(data).mean()).backward()
    for number in range(4):
        graph.replay()
        scaler.unscale_(optimizer)
        assert model.bias.grad is not None
        torch.testing.assert_close(model.bias.grad, torch.full((4,), 0.25, device="cuda"))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 8.0 * 2.0 ** (number + 1)
