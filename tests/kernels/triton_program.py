"""The Triton kernels under Triton's interpreter against the reference; run by test_triton_kernels.py in a process.

The interpreter computes IEEE operations, fused ones too. So does torch, but for its unfused square root, which is given
the nearest value here; then the two are equal to the last bit.
"""

from __future__ import annotations

import itertools
import math
import sys
from copy import deepcopy as copy_module
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
from tests.kernels.test_cpu_kernels import (
    ADAMW_RULES,
    HOW,
    SGD_RULES,
    STORED,
    copy,
    counts,
    grads_of,
    moments_of,
    same,
    sums_of,
    weights_of,
)
from tests.triton_interpreter import quicken
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.kernels import registry
from mezzo.kernels.operands import operands
from mezzo.kernels.ops import adamw as adamw_reference
from mezzo.kernels.ops import sgd as sgd_reference
from mezzo.kernels.ops.adamw import AdamWRule
from mezzo.kernels.ops.gradients import ScaledGradients
from mezzo.kernels.ops.sgd import SGDRule
from mezzo.loss_scale import LossScale, next_state
from mezzo.policy import ScalingConfig

LENGTH = 1100
"""Two programs for the longer tensors, the second with a tail."""


def trim(item: Any) -> Any:
    """Return the first elements of every tensor, and of the special values every 61st."""
    if isinstance(item, Tensor):
        return (
            (item[::61] if item.numel() == 1 << 16 else item[:LENGTH]).clone()
            if item.dim() == 1 and item.numel() > 1
            else item
        )
    if isinstance(item, list):
        return [trim(one) for one in item]
    if hasattr(item, "__dataclass_fields__"):
        return type(item)(**{name: trim(getattr(item, name)) for name in item.__dataclass_fields__})
    return item


