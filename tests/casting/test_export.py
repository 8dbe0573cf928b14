"""torch.export of a model with regions: the program has the dtypes and the bits of eager, strict and not."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.torch_versions import traces_regions
from torch import Tensor, nn
from torch.export import ExportedProgram, export
from torch.utils.checkpoint import checkpoint

import mezzo

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:While compiling, we found certain side effects",  # the strict exporter sees a region being entered and left
)
REGIONS: dict[str, dict[str, Any]] = {
    "dispatcher": {},
    "fp16": {"dtype": torch.float16},
    "edited": {"policy": "bf16, modules=none, op:softmax=fp32"},
    "mezzo": {"policy": "bf16, modules=none, ops=mezzo"},
    "off": {"enabled": False},
}


class WithRegion(nn.Module):
    def __init__(self, **region: Any) -> None:
        super().__init__()
        self.linear, self.region = nn.Linear(8, 8), region

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with mezzo.autocast("cpu", **self.region):
            y = self.linear(x).softmax(-1)
        return y, self.linear(x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        with mezzo.autocast("cpu"):
            y = self.linear(x)
            with mezzo.autocast("cpu", enabled=False):
                z = self.linear(y.float())
            with torch.autocast("cpu", enabled=False):
                w = self.linear(y.float())
            with mezzo.autocast("cpu", policy="bf16, modules=none, op:linear=fp32"):
                v = self.linear(y)
        return y, z, w, v, self.linear(x)


class Decorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    @mezzo.autocast("cpu")
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).exp()


def prepared(policy: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    mezzo.prepare(model, None, policy)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda region=region: WithRegion(**region) for name, region in REGIONS.items()},
    "nested": Nested,
    "decorated": Decorated,
    **{
        policy: lambda policy=policy: prepared(policy)
        for policy in (
            "bf16, output=none",
            "bf16, output=fp32",
            "bf16, ops=mezzo",
            "bf16-master",
            "bf16, module:0=fp32",
        )
    },
}


TRACED = ("dispatcher", "nested", "bf16, output=fp32", "bf16, ops=mezzo")
"""Whose strict programs are made in the quick suite too."""


def strict_or_not(names: Iterable[str], traced: Sequence[str]) -> list[Any]:
    """Each name with both exporters, the strict one of most in the slow tests."""
    cases = [pytest.param(name, False, id=f"{name}-not-strict") for name in names]
    return cases + [
        pytest.param(name, True, id=f"{name}-strict", marks=[traces_regions, *([] if name in traced else [pytest.mark.slow])])
        for name in names
    ]  # fmt: skip


def check_program(program: ExportedProgram, model: nn.Module, x: Tensor) -> None:
    got, want = program.module()(x), model(x)
    for ours, theirs in zip(*((t,) if isinstance(t, Tensor) else t for t in (got, want)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(("name", "strict"), strict_or_not(MODELS, TRACED))
def test_the_program_casts_as_eager_does(name: str, strict: bool) -> None:
    model, x = MODELS[name](), torch.randn(4, 8)
    check_program(export(model, (x,), strict=strict), model, x)
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(("name", "strict"), strict_or_not(["dispatcher", "nested", "bf16, output=fp32"], ["nested"]))
def test_core_aten_ops_cast_too(name: str, strict: bool) -> None:
    model, x = MODELS[name](), torch.randn(4, 8)
    check_program(export(model, (x,), strict=strict).run_decompositions(), model, x)


def test_a_region_around_the_program_casts_it() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    with mezzo.autocast("cpu"):
        want = model(x)
        program = export(model, (x,), strict=True)
        assert torch.equal(program.module()(x), want)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=traces_regions)])
@pytest.mark.parametrize("around", [torch.autocast, mezzo.autocast])
@pytest.mark.parametrize("name", ["bf16, output=fp32", "bf16, module:0=fp32", "bf16-master"])
def test_a_region_around_the_export_changes_nothing_in_a_prepared_model(name: str, around: Any, strict: bool) -> None:
    model, x = MODELS[name](), torch.randn(4, 8)
    with around("cpu"):
        program = export(model, (x,), strict=strict)
    check_program(program, model, x)
    assert not torch.is_autocast_enabled("cpu")


class Unfinished(nn.Module):
    """A model whose traced graph the strict exporter cannot run: torch (2.13) has no way through a checkpoint there."""

    def __init__(self, **region: Any) -> None:
        super().__init__()
        self.first, self.last, self.region = nn.Linear(8, 8), nn.Linear(8, 8), region

    def forward(self, x: Tensor) -> Tensor:
        with mezzo.autocast("cpu", **self.region) if self.region else nullcontext():
            return checkpoint(self.last, self.first(x), use_reentrant=False)


@traces_regions
@pytest.mark.parametrize("region", [{}, pytest.param({"dtype": torch.float16}, marks=pytest.mark.slow)])
def test_an_export_that_fails_leaves_no_region_on(region: dict[str, Any]) -> None:
    model = Unfinished(**region)
    if not region:
        mezzo.prepare(model, None, "bf16")
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    with contextlib.suppress(RuntimeError):
        export(model, (torch.randn(4, 8),), strict=True)
    gc.collect()
    assert (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    ) == before


def test_training_through_an_exported_program() -> None:
    model, x = MODELS["dispatcher"](), torch.randn(4, 8)
    program = export(model, (x,), strict=False).module()
    for one in (model, program):
        one(x)[0].float().square().sum().backward()
    want = dict(model.named_parameters())["linear.weight"].grad
    got = dict(program.named_parameters())["linear.weight"].grad
    assert want is not None and torch.equal(got, want)
