"""Runs that torch trains and no check may stop: unusual dtypes, magnitudes, masks, optimizers and rates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.step.step_models import INF, Net, batch, mse
from torch import Tensor, nn

import mezzo
from mezzo.errors import InvariantError, NonFiniteStep


def train(model: nn.Module, optimizer: Any, policy: str = "fp32", *, steps: int = 5, factor: float = 1.0) -> list[bool]:
    """Take steps whose invariants are all looked at; return which were applied."""
    amp = mezzo.prepare(model, optimizer, f"{policy}, guard.check_every=1")
    applied = []
    for _ in range(steps):
        x, y = batch()
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        dtype = dtype if dtype is torch.float64 else torch.float32
        amp.zero_grad()
        amp.backward(mse(model(x.to(dtype)), y.to(dtype)) * factor)
        applied.append(bool(amp.step()))
    amp.report(strict=True)
    return applied


class Double(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.norm(self.stats(self.inner(x)).relu()))


@pytest.mark.parametrize("fused", [False, True])
def test_an_fp64_model_under_fp32(fused: bool) -> None:
    """`policy="fp32"` for a model in fp64 is the advice of mezzo's own error."""
    model = Double().double()
    assert all(train(model, torch.optim.AdamW(model.parameters(), fused=fused)))
    assert all(p.dtype is torch.float64 for p in model.parameters())


@pytest.mark.parametrize("scaling", ["", ", scaling.init_scale=1024"])
@pytest.mark.parametrize("factor", [1e-22, 1e-30, 1e18, 1e20])
def test_gradients_whose_squares_fp32_cannot_hold(factor: float, scaling: str) -> None:
    """They are finite, so the step is taken, and the norm is that of fp64."""
    model = Net(has_batch_norm=False)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0), f"fp32, guard.check_every=1{scaling}")
    for _ in range(4):
        x, y = batch()
        amp.zero_grad()
        amp.backward(mse(model(x), y) * factor)
        with amp.unscaled_grads() as grads:
            want = torch.cat([g.double().flatten() for g in grads.values()]).norm()
        result = amp.step(max_norm=1.0)
        assert result.applied and result.grad_norm == pytest.approx(float(want), rel=1e-4)


@pytest.mark.parametrize("value", [-INF, INF])
def test_a_frozen_parameter_that_is_a_mask(value: float) -> None:
    class Masked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Parameter(torch.tensor([0.0, value]), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.mask[0]

    model = Masked()
    amp = mezzo.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), "fp16, scaling.init_scale=256, guard.check_every=1"
    )
    for factor in (1.0, INF, 1.0, 1.0):  # a skipped step asks for weights that are not finite
        x, y = batch()
        amp.zero_grad()
        amp.backward(mse(model(x), y) * factor)
        assert bool(amp.step()) is (factor == 1)


FROZEN: dict[str, Any] = {
    "edges": lambda: torch.eye(3).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    "not filled in yet": lambda: torch.full((3,), math.nan),
    "fp8": lambda: torch.ones(4).to(torch.float8_e4m3fn),
}


