"""Prepared steps on a real GPU: as exact as fp32 allows, without a wait of the host, and kept casts that change no bit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tests.cuda_waits import no_waiting
from torch import Tensor, nn

import mezzo

from .names import LOOKED_AT

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STEPS = LOOKED_AT + 8


class Block(nn.Module):
    """Attention and an MLP of 256 features, with one kind of norm."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(256), norm(256)
        self.qkv, self.out = nn.Linear(256, 768), nn.Linear(256, 256)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = [one.unflatten(-1, (4, 64)).transpose(1, 2) for one in self.qkv(self.norm1(x)).chunk(3, -1)]
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def model(norm: Any = nn.LayerNorm) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), Block(norm), Block(norm), nn.Linear(256, 8)).cuda()


def batches() -> Tensor:
    return torch.randn(STEPS, 16, 128, 64, generator=torch.Generator().manual_seed(1)).cuda()


def losses_of(net: nn.Module, optimizer: Any, policy: str, norm: float | None = 1.0) -> list[float]:
    amp, found = mezzo.prepare(net, optimizer, policy), []
    for number, x in enumerate(batches()):
        with no_waiting() if number >= LOOKED_AT else warnings.catch_warnings():
            amp.zero_grad()
            loss = net(x).float().square().mean()
            amp.backward(loss)
            amp.step(max_norm=norm)
            found.append(loss.detach())
    assert amp.counters().applied == STEPS
    return torch.stack(found).tolist()


OPTIMIZERS = {
    "torch.AdamW": lambda params, policy: torch.optim.AdamW(params, lr=1e-3, fused=True),
    "mezzo.AdamW": lambda params, policy: mezzo.optim.AdamW(
        params, lr=1e-3, master={"bf16-master": "split", "fp16-master": "fp32"}.get(policy, "none")
    ),
    "torch.SGD": lambda params, policy: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-master", "fp16", "fp16-master"])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_healthy_step_never_waits_and_follows_fp32(policy: str, optimizer: str, norm: Any) -> None:
    one, other = model(norm), model(norm)
    scaled = f"{policy}, scaling.init_scale=1024" if policy.startswith("fp16") else policy
    found = losses_of(one, OPTIMIZERS[optimizer](one.parameters(), policy), scaled)
    exact = losses_of(other, OPTIMIZERS[optimizer](other.parameters(), "fp32"), "fp32")
    assert exact[-1] < exact[0]
    allowed = 2.0**-20 if policy == "fp32" else 8 * torch.finfo(torch.bfloat16).eps
    assert found == pytest.approx(exact, rel=allowed)


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16"])
def test_kept_casts_change_no_bit(policy: str) -> None:
    x = batches()[0]
    outputs = []
    for cache in ("region", "persistent"):
        net = mezzo.prepare(model(), None, policy, cache=cache).model.eval()
        with torch.inference_mode(), no_waiting():
            net(x)
            outputs += [net(x)]
        with torch.no_grad():
            net[0].weight.mul_(2.0)
            outputs += [net(x)]
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])
    assert not torch.equal(outputs[0], outputs[1])


def test_a_captured_step_trains_as_an_eager_one() -> None:
    found = []
    for is_captured in (False, True):
        net = model()
        amp = mezzo.prepare(net, mezzo.optim.AdamW(net.parameters(), lr=1e-3, master="split"), "bf16-master")

        def step(x: Tensor, amp: Any = amp, net: nn.Module = net) -> Tensor:
            amp.zero_grad()
            loss = net(x).float().square().mean()
            amp.backward(loss)
            amp.step(max_norm=1.0)
            return loss.detach()

        call = amp.capture(step) if is_captured else step
        found.append([call(x).clone() for x in batches()])
        assert not is_captured or call.num_replayed > 0
    eager, captured = (torch.stack(one).tolist() for one in found)
    assert captured == pytest.approx(eager, rel=8 * torch.finfo(torch.bfloat16).eps)
