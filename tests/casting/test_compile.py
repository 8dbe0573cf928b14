"""torch.compile traces a region away: no graph break, no recompile, the dtypes and gradients of eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters

from mezzo import Policy
from mezzo.casting import autocast

BF16 = torch.bfloat16
MEZZO = Policy(compute=BF16, ops="mezzo")
REGIONS = {
    "dispatcher": {"dtype": BF16},
    "mode": {"policy": MEZZO},
    "persistent": {"policy": MEZZO, "cache": "persistent"},
}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tied, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(torch.relu(self.tied(x)))
        return y, nn.functional.mse_loss(self.tied(y).softmax(-1), x)


def contains(net: Net, region: dict[str, object]) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with autocast("cpu", **region):
            return net(x)

    return forward


def decorated(net: Net, region: dict[str, object]) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    return autocast("cpu", **region)(net)


def step(
    net: Net, forward: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor
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


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize("style", [contains, decorated])
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


@pytest.mark.parametrize("name", REGIONS)
def test_a_compiled_function_called_inside_the_region(name: str) -> None:
    net, x = Net(), torch.randn(4, 8)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")

    def inside(function: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with autocast("cpu", **REGIONS[name]):
                return function(x)

        return step(net, forward, x)

    want = inside(net)
    for _ in range(10):
        check(inside(compiled), want)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("name", ["dispatcher", "mode"])
def test_inductor_gives_the_same_dtypes_and_close_values(name: str) -> None:
    net, x = Net(), torch.randn(4, 8)
    forward = contains(net, REGIONS[name])
    compiled = torch.compile(forward, fullgraph=True)
    want = step(net, forward, x)
    for got, expected in zip(step(net, compiled, x), want, strict=True):
        assert got.dtype == expected.dtype
        # Inductor fuses and keeps fp32 between ops: at most the rounding of three 16-bit stores is saved.
        bound = 3 * torch.finfo(BF16).eps * expected.abs().max().float()
        assert (got.float() - expected.float()).abs().max() <= bound


def test_another_dtype_outside_is_another_graph() -> None:
    net, x = Net(), torch.randn(4, 8)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for dtype in (BF16, torch.float16):
        with autocast("cpu", dtype=dtype):
            assert compiled(x)[0].dtype == net(x)[0].dtype
    assert counters["stats"]["unique_graphs"] == 2
