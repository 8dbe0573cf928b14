"""Every figure of `compare` is the one that fp64 gives: what a module adds, what came in, and both losses."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tolerance import relative
from torch import Tensor, nn

import mezzo
import mezzo.diagnose as diagnose


def square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).float().square().mean()


def ratio(reference: Tensor | list[Tensor], actual: Tensor | list[Tensor]) -> float:
    """Return error over signal, as lengths, computed in fp64."""
    want = reference if isinstance(reference, list) else [reference]
    got = actual if isinstance(actual, list) else [actual]
    noise = sum(float((g.double() - w.double()).square().sum()) for w, g in zip(want, got, strict=True))
    return math.sqrt(noise / sum(float(w.double().square().sum()) for w in want))


def length(decibels: float) -> float:
    return 10.0 ** (-decibels / 20)


def agrees(decibels: float, true: float, terms: int) -> None:
    """The reference is fp32 where the oracle is fp64: error vectors may differ by what fp32 rounds off."""
    slack = 2 * relative(torch.float32, terms)
    assert abs(length(decibels) - true) <= slack, f"{length(decibels):.3e}, fp64 says {true:.3e}, slack {slack:.1e}"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.norm, self.down = nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.act(self.up(x))))


TERMS = 8 * 32 * 32
"""More than the products summed on any path through `Net` and back."""


class Observed:
    """What went into and came out of each module in one real step under a policy, by hooks of torch's own."""

    def __init__(self, model: nn.Module, x: Tensor, policy: str, scale: float) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        self.grad_out: dict[str, Tensor] = {}
        self.grad_in: dict[str, Tensor] = {}
        bound = copy.deepcopy(model)
        mezzo.prepare(bound, None, policy)
        for name, module in bound.named_children():
            module.register_forward_hook(self.hook(name))
        self.loss = square(bound, x)
        (self.loss * scale).backward()
        self.grads = {n: p.grad for n, p in bound.named_parameters()}

    def hook(self, name: str) -> Callable[..., None]:
        def see(_: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
            self.inputs[name], self.outputs[name] = args[0].detach(), out.detach()
            out.register_hook(lambda grad: self.grad_out.update({name: grad}))
            if args[0].requires_grad:
                args[0].register_hook(lambda grad: self.grad_in.update({name: grad}))

        return see


class Exact:
    """The same step in fp64, and single modules in fp64 on what they really got."""

    def __init__(self, model: nn.Module, x: Tensor, scale: float) -> None:
        self.model = copy.deepcopy(model).double()
        self.outputs: dict[str, Tensor] = {}
        for name, module in self.model.named_children():
            module.register_forward_hook(lambda _, __, out, name=name: self.outputs.update({name: out.detach()}))
        (self.model(x.double()).square().mean() * scale).backward()
        self.grads = {n: p.grad.clone() for n, p in self.model.named_parameters()}
        self.whole = dict(self.outputs)

    def alone(self, name: str, x: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        module = self.model.get_submodule(name)
        x = x.double().requires_grad_()
        out = module(x)
        found = torch.autograd.grad(out, [x, *module.parameters()], grad_out.double())
        return out.detach(), found[0], list(found[1:])


@pytest.mark.parametrize("policy", ["bf16", "fp16", "bf16, *norm=fp32", "fp16, ops=mezzo"])
def test_every_figure_of_every_module_agrees_with_fp64(policy: str) -> None:
    model, x = Net(), torch.randn(8, 16)
    report = diagnose.compare(model, x, square, policy, tries=0)
    scale = report.measurement.scale
    real, exact = Observed(model, x, policy, scale), Exact(model, x, scale)
    found = {m.module: m for m in report.measurement.modules}
    for name in ("up", "act", "norm", "down"):
        out, grad_in, weights = exact.alone(name, real.inputs[name], real.grad_out[name])
        module = found[name]
        assert module.forward is not None
        agrees(module.forward.local, ratio(out, real.outputs[name]), TERMS)
        agrees(module.forward.inherited, ratio(exact.whole[name], out), TERMS)
        agrees(module.forward.total, ratio(exact.whole[name], real.outputs[name]), TERMS)
        if name != "up":
            assert module.backward is not None
            agrees(module.backward.local, ratio(grad_in, real.grad_in[name]), TERMS)
        if weights:
            assert module.weights is not None
            got = [g for n, g in real.grads.items() if n.startswith(f"{name}.")]
            want = [g for n, g in exact.grads.items() if n.startswith(f"{name}.")]
            agrees(module.weights.local, ratio(weights, got), TERMS)
            agrees(module.weights.total, ratio(want, got), TERMS)
    assert report.measurement.gradients is not None
    agrees(report.measurement.gradients.total, ratio([*exact.grads.values()], [*real.grads.values()]), TERMS)
    for p in report.measurement.parameters:
        agrees(p.total, ratio(exact.grads[p.name], real.grads[p.name]), TERMS)
    shares = [p.share for p in report.measurement.parameters]
    assert math.isclose(sum(shares), 1.0, rel_tol=1e-9) and min(shares) >= 0


def test_the_op_itself_is_judged_on_what_it_was_given() -> None:
    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.mm(x, x.t().contiguous()).tanh()

    x = torch.randn(8, 16)
    report = diagnose.compare(Product(), x, None, "bf16, output=none", tries=0)
    ops = {(op.op, op.phase): op for op in report.measurement.ops if op.path == "Product"}
    low = x.bfloat16()
    product = low @ low.t().contiguous()
    agrees(ops["to", "forward"].agreement.local, ratio(x, low), 16)
    agrees(ops["mm", "forward"].agreement.local, ratio(low.double() @ low.double().t(), product), 16)
    agrees(ops["mm", "forward"].agreement.inherited, ratio(x.double() @ x.double().t(),
                                                           low.double() @ low.double().t()), 16)  # fmt: skip
    agrees(ops["tanh", "forward"].agreement.local, ratio(product.double().tanh(), product.tanh()), 16)
    assert ops["mm", "forward"].flops == 2 * 8 * 8 * 16
    assert ops["mm", "forward"].frame is not None and "torch.mm(x" in source(ops["mm", "forward"].frame)


def source(frame: Any) -> str:
    return Path(frame.file).read_text(encoding="utf-8").splitlines()[frame.line - 1]


def test_both_losses_are_those_of_real_runs() -> None:
    model, x = Net(), torch.randn(8, 16)
    m = diagnose.compare(model, x, square, "bf16", tries=0).measurement
    bound = copy.deepcopy(model)
    mezzo.prepare(bound, None, "bf16")
    assert m.loss == square(bound, x).item()
    assert m.reference_loss == pytest.approx(square(model, x).item(), rel=relative(torch.float32, TERMS))
