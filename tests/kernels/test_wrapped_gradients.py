"""A gradient of another class than torch's own comes to a layer wherever its result meets such a tensor: torch's ops take it, no kernel does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import mezzo


class Attends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = x.view(*x.shape[:2], 3, 2, 32).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(query, key, value)


class Recurs(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(64, 128, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(64, 64), (512, 64)),
    "convolution": (lambda: nn.Conv2d(32, 64, 3, padding=1), (4, 32, 32, 32)),
    "attention": (Attends, (2, 64, 192)),
    "RMS norm": (lambda: nn.RMSNorm(64), (512, 64)),
    "layer norm": (lambda: nn.LayerNorm(64), (512, 64)),
    "LSTM": (lambda: Recurs(nn.LSTM), (16, 12, 64)),
    "GRU": (lambda: Recurs(nn.GRU), (16, 12, 64)),
}


def gradients(model: nn.Module, x: Tensor, wraps: bool) -> list[Tensor]:
    x = x.clone().requires_grad_()
    out = model(x)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    loss = (out * (TwoTensor(slope, slope.clone()) if wraps else slope)).sum()
    found = torch.autograd.grad(loss, [x, *model.parameters()])
    return [one.a if isinstance(one, TwoTensor) else one for one in found]


@pytest.mark.parametrize("policy", ["bf16", "bf16, ops=mezzo"])
@pytest.mark.parametrize("name", MODELS)
def test_its_gradients_are_those_of_a_plain_one(name: str, policy: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    plain, x = make(), torch.randn(shape)
    model = nn.Sequential(copy.deepcopy(plain))
    mezzo.prepare(model, None, policy)
    for found, exact in zip(gradients(model, x, wraps=True), gradients(plain, x, wraps=False), strict=True):
        error = (found.float() - exact).norm() / exact.norm()
        assert error < 4 * torch.finfo(torch.bfloat16).eps
