"""Weights in fp64 beside a policy of 16 bit: refused, but for a part that a rule keeps out of it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.step.step_models import Net, prepared
from torch import nn

import mezzo
from mezzo.errors import PolicyError


def train_beside_autocast(
    amp: mezzo.Stepper, plain: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[nn.Module], torch.Tensor]
) -> None:
    """Take three clipped steps with a prepared model, and with a twin under torch.autocast."""
    for _ in range(3):
        amp.zero_grad()
        amp.backward(loss(amp.model))
        assert amp.step(max_norm=1.0)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=amp.policy.compute):
            loss(plain).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()


def test_fp64_weights_would_not_be_cast() -> None:
    """S19."""
    with pytest.raises(PolicyError, match="6 of 8 parameters are fp64"):
        prepared("bf16", model=Net().double())


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16", "fp16-master, scaling.init_scale=256"])
def test_a_part_in_fp64_stays_so_under_the_rule_that_the_refusal_says(policy: str) -> None:
    """As under torch.autocast, which leaves it alone; a rule inside of it that asks for 16 bit is refused as before."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Linear(4, 4)
            self.wide = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1)).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.wide(self.low(x).double())
            return out

    model, x = Wide(), torch.randn(8, 4)
    plain = copy.deepcopy(model)
    ours, torchs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    with pytest.raises(
        PolicyError, match=r"4 of 8 parameters are fp64 .* or 'wide\.0=fp32' for a part that is to stay fp64"
    ):
        mezzo.prepare(model, ours, policy)
    with pytest.raises(PolicyError, match=r"2 of 8 parameters are fp64 \(wide\.2\.weight, wide\.2\.bias\)"):
        mezzo.prepare(model, ours, f"{policy}, module:wide=fp32, module:wide.2=bf16")
    amp = mezzo.prepare(model, ours, f"{policy}, module:wide=fp32")
    train_beside_autocast(amp, plain, torchs, lambda net: net(x).square().mean())
    amp.report(strict=True)
    assert all(p.dtype is torch.float64 for p in model.wide.parameters())
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.double(), q.double(), rtol=2**-7, atol=2**-9, msg=name)


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16, scaling.init_scale=256", "bf16, ops=mezzo"])
def test_a_single_number_in_fp64_widens_nothing_and_is_taken(policy: str) -> None:
    """`nn.Parameter(torch.tensor(numpy.log(1 / 0.07)))`, the temperature of OneFormer, is fp64 and of shape ()."""

    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 8)
            self.temperature = nn.Parameter(torch.tensor(2.6, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * self.temperature.exp()

    torch.manual_seed(0)
    model, x = Contrast(), torch.randn(16, 8)
    plain = copy.deepcopy(model)
    ours, torchs = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain))
    amp = mezzo.prepare(model, ours, policy + ", output=none")

    def loss(net: nn.Module) -> torch.Tensor:
        out = net(x)
        assert net is plain or out.dtype is amp.policy.compute
        return out.float().square().mean()

    train_beside_autocast(amp, plain, torchs, loss)
    assert model.temperature.dtype is torch.float64
    torch.testing.assert_close(model.temperature, plain.temperature, rtol=2**-9, atol=0)
    amp.report(strict=True)
    amp.load_state_dict(amp.state_dict())
