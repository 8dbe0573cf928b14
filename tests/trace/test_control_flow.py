"""A traced program may branch and loop by torch's control-flow ops: same numbers and gradients, and the ops inside are seen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import mezzo.diagnose as diagnose

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
Body = Callable[[nn.Module, Tensor], Tensor]
BODIES: dict[str, tuple[Body, Body]] = {
    "cond": (
        lambda net, x: torch.cond(x.sum() > -99, lambda t: net(t), lambda t: net(t) * 2, (x,)),
        lambda net, x: net(x),
    ),
    "nested cond": (
        lambda net, x: torch.cond(
            x.sum() > -99, lambda t: torch.cond(t.sum() < -99, net, lambda u: net(u) * 2, (t,)), net, (x,)
        ),
        lambda net, x: net(x) * 2,
    ),
    "map": (lambda net, x: torch_map(lambda row: net(row), x), lambda net, x: torch.stack([net(row) for row in x])),
    "scan": (
        lambda net, x: scan(lambda carry, row: (carry + net(row), carry * row), torch.zeros(8), x)[0],
        lambda net, x: torch.stack([net(row) for row in x]).sum(0),
    ),
    "associative_scan": (
        lambda net, x: associative_scan(lambda a, b: a + b, net(x), 0, combine_mode="generic"),
        lambda net, x: net(x).cumsum(0),
    ),
    "while_loop": (
        lambda net, x: while_loop(lambda i, t: i < 2, lambda i, t: (i + 1, net(t)), (torch.tensor(0), x))[1],
        lambda net, x: net(net(x)),
    ),
}


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.linear = body, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.linear, x)


def nets(name: str) -> list[Net]:
    made = [Net(body) for body in BODIES[name]]
    made[1].load_state_dict(made[0].state_dict())
    return made


@pytest.mark.parametrize("name", BODIES)
def test_the_weights_of_branches_have_their_gradients(name: str) -> None:
    net, plain = nets(name)
    with diagnose.trace(net) as t:
        net(X).square().mean().backward()
    plain(X).square().mean().backward()
    for got, wanted in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad)
    assert t.report.findings == () and t.report.answer == "healthy"


@pytest.mark.parametrize("name", BODIES)
def test_an_op_inside_is_named(name: str) -> None:
    net = nets(name)[0]
    net.linear.register_forward_hook(lambda module, args, out: torch.log(out - out))
    with diagnose.trace(net) as t:
        net(X).square().mean().backward()
    assert t.report.findings[0].op == "log"


@pytest.mark.parametrize("name", BODIES)
def test_mismatch_sees_inside(name: str) -> None:
    net, plain = nets(name)
    report = diagnose.mismatch(net, plain, X)
    assert report.finding is None and "They agree" in str(report)


@pytest.mark.slow  # it compiles the branches
def test_explain_counts_inside() -> None:
    assert diagnose.explain(nets("cond")[0], X, "bf16", budget_s=0.01).low_share == 1.0
