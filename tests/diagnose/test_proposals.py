"""Rules that `compare` proposes: the imprecise module first, what they gain and cost, and what overflows next."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from tests.diagnose.test_agreement import TERMS, Net, agrees, length, ratio, square
from tests.tolerance import relative
from torch import Tensor, nn

import mezzo
import mezzo.diagnose as diagnose
from mezzo import Policy
from mezzo.diagnose.compare_report import Proposal
from mezzo.diagnose.proposals import DB_FOR_ALL_WORK, ranked


class Cancel(nn.Module):
    """Loses eight bits: a planted fault that no single op shows."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(torch.add(x, 64.0), -64.0)


class Layer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.mix, self.inner = nn.Linear(16, 16), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.mix(x))


class Stack(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, inner))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def gradient_error(model: nn.Module, x: Tensor, policy: str | Policy) -> float:
    bound = copy.deepcopy(model)
    mezzo.prepare(bound, None, policy)
    square(bound, x).backward()
    exact = copy.deepcopy(model).double()
    exact(x.double()).square().mean().backward()
    return ratio([p.grad for p in exact.parameters()], [p.grad for p in bound.parameters()])


def test_a_planted_imprecise_module_is_named_first_and_mended() -> None:
    model, x = Stack(nn.Tanh(), nn.Tanh(), Cancel(), nn.Tanh()), torch.randn(8, 16)
    report = diagnose.compare(model, x, square, "bf16")
    assert report.ranking[0].module == "layers.2.inner"
    first, second = report.ranking[0].forward, report.ranking[1].forward
    assert first is not None and second is not None and first.local < second.local - 20
    mending = [p for p in report.proposals if p.edit == "layers.2.inner=fp32"]
    assert len(mending) == 1 and mending[0].gain > 10
    assert [worth(p) for p in report.proposals] == sorted((worth(p) for p in report.proposals), reverse=True)
    before = gradient_error(model, x, "bf16")
    for p in report.proposals:
        after = gradient_error(model, x, f"bf16, {p.edit}")
        assert after < before
        agrees(p.gradients or 0.0, after, TERMS)
        assert length(p.gain) == pytest.approx(after / before, rel=2 * relative(torch.float32, TERMS) / after)


@pytest.mark.parametrize(
    ("policy", "weight", "best", "is_named"),
    [("fp16, scaling=none", 1e-8, "scaling=dynamic", True), ("fp16", 1e-14, "compute=bf16", True), ("fp16, scaling=none", 1e-5, "scaling=dynamic", False)],
)  # fmt: skip
def test_gradients_that_16_bit_flushed_are_named_and_kept_by_an_edit(
    policy: str, weight: float, best: str, is_named: bool
) -> None:
    """They are as far from fp32 as they are long: 0 dB."""

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).float().square().mean() * weight

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(8, 16)
    found = diagnose.compare(model, x, loss_of, policy)
    is_told = f"gradients that are 0 at loss scale {found.measurement.scale:g}" in found.document().verdict
    assert is_told is is_named, found.document().verdict
    assert best in [p.edit for p in found.proposals] and found.proposals[0].gain > 20
    better = diagnose.compare(model, x, loss_of, f"{policy}, {found.proposals[0].edit}", tries=0).measurement
    assert better.figure == pytest.approx(found.proposals[0].gradients) and better.figure > 30


def worth(p: Proposal) -> float:
    return p.gain - DB_FOR_ALL_WORK * p.cost


def test_a_cheap_rule_comes_before_a_dear_one_that_gains_little_more() -> None:
    def edit(name: str, gain: float, cost: float) -> Proposal:
        return Proposal(edit=name, gain=gain, gradients=None, outputs=0.0, cost=cost)

    found = [
        edit("all layers", 12.5, 0.4),
        edit("one norm", 12.0, 0.001),
        edit("a softmax", 3.0, 0.0),
        edit("inf", math.inf, 0.3),
    ]
    assert [p.edit for p in ranked(found)] == ["inf", "one norm", "all layers", "a softmax"]


def test_layers_that_are_alike_get_one_rule() -> None:
    model, x = Stack(*(Cancel() for _ in range(11))), torch.randn(8, 16)
    report = diagnose.compare(model, x, square, "bf16", tries=1)
    assert report.tried == ("layers.[0-9].inner=fp32, layers.[0-9][0-9].inner=fp32",)
    assert report.proposals[0].edit == report.tried[0]


def test_each_proposal_states_the_work_it_takes_to_fp32() -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.add(torch.add(x @ x.t() / 64, 64.0), -64.0)

    model, x = nn.Sequential(nn.Linear(64, 64, bias=False), Product()), torch.randn(32, 64)
    report = diagnose.compare(model, x, None, "bf16")
    linear, product = 2 * 32 * 64 * 64, 2 * 32 * 64 * 32
    # backward of the first layer needs no gradient of its input; the product takes two
    assert report.measurement.flops == 2 * linear + 3 * product
    dear = {f"module:{i}=fp32": n / report.measurement.flops for i, n in ((0, 2 * linear), (1, 3 * product))}
    assert dear["module:0=fp32"] > 0.5 >= dear["module:1=fp32"]
    assert "module:0=fp32" not in report.tried and "module:1=fp32" in report.tried
    costs = {p.edit: p.cost for p in report.proposals}
    assert costs["module:1=fp32"] == dear["module:1=fp32"]


def test_an_overflow_is_an_infinite_error_and_its_rule_is_found() -> None:
    model, x = Net(), torch.randn(8, 16)
    nn.init.constant_(model.up.weight, 3e4)
    report = diagnose.compare(model, x, square, "fp16, *norm=fp32")
    m = report.measurement
    assert not report.is_healthy and m.gradients is not None and m.gradients.total == -math.inf
    assert math.isfinite(m.reference_loss)
    assert [e.module for e in m.modules if e.local_share == math.inf] == ["up"]
    assert report.proposals[0].edit == "module:up=fp32" and report.proposals[0].gain == math.inf
    assert math.isfinite(gradient_error(model, x, "fp16, *norm=fp32, module:up=fp32"))
    assert json.loads(report.to_json())["measurement"]["gradients"]["total"] == "-inf"


def test_an_overflow_is_followed_to_whatever_overflows_next() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in ("a", "b", "c")})
            self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts.values():
                x = part(x)
            return self.head(self.norm(x))

    model, x = Chain(), torch.randn(8, 16)
    nn.init.constant_(model.parts["b"].weight, 6e4)
    report = diagnose.compare(model, x, square, "fp16, *norm=fp32")
    [mending] = report.proposals
    assert set(mending.edit.split(", ")) == {"parts.b=fp32", "parts.c=fp32"}
    assert not math.isfinite(gradient_error(model, x, "fp16, *norm=fp32, parts.b=fp32"))
    assert math.isfinite(gradient_error(model, x, f"fp16, *norm=fp32, {mending.edit}"))


def test_the_loss_scale_is_one_that_a_scaler_would_settle_at() -> None:
    model, x = nn.Linear(16, 4), torch.randn(8, 16)
    big = lambda model, batch: square(model, batch) * 64  # noqa: E731
    m = diagnose.compare(model, x, big, "fp16", tries=0).measurement
    assert m.scale < 65536 and m.gradients is not None and math.isfinite(m.gradients.total)

    def finite(scale: float) -> bool:
        bound = copy.deepcopy(model)
        mezzo.prepare(bound, None, "fp16")
        (big(bound, x) * scale).backward()
        return all(bool(p.grad.isfinite().all()) for p in bound.parameters())

    assert finite(m.scale) and not finite(2 * m.scale)
