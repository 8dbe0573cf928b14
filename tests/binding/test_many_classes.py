"""The compiler gives up a code that it compiled so many times, with all that it calls; the models of a process do not share those."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest
import torch
from tests.torch_versions import traces_regions
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import mezzo

MODELS = 4


@pytest.fixture(autouse=True)
def _gives_up_early() -> Iterator[None]:
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=MODELS - 2):
        yield


class Halves(nn.Module):
    """The compiler makes two graphs of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        torch._dynamo.graph_break()
        return self.outer(x)  # type: ignore[no-any-return]


def prepared(policy: str, part: nn.Module) -> nn.Module:
    """Return a model of a class of its own."""
    return mezzo.prepare(type("Net", (nn.Sequential,), {})(part), None, policy).model


@traces_regions
def test_compiled_whole() -> None:
    for width in range(MODELS):
        model, x = prepared("bf16", nn.Linear(4, 1 + width)), torch.randn(3, 4)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("policy", ["bf16", "bf16, module:0=fp32"])
def test_compiled_in_parts(policy: str) -> None:
    for width in range(MODELS):
        forward = types.FunctionType(Halves.forward.__code__.replace(), globals())
        model = prepared(policy, type("Part", (Halves,), {"forward": forward})(1 + width))
        counter, x = CompileCounter(), torch.randn(3, 4)
        assert torch.equal(torch.compile(model, backend=counter)(x), model(x))
        assert counter.frame_count == 2