@pytest.mark.filterwarnings("ignore")  # torch calls some of them old, or young
@pytest.mark.parametrize("kind", FROZEN)
def test_a_frozen_parameter_of_any_kind(kind: str) -> None:
    model = Net()
    model.frozen = nn.Parameter(FROZEN[kind](), requires_grad=False)
    assert all(train(model, torch.optim.SGD(model.parameters(), lr=0.01), "bf16"))


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_trained_sparse_parameter() -> None:
    class Weighted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.edges = nn.Parameter(torch.eye(3).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.sparse.sum(self.edges)

    model = Weighted()
    assert all(train(model, torch.optim.SGD(model.parameters(), lr=0.01), "bf16"))


@pytest.mark.parametrize("policy", ["bf16", "fp16, scaling.init_scale=256"])
def test_a_buffer_that_forward_assigns(policy: str) -> None:
    class Remembering(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.inner(x).detach().mean(0)
            return super().forward(x)

    model = Remembering()
    assert all(train(model, torch.optim.SGD(model.parameters(), lr=0.01), policy))


def test_only_a_group_with_rate_zero_has_gradients() -> None:
    model = Net()
    model.unused = nn.Linear(2, 2)
    groups = [{"params": [*Net.parameters(model)][:8], "lr": 0.0}, {"params": model.unused.parameters(), "lr": 0.1}]
    assert all(train(model, torch.optim.SGD(groups, lr=0.1)))


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_one_weight_in_a_long_warm_up(optimizer: Any) -> None:
    """fp32 loses these updates, in torch as well; it is said, and the run goes on."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).sum(1, keepdim=True)

    model = One()
    assert all(train(model, optimizer(model.parameters(), lr=1e-9)))


class EverySecond(torch.optim.SGD):
    """Moves at every second call, as optimizers that accumulate do."""

    calls = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.calls += 1
        return super().step(closure) if self.calls % 2 == 0 else None


class WideState(torch.optim.SGD):
    """Keeps fp64 sums, and the least loss so far, which starts at inf."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("total", torch.zeros_like(p, dtype=torch.float64)).add_(p.grad.detach().double())
            state.setdefault("least", torch.full_like(p, INF))
            state.setdefault("bound", torch.tensor(INF))
        return super().step(closure)


@pytest.mark.parametrize("optimizer", [EverySecond, WideState])
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_optimizers_of_other_habits(optimizer: Any, policy: str) -> None:
    model = Net()
    assert all(train(model, optimizer(model.parameters(), lr=0.01), policy, steps=8))


@pytest.mark.parametrize("name", ["NAdam", "RAdam", "ASGD", "Adamax", "Adafactor", "Rprop"])
def test_under_a_default_dtype_of_fp64(name: str) -> None:
    model = Net()
    torch.set_default_dtype(torch.float64)
    try:
        assert all(train(model, getattr(torch.optim, name)(model.parameters(), lr=0.01)))
    finally:
        torch.set_default_dtype(torch.float32)


class Spare(Net):
    """Looks rows up in a table, of which one is NaN and never asked for, and has a layer that its forward leaves out."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.table, self.spare = nn.Embedding(4, 8), nn.Linear(4, 4).requires_grad_(trained)
        with torch.no_grad():
            self.table.weight[3] = self.spare.weight[0] = math.nan

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table(torch.arange(x.shape[0]) % 3).float().mean(1, keepdim=True)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16-master", "fp16, scaling.init_scale=65536"])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_nan_that_no_step_reads(kind: Any, trained: bool, policy: str) -> None:
    """Neither a healthy step nor one that a batch, or the loss scale, spoiled lays it at its door."""
    model = Spare(trained)
    amp = mezzo.prepare(model, kind(model.parameters(), lr=0.01), policy + ", guard.check_every=1")
    for factor in (*[1.0] * 6, INF, 1.0, math.nan, 1.0):
        x, y = batch()
        amp.zero_grad()
        amp.backward(mse(model(x), y) * factor)
        if "fp16" not in policy:
            assert bool(amp.step()) is math.isfinite(factor)
        else:  # the scale is on its way down from where gradients overflow
            amp.step()
    assert amp.model.table.weight[:3].isfinite().all()


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16, scaling.init_scale=256"])
@pytest.mark.parametrize("name", ["table", "inner"])
@pytest.mark.parametrize("trained", [False, True])
def test_nan_that_a_step_reads_is_named_at_once(name: str, trained: bool, policy: str) -> None:
    model = Spare(trained)
    model.get_submodule(name).requires_grad_(trained)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), policy)
    x, y = batch()
    amp.backward(mse(model(x), y))
    assert amp.step()
    amp.zero_grad()
    with torch.no_grad():
        model.get_submodule(name).weight[0, 0] = math.nan
    amp.backward(mse(model(x), y))
    with pytest.raises(NonFiniteStep, match=rf"no loss scale can fix it: inf or NaN in 1 parameter: {name}\.weight \("):
        amp.step()


def test_an_optimizer_that_never_moves_is_found() -> None:
    """No bit of any weight in a hundred steps with gradients and a rate: not one of the runs above."""

    class Idle(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    model = Net()
    amp = mezzo.prepare(model, Idle(model.parameters(), lr=0.1), "fp32, guard.check_every=50")
    with pytest.raises(InvariantError, match=r"100 steps .* changed none of the 8 parameters of Idle"):
        for _ in range(101):
            x, y = batch()
            amp.zero_grad()
            amp.backward(mse(model(x), y))
            amp.step()
    assert amp.counters().applied == 100
