"""A prepared model that torch.compile cannot make one graph of runs as it does in eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import mezzo


class Breaks(nn.Module):
    """A model in which the compiler cannot make one graph, as many are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        torch._dynamo.graph_break()
        return self.second(torch.relu(y))


@pytest.mark.filterwarnings(
    "ignore:Dynamo does not know how to trace:UserWarning",
    "ignore:The .grad attribute:UserWarning",
    "ignore::DeprecationWarning",
)
@pytest.mark.parametrize(
    ("policy", "style"),
    [
        ("bf16", "compiled"), ("bf16-master", "in place"), ("bf16, ops=mezzo", "compiled"),
        ("bf16, module:second=fp32", "in place"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("bf16", "in place"), ("bf16-master", "compiled"), ("bf16, ops=mezzo", "in place"),
            ("bf16, module:second=fp32", "compiled"),
        )),
    ],
)  # fmt: skip
def test_a_compiled_model_that_breaks_the_graph_runs_as_in_eager(policy: str, style: str) -> None:
    torch._dynamo.reset()
    torch.default_generator.manual_seed(0)
    eager, x = Breaks(), torch.randn(4, 8)
    net = copy.deepcopy(eager)
    for model in (eager, net):
        mezzo.prepare(model, None, policy)
    if style == "in place":
        net.compile(backend="aot_eager")
    compiled = net if style == "in place" else torch.compile(net, backend="aot_eager")
    want = eager(x)
    for _ in range(3):
        got = compiled(x)
        assert got.dtype is want.dtype
        assert torch.equal(got, want)
    grads = []
    for model, out in ((eager, want), (net, got)):
        out.float().square().mean().backward()
        grads.append([p.grad for p in model.parameters()])
    for mine, theirs in zip(*grads, strict=True):
        assert mine is not None and theirs is not None and mine.dtype is theirs.dtype
        # The compiler sums and rounds in an order of its own.
        bound = 2 * torch.finfo(torch.bfloat16).eps * theirs.abs().max().float()
        assert (mine.float() - theirs.float()).abs().max() <= bound


@pytest.mark.parametrize("policy", ["bf16", "fp16-master"])
def test_a_compiled_loop_compiles_the_model_and_takes_the_steps_of_eager(policy: str) -> None:
    """Traced, a step would become dozens of graphs, and update by the reference in place of the kernels."""
    weights, graphs = [], []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    for is_compiled in (False, True):
        torch._dynamo.reset()
        torch.default_generator.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)
        amp = mezzo.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01), policy)

        def train(x: Tensor, amp: mezzo.Stepper = amp) -> None:
            amp.zero_grad()
            amp.backward(amp.model(x).square().mean())
            amp.step(max_norm=1.0)

        step = torch.compile(train, backend=backend) if is_compiled else train
        for _ in range(4):
            step(x)
        assert amp.counters().applied == 4
        weights.append([p.detach().clone() for p in net.parameters()])
    assert len(graphs) == 1
    assert all(map(torch.equal, *weights))
