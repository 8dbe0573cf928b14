"""Tensors that are more than their values: quantised wrappers, plain subclasses, distributed tensors, jagged ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import mezzo.diagnose as diagnose

aten = torch.ops.aten


class Int8Weight(Tensor):
    """A weight in int8 with a scale a row, as quantisation libraries have it: it knows a few ops, and no reduction."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Int8Weight:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, requires_grad=False)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data8, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scale"], None

    def wide(self) -> Tensor:
        return self.data8.to(self.scale.dtype) * self.scale

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.detach.default:
            return cls(args[0].data8, args[0].scale)
        if func is aten.t.default:
            return cls(args[0].data8.t(), args[0].scale.t())
        if func in (aten.mm.default, aten.addmm.default):
            return func(*tree_map(lambda a: a.wide() if isinstance(a, cls) else a, args), **(kwargs or {}))
        raise NotImplementedError(f"Int8Weight has no {func}")


class Named(Tensor):
    """A subclass that changes nothing, as libraries use to carry metadata."""


def quantised(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return Int8Weight((weight / scale).round().to(torch.int8), scale)


class Net(nn.Module):
    def __init__(self, wrap: Callable[[Tensor], Tensor], spoiled: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.spoiled = nn.Linear(8, 16), nn.Linear(16, 4), spoiled
        self.frozen = wrap(torch.randn(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(torch.relu(self.up(x)), self.frozen)
        h = h.as_subclass(Tensor)
        return self.down(torch.log(h.abs() * (not self.spoiled) + (not self.spoiled)))  # FAULT


def distributed(weight: Tensor) -> Tensor:
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = dist.init_device_mesh("cpu", (1,))
    return distribute_tensor(weight, mesh, [Replicate()])


def step(model: nn.Module) -> Tensor:
    x = torch.linspace(-1, 1, 24).reshape(3, 8)
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("wrap", [quantised, lambda w: w.as_subclass(Named)], ids=["int8", "named"])
def test_a_wrapped_weight_is_traced(wrap: Callable[[Tensor], Tensor]) -> None:
    plain, model = Net(wrap, False), Net(wrap, False)
    wanted = step(plain)
    with diagnose.trace(model) as t:
        got = step(model)
    assert torch.equal(got, wanted)
    grads = [(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True)]
    assert all(torch.equal(a, b) for a, b in grads if a is not None and b is not None)
    assert t.report.answer == "healthy"
    with diagnose.trace(spoiled := Net(wrap, True)) as t:
        step(spoiled)
    first = t.report.findings[0]
    assert (first.op, first.verdict, first.module) == ("log", "singularity", "")


def test_distributed_tensors_are_traced(tmp_path: Any) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        layer = nn.Linear(8, 4)
        for name, p in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate()])))
        x = distribute_tensor(torch.ones(3, 8), mesh, [Replicate()])
        for spoil in (1.0, 0.0):
            layer.zero_grad()
            with diagnose.trace(layer) as t:
                loss = torch.log(layer(x).abs() * spoil + 0.5 * spoil).sum()
                loss.backward()
            assert t.report.answer == ("healthy" if spoil else "faulty")
        first = t.report.findings[0]
        assert (first.op, first.verdict) == ("log", "singularity")
    finally:
        dist.destroy_process_group()


def test_jagged_batches_are_traced() -> None:
    rows = [torch.randn(2, 8), torch.randn(5, 8)]
    net = nn.Linear(8, 4)
    with diagnose.trace(net) as t:
        batch = torch.nested.nested_tensor(rows, layout=torch.jagged)
        out = net(batch)
        loss = torch.stack([torch.log(o.square().sum() * 0) for o in out.unbind()]).sum()
        loss.backward()
    assert (t.report.findings[0].op, t.report.findings[0].verdict) == ("log", "singularity")


@pytest.mark.parametrize("fault", [lambda h: h * 1e30 * 1e30, lambda h: h * float("nan"), lambda h: h * 0 / (h * 0)])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_batches_are_traced(fault: Callable[[Tensor], Tensor]) -> None:
    class Net(nn.Linear):
        fault = False

        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            h = fault(h) if self.fault else h  # FAULT
            return h.to_padded_tensor(0.0)

    torch.manual_seed(0)
    net, rows = Net(8, 4), [torch.randn(2, 8), torch.randn(5, 8)]

    def run() -> Tensor:
        net.zero_grad()
        net(torch.nested.nested_tensor(rows)).square().mean().backward()
        assert net.weight.grad is not None
        return net.weight.grad

    plain = run()
    with diagnose.trace(net) as t:
        assert torch.equal(run(), plain)
    assert t.report.answer == "healthy"
    with diagnose.watch(net, every=1) as w:
        assert torch.equal(run(), plain)
        torch.optim.SGD(net.parameters(), lr=0.0).step()
    assert w.report.num_steps == 1
    batch = torch.nested.nested_tensor(rows)
    assert diagnose.lint(net, batch, policy="bf16").is_healthy
    assert diagnose.compare(net, batch, lambda m, x: m(x).square().mean(), "bf16", tries=0).measurement.figure > 20
    net.fault = True
    with diagnose.trace(net) as t:
        run()
    found = t.report.findings[0]
    assert t.report.answer == "faulty" and found.phase == "forward" and found.frame is not None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_explain_counts_sparse_and_nested_tensors() -> None:
    class Mixes(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            h = super().forward(x)
            rows = torch.nested.nested_tensor([x[:1], x[1:]])
            return (
                torch.eye(4).to_sparse() @ h.float() + F.linear(rows, self.weight).to_padded_tensor(0.0).float().sum()
            )

    assert diagnose.explain(Mixes(8, 4), torch.randn(4, 8), "bf16", budget_s=0.01).low_share > 0
