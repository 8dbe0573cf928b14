"""Faults of the backward pass: the forward is finite."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.zoo.case import Case
from tests.zoo.faulty_forward import ALL, FP32, Run, functional, train
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def root_at_zero(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        gap = (x - x.detach()).float().square().sum(-1)
        return gap.sqrt()  # FAULT

    return functional(compute, dtype, torch.randn(4, 8))


def power_at_zero(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return x.float().pow(0.5)  # FAULT

    return functional(compute, dtype, torch.linspace(0, 1, 16))


def guarded_logarithm(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        p = x.float() * 2
        return torch.where(p > 0, p.log(), 0.0)  # FAULT

    return functional(compute, dtype, torch.linspace(0, 1, 16))


def guarded_division(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        n = x.float() * 2
        return torch.where(n > 0, 1 / n, 0.0)  # FAULT

    return functional(compute, dtype, torch.linspace(0, 1, 16))


def arc_cosine_at_one(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return x.float().acos()  # FAULT

    return functional(compute, dtype, torch.linspace(-1, 1, 9))


def spread_of_equals(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        centred = (x - x.detach()).float()
        return (centred.square().mean(-1)).sqrt()  # FAULT

    return functional(compute, dtype, torch.randn(2, 8))


def distance_to_itself(dtype: torch.dtype) -> Run:
    class Distances(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.float()
            squares = (x[:, None] - x[None]).square().sum(-1)
            return squares.sqrt()  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.distances = nn.Linear(8, 8), Distances()

        def forward(self, x: Tensor) -> Tensor:
            return self.distances(self.body(x))

    return train(Net(), dtype, torch.randn(4, 8))


def custom_backward(dtype: torch.dtype) -> Run:
    class Rooted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            y = x.float().sqrt()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            (y,) = ctx.saved_tensors
            return grad / (2 * y)  # FAULT

    def compute(x: Tensor) -> Tensor:
        return Rooted.apply(x * 2)

    return functional(compute, dtype, torch.linspace(0, 1, 16))


def custom_backward_overflow(dtype: torch.dtype) -> Run:
    class Amplified(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            return grad * 1e7  # FAULT

    def compute(x: Tensor) -> Tensor:
        return Amplified.apply(x)

    return functional(compute, dtype, torch.randn(16))


def checkpointed_root(dtype: torch.dtype) -> Run:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            p = (x - x.detach()).float()
            return p.sqrt()  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.block = nn.Linear(8, 8), Block()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.body(x), use_reentrant=False)

    return train(Net(), dtype, torch.randn(4, 8))


def checkpointed_root_reentrant(dtype: torch.dtype) -> Run:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            p = (x - x.detach()).float()
            return p.sqrt()  # FAULT

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.block = nn.Linear(8, 8), Block()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.body(x), use_reentrant=True)

    return train(Net(), dtype, torch.randn(4, 8))


def in_place_backward(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        y = x.float() * 2
        y.sqrt_()  # FAULT
        return y

    return functional(compute, dtype, torch.linspace(0, 1, 16))


def in_place_view_backward(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        y = x.float() * 2
        y[:4].sqrt_()  # FAULT
        return y

    return functional(compute, dtype, torch.linspace(0, 1, 16))


def second_backward(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return (x - x.detach()).float().sqrt()  # FAULT

    model = nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def run() -> None:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
            model(x).float().mean().backward()
            loss = compute(model(x)).mean()
        loss.backward()

    return run


def gradient_penalty(dtype: torch.dtype) -> Run:
    critic = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    nn.init.constant_(critic[0].bias, -100.0)
    x = torch.randn(4, 8, requires_grad=True)

    def run() -> None:
        (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        length = grad.square().sum(-1).sqrt()  # FAULT
        ((length - 1) ** 2).mean().backward()

    return run


def gradient_beyond_fp16(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        small = x * 1e-4
        return (small.float() * 1e9).to(small.dtype).float()  # FAULT

    return functional(compute, dtype, torch.randn(2) * 0.01)


def _scaled(dtype: torch.dtype, scale: float, model: nn.Module, loss_of) -> Run:
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(4, 8)

    def run() -> None:
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(model(x))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return run


def loss_scale_too_high(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    return _scaled(dtype, 2.0**20, Net(), lambda y: y.float().sum())  # FAULT


def loss_scale_in_a_product(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 64), nn.Linear(64, 1, bias=False)
            nn.init.constant_(self.head.weight, 4.0)

        def forward(self, x: Tensor) -> Tensor:
            h = self.body(x)
            return self.head(h)  # FAULT

    return _scaled(dtype, 2.0**15, Net(), lambda y: y.float().sum())


def loss_scale_on_a_16_bit_loss(dtype: torch.dtype) -> Run:
    model = nn.Linear(8, 8)
    scaler = torch.amp.GradScaler("cpu")
    x = torch.randn(4, 8)

    def run() -> None:
        with torch.autocast("cpu", dtype=dtype):
            loss = model(x).sum()
        scaler.scale(loss).backward()  # FAULT

    return run


def embedding_gradient(dtype: torch.dtype) -> Run:
    table = nn.Embedding(4, 8)
    index = torch.tensor([0, 1, 1, 3])
    with torch.no_grad():
        table.weight[1] = 0.0

    def run() -> None:
        vectors = table(index)
        unit = vectors / vectors.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-6)  # FAULT
        F.mse_loss(unit, torch.ones(4, 8)).backward()

    return run


CASES = [
    Case(build=root_at_zero, op="sqrt", module="body", verdict="singularity", phase="backward", dtypes=ALL),
    Case(build=power_at_zero, op="pow", module="body", verdict="singularity", phase="backward", dtypes=ALL),
    Case(build=guarded_logarithm, op="log", module="body", verdict="singularity", phase="backward", dtypes=ALL),
    Case(build=guarded_division, op="reciprocal", module="body", verdict="singularity", dtypes=ALL),
    Case(build=arc_cosine_at_one, op="acos", module="body", verdict="singularity", phase="backward", dtypes=ALL),
    Case(build=spread_of_equals, op="sqrt", module="body", verdict="singularity", phase="backward", dtypes=ALL),
    Case(build=distance_to_itself, op="sqrt", module="distances", verdict="singularity", phase="backward", dtypes=ALL),
    Case(build=custom_backward, op="div", module="body", verdict="singularity", phase="backward", dtypes=ALL),
    Case(build=custom_backward_overflow, op="mul", module="body", verdict="overflow", phase="backward"),
    Case(build=checkpointed_root, op="sqrt", module="block", verdict="singularity", phase="backward", dtypes=ALL),
    Case(
        build=checkpointed_root_reentrant,
        op="sqrt",
        module="block",
        verdict="singularity",
        phase="backward",
        dtypes=ALL,
    ),
    Case(build=in_place_backward, op="sqrt", module="body", verdict="singularity", phase="backward", dtypes=ALL),
    Case(build=in_place_view_backward, op="sqrt", module="body", verdict="singularity", phase="backward", dtypes=ALL),
    Case(build=second_backward, op="sqrt", verdict="singularity", phase="backward", dtypes=ALL),
    Case(build=gradient_penalty, op="sqrt", verdict="singularity", phase="backward", dtypes=(FP32,)),
    Case(build=gradient_beyond_fp16, op="to", module="body", verdict="overflow", phase="backward"),
    Case(build=loss_scale_too_high, op="to", verdict="loss-scale", phase="backward", names=("2^5",)),
    Case(build=loss_scale_in_a_product, op="mm", module="head", verdict="loss-scale", phase="backward", names=("2^2",)),
    Case(build=loss_scale_on_a_16_bit_loss, op="mul", verdict="loss-scale", phase="backward", names=("2^1",)),
    Case(build=embedding_gradient, op="sqrt", verdict="singularity", phase="backward", dtypes=(FP32,)),
]
