"""The compiled kernels equal the reference: steps to the last bit, norms within what their sums may round."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.tolerance import relative
from torch import Tensor

from mezzo.kernels import registry
from mezzo.kernels.operands import operands
from mezzo.kernels.ops import adamw as adamw_reference
from mezzo.kernels.ops import gradients as gradients_reference
from mezzo.kernels.ops import sgd as sgd_reference
from mezzo.kernels.ops.adamw import AdamWRule
from mezzo.kernels.ops.adamw import cpu as adamw_cpu
from mezzo.kernels.ops.gradients import ScaledGradients
from mezzo.kernels.ops.gradients import cpu as gradients_cpu
from mezzo.kernels.ops.gradients import foreach as gradients_foreach
from mezzo.kernels.ops.sgd import SGDRule
from mezzo.kernels.ops.sgd import cpu as sgd_cpu
from mezzo.kernels.weights import Weights, store_master

STORED = [
    ("none", torch.float32), ("split", torch.bfloat16), ("fp32", torch.bfloat16), ("fp32", torch.float16),
    ("kahan", torch.bfloat16), ("kahan", torch.float16), ("stochastic", torch.bfloat16), ("stochastic", torch.float16),
]  # fmt: skip
ADAMW_RULES = (
    AdamWRule(beta1=0.9, beta2=0.999, eps=1e-8),
    AdamWRule(beta1=0.3, beta2=0.9, eps=1e-3, amsgrad=True, l2=0.1),
)
SGD_RULES = (
    SGDRule(weight_decay=0.0, momentum=0.9),
    SGDRule(weight_decay=0.1, momentum=0.9, nesterov=True),
    SGDRule(weight_decay=0.1, momentum=0.0),
)
EVERY = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
SIZES = (0, 1, 63, 127, 1 << 16, (1 << 16) + 5)


def special(dtype: torch.dtype) -> Tensor:
    """Every value of a 16-bit format, NaN and inf too; for fp32 every one of bf16's, with lower bits."""
    if dtype is not torch.float32:
        return EVERY.view(dtype).clone()
    return ((EVERY.to(torch.int32) << 16) | torch.randint(0, 1 << 16, EVERY.shape, dtype=torch.int32)).view(
        torch.float32
    )


def data(dtype: torch.dtype) -> list[Tensor]:
    return [*(torch.randn(size).to(dtype) for size in SIZES), special(dtype), torch.randn(6, 8).to(dtype)[::2, ::3]]


def weights_of(mode: Any, dtype: torch.dtype) -> Weights:
    masters = [x.float() for x in data(torch.float32)]
    pairs = [store_master(mode, master, dtype, None) for master in masters]
    values = [value.clone() for value, _ in pairs]
    values[-1] = torch.randn(6, 8).to(dtype)[::2, ::3]
    aux = [rest.clone() for _, rest in pairs if rest is not None]
    if aux:  # some weights written from outside, beside what was kept for another
        values[4][:1000] = torch.randn(1000).to(dtype)
        values[4][1000:2000] = 0.0
    return Weights(mode=mode, values=values, aux=aux, seeds=list(range(3, 3 + len(values))))


def copy(item: Any) -> Any:
    if isinstance(item, Tensor):
        return (
            torch.empty_strided(item.shape, item.stride(), dtype=item.dtype).copy_(item)
            if item.is_contiguous()
            else item.clone()
        )
    if isinstance(item, list):
        return [copy(one) for one in item]
    if isinstance(item, dict):
        return {name: copy(one) for name, one in item.items()}
    return (
        type(item)(**{name: copy(getattr(item, name)) for name in item.__dataclass_fields__})
        if hasattr(item, "__dataclass_fields__")
        else item
    )


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Equal bit for bit, but any NaN is any NaN."""
    word = {1: torch.int8, 2: torch.int16, 4: torch.int32}
    for a, b in zip(one, other, strict=True):
        differ = a.contiguous().view(word[a.element_size()]) != b.contiguous().view(word[b.element_size()])
        if a.is_floating_point():
            differ &= ~(a.isnan() & b.isnan())
        if bool(differ.any()):
            place = int(differ.view(-1).nonzero()[0])
            print(a.shape, place, a.reshape(-1)[place], b.reshape(-1)[place], int(differ.sum()))
            return False
    return True


def grads_of(dtype: torch.dtype, **how: Any) -> ScaledGradients:
    values = [torch.randn(x.shape).to(dtype) for x in data(torch.float32)]
    values[6] = special(dtype)[torch.randperm(1 << 16)]
    return ScaledGradients(values=values, **how)


HOW: list[dict[str, Any]] = [
    {},
    {
        "inv_scale": torch.tensor(2.0**-9),
        "clip_coef": torch.tensor(0.37),
        "found_inf": torch.zeros(1),
        "maximize": True,
    },
]


def moments_of(weights: Weights, dtype: torch.dtype, amsgrad: bool = False) -> dict[str, list[Tensor]]:
    positive = ("exp_avg_sq", "max_exp_avg_sq") if amsgrad else ("exp_avg_sq",)
    moments = {"exp_avg": [torch.randn(x.shape).to(dtype) for x in weights.values]}
    return moments | {name: [torch.rand(x.shape).to(dtype) for x in weights.values] for name in positive}


def sums_of(weights: Weights, make: Any = torch.zeros) -> dict[str, list[Tensor]]:
    return {"momentum_buffer": [make(x.shape) for x in weights.values]}


def counts(weights: Weights, step: float) -> Tensor:
    """Return a step count for each weight; not all alike."""
    return step + torch.arange(len(weights.values), dtype=torch.float32) % 3


@pytest.fixture
def nearest_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give torch's unfused fp32 root the nearest value; it misses one in five by an ulp, its fused kernels none."""
    root = Tensor.sqrt
    monkeypatch.setattr(Tensor, "sqrt", lambda x: root(x.double()).to(x.dtype))


