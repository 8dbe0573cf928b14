"""Small models, batches and recorders that the tests of the step share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mezzo
from mezzo.kernels.ops import adamw, sgd
from mezzo.loss_scale import accumulation
from mezzo.step import gradients, result

INF, NAN = float("inf"), float("nan")


class Net(nn.Module):
    """Linear layers around a batch norm and a layer norm; fp32 output, as losses want it."""

    def __init__(self, width: int = 8, has_batch_norm: bool = True) -> None:
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.stats = nn.BatchNorm1d(width) if has_batch_norm else nn.Identity()
        self.norm = nn.LayerNorm(width)
        self.outer = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.norm(self.stats(self.inner(x)).relu())).float()


def wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the host decide nothing, as for an accelerator, on the CPU's tensors."""
    for module in (accumulation, gradients, result):
        monkeypatch.setattr(module, "host_decides", lambda device: False)
    for numbers in (adamw, sgd):
        monkeypatch.setattr(numbers, "is_counted_on_host", lambda step, lr: False)


def batch(size: int = 16) -> tuple[Tensor, Tensor]:
    x = torch.randn(size, 4)
    return x, x.sum(1, keepdim=True)


def mse(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "fused-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused-adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "fused-adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "mezzo-adamw": lambda p: mezzo.optim.AdamW(p, lr=0.01),
    "mezzo-sgd": lambda p: mezzo.optim.SGD(p, lr=0.05, momentum=0.9),
    "master-weights": lambda p: mezzo.optim.MasterWeights(torch.optim.AdamW(p, lr=0.01)),
    "master-weights-fused": lambda p: mezzo.optim.MasterWeights(torch.optim.AdamW(p, lr=0.01, fused=True)),
}
ON_DEVICE = ("fused-adamw", "fused-adagrad", "mezzo-adamw", "mezzo-sgd", "master-weights-fused")
"""Optimizers that leave out a step without the host."""


CALM = "fp16, scaling.init_scale=256"
"""fp16 with a scale at which the small models here do not overflow."""


def run(amp: mezzo.Stepper, x: Tensor, y: Tensor, **options: Any) -> mezzo.StepResult:
    amp.zero_grad()
    amp.backward(mse(amp.model(x), y))
    return amp.step(**options)


def prepared(
    policy: str = "fp32", optimizer: str = "sgd", model: nn.Module | None = None, **options: Any
) -> tuple[nn.Module, mezzo.Stepper]:
    model = Net() if model is None else model
    return model, mezzo.prepare(model, OPTIMIZERS[optimizer](model.parameters()), policy, **options)


def everything(amp: mezzo.Stepper) -> dict[str, Tensor]:
    """Copy all that a step may change: weights, buffers, optimizer state."""
    found = {f"model.{name}": value for name, value in amp.model.state_dict().items()}
    for index, optimizer in enumerate(amp.optimizers):
        for index, entry in optimizer.state_dict()["state"].items():
            entry = entry if isinstance(entry, dict) else {"": entry}
            found |= {f"{index}.{index}.{k}": v for k, v in entry.items() if isinstance(v, Tensor)}
    return {name: value.detach().clone() for name, value in found.items()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Assert two copies of `everything` agree bit for bit."""
    assert got.keys() == want.keys()
    different = [name for name in want if not torch.equal(got[name], want[name])]
    assert not different, different


class Dtypes(TorchDispatchMode):
    """Records the dtypes in which matrix products and norms run, forward and backward."""

    OPS = ("addmm", "mm", "bmm", "native_layer_norm", "native_batch_norm", "convolution")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in self.OPS:
            self.seen.append((name, next(a.dtype for a in args if isinstance(a, Tensor))))
        return func(*args, **(kwargs or {}))

    def of(self, *names: str) -> list[torch.dtype]:
        return [dtype for name, dtype in self.seen if name in names]


def twin(model: nn.Module) -> nn.Module:
    """Copy a model before it is prepared."""
    return copy.deepcopy(model)


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that is made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        out = func(*args, **(kwargs or {}))
        made = [t.untyped_storage() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.nbytes = max([self.nbytes, *(s.nbytes() for s in made if s._cdata not in given)])
        return out