def fused(x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z of fp32 arrays, rounded once: in fp64 the product is exact, and the sum is rounded to odd before it is narrowed."""
    product, z = x.astype(np.float64) * y, z.astype(np.float64)
    total = product + z
    given = total - product
    error = (product - (total - given)) + (z - given)
    is_even = (np.asarray(total).view(np.int64) & 1) == 0
    toward = np.nextafter(total, np.copysign(np.inf, error))
    return np.where(np.isfinite(total) & (error != 0) & is_even, toward, total).astype(np.float32)


def fuse_products() -> None:
    """Have Triton's interpreter round fused products once, as it does from 3.9 on. Writes: its builder."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        return TensorHandle(fused(x.data, y.data, z.data), z.dtype.scalar)

    InterpreterBuilder.create_fma = create_fma


def count_by_numbers() -> None:
    """Have Triton's interpreter take a number of its own for one to count to, as it does from 3.7 on. Writes: how it stands in for tensors."""
    from triton.runtime import interpreter

    patched = interpreter._patch_lang_tensor

    def patch_(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_


def rounded_alone(root: Any) -> Any:
    return lambda x: root(x.double()).to(x.dtype)


def check(
    step_: Any, reference_: Any, weights: Any, moments: Any, grads: ScaledGradients, rest: tuple[Any, ...]
) -> None:
    one, other = (copy(weights), copy(moments)), (copy(weights), copy(moments))
    step_(operands(*other, ScaledGradients(values=grads.values, found_inf=torch.ones(()))), *rest)
    assert_same(other, (weights, moments))
    reference_(operands(*one, grads), *rest)
    step_(operands(*other, grads), *rest)
    assert_same(other, one)


def assert_same(got: tuple[Any, Any], want: tuple[Any, Any]) -> None:
    for name in ("values", "aux"):
        assert same(getattr(got[0], name), getattr(want[0], name)), name
    for name in want[1]:
        assert same(got[1][name], want[1][name]), name


def check_scalars(every: bool) -> None:
    """The numbers of a step are those that the host makes for parameters on the CPU, bit for bit."""
    from mezzo.kernels.ops.adamw import triton as kernel
    from mezzo.kernels.ops.sgd import triton as sgd_triton

    counts = [1, 2, 3, 10, 999, 1000, 12345, 10**6, 2**24, *(range(4, 300) if every else ())]
    step = torch.tensor(counts, dtype=torch.float32)
    for beta1, beta2, lr, decay in ((0.9, 0.999, 1e-3, 0.01), (0.5, 0.9999, 3.7e-5, 0.1), (0.9, 0.95, 0.0, 0.0)):
        rule = AdamWRule(beta1=beta1, beta2=beta2, eps=1e-8, lr=lr, decay=decay)
        assert same([kernel.scalars(step, rule)], [adamw_reference.scalars(step, rule)]), rule
    for momentum, dampening, lr in ((0.9, 0.0, 1e-3), (0.5, 0.3, 3.7e-5), (0.0, 0.0, 0.1)):
        rule = SGDRule(weight_decay=0.1, momentum=momentum, lr=lr, dampening=dampening)
        read = 3 if momentum else 1
        assert same([sgd_triton.scalars(step, rule)[:, :read]], [sgd_reference.scalars(step, rule)[:, :read]]), rule
    print("equal scalars", flush=True)


def check_decisions(count: int) -> None:
    """Every kind of finding, of one to three optimizers: the vector is the reference's, bit for bit."""
    from mezzo.kernels.ops import decision as reference
    from mezzo.kernels.ops.decision import decision_slots, pack_decision, triton

    draw = torch.Generator().manual_seed(0)
    flags = torch.tensor([0.0, 0.0, 0.0, 1.0, math.nan])
    for case in range(count):
        num, together, clips = 1 + case % 3, bool(case & 4), bool(case & 8)
        numbers = {
            name: [*torch.rand(where.stop - where.start, generator=draw).mul(8)]
            for name, where in decision_slots(num).items()
        }
        for name in ("early", "elsewhere", "optimizers", "loss_bad", "buffers_bad"):
            numbers[name] = [*flags[torch.randint(5, (len(numbers[name]),), generator=draw)]]
        if case % 5 == 0:
            numbers["grad_norm"] = numbers["norms"][:1] = [torch.tensor([0.0, math.inf, math.nan, 1e-30][case % 4])]
        one = pack_decision(numbers, torch.zeros(()))
        other = one.clone()
        reference.decide_(one, num, together=together, clips=clips)
        triton.decide_(other, num, together=together, clips=clips)
        assert same([one], [other]), (case, one, other)


def check_loss_scales(count: int) -> None:
    """A loss scale that moves for many steps is `next_state`'s, left alone where it is not to blame."""
    from mezzo.kernels.ops.decision import decision_slots, triton

    draw, at = torch.Generator().manual_seed(0), decision_slots(1)
    for config in (
        ScalingConfig(growth_interval=2, init_scale=8.0, max_scale=32.0),
        ScalingConfig(growth_interval=1, growth_factor=2.0**40, init_scale=2.0**60, min_scale=0.0),
        ScalingConfig(growth_interval=3, backoff_factor=0.3, hysteresis=2),
        ScalingConfig.fixed(1024.0),
    ):
        state, mine = LossScale.start(config, "cpu"), LossScale.start(config, "cpu")
        for _ in range(count):
            gradients, loss, buffers = (torch.rand(3, generator=draw) < torch.tensor([0.4, 0.2, 0.2])).tolist()
            vector = torch.zeros(14)
            vector[0], vector[at["loss_bad"]], vector[at["buffers_bad"]] = gradients, loss, buffers
            if not (loss or (buffers and not gradients)):
                state = next_state(state, gradients, config)
            ceiling = math.inf if config.max_scale is None else config.max_scale
            triton.move_scale_(
                vector, mine, config.growth_factor, config.backoff_factor, config.min_scale, ceiling,
                config.growth_interval, config.hysteresis, dynamic=config.dynamic,
            )  # fmt: skip
            assert mine.numbers() == state.numbers(), (config, mine, state)


def check_layer_norms(every: bool) -> None:
    """Forward and backward of the kernel beside fp64: rounded once, sums in fp32; through autograd, for operands of every kind."""
    shapes = ((9, 2050), (2050,)), ((3, 5, 40, 32), (40, 32)), ((5, 4099), (4099,)), ((17, 1024), (1024,))
    options = {}, {"bias": False}, {"dtype": torch.float16}
    cases = list(itertools.product(shapes, (torch.bfloat16, torch.float16), options))
    for (shape, over), dtype, given in cases if every else cases[: 2 * 3 * 2 : 5]:
        x = torch.randn(*shape[1:], shape[0]).movedim(-1, 0).to(dtype).mul(3).add(1)  # does not lie in rows
        seed = torch.randn(over).to(dtype).expand(shape)
        for norm in torch.nn.LayerNorm(over, **given), torch.nn.RMSNorm(over, eps=1e-3, dtype=given.get("dtype")):
            check_layer_norm(norm, x, seed if given else torch.randn_like(x))
    print("equal layer norms", flush=True)


def run_rms_norm(norm: Any, x: Tensor) -> Tensor:
    from mezzo.kernels import rms_norm

    return rms_norm(x, list(norm.normalized_shape), norm.weight, norm.eps, x.dtype, norm.training)


def check_layer_norm(norm: Any, x: Tensor, seed: Tensor) -> None:
    """Of a layer norm or an RMS norm, which is the same kernel."""
    from mezzo import kernels
    from mezzo.kernels.ops import layer_norm

    layer_norm.SMALL = layer_norm.SMALL_ON_CPU = 0  # so that none is torch's

    name, run = ("layer_norm", kernels.layer_norm) if hasattr(norm, "bias") else ("rms_norm", run_rms_norm)
    for p in norm.parameters():
        torch.nn.init.normal_(p)
    exact = copy_module(norm).double()
    a, b = x.clone().requires_grad_(), x.double().requires_grad_()
    with Ops() as seen:
        out = run(norm, a)
        out.backward(seed)
    assert {name, f"{name}_backward"} < seen.names and "native_layer_norm" not in seen.names, seen.names
    with torch.no_grad():
        assert torch.equal(run(norm, x), out)
    want = exact(b)
    want.backward(seed.double())
    half, spacing = torch.finfo(x.dtype).eps / 2, 2.0**-20
    assert ((out - want).abs() <= half * want.abs() + spacing * want.abs().max()).all()
    assert ((a.grad - b.grad).abs() <= half * b.grad.abs() + spacing * b.grad.abs().max()).all()
    for p, q in zip(norm.parameters(), exact.parameters(), strict=True):
        allowed = torch.finfo(p.dtype).eps if p.dtype.itemsize == 2 else x.numel() / p.numel() * spacing
        assert ((p.grad - q.grad).abs() <= allowed * q.grad.abs().max()).all()


class Ops(TorchDispatchMode):
    """Names of the ops that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def main(every: bool) -> None:
    from mezzo.kernels.ops.adamw import triton as adamw
    from mezzo.kernels.ops.sgd import triton as sgd

    np.seterr(all="ignore")
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    with FakeTensorMode():  # a plan made of shapes says nothing about kernels
        registry.choose("adamw", cpu, torch.bfloat16)
        assert registry.choose("adamw", cpu, torch.bfloat16, "triton").backend == "triton"
    version = tuple(int(number) for number in triton.__version__.split(".")[:2])
    if version < (3, 9):
        fuse_products()
    if version < (3, 7):
        count_by_numbers()
    Tensor.sqrt = rounded_alone(Tensor.sqrt)  # type: ignore[method-assign]  # a process of its own
    check_scalars(every)
    check_decisions(960 if every else 120)
    check_loss_scales(200 if every else 25)
    check_layer_norms(every)
    turns = itertools.cycle(SGD_RULES)
    for number, (mode, dtype) in enumerate(STORED):
        for way, state in enumerate((torch.float32, torch.bfloat16)):
            if not every and way != number % 2:
                continue
            weights = trim(weights_of(mode, dtype))
            if way:  # parts of larger tensors take the noise of the whole
                weights = replace(weights, offsets=[1000 * place for place in range(len(weights.values))])
            grads = trim(grads_of(torch.float32 if way else dtype, **HOW[way]))
            step = counts(weights, 7)
            moments, rule = moments_of(weights, state, bool(way)), ADAMW_RULES[way]
            rest = (rule, adamw_reference.scalars(step, replace(rule, lr=0.01, decay=0.1)), step)
            check(adamw.step_, adamw_reference.step_, weights, moments, grads, rest)
            turn = next(turns)
            sums = sums_of(weights, lambda shape, state=state: torch.randn(shape).to(state)) if turn.momentum else {}
            check(
                sgd.step_,
                sgd_reference.step_,
                weights,
                sums,
                grads,
                (turn, sgd_reference.scalars(step, replace(turn, lr=0.1, dampening=0.2)), step),
            )
        print("equal", mode, dtype, flush=True)


if __name__ == "__main__":
    quicken()
    main("every" in sys.argv)