@pytest.mark.usefixtures("nearest_roots")
@pytest.mark.parametrize("how", HOW, ids=["plain", "scaled"])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("mode", "dtype"), STORED)
def test_adamw_equals_the_reference(mode: str, dtype: torch.dtype, state: torch.dtype, how: dict[str, Any]) -> None:
    for wide, rule in zip((False, True), ADAMW_RULES, strict=True):
        weights = weights_of(mode, dtype)
        moments = moments_of(weights, state, rule.amsgrad)
        one, other = (copy(weights), copy(moments)), (copy(weights), copy(moments))
        for t in (1, 7, 70_001):
            grads = grads_of(torch.float32 if wide else dtype, **how)
            step = counts(weights, t)
            scalars = adamw_reference.scalars(step, replace(rule, lr=0.01, decay=0.1))
            adamw_reference.step_(operands(*one, grads), rule, scalars, step)
            adamw_cpu.step_(operands(*other, grads), rule, scalars, step)
            for name in ("values", "aux"):
                assert same(getattr(one[0], name), getattr(other[0], name)), name
            for name in moments:
                assert same(one[1][name], other[1][name]), name


@pytest.mark.parametrize("how", HOW, ids=["plain", "scaled"])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("mode", "dtype"), STORED)
def test_sgd_equals_the_reference(mode: str, dtype: torch.dtype, state: torch.dtype, how: dict[str, Any]) -> None:
    for wide, rule in zip((False, True, False), SGD_RULES, strict=True):
        weights = weights_of(mode, dtype)
        sums = sums_of(weights, lambda shape: torch.randn(shape).to(state)) if rule.momentum else {}
        one, other = (copy(weights), copy(sums)), (copy(weights), copy(sums))
        for t in (1, 2):
            grads = grads_of(torch.float32 if wide else dtype, **how)
            step = counts(weights, t)
            scalars = sgd_reference.scalars(step, replace(rule, lr=0.1, dampening=0.2))
            sgd_reference.step_(operands(*one, grads), rule, scalars, step)
            sgd_cpu.step_(operands(*other, grads), rule, scalars, step)
            assert same(one[0].values, other[0].values)
            assert same(one[0].aux, other[0].aux)
            assert all(same(one[1][name], other[1][name]) for name in sums)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_norms_equal_the_reference(dtype: torch.dtype, threads: int) -> None:
    grads = [torch.randn(size).to(dtype) for size in (0, 1, 63, 64, 65, 1 << 16, (1 << 17) + 3)]
    grads += [torch.tensor([1.0, bad, 2.0]).to(dtype) for bad in (math.inf, math.nan)]
    grads += [torch.randn(7, 9).to(dtype).t(), torch.randn(9, 9).to(dtype)[::2, 1:], torch.tensor(3.0).to(dtype)]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got = gradients_cpu.tensor_norms(grads)
    finally:
        torch.set_num_threads(before)
    want = gradients_reference.tensor_norms(grads)
    torch.testing.assert_close(got, want, rtol=relative(torch.float32, 1 << 16), atol=0.0, equal_nan=True)
    exact = torch.stack([grad.double().norm() for grad in grads]).float()
    torch.testing.assert_close(got, exact, rtol=relative(torch.float32, 1 << 10), atol=0.0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_torchs_multi_tensor_norms_equal_the_reference(dtype: torch.dtype) -> None:
    grads = [torch.randn(size).to(dtype) for size in (0, 1, 63, 5000)] + [torch.tensor([1.0, math.inf]).to(dtype)]
    want = gradients_reference.tensor_norms(grads)
    torch.testing.assert_close(
        gradients_foreach.tensor_norms(grads), want, rtol=relative(torch.float32, 5000), atol=0.0
    )


def test_threads_do_not_change_a_bit() -> None:
    rule = AdamWRule(beta1=0.9, beta2=0.999, eps=1e-8)
    runs = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.manual_seed(0)
        weights, grads = weights_of("stochastic", torch.bfloat16), grads_of(torch.bfloat16)
        moments, step = moments_of(weights, torch.float32), counts(weights, 3)
        torch.set_num_threads(threads)
        adamw_cpu.step_(
            operands(weights, moments, grads),
            rule,
            adamw_reference.scalars(step, replace(rule, lr=0.1, decay=0.0)),
            step,
        )
        runs.append([*weights.values, *moments["exp_avg_sq"]])
    torch.set_num_threads(before)
    assert same(runs[0], runs[1])
    assert same(runs[0], runs[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.999), (0.0, 0.0)])
