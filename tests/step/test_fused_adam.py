"""torch's fused Adam and AdamW are stepped by their kernel alone where that is all that torch does, and come out as torch leaves them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

import mezzo
from mezzo._torch import TorchDispatchMode, version
from mezzo.step.update import bare_step


class LogOps(TorchDispatchMode):
    """Sees each op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Parts(nn.Module):
    """A part that every batch goes through, and one that only some do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.often, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, *, goes_through: bool) -> Tensor:
        hidden = self.first(x).relu()
        return self.last(self.often(hidden) if goes_through else hidden).square().mean()


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[::2], "weight_decay": 0.3}, {"params": params[1::2], "lr": 0.02, "betas": (0.8, 0.9)}]


def make(kind: type[Optimizer], **options: Any) -> tuple[Parts, Any]:
    torch.manual_seed(0)
    model = Parts()
    return model, kind(in_groups(model), **{"lr": 0.01, "fused": True, **options})


@pytest.fixture
def num_full_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often torch went through all weights by itself."""
    full = [0]

    def count(own: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            full[0] += 1
            return own(*args, **kwargs)

        return counted

    for kind in [k for k in (Adam, AdamW) if "_init_group" in vars(k)]:  # other tests leave the second its own
        monkeypatch.setattr(kind, "_init_group", count(kind._init_group))
    monkeypatch.setattr("mezzo.step.update.is_hooked", lambda _: False)  # other tests leave hooks for all optimizers
    return full


def train(amp: Any, model: Parts, steps: range) -> None:
    for k in steps:
        generator = torch.Generator().manual_seed(k)
        amp.zero_grad()
        amp.backward(model(torch.randn(4, 8, generator=generator), goes_through=k % 3 > 0))
        amp.step(max_norm=0.5 if k % 2 else None)


def state_of(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    return [t for p in model.parameters() for t in (p.detach(), *optimizer.state.get(p, {}).values())]


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    "options", [{}, {"maximize": True}, {"amsgrad": True}, {"lr": torch.tensor(0.01)}, {"fused": False}], ids=str
)
def test_weights_moments_and_counts_are_those_of_torch(
    kind: type[Optimizer],
    policy: str,
    options: dict[str, Any],
    num_full_steps: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (model, optimizer), (other, theirs) = make(kind, **options), make(kind, **options)
    train(mezzo.prepare(model, optimizer, policy), model, range(12))
    num_ours = num_full_steps[0]
    with monkeypatch.context() as patch:
        patch.setattr("mezzo.step.fused_adam._lists_of", lambda _: None)
        train(mezzo.prepare(other, theirs, policy), other, range(12))
    assert all(map(torch.equal, state_of(model, optimizer), state_of(other, theirs)))
    in_all = num_full_steps[0] - num_ours
    num_new = 2 if policy == "fp16" else 4  # of steps that make state: fp16 skips the one that leaves the middle out
    assert in_all == (22 if policy == "fp16" else 24) and num_ours == (
        num_new if options in ({}, {"maximize": True}) else in_all
    )


def test_a_scheduler_counts_the_steps(num_full_steps: list[int]) -> None:
    model, optimizer = make(AdamW)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    amp = mezzo.prepare(model, optimizer, "bf16")
    train(amp, model, range(2))
    before, optimizer._opt_called = num_full_steps[0], False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(amp, model, range(2, 3))
        scheduler.step()
    assert num_full_steps[0] == before


def narrow(optimizer: Any, p: Tensor) -> None:
    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].bfloat16()


def wide(optimizer: Any, p: Tensor) -> None:
    optimizer.state[p]["step"] = optimizer.state[p]["step"].double()


def inferred(optimizer: Any, p: Tensor) -> None:
    with torch.inference_mode():
        optimizer.state[p]["step"] = torch.tensor(3.0)


def absent(optimizer: Any, p: Tensor) -> None:
    del optimizer.state[p]["exp_avg_sq"]


def forgotten(optimizer: Any, p: Tensor) -> None:
    del optimizer.state[p]


def swapped(optimizer: Any, p: Tensor) -> None:
    entries = optimizer.state
    first = next(iter(entries))
    entries[first], entries[p] = entries[p], entries[first]


def moved(optimizer: Any, p: Tensor) -> None:
    optimizer.state[p] = optimizer.state.pop(p)


def loaded(optimizer: Any, p: Tensor) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def sparse(optimizer: Any, p: Tensor) -> None:
    assert p.grad is not None
    p.grad = p.grad.to_sparse()


def frozen(optimizer: Any, p: Tensor) -> None:
    p.grad = None


@pytest.mark.parametrize(
    "change",
    [narrow, wide, inferred, absent, forgotten, swapped, moved, loaded, sparse, frozen],
    ids=lambda f: f.__name__,
)
def test_changed_state_ends_as_it_ends_in_torch(
    change: Callable[[Any, Tensor], None], num_full_steps: list[int]
) -> None:
    ends, tensors = [], []
    for is_ours in (True, False):
        p = [nn.Parameter(torch.arange(6.0).reshape(2, 3) + k) for k in range(3)]
        optimizer: Any = AdamW(p, lr=0.1, fused=True)
        for _ in range(2):
            for k, one in enumerate(p):
                one.grad = torch.full_like(one, k + 1.0)
            optimizer.step()
        change(optimizer, p[1])
        try:
            bare_step(optimizer)() if is_ours else optimizer.step()
            ends.append("")
        except (RuntimeError, KeyError) as error:
            ends.append(f"{type(error).__name__}: {error}")
        tensors.append([t for one in p for t in (one.detach(), *optimizer.state.get(one, {}).values())])
    assert ends[0] == ends[1] and len(tensors[0]) == len(tensors[1])
    assert all(map(torch.equal, *tensors))


@pytest.mark.parametrize("found_inf", [0.0, 1.0])
def test_a_step_that_the_device_decides_is_that_of_torch(found_inf: float, num_full_steps: list[int]) -> None:
    tensors = []
    for step in (bare_step, lambda optimizer: optimizer.step):
        p = nn.Parameter(torch.arange(6.0))
        optimizer: Any = AdamW([p], lr=0.1, fused=True)
        for k in range(3):
            p.grad = torch.full_like(p, 8.0 + k)
            if k == 2:
                optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(found_inf)
            step(optimizer)()
        tensors.append([p.detach(), p.grad, *optimizer.state[p].values()])
    assert all(map(torch.equal, *tensors)) and float(tensors[0][2]) == 3 - found_inf
    assert num_full_steps[0] == 4


def test_versions_move_as_they_do_in_torch(num_full_steps: list[int]) -> None:
    moved = []
    for step in (bare_step, lambda optimizer: optimizer.step):
        p = nn.Parameter(torch.ones(3))
        optimizer: Any = AdamW([p], fused=True)
        versions = []
        for _ in range(3):
            p.grad = torch.ones(3)
            step(optimizer)()
            versions.append([version(t) for t in (p, *optimizer.state[p].values())])
        moved.append(versions)
    assert moved[0] == moved[1]


@pytest.mark.parametrize(
    "watch",
    [torch.device("cpu"), LogOps(), torch.overrides.BaseTorchFunctionMode()],
    ids=["device", "dispatch", "function"],
)
def test_a_mode_sees_what_torch_does(watch: Any, num_full_steps: list[int]) -> None:
    model, optimizer = make(AdamW)
    amp = mezzo.prepare(model, optimizer, "bf16")
    train(amp, model, range(2))
    before = num_full_steps[0]
    with watch:
        train(amp, model, range(2, 3))
    assert num_full_steps[0] == before + 2
