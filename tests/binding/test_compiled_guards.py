"""What a compiler asks of the modules of a prepared model at each call: little, and enough to notice another policy."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.pairwise import pairwise
from tests.torch_versions import TORCH, traces_regions, warns_of_breaks
from torch import nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import mezzo
from mezzo.errors import PolicyError

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:While compiling"),
    warns_of_breaks,
]


class Chain(nn.Sequential):
    """A class of this file's own, so that its compiled graphs are its own too."""


def chain(policy: str) -> nn.Module:
    torch.manual_seed(0)
    parts = [part for _ in range(4) for part in (nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.0))]
    model = Chain(*parts)
    mezzo.prepare(model, policy=policy)
    return model


@traces_regions
def test_a_module_is_asked_for_its_class_alone() -> None:
    model = chain("bf16")
    model.compile(backend="eager", fullgraph=True)
    model(torch.randn(2, 8))
    compiled = inspect.getclosurevars(type(model).forward).nonlocals["run_in_one_graph"]
    (entry,) = _debug_get_cache_entry_list(compiled.__code__)
    guards = str(entry.guard_manager).splitlines()
    asked = [line for line in guards if re.search(r"_modules\[.*\._mezzo_", line)]
    assert asked == []
    assert sum("TYPE_MATCH" in line and "_modules['" in line for line in guards) >= 12


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())  # type: ignore[no-any-return]


@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
def test_a_compiled_model_is_one_graph(policy: str) -> None:
    torch.compiler.reset()
    model, counter = Two(), CompileCounter()
    mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    torch.compile(model, backend=counter)(torch.randn(2, 8))
    assert counter.frame_count == 1


