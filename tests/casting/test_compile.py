"""torch.compile traces a region away: no graph break, no recompile, the dtypes and gradients of eager."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo
from tests.casting.test_cast_cache import BF16, REGIONS
from tests.torch_versions import traces_regions, warns_of_breaks
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from mezzo.casting import autocast, cast_cache, custom_bwd, custom_fwd

# Around a compiled function a region of torch's own table is state, one with rules is a mode to be traced.
AROUND = ["dispatcher", *(pytest.param(name, marks=traces_regions) for name in ("mode", "persistent"))]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tied, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(torch.relu(self.tied(x)))
        return y, nn.functional.mse_loss(self.tied(y).softmax(-1), x)


def contains(net: nn.Module, region: dict[str, object]) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with autocast("cpu", **region):
            return net(x)

    return forward


def decorated(net: Net, region: dict[str, object]) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    return autocast("cpu", **region)(net)


def step(
    net: nn.Module, forward: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor
) -> list[torch.Tensor]:
    net.zero_grad()
    y, loss = forward(x)
    loss.backward()
    return [y.detach(), loss.detach(), *[p.grad.clone() for p in net.parameters() if p.grad is not None]]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


def check(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert [t.dtype for t in got] == [t.dtype for t in want]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def check_close(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert [t.dtype for t in got] == [t.dtype for t in want]
    for a, b in zip(got, want, strict=True):
        # Inductor fuses and keeps fp32 between ops: at most the rounding of three 16-bit stores is saved.
        assert (a.float() - b.float()).abs().max() <= 3 * torch.finfo(BF16).eps * b.abs().max().float()


@traces_regions
@pytest.mark.parametrize(
    ("name", "style"),
    [
        *((name, contains) for name in REGIONS),
        *(pytest.param(name, decorated, marks=[] if name == "mode" else pytest.mark.slow) for name in REGIONS),
    ],
)
def test_a_function_that_contains_the_region(
    name: str, style: Callable[..., Callable[..., tuple[torch.Tensor, torch.Tensor]]]
) -> None:
    net, x = Net(), torch.randn(4, 8)
    forward = style(net, REGIONS[name])
    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    want = step(net, forward, x)
    for _ in range(10):
        check(step(net, compiled, x), want)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@traces_regions
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", REGIONS)
def test_a_weight_that_was_written_is_cast_anew(name: str, backend: str) -> None:
    """The "eager" backend runs the graph as it was traced, so that torch would cast by itself, and keep what it cast."""
    net, x = Net(), torch.randn(4, 8)
    forward = contains(net, REGIONS[name])
    compiled = torch.compile(forward, fullgraph=True, backend=backend)
    for _ in range(3):
        check(step(net, compiled, x), step(net, forward, x))
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1.5)


@pytest.mark.parametrize("name", AROUND)
def test_a_compiled_function_called_inside_the_region(name: str) -> None:
    net, x = Net(), torch.randn(4, 8)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")

    want = step(net, contains(net, REGIONS[name]), x)
    for _ in range(10):
        check(step(net, contains(compiled, REGIONS[name]), x), want)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@traces_regions
def test_the_first_cache_of_a_process_may_be_made_while_the_compiler_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast_cache, "_hooked", False)
    net, x = Net(), torch.randn(4, 8)
    forward = contains(net, REGIONS["persistent"])
    check(step(net, torch.compile(forward, fullgraph=True, backend="aot_eager"), x), step(net, forward, x))


def inside(net: Net, region: dict[str, object]) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    return contains(torch.compile(net, fullgraph=True), region)


def outside(net: Net, region: dict[str, object]) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    return torch.compile(contains(net, region), fullgraph=True)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("dispatcher", inside),
        pytest.param("mode", outside, marks=traces_regions),
        pytest.param("persistent", inside, marks=traces_regions),
        *(pytest.param(name, place, marks=[traces_regions, pytest.mark.slow])
          for name, place in (("dispatcher", outside), ("mode", inside), ("persistent", outside))),
    ],
)  # fmt: skip
def test_inductor_gives_the_same_dtypes_and_close_values(
    name: str, place: Callable[..., Callable[..., tuple[torch.Tensor, torch.Tensor]]]
) -> None:
    net, x = Net(), torch.randn(4, 8)
    want = step(net, contains(net, REGIONS[name]), x)
    check_close(step(net, place(net, REGIONS[name]), x), want)


def test_another_dtype_outside_is_another_graph() -> None:
    net, x = Net(), torch.randn(4, 8)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for dtype in (BF16, torch.float16):
        with autocast("cpu", dtype=dtype):
            assert compiled(x)[0].dtype == net(x)[0].dtype
    assert counters["stats"]["unique_graphs"] == 2


class Broken(nn.Module):
    """A model in which the compiler cannot make one graph, as many are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x)
        torch._dynamo.graph_break()
        out = self.second(torch.relu(y))
        return out, out.float().square().mean()


