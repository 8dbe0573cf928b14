"""Faults that were there before: parameters, buffers, inputs, optimizer state. Faults of the update, and of depth."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tests.zoo.case import Case
from tests.zoo.faulty_forward import ALL, BF16, FP32, Run, train
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.norm(x)
        return self.last(x)


def bad_parameter(dtype: torch.dtype) -> Run:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(x)  # FAULT

    model = Two()
    with torch.no_grad():
        model.last.weight[3] = math.nan
    return train(model, dtype, torch.randn(4, 8))


def bad_embedding_row(dtype: torch.dtype) -> Run:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(10, 8), nn.Linear(8, 8)

        def forward(self, index: Tensor) -> Tensor:
            x = self.table(index)  # FAULT
            return self.last(x)

    model = Words()
    with torch.no_grad():
        model.table.weight[7, 0] = math.inf
    return train(model, dtype, torch.tensor([[1, 7, 3]]))


def bad_buffer(dtype: torch.dtype) -> Run:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.first(x))  # FAULT

    model = Normed().eval()
    model.norm.running_var[2] = math.nan
    return train(model, dtype, torch.randn(4, 8))


def bad_input(dtype: torch.dtype) -> Run:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            return self.first(x * scale)  # FAULT

    x = torch.randn(4, 8)
    x[2, 5] = math.nan
    return train(Plain(), dtype, x, torch.ones(8))


def bad_named_input(dtype: torch.dtype) -> Run:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor, extra: Tensor) -> Tensor:
            return self.first(x) + extra  # FAULT

    return train(Plain(), dtype, torch.randn(4, 8), extra=torch.full((8,), math.inf))


def bad_target(dtype: torch.dtype) -> Run:
    model, x, target = nn.Linear(8, 8), torch.randn(4, 8), torch.randn(4, 8)
    target[0, 0] = math.nan

    def run() -> None:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
            loss = F.mse_loss(model(x).float(), target)  # FAULT
        loss.backward()

    return run


def bad_target_of_a_loss_module(dtype: torch.dtype) -> Run:
    model, criterion, x, target = nn.Linear(8, 8), nn.L1Loss(), torch.randn(4, 8), torch.randn(4, 8)
    target[0, 0] = math.nan

    def run() -> None:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not FP32):
            loss = criterion(model(x).float(), target)  # FAULT
        loss.backward()

    return run


def bad_hidden_state(dtype: torch.dtype) -> Run:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(8, 8)

        def forward(self, x: Tensor, state: Tensor) -> Tensor:
            return self.rnn(x, state)[0]  # FAULT

    return train(Tagger(), dtype, torch.randn(3, 2, 8), torch.full((1, 2, 8), math.nan))


def bad_weight_of_an_lstm(dtype: torch.dtype) -> Run:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x)[0]  # FAULT

    model = Tagger()
    with torch.no_grad():
        model.rnn.weight_hh_l0[0, 0] = math.nan
    return train(model, dtype, torch.randn(3, 2, 8))


def bad_optimizer_state(dtype: torch.dtype) -> Run:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(16, 8)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.state[model[1].weight]["exp_avg"][0, 0] = math.nan

    def run() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()  # FAULT

    return run


def eps_of_adam_in_fp16(dtype: torch.dtype) -> Run:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8)
    x = (1e-5 * torch.randn(16, 8)).to(dtype)

    def run() -> None:
        model(x).float().mean().backward()
        model[0].weight.grad[0] = 0
        optimizer.step()  # FAULT

    return run


def lost_updates(dtype: torch.dtype) -> Run:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01)
    x = torch.randn(16, 8).to(dtype)

    def run() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).float().square().mean().backward()
            optimizer.step()  # FAULT

    return run


def weights_stepped_by_hand(dtype: torch.dtype) -> Run:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).to(dtype)
    x = torch.randn(16, 8).to(dtype)

    def run() -> None:
        for _ in range(3):
            model.zero_grad()
            model(x).float().square().mean().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= 1e-5 * p.grad  # FAULT

    return run


def average_that_does_not_move(dtype: torch.dtype) -> Run:
    model = nn.Linear(8, 8).to(dtype)
    average = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 8).to(dtype)).float().square().mean().backward()
            optimizer.step()
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.mul_(0.999).add_(p.detach(), alpha=0.001)  # FAULT

    return run


def sum_over_nothing(dtype: torch.dtype) -> Run:
    model = nn.Linear(3, 5)

    def run() -> None:
        hidden = torch.tensor([[False] * 5, [True] * 5])
        scores = model(torch.randn(2, 3)).masked_fill(hidden, -torch.inf)
        torch.logsumexp(scores, 1).mean().backward()  # FAULT

    return run


def learning_rate_too_high(dtype: torch.dtype) -> Run:
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e38)
    x = torch.randn(16, 8)

    def run() -> None:
        (model(x).square().mean() * 1000).backward()
        optimizer.step()  # FAULT

    return run


def momentum_overflows_in_fp16(dtype: torch.dtype) -> Run:
    model = nn.Sequential(nn.Linear(8, 8)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.99)
    x = torch.full((4, 8), 30000.0, dtype=dtype)

    def run() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).float().mean().backward()
            model[0].bias.grad.fill_(50000.0)
            optimizer.step()  # FAULT

    return run


def deep_tanh(dtype: torch.dtype) -> Run:
    layers = [layer for _ in range(30) for layer in (nn.Linear(16, 16), nn.Tanh())]
    return train(nn.Sequential(*layers), dtype, torch.randn(4, 16))


def deep_and_growing(dtype: torch.dtype) -> Run:
    layers = [nn.Linear(16, 16, bias=False) for _ in range(12)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=2.0)
    return train(nn.Sequential(*layers), dtype, torch.randn(4, 16))


def growing_residual(dtype: torch.dtype) -> Run:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(8, 8, bias=False)
            nn.init.eye_(self.body.weight)

        def forward(self, x: Tensor) -> Tensor:
            return x + 2 * self.body(x)  # FAULT

    return train(nn.Sequential(*[Block() for _ in range(14)]), dtype, torch.randn(4, 8))


def chaotic_gradients(dtype: torch.dtype) -> Run:
    class Amplify(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx, grad: Tensor) -> Tensor:
            return 5 * grad

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return Amplify.apply(x + 0.1 * self.body(x))

    return train(nn.Sequential(*[Block() for _ in range(14)]), dtype, torch.randn(4, 16))


def poisoned_by_an_earlier_step(dtype: torch.dtype) -> Run:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [torch.randn(4, 8) for _ in range(4)]

    def run() -> None:
        for i, x in enumerate(batches):
            optimizer.zero_grad()
            p = (model(x).relu() if i == 2 else model(x).exp()).clamp(max=10)
            loss = -p.log().mean()  # FAULT
            loss.backward()
            optimizer.step()

    return run


CASES = [
    Case(
        build=bad_parameter,
        op="layer_norm",
        module="last",
        verdict="inherited",
        dtypes=ALL,
        names=("parameter last.weight", "1 NaN"),
    ),
    Case(
        build=bad_embedding_row,
        op="embedding",
        module="table",
        verdict="inherited",
        dtypes=ALL,
        names=("parameter table.weight", "1 inf"),
    ),
    Case(
        build=bad_buffer,
        op="batch_norm",
        module="norm",
        verdict="inherited",
        dtypes=ALL,
        names=("buffer norm.running_var",),
    ),
    Case(build=bad_input, op="mul", verdict="inherited", dtypes=ALL, names=("input [0] of Plain",)),
    Case(build=bad_named_input, op="add", verdict="inherited", dtypes=ALL, names=("input ['extra'] of Plain",)),
    Case(build=bad_target, op="mse_loss", verdict="inherited", dtypes=ALL, names=("'target'",)),
    Case(build=bad_target_of_a_loss_module, op="sub", verdict="inherited", dtypes=ALL, names=("input [1] of L1Loss",)),
    Case(
        build=bad_hidden_state,
        op="addmm",
        module="rnn",
        verdict="inherited",
        dtypes=(FP32,),
        names=("input [1] of Tagger",),
    ),
    Case(
        build=bad_weight_of_an_lstm,
        op="mkldnn_rnn_layer",
        module="rnn",
        verdict="inherited",
        dtypes=(FP32,),
        names=("parameter rnn.weight_hh_l0",),
    ),
    Case(
        build=bad_optimizer_state,
        op="lerp",
        module="1",
        verdict="inherited",
        phase="optimizer",
        names=("exp_avg of 1.weight",),
        dtypes=(FP32,),
    ),
    Case(build=eps_of_adam_in_fp16, op="addcdiv", module="0", verdict="underflow", phase="optimizer", names=("1e-08",)),
    Case(build=lost_updates, op="step", module="0", verdict="lost-update", phase="optimizer", dtypes=(BF16,)),
    Case(build=weights_stepped_by_hand, op="sub", module="0", verdict="lost-update", phase="optimizer", dtypes=(BF16,)),
    Case(build=average_that_does_not_move, op="add", verdict="lost-update", phase="optimizer", dtypes=(BF16,)),
    Case(build=sum_over_nothing, op="logsumexp", verdict="singularity", dtypes=(FP32,)),
    Case(build=learning_rate_too_high, op="add", module="0", verdict="overflow", phase="optimizer", dtypes=(FP32,)),
    Case(build=momentum_overflows_in_fp16, op="add", module="0", verdict="overflow", phase="optimizer"),
    Case(build=deep_tanh, op="gradient", module="*.bias", verdict="vanishing", phase="backward", dtypes=(FP32,)),
    Case(build=deep_and_growing, op="Linear", module="*", verdict="exploding", dtypes=(FP32, BF16)),
    Case(build=growing_residual, op="mul", module="9", verdict="exploding"),
    Case(
        build=chaotic_gradients,
        op="gradient",
        module="*.body.weight",
        verdict="exploding",
        phase="backward",
        dtypes=(FP32,),
    ),
    Case(build=poisoned_by_an_earlier_step, op="log", verdict="singularity", dtypes=(FP32,)),
]