class Broken(Two):
    """A layer that breaks the graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        return x + self.second(x)


class Block(Two):
    def __init__(self) -> None:
        super().__init__()
        self.first = Broken()


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float()


def graphs_breaks_and_frames(policy: str | None, lengths: tuple[int, ...]) -> tuple[int, int, int]:
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Stacked()
    amp = None if policy is None else mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy)
    compiled = torch.compile(model, backend="eager")
    for length in lengths:
        with torch.autocast("cpu", torch.bfloat16, enabled=amp is None):
            loss = compiled(torch.ones(length, 8)).square().mean()
        (torch.Tensor.backward if amp is None else amp.backward)(loss)
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), counters["frames"]["total"]


@traces_regions
@pytest.mark.parametrize(
    "policy", ["bf16-master", *(pytest.param(one, marks=pytest.mark.slow) for one in ("bf16", "bf16, ops=mezzo"))]
)
def test_a_graph_that_breaks_in_the_region_is_tried_once_more_than_under_torch_autocast(policy: str) -> None:
    theirs, ours = (graphs_breaks_and_frames(one, (3, 5, 7)) for one in (None, policy))
    assert ours[0] == theirs[0]
    assert ours[1] == theirs[1] + 1, "the model with its region, at the first call alone"
    assert ours[2] <= theirs[2] + 3, "that one, and each of mezzo's that meets the region's mode"


@traces_regions
def test_models_under_one_policy_share_a_graph_and_another_policy_is_noticed() -> None:
    torch.compiler.reset()
    counter, x = CompileCounter(), torch.randn(2, 8)
    for policy, graphs, dtype in (("bf16", 1, torch.bfloat16), ("bf16", 1, torch.bfloat16), ("fp16", 2, torch.float16)):
        model = chain(f"{policy}, output={policy}")
        model.compile(backend=counter, fullgraph=True)
        assert model(x).dtype is dtype
        assert counter.frame_count == graphs
    mezzo.prepare(model, policy="bf16, output=bf16")
    assert model(x).dtype is torch.bfloat16


def test_a_module_with_a_rule_and_one_of_another_model_keep_their_own() -> None:
    seen: list[torch.dtype] = []

    class Seen(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            seen.append(out.dtype)
            return out

    other = Chain(Seen(8, 8))
    mezzo.prepare(other, policy="fp16")

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.wide = Seen(8, 8), Seen(8, 8)
            self.__dict__["other"] = other

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.wide(self.low(x)) + self.other[0](x)

    model = Outer()
    mezzo.prepare(model, policy="bf16, module:wide=fp32")
    model.compile(backend="eager")
    model(torch.randn(2, 8))
    assert seen == [torch.bfloat16, torch.float32, torch.float16]
    model.low, model.wide = model.wide, model.low  # a compiled graph is of what stood where
    model(torch.randn(2, 8))
    assert seen[3:] == [torch.float32, torch.bfloat16, torch.float16]


class Marked:
    """What somebody else mixes into the class of a module, as sharding does."""


@pytest.mark.parametrize("is_compiled", [False, True])
def test_modules_of_a_class_made_above_the_bound_one_keep_it_and_their_rules(is_compiled: bool) -> None:
    torch.compiler.reset()
    model = Two()
    mezzo.prepare(model, policy="bf16, module:second=fp32")
    for part in (model.first, model.second):
        part.__class__ = type("MarkedLinear", (Marked, type(part)), {})
    if is_compiled:
        model.compile(backend="eager")
    x = torch.randn(2, 8)
    before = model(x)
    model.first, model.second = model.second, model.first
    mezzo.prepare(model, policy="bf16, module:second=fp32")
    assert isinstance(model.first, Marked) and isinstance(model.second, Marked)
    first = F.linear(x.bfloat16(), model.first.weight.bfloat16(), model.first.bias.bfloat16()).relu()
    assert torch.equal(model(x), F.linear(first.float(), model.second.weight, model.second.bias))
    assert not torch.equal(model(x), before)


@pytest.mark.parametrize("backend", [None, "eager"])
@pytest.mark.parametrize(("policy", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float32)])
def test_a_part_of_another_model_under_an_equal_policy_is_a_part_of_this_one(
    backend: str | None, policy: str, dtype: torch.dtype
) -> None:
    other = Chain(nn.Linear(8, 8))
    mezzo.prepare(other, policy=policy)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.__dict__["other"], self.seen, self.own = other, None, nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.other[0](self.own(x))
            self.seen = out.dtype
            return out

    model = Outer()
    mezzo.prepare(model, policy="bf16")
    if backend is not None:
        model.compile(backend=backend)
    assert model(torch.randn(2, 8)).dtype is torch.float32
    assert model.seen is dtype


class Seen(nn.Linear):
    """A layer that says in which dtype it ran."""

    dtypes: ClassVar[list[torch.dtype]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.dtypes.append(out.dtype)
        return out


class Adapted(nn.Module):
    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.up = base, Seen(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(x)


@pairwise(
    policy=["bf16, module:0=fp32", "bf16-master, module:0=fp32", "bf16-master"],
    change=["a new layer", "an adapter", "a layer of another model"],
    way=["eager", "compile", "torch.compile", "function", "layers"],
)
def test_modules_that_come_into_a_compiled_model_follow_its_policy(policy: str, change: str, way: str) -> None:
    torch.compiler.reset()
    Seen.dtypes.clear()
    model = Chain(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = mezzo.prepare(model, optimizer, policy=policy)
    forward: Callable[[torch.Tensor], torch.Tensor] = model
    if way == "compile":
        model.compile(backend="eager", fullgraph=TORCH >= (2, 12))
    elif way == "layers":
        model[0].compile(backend="eager")
    elif way != "eager":
        forward = torch.compile(model if way == "torch.compile" else lambda x: model(x), backend="eager")

    def step() -> None:
        amp.backward(forward(torch.ones(4, 8)).float().sum())
        assert amp.step()
        amp.zero_grad()

    step()
    if change == "an adapter":
        model[0] = Adapted(model[0])
        optimizer.add_param_group({"params": list(model[0].up.parameters())})
    else:
        other = Chain(Seen(8, 8))
        if change != "a new layer":
            mezzo.prepare(other, policy="fp16")
        model[0] = other[0]
        optimizer.param_groups[0]["params"][:2] = list(model[0].parameters())
    for _ in range(3):
        step()
    low = policy == "bf16-master"
    assert Seen.dtypes == [torch.bfloat16 if low else torch.float32] * len(Seen.dtypes)
    assert len(Seen.dtypes) >= 3
    new = model[0].up if change == "an adapter" else model[0]
    assert new.weight.dtype is (torch.bfloat16 if low else torch.float32)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_change_that_no_policy_allows_is_refused_by_the_step_of_a_compiled_model(compiles: bool) -> None:
    torch.compiler.reset()
    model = Chain(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = mezzo.prepare(model, optimizer, policy="bf16, module:1=fp32")
    if compiles:
        model.compile(backend="eager")

    def step() -> None:
        amp.backward(model(torch.ones(4, 8)).sum())
        amp.step()
        amp.zero_grad()

    step()
    before, model[0] = model[0], model[1]
    with pytest.raises(PolicyError, match="are one Linear in two places"):
        step()
    model[0] = before
    step()
