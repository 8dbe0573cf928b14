"""Faults of the forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tests.zoo.case import Case
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Run = Callable[[], object]
FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
ALL = (FP16, BF16, FP32)


def train(model: nn.Module, dtype: torch.dtype, *inputs: Tensor, scale: float = 1.0, **named: Tensor) -> Run:
    """One training step: forward and loss in a region, backward outside, of the loss times a scale."""

    def run() -> None:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
            loss = total(model(*inputs, **named)) * scale
        loss.backward()

    return run


def total(output: object) -> Tensor:
    if isinstance(output, Tensor):
        return output.float().mean()
    values = (
        output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else vars(output).values()
    )
    return torch.stack([total(v) for v in values]).sum()


def scaled_linear(inside: int, out: int, weight: float) -> nn.Linear:
    layer = nn.Linear(inside, out)
    nn.init.constant_(layer.weight, weight)
    return layer


class Wrapped(nn.Module):
    """A healthy layer, a sick one, a healthy one."""

    def __init__(self, sick: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.before, self.sick, self.after = nn.Linear(width, width), sick, nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.sick(self.before(x)))


def functional(compute: Callable[[Tensor], Tensor], dtype: torch.dtype, x: Tensor, scale: float = 1.0) -> Run:
    """A model whose only module calls a function on a leaf of a compute dtype."""

    class Body(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return compute(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Body()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    leaf = x.to(dtype).requires_grad_()
    return train(Net(), dtype, leaf, scale=scale)


def attention_scores(dtype: torch.dtype) -> Run:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (self.qkv(x) * 200).chunk(3, -1)
            scores = q @ k.transpose(-1, -2)  # FAULT
            return (scores / math.sqrt(8)).softmax(-1) @ v

    return train(Wrapped(Attention()), dtype, 20 * torch.randn(2, 6, 8))


def feed_forward(dtype: torch.dtype) -> Run:
    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = scaled_linear(8, 32, 10.0), scaled_linear(32, 8, 30.0)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x.abs()).relu()
            return self.down(h)  # FAULT

    return train(Wrapped(FeedForward()), dtype, 10 * torch.randn(4, 8))


def mean_of_squares(dtype: torch.dtype) -> Run:
    class RMSNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = 1e3 * x
            return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()  # FAULT

    return train(Wrapped(RMSNorm()), dtype, 10 * torch.randn(4, 8))


def cast_of_a_large_activation(dtype: torch.dtype) -> Run:
    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.project(x.float() * 1e6)  # FAULT

    return train(Wrapped(Big()), dtype, torch.randn(4, 8))


def convolution(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.body = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
            nn.init.constant_(self.body.weight, 100.0)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).relu()
            return self.body(x)  # FAULT

    return train(Net(), dtype, 50 * torch.randn(2, 3, 8, 8))


def sum_of_many(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return x.sum(-1)  # FAULT

    return functional(compute, dtype, torch.full((2, 4096), 20.0))


def exponential_in_16_bit(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        weights = x.exp()  # FAULT
        return weights / weights.sum(-1, keepdim=True)

    return functional(compute, dtype, torch.tensor([[1.0, 12.0, 3.0]]))


def exponential_in_32_bit(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        weights = x.exp()  # FAULT
        return weights / weights.sum(-1, keepdim=True)

    return functional(compute, dtype, torch.tensor([[1.0, 100.0, 3.0]]))


def exponential_beyond_all_formats(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return x.exp()  # FAULT

    return functional(compute, dtype, torch.tensor([[1.0, 2000.0, 3.0]]))


def running_sum(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return x.cumsum(-1)  # FAULT

    return functional(compute, dtype, torch.full((2, 64), 2000.0))


def residual_sum(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        branch = x * 1.5
        return x + branch  # FAULT

    return functional(compute, dtype, torch.full((2, 8), 40000.0))


def division_by_a_small_number(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        temperature = torch.full_like(x, 1e-3)
        return x / temperature  # FAULT

    return functional(compute, dtype, torch.linspace(1, 100, 16))


def contraction(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return torch.einsum("bik,bjk->bij", x, x)  # FAULT

    return functional(compute, dtype, torch.full((2, 4, 8), 100.0))


def in_place(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        y = x + 1
        y.mul_(1000)  # FAULT
        return y

    return functional(compute, dtype, torch.linspace(0, 100, 16))


def in_place_through_a_view(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        y = x.clone()
        y.view(4, 4)[2].pow_(3)  # FAULT
        return y

    return functional(compute, dtype, torch.linspace(0, 100, 16))


def nested_outputs(dtype: torch.dtype) -> Run:
    class Heads(nn.Module):
        def forward(self, x: Tensor) -> dict[str, object]:
            big = x * 7e4  # FAULT
            return {"small": x, "more": (x, {"big": big})}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.heads = nn.Linear(8, 8), Heads()

        def forward(self, x: Tensor) -> dict[str, object]:
            return self.heads(self.body(x).tanh() + 2)

    return train(Net(), dtype, torch.randn(4, 8))


@dataclass
class Answer:
    logits: Tensor
    extra: tuple[Tensor, ...]


def dataclass_outputs(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Answer:
            x = self.body(x)
            return Answer(logits=x, extra=((x.abs() + 1) * 7e4,))  # FAULT

    return train(Net(), dtype, torch.randn(4, 8))


def custom_function(dtype: torch.dtype) -> Run:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 3e4  # FAULT

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad

    def compute(x: Tensor) -> Tensor:
        return Scaled.apply(x + 2)

    return functional(compute, dtype, torch.linspace(0, 10, 16))


def _checkpointed(dtype: torch.dtype, reentrant: bool, block: nn.Module) -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.block = nn.Linear(8, 8), block

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.body(x), use_reentrant=reentrant)

    return train(Net(), dtype, torch.randn(4, 8))


def checkpointed(dtype: torch.dtype) -> Run:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = (x.abs() + 1) * 1e3
            return x * x  # FAULT

    return _checkpointed(dtype, False, Block())


def checkpointed_reentrant(dtype: torch.dtype) -> Run:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = (x.abs() + 1) * 1e3
            return x * x  # FAULT

    return _checkpointed(dtype, True, Block())


def recurrent_growth(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(8, 8, nonlinearity="relu")
            nn.init.constant_(self.rnn.weight_hh_l0, 1.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0]  # FAULT

    return train(Net(), dtype, torch.randn(12, 2, 8))


def loss_in_16_bit(dtype: torch.dtype) -> Run:
    model = nn.Sequential(nn.Linear(8, 8)).to(dtype)
    x = (100 * torch.randn(4, 8)).to(dtype)

    def run() -> None:
        loss = (model(x) - 1000).square().mean()  # FAULT
        loss.backward()

    return run


def product_of_many(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        return x.prod(-1)  # FAULT

    return functional(compute, dtype, torch.full((2, 20), 2.0))


def overflow_beside_a_mask(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
        scores = x.masked_fill(hidden, -math.inf) + x * 3  # FAULT
        return scores.softmax(-1)

    return functional(compute, dtype, torch.full((4, 4), 30000.0))


def overflow_of_masked_scores(dtype: torch.dtype) -> Run:
    def compute(x: Tensor) -> Tensor:
        hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
        scores = x.masked_fill(hidden, -math.inf)
        scores = scores * 3  # FAULT
        return scores.softmax(-1)

    return functional(compute, dtype, torch.full((4, 4), 30000.0))


def poisoned_statistics(dtype: torch.dtype) -> Run:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
            nn.init.constant_(self.conv.weight, 100.0)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)  # FAULT
            return self.norm(x)

    return train(Net(), dtype, 100 * torch.rand(2, 3, 8, 8))


CASES = [
    Case(build=attention_scores, op="bmm", module="sick", verdict="overflow"),
    Case(build=feed_forward, op="addmm", module="sick.down", verdict="overflow"),
    Case(build=mean_of_squares, op="pow", module="sick", verdict="overflow"),
    Case(build=cast_of_a_large_activation, op="to", module="sick.project", verdict="overflow"),
    Case(build=convolution, op="convolution", module="body", verdict="overflow"),
    Case(build=sum_of_many, op="sum", module="body", verdict="overflow"),
    Case(build=exponential_in_16_bit, op="exp", module="body", verdict="overflow", names=("1.63e+05",)),
    Case(build=exponential_in_32_bit, op="exp", module="body", verdict="overflow", dtypes=ALL),
    Case(build=exponential_beyond_all_formats, op="exp", module="body", verdict="overflow", dtypes=ALL),
    Case(build=running_sum, op="cumsum", module="body", verdict="overflow"),
    Case(build=residual_sum, op="add", module="body", verdict="overflow"),
    Case(build=division_by_a_small_number, op="div", module="body", verdict="overflow"),
    Case(build=contraction, op="bmm", module="body", verdict="overflow"),
    Case(build=in_place, op="mul", module="body", verdict="overflow"),
    Case(build=in_place_through_a_view, op="pow", module="body", verdict="overflow"),
    Case(build=nested_outputs, op="mul", module="heads", verdict="overflow"),
    Case(build=dataclass_outputs, op="mul", verdict="overflow"),
    Case(build=custom_function, op="mul", module="body", verdict="overflow"),
    Case(build=checkpointed, op="mul", module="block", verdict="overflow"),
    Case(build=checkpointed_reentrant, op="mul", module="block", verdict="overflow"),
    Case(build=recurrent_growth, op="addmm", module="rnn", verdict="overflow"),
    Case(build=loss_in_16_bit, op="pow", verdict="overflow"),
    Case(build=product_of_many, op="to", module="body", verdict="overflow", phase="backward"),
    Case(build=overflow_beside_a_mask, op="mul", module="body", verdict="overflow"),
    Case(build=overflow_of_masked_scores, op="mul", module="body", verdict="overflow"),
    Case(build=poisoned_statistics, op="convolution", module="conv", verdict="overflow"),
]
