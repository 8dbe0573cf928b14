"""The gradient of a table in 16 bit is a sum in fp32, rounded once, whatever else the layer is told to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mezzo
import mezzo.diagnose as diagnose

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"padding_idx": 3},
    "by frequency": {"scale_grad_by_freq": True},
    "renormed": {"max_norm": 0.5},
}
FEW = torch.arange(700).reshape(2, 350) % 3
IDS = {"more than rows": torch.arange(4096) % 5, "fewer than rows": FEW, "of 32 bits": FEW.int()}


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(1000, 8, **options)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


def gradient(model: nn.Module, ids: Tensor, policy: str, factor: Tensor) -> Tensor:
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    amp.backward((model(ids).float() * factor).sum())
    with amp.unscaled_grads() as grads:
        return next(iter(grads.values())).double().clone()


@pytest.mark.parametrize("policy", ["bf16-master", "fp16-master, scaling=none", "bf16-master, ops=mezzo"])
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_of_a_row_met_often(options: dict[str, Any], ids: Tensor, policy: str) -> None:
    factor = torch.rand(*ids.shape, 8) / 64
    made = []
    for each in (policy, "fp32"):
        torch.manual_seed(0)
        made.append(gradient(Net(**options), ids, each, factor))
    atol = 2**-8 * float(made[1].abs().max())  # the sum and each summand, rounded once
    torch.testing.assert_close(made[0], made[1], rtol=2**-7, atol=atol / 16)


class Summed(nn.Module):
    """Adds positions to what it looked up in place, as models of transformers do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.table, self.positions, self.way = nn.Embedding(9, 8), nn.Embedding(64, 8), way

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids)
        if self.way == "+=":
            rows += self.positions(torch.arange(ids.shape[-1]))
        elif self.way == "slice":
            rows[..., 1:, :].mul_(2)
        else:
            rows.flatten().clamp_(-1, 1)
        return rows


@pytest.mark.parametrize("way", ["+=", "slice", "view"])
@pytest.mark.parametrize("shape", [(64,), (3, 32)], ids=str)
def test_what_was_looked_up_may_be_written_in_place(shape: tuple[int, ...], way: str) -> None:
    ids, grads = torch.randint(9, shape), []
    for policy in ("bf16-master", "fp32"):
        torch.manual_seed(0)
        grads.append(gradient(Summed(way), ids, policy, torch.ones(*shape, 8)))
    torch.testing.assert_close(grads[0], grads[1], rtol=2**-7, atol=2**-7)


BAGS: dict[str, dict[str, Any]] = {
    **OPTIONS, "padding that none has": {"padding_idx": 900}, "mean": {"mode": "mean"}, "mean, padding": {"mode": "mean", "padding_idx": 0},
    "max": {"mode": "max"},
}  # fmt: skip


@pytest.mark.parametrize("policy", ["bf16-master", "fp16-master, scaling=none", "bf16-master, ops=mezzo"])
@pytest.mark.parametrize("shape", ["rows", "offsets", "last offset", "weighted"])
@pytest.mark.parametrize("options", BAGS.values(), ids=BAGS)
def test_gradients_of_a_row_in_many_bags(options: dict[str, Any], shape: str, policy: str) -> None:
    if shape == "weighted" and (options.get("mode", "sum") != "sum" or "scale_grad_by_freq" in options):
        pytest.skip("torch takes weights for sums alone")
    ids, offsets, numbers = torch.arange(4096) % 5, torch.arange(0, 4096 + (shape == "last offset"), 2), []
    factor = torch.rand(2048, 8) / 64
    for each in (policy, "fp32"):
        torch.manual_seed(0)
        weights = (torch.rand(4096) + 0.5).requires_grad_()
        bag = nn.EmbeddingBag(1000, 8, **{"mode": "sum", **options}, include_last_offset=shape == "last offset")
        optimizer = torch.optim.SGD(bag.parameters(), lr=0.1)
        amp = mezzo.prepare(bag, optimizer, each)
        extra = {"per_sample_weights": weights.to(bag.weight.dtype)} if shape == "weighted" else {}
        out = bag(ids.reshape(2048, 2)) if shape == "rows" else bag(ids, offsets, **extra)
        amp.backward((out.float() * factor).sum())
        with amp.unscaled_grads() as grads:
            numbers.append([out.detach().double(), *(g.double().clone() for g in grads.values())])
        numbers[-1] += [weights.grad.double()] if shape == "weighted" and weights.grad is not None else []
    for got, exact in zip(*numbers, strict=True):
        torch.testing.assert_close(got, exact, rtol=2**-6, atol=2**-7 * float(exact.abs().max()))


def test_a_trace_sees_what_runs_without_it() -> None:
    grads = []
    for looks in (False, True):
        torch.manual_seed(0)
        model, factor = Net(), torch.rand(4096, 8)
        if not looks:
            grads.append(gradient(model, IDS["more than rows"], "bf16-master", factor))
            continue
        with diagnose.trace(model) as t:
            grads.append(gradient(model, IDS["more than rows"], "bf16-master", factor))
        assert t.report.is_healthy
    assert torch.equal(*grads)


def test_gradients_of_gradients() -> None:
    model = Net()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16-master")
    out = model(torch.tensor([1, 1, 2]))
    (first,) = torch.autograd.grad(out.float().square().sum(), model.table.weight, create_graph=True)
    (second,) = torch.autograd.grad(first.float().sum(), model.table.weight)
    assert second[1].tolist() == [4.0] * 8 and second[2].tolist() == [2.0] * 8
    amp.release()


def test_a_network_that_overflows_is_named_through_the_table() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.table(ids) * 1e5)

    model = Deep()
    with diagnose.trace(model) as t:
        gradient(model, torch.tensor([1, 2, 2]), "fp16, params=fp16, master=fp32, scaling=none", torch.ones(3, 2))
    found = t.report.findings[0]
    assert (found.verdict, found.op) == ("overflow", "mul")