def test_the_numbers_of_a_step_are_those_of_each_parameters_count(
    beta1: float, beta2: float, dtype: torch.dtype
) -> None:
    rule, counts = AdamWRule(beta1=beta1, beta2=beta2, eps=1e-8), [1.0, 3.0, 3.0, 1e6]
    wanted = [(1 - 0.01 * 0.1, -0.01 / (1 - beta1**t), math.sqrt(1 - beta2**t)) for t in counts]
    for step in (torch.tensor(counts), torch.tensor(counts[1:2] * 5)):
        found = adamw_reference.scalars(step, replace(rule, lr=0.01, decay=0.1), dtype)
        rows = wanted if step.numel() == 4 else wanted[1:2] * 5
        torch.testing.assert_close(
            found, torch.tensor(rows, dtype=dtype), rtol=2e-13 if dtype.itemsize == 8 else 1.2e-7, atol=0
        )
        on_device = adamw_reference.scalars(step, replace(rule, lr=torch.tensor(0.01, dtype=dtype), decay=0.1), dtype)
        torch.testing.assert_close(found, on_device, rtol=3e-7, atol=0)
    momentum = SGDRule(weight_decay=0.0, momentum=0.9)
    rows_sgd = sgd_reference.scalars(torch.tensor(counts), replace(momentum, lr=0.1, dampening=0.2), dtype)
    assert rows_sgd.tolist() == torch.tensor([(-0.1, 0, 1), *[(-0.1, 0.9, 0.8)] * 3], dtype=dtype).tolist()
    assert adamw_reference.scalars(torch.zeros(2), replace(rule, lr=0.01, decay=0.1)).isfinite().all(), (
        "a step that was left out counts none"
    )


def test_a_written_weight_has_a_new_version() -> None:
    rule, weights = SGDRule(weight_decay=0.0, momentum=0.9), weights_of("split", torch.bfloat16)
    sums, step = sums_of(weights), counts(weights, 1)
    before = [x._version for x in weights.values]
    given = operands(weights, sums, grads_of(torch.bfloat16))
    sgd_cpu.step_(given, rule, sgd_reference.scalars(step, replace(rule, lr=0.1, dampening=0.0)), step)
    assert all(x._version > old for x, old in zip(weights.values, before, strict=True))


def test_a_blocked_step_writes_nothing() -> None:
    rule, weights = SGDRule(weight_decay=0.0, momentum=0.9), weights_of("split", torch.bfloat16)
    sums, step = sums_of(weights), counts(weights, 1)
    before = copy(weights)
    for found in (torch.ones(()), torch.tensor([math.nan]), torch.tensor(2, dtype=torch.int32)):
        given = operands(weights, sums, grads_of(torch.bfloat16, found_inf=found))
        sgd_cpu.step_(given, rule, sgd_reference.scalars(step, replace(rule, lr=0.1, dampening=0.0)), step)
        assert same(weights.values, before.values)
        assert same(weights.aux, before.aux)
        assert all(bool((x == 0).all()) for x in sums["momentum_buffer"])


@pytest.mark.parametrize(("device", "dtype", "why"), [
    ("cpu", torch.float32, "adamw on cpu fp32: cpu, the fastest that can run here"),
    ("cpu", torch.float64, "adamw on cpu fp64: reference, not cpu: it does not compute in fp64; not triton: it does not compute in fp64; not fused: it does not compute in fp64"),
    ("meta", torch.bfloat16, "adamw on meta bf16: reference, not cpu: it is for CPU; not triton: it is for CUDA; not fused: torch has none for META"),
])  # fmt: skip
def test_the_choice_is_explained(device: str, dtype: torch.dtype, why: str) -> None:
    assert registry.why("adamw", torch.device(device), dtype) == why
    assert registry.choose("adamw", torch.device("cpu"), dtype, "reference").reason == "asked for"
