"""The recipe's advanced topics: accumulation, penalty, several models, losses and optimizers, custom Functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.originals.libraries import PRECISIONS, Library, batches, check_same, make_model, weights
from torch import Tensor, nn

import mezzo

every_precision = pytest.mark.parametrize("precision", PRECISIONS)


@every_precision
def test_accumulation(precision: str) -> None:
    def program(library: Library, region: dict[str, Any]) -> object:
        net, every = make_model(16, 16, 2), 2
        opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
        scaler = library.GradScaler("cpu", enabled=region["enabled"])
        for number, (input, target) in enumerate(batches(8), 1):
            with library.autocast("cpu", **region):
                loss = nn.functional.mse_loss(net(input), target) / every
            scaler.scale(loss).backward()
            if number % every == 0:
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
        return weights(net), scaler.get_scale()

    check_same(program, precision)


@every_precision
def test_gradient_penalty(precision: str) -> None:
    def program(library: Library, region: dict[str, Any]) -> object:
        net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        opt = torch.optim.SGD(net.parameters(), lr=0.01)
        scaler = library.GradScaler("cpu", init_scale=128.0, enabled=region["enabled"])
        penalties = []
        for input, target in batches(out=1):
            with library.autocast("cpu", **region):
                loss = nn.functional.mse_loss(net(input), target)
            scaled = torch.autograd.grad(scaler.scale(loss), list(net.parameters()), create_graph=True)
            grads = [grad / scaler.get_scale() for grad in scaled]
            with library.autocast("cpu", **region):
                norm = torch.stack([grad.pow(2).sum() for grad in grads]).sum().sqrt()
                loss = loss + norm
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            penalties.append(norm.detach())
        return penalties, weights(net)

    check_same(program, precision)


@every_precision
def test_several_models_losses_and_optimizers(precision: str) -> None:
    def program(library: Library, region: dict[str, Any]) -> object:
        models = make_model(16, 16, 2), make_model(16, 16, 2)
        opts = [torch.optim.SGD(models[0].parameters(), lr=0.01), torch.optim.Adam(models[1].parameters(), lr=1e-3)]
        scaler = library.GradScaler("cpu", enabled=region["enabled"])
        for input, target in batches():
            for opt in opts:
                opt.zero_grad()
            with library.autocast("cpu", **region):
                first, second = models[0](input), models[1](input)
                loss0 = nn.functional.mse_loss(2 * first + 3 * second, target)
                loss1 = nn.functional.mse_loss(3 * first - 5 * second, target)
            scaler.scale(loss0).backward(retain_graph=True)
            scaler.scale(loss1).backward()
            scaler.unscale_(opts[0])
            for opt in opts:
                scaler.step(opt)
            scaler.update()
        return weights(*models), scaler.get_scale()

    check_same(program, precision)


def _functions(library: Library) -> tuple[type[torch.autograd.Function], type[torch.autograd.Function]]:
    """A Function that follows the region it is called in, and one that needs fp32."""

    class Product(torch.autograd.Function):
        @staticmethod
        @library.custom_fwd(device_type="cpu")
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a.mm(b)

        @staticmethod
        @library.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            a, b = ctx.saved_tensors
            return grad.mm(b.t()), a.t().mm(grad)

    class Exponential(torch.autograd.Function):
        @staticmethod
        @library.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            assert x.dtype is torch.float32
            result = x.exp()
            ctx.save_for_backward(result)
            return result

        @staticmethod
        @library.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (result,) = ctx.saved_tensors
            assert not torch.is_autocast_enabled("cpu")
            return grad * result

    return Product, Exponential


@every_precision
def test_custom_functions(precision: str) -> None:
    def program(library: Library, region: dict[str, Any]) -> object:
        product, exponential = _functions(library)
        a, b = (torch.randn(8, 8, requires_grad=True) for _ in range(2))
        with library.autocast("cpu", **region):
            middle = product.apply(a, b)
            loss = exponential.apply(middle * 0.1).sum()
        loss.backward()
        return middle, loss, a.grad, b.grad

    check_same(program, precision)


def test_data_parallel_around_a_prepared_model_passes_through() -> None:
    """Without devices it calls the model itself: the same output, gradients and step as without it."""
    found = []
    for wrap in (lambda model: model, nn.DataParallel):
        torch.manual_seed(0)
        model = make_model(16, 16, 2)
        amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters()), "bf16")
        output = wrap(model)(batches()[0][0])
        amp.backward(output.square().mean())
        assert amp.step()
        found.append([output.detach(), *(p.detach() for p in model.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_data_parallel_passes_through_without_devices(precision: str) -> None:
    def program(library: Library, region: dict[str, Any]) -> object:
        net = nn.DataParallel(make_model(16, 16, 2))
        with library.autocast("cpu", **region):
            output = net(batches()[0][0])
        output.float().sum().backward()
        return output, [p.grad for p in net.parameters()]

    check_same(program, precision)
