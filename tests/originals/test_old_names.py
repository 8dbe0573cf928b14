"""The names and signatures of torch.cuda.amp, by position, as older programs have them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from tests.originals.libraries import batches, make_model, weights
from tests.torch_versions import TORCH
from torch import Tensor, nn

import mezzo

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch's own old names say that they are old
absent = pytest.mark.filterwarnings("ignore:.*CUDA.*|.*cuda.*:UserWarning")


def arguments(called: Any) -> list[tuple[str, Any]]:
    """Return names and defaults; of a class those of its `__init__`, which the mark of an old name does not hide on Python 3.13."""
    is_class = inspect.isclass(called)
    found = inspect.signature(called.__init__ if is_class else called).parameters.values()
    return [(p.name, p.default) for p in found][is_class:]


@pytest.mark.parametrize("name", ["autocast", "GradScaler", "custom_fwd", "custom_bwd"])
def test_the_signatures_are_torchs(name: str) -> None:
    ours, theirs = (arguments(getattr(module, name)) for module in (mezzo.cuda.amp, torch.cuda.amp))
    assert ours[: len(theirs)] == theirs


@absent
def test_arguments_by_position() -> None:
    region = mezzo.cuda.amp.autocast(True, torch.bfloat16, False)
    assert (region.device, region.fast_dtype, region._cache_enabled) == ("cuda", torch.bfloat16, False)
    assert isinstance(region, torch.autocast) == (TORCH >= (2, 12))  # decision 0085
    assert not mezzo.cuda.amp.autocast(False)._enabled
    scaler = mezzo.cuda.amp.GradScaler(1024.0, 3.0, 0.25, 7, False)
    assert isinstance(scaler, mezzo.GradScaler) and not scaler.is_enabled()
    scaler = mezzo.cuda.amp.GradScaler(1024.0, 3.0, 0.25, 7)
    factors = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    assert factors == (3.0, 0.25, 7)


@absent
def test_an_old_program_runs_with_its_import_changed() -> None:
    results = []
    for amp in (torch.cuda.amp, mezzo.cuda.amp):
        torch.manual_seed(0)
        net, loss_fn = make_model(16, 16, 2), nn.MSELoss()
        opt = torch.optim.SGD(net.parameters(), lr=0.01)
        scaler = amp.GradScaler()
        for input, target in batches():
            with amp.autocast():
                loss = loss_fn(net(input), target)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        results.append(weights(net))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("called", [False, True], ids=["bare", "called"])
def test_custom_functions_bare_and_called(called: bool) -> None:
    def dressed(decorator: Any) -> Any:
        return decorator(device_type="cpu") if called else decorator

    class Square(torch.autograd.Function):
        @staticmethod
        @dressed(mezzo.custom_fwd)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.mm(x)

        @staticmethod
        @dressed(mezzo.custom_bwd)
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            assert torch.is_autocast_enabled("cpu")
            return grad.mm(x.t()) + x.t().mm(grad)

    x = torch.randn(4, 4, requires_grad=True)
    with mezzo.autocast("cpu", torch.bfloat16):
        y = Square.apply(x)
    y.float().sum().backward()
    assert y.dtype is torch.bfloat16 and x.grad is not None and x.grad.dtype is torch.float32


def test_the_decorators_of_the_old_namespace() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        @mezzo.cuda.amp.custom_fwd
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        @mezzo.cuda.amp.custom_bwd
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    Double.apply(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]
