"""What a refusal of two dtypes that meet says to write instead is written instead, and trains."""

from __future__ import annotations

from typing import Any

import torch
from tests.step.test_advice import POLICIES, X, adamw, net, refused, train
from torch import Tensor, nn

import mezzo
from mezzo.errors import CastError


class Partly(nn.Module):
    """A region switched off inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = net(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(h.float())


class PartlyCast(Partly):
    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        with torch.autocast("cpu", enabled=False):
            return self.head(h.to(self.head.weight.dtype))


def test_weights_in_16_bit_where_a_region_is_switched_off() -> None:
    model = Partly()
    amp = mezzo.prepare(model, adamw(model), "bf16-master")
    refused(lambda: model(X), CastError, "x.to(weight.dtype)", "module:NAME=fp32")
    amp.release()
    train(mezzo.prepare(model, adamw(model), "bf16-master, module:head=fp32"))
    cast = PartlyCast()
    train(mezzo.prepare(cast, adamw(cast), "bf16-master"))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Decorated(Product):
    forward = staticmethod(mezzo.custom_fwd(Product.forward))
    backward = staticmethod(mezzo.custom_bwd(Product.backward))


class Own(nn.Module):
    def __init__(self, function: type[Product]) -> None:
        super().__init__()
        self.function, self.weight = function, net()[0].weight
        self.head = net()[2]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function.apply(x, self.weight).tanh())


@POLICIES
def test_an_autograd_function_whose_backward_multiplies(policy: str) -> None:
    model = Own(Product)
    amp = mezzo.prepare(model, adamw(model), policy)
    loss = model(X).square().mean()
    where = "`return grad @ weight, grad.t() @ x`"
    refused(
        lambda: amp.backward(loss),
        CastError,
        where,
        "in the backward of Product",
        "mezzo.custom_fwd",
        "mezzo.custom_bwd",
    )
    amp.release()
    model.function = Decorated
    train(mezzo.prepare(model, adamw(model), policy))
