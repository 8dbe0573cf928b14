"""Two models whose forward agrees and whose gradients do not: the op of backward is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.diagnose.pairs import IDS, Attention, Block, X, lm, prepared, same_weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mezzo.diagnose import mismatch
from mezzo.errors import ConfigError


class LeakyBackward(torch.autograd.Function):
    """A ReLU whose derivative was written for another function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.relu()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x > 0, grad, 0.1 * grad)


class Relu(nn.Module):
    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


class HalfGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        return grad @ weight, 0.5 * flat.T @ x.flatten(0, -2), flat.sum(0)


def half_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return HalfGrad.apply(x, weight, bias)


def net(run: Callable[[Tensor], Tensor], *, detached: bool = False) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.norm, self.down = nn.Linear(16, 32), Relu(run), nn.LayerNorm(32), nn.Linear(32, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.act(self.up(x)))
            return self.down(h.detach() if detached else h)

    torch.manual_seed(0)
    return Net()


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).float().square().mean()


def test_a_wrong_derivative_is_named() -> None:
    report = mismatch(net(torch.relu), net(LeakyBackward.apply), X, loss_fn)
    found = report.finding
    assert found is not None and found.module == "act"
    assert "relu" in str(found.a).lower() and "LeakyBackward" in str(found.b)
    gaps = {o.name: o.difference for o in report.outputs}
    assert gaps["loss"] == 0 == gaps["gradient of down.weight"] < gaps["gradient of up.weight"]
    assert mismatch(net(torch.relu), net(LeakyBackward.apply), X).finding is None


def test_a_detached_path_is_named() -> None:
    found = mismatch(net(torch.relu), net(torch.relu, detached=True), X, loss_fn).finding
    assert found is not None
    assert (found.cause, found.op, found.module, found.b) == ("missing op", "backward of addmm", "down", None)


def test_a_difference_of_forward_comes_first() -> None:
    found = mismatch(lm().eval(), same_weights(lm().eval(), lm(eps=1e-2)).eval(), IDS, loss_fn).finding
    assert found is not None
    assert (found.cause, found.op, found.module) == ("arguments", "layer_norm", "layers.0.norm1")


class Recomputed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def blocks(other: type[Block], **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    a = Block(dropout=0.0)
    return a, same_weights(a, other(dropout=0.0, **options))


class ManualNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.weight + self.bias


EQUAL: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "itself": lambda: ((m := lm().eval()), copy.deepcopy(m), IDS),
    "unfused attention": lambda: ((a := Attention()), same_weights(a, Attention(fused=False)), X),
    "recomputed": lambda: (*blocks(Recomputed), X),
    "norm by hand": lambda: (nn.LayerNorm(16), ManualNorm(16), X),
    "bf16": lambda: ((m := net(torch.tanh)), prepared(m, "bf16"), X),
    "fp16": lambda: ((m := net(torch.tanh)), prepared(m, "fp16"), X),
    "bf16 masters": lambda: ((m := lm(depth=1).eval()), prepared(m, "bf16-master"), IDS),
    "compiled by a faithful backend": lambda: ((m := lm(depth=1).eval()), torch.compile(m, backend="eager"), IDS),
}


@pytest.mark.parametrize("name", EQUAL)
def test_rounding_of_gradients_is_no_finding(name: str) -> None:
    report = mismatch(*EQUAL[name](), loss_fn)
    assert report.finding is None, report.finding


def test_a_compilers_wrong_backward_is_named() -> None:
    """A compiler whose forward is right, and whose gradients of a linear layer are not."""

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        for node in graph.graph.nodes:
            if getattr(node.target, "__name__", "") == "linear":
                node.target = half_linear
        graph.recompile()
        return graph.forward

    model = net(torch.tanh)
    found = mismatch(model, torch.compile(model, backend=backend), X, loss_fn).finding
    assert found is not None
    assert (found.cause, found.op, found.module) == ("kernel", "backward", "down")
    assert "gradient of down.weight in b is" in found.what and "its forward is right" in found.what


def test_gradients_need_two_models_of_the_same_parameters() -> None:
    with pytest.raises(ConfigError, match="give two models"):
        mismatch(net(torch.relu), lambda x: x, X, loss_fn)
    with pytest.raises(ConfigError, match="only one of a and b has"):
        mismatch(nn.Linear(16, 4), nn.Linear(16, 4, bias=False), X, loss_fn)
