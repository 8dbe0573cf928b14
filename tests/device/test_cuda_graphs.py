"""Captured steps on a real GPU: replays are the steps that the function takes, in the same order of arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mezzo

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("policy", ["bf16", "fp16, scaling.init_scale=1024, scaling.growth_interval=2", "bf16-master"])
@pytest.mark.parametrize("kind", ["mezzo", "torch"])
def test_replays_are_eager_steps(policy: str, kind: str) -> None:
    if kind == "torch" and policy == "bf16-master":
        pytest.skip("mezzo steps torch's AdamW by its own kernel then")
    data = torch.randn(14, 64, 128, generator=torch.Generator().manual_seed(1)).cuda()
    factors = torch.ones(14, device="cuda").index_fill_(0, torch.tensor([8], device="cuda"), torch.inf)
    found = []
    for is_captured in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(128, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 64), nn.BatchNorm1d(64)
        ).cuda()
        optimizer: torch.optim.Optimizer = (
            torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True, capturable=True)
            if kind == "torch"
            else mezzo.optim.AdamW(net.parameters(), lr=1e-3, master="split" if policy == "bf16-master" else "none")
        )
        amp = mezzo.prepare(net, optimizer, policy)

        def step(
            x: Tensor, factor: Tensor, amp: mezzo.Stepper = amp, net: nn.Module = net
        ) -> tuple[Tensor, mezzo.StepResult]:
            amp.zero_grad()
            loss = net(x).float().square().mean() * factor
            amp.backward(loss)
            return loss.detach(), amp.step(max_norm=0.5)

        call = amp.capture(step) if is_captured else step
        done = [call(x, factor) for x, factor in zip(data, factors, strict=True)]
        found.append(
            (
                [loss.item() for loss, _ in done],
                [(result.applied, result.scale) for _, result in done],
                amp.counters(),
                [p.float().tolist() for p in net.parameters()],
            )
        )
    assert repr(found[0][1:3]) == repr(found[1][1:3])
    assert found[0][0] == pytest.approx(found[1][0], rel=2.0**-6, nan_ok=True)  # libraries may pick other kernels
    assert found[0][2].skipped == 1
