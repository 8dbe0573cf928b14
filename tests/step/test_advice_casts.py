"""What a refusal of two dtypes that meet says to write instead is written instead, and trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.step.test_advice import POLICIES, X, adamw, net, refused, train
from torch import Tensor, nn

import mezzo
from mezzo.errors import CastError, RegionError


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
    refused(lambda: model(X), CastError, "x.to(weight.dtype)", "module:head=fp32")
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


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16, scaling=1024"])
def test_the_backward_of_a_custom_op_is_told_to_register_its_casts(policy: str) -> None:
    name = f"test_advice_casts::product_{policy[:4]}{policy[5:11].strip()}".replace(" ", "")

    @torch.library.custom_op(name, mutates_args=())
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = net()[0], net()[2]

        def forward(self, x: Tensor) -> Tensor:
            return self.head(product(x, self.first.weight).tanh())

    torch.library.register_autograd(
        name, Product.backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    model, dtype = Own(), torch.float16 if policy.startswith("fp16") else torch.bfloat16
    amp = mezzo.prepare(model, adamw(model), policy)
    loss = model(X).square().mean()
    refused(
        lambda: amp.backward(loss),
        CastError,
        "in the backward of test_advice_casts_product",
        f"Write torch.library.register_autocast(op, 'cpu', {dtype})",
    )
    amp.zero_grad()
    torch.library.register_autocast(name, "cpu", dtype)
    train(amp)


class ProductWithSetup(torch.autograd.Function):
    """Written as torch.func asks for it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = Product.backward


class DecoratedForward(ProductWithSetup):
    forward = staticmethod(mezzo.custom_fwd(ProductWithSetup.forward))
    backward = staticmethod(mezzo.custom_bwd(Product.backward))


class DecoratedSetup(ProductWithSetup):
    setup_context = staticmethod(mezzo.custom_fwd(ProductWithSetup.setup_context))
    backward = staticmethod(mezzo.custom_bwd(Product.backward))


@POLICIES
def test_an_autograd_function_with_a_setup_context(policy: str) -> None:
    model = Own(ProductWithSetup)  # type: ignore[arg-type]  # a Function too
    amp = mezzo.prepare(model, adamw(model), policy)
    loss = model(X).square().mean()
    refused(lambda: amp.backward(loss), CastError, "(or setup_context, where it has one) with mezzo.custom_fwd")
    amp.zero_grad()
    model.function = DecoratedForward  # type: ignore[assignment]
    loss = model(X).square().mean()
    refused(lambda: amp.backward(loss), RegionError, "decorate its setup_context")
    amp.zero_grad()
    model.function = DecoratedSetup  # type: ignore[assignment]
    train(amp)
    grads = torch.func.vmap(torch.func.grad(lambda x: model(x[None]).square().mean()))(X)
    assert grads.shape == X.shape and grads.isfinite().all()


def test_inputs_cast_for_a_forward_are_cast_for_its_setup_context() -> None:
    seen: list[tuple[torch.dtype, ...]] = []

    class Cast(torch.autograd.Function):
        @staticmethod
        @mezzo.custom_fwd(cast_inputs=torch.float32)
        def forward(x: Tensor) -> Tensor:
            seen.append((x.dtype,))
            return (x @ x).bfloat16()

        @staticmethod
        @mezzo.custom_fwd(cast_inputs=torch.float32)
        def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
            seen.append((inputs[0].dtype, output.dtype))
            ctx.save_for_backward(inputs[0])

        @staticmethod
        @mezzo.custom_bwd
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            product = grad.float() @ x
            seen.append((product.dtype,))
            return product

    x = torch.randn(3, 3, dtype=torch.bfloat16, requires_grad=True)
    with mezzo.autocast("cpu"):
        y = Cast.apply(x)
    y.float().sum().backward()
    assert seen == [(torch.float32,), (torch.float32, torch.bfloat16), (torch.float32,)]