@warns_of_breaks
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("dispatcher", "aot_eager"),
        ("dispatcher", "inductor"),
        pytest.param("mode", "aot_eager", marks=traces_regions),
        pytest.param("persistent", "aot_eager", marks=traces_regions),
        *(pytest.param(name, "inductor", marks=[traces_regions, pytest.mark.slow]) for name in ("mode", "persistent")),
    ],
)
def test_a_model_that_breaks_the_graph_inside_the_region_runs_as_in_eager(name: str, backend: str) -> None:
    net, x = Broken(), torch.randn(4, 8)
    forward = contains(net, REGIONS[name])
    want = step(net, forward, x)
    compiled = torch.compile(forward, backend=backend)
    for _ in range(3):
        (check if backend == "aot_eager" else check_close)(step(net, compiled, x), want)
    assert counters["graph_break"]


def checkpointed(forward: Any) -> Any:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def branched(forward: Any) -> Any:
    return lambda x: torch.cond(x.sum() > 0, forward, lambda x: forward(-x), (x,))


def in_a_function(forward: Any) -> Any:
    class Function(torch.autograd.Function):
        @staticmethod
        @custom_fwd
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return forward(x).detach()

        @staticmethod
        @custom_bwd
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return (grad.float() @ grad.float().mT @ x).float()

    return Function.apply


@pytest.mark.parametrize("around", [autocast, torch.autocast, None], ids=["mezzo", "torch", "none"])
@pytest.mark.parametrize("part", [checkpointed, branched, in_a_function])
@traces_regions
def test_a_region_in_a_part_of_a_graph(part: Any, around: Any) -> None:
    """torch's own setters of its switches fail there (torch 2.13)."""
    linear, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)

    def region(x: torch.Tensor) -> torch.Tensor:
        with autocast("cpu"):
            return linear(x)

    inner = part(region)

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with around("cpu") if around is not None else nullcontext():
            y = inner(x)
            with autocast("cpu", enabled=False):
                z = linear(x)
            return y, z, linear(x)

    results = []
    for run in (torch.compile(forward, fullgraph=True, backend="aot_eager"), forward):
        x.grad = None
        outputs = run(x)
        sum(y.float().square().sum() for y in outputs).backward()
        results.append([*outputs, x.grad])
        assert not torch.is_autocast_enabled("cpu") and torch.is_autocast_cache_enabled()
    check(*results)


def mapped(forward: Any) -> Any:
    from torch._higher_order_ops.map import map as map_rows

    return lambda x: map_rows(forward, x)


@pytest.mark.parametrize("around", [True, False], ids=["around", "inside"])
@pytest.mark.parametrize("part", [checkpointed, branched, mapped])
@traces_regions
def test_the_rules_of_a_region_hold_in_a_part_of_a_graph(part: Any, around: bool) -> None:
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)
    run = part(lambda x: linear(x).softmax(-1))
    region = {"policy": "bf16, op:softmax=fp32"}
    compiled = torch.compile(run if around else contains(run, region), fullgraph=True, backend="aot_eager")
    got = contains(compiled, region)(x) if around else compiled(x)
    with autocast("cpu", **region):
        want = linear(x).softmax(-1)
        eager = run(x)  # torch.cond and map compile themselves
    assert want.dtype is torch.float32
    check([got, eager], [want, want])
    if part is checkpointed:
        grads = (torch.autograd.grad(out.square().sum(), linear.weight) for out in (got, want))
        check(*map(list, grads))
    assert not torch.overrides._len_torch_function_stack()
