"""Generated calls of the compiled kernels, right and wrong ones, for a process with AddressSanitizer and UBSan.

A call either equals the reference bit for bit, with nothing touched beside its operands, or is refused with nothing
touched at all. `python -m tests.kernels.sanitizer_program 20000` makes as many calls; `tests/kernels/test_sanitizers.py`
runs it with the compiler's sanitizers loaded.
"""

from __future__ import annotations

import os
import random
import sys
from array import array
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.sanitized_layers import (
    OUTCOMES,
    check_attention,
    check_convolution,
    check_dropout,
    check_linear,
    check_linear_training,
    check_norm,
    check_recurrent,
)
from tests.kernels.test_cpu_kernels import same
from torch import Tensor

from mezzo.errors import OperandError
from mezzo.kernels import registry
from mezzo.kernels.backends.cpp.build import Kernel
from mezzo.kernels.operands import operands
from mezzo.kernels.ops import adamw as adamw_reference
from mezzo.kernels.ops import sgd as sgd_reference
from mezzo.kernels.ops.adamw import AdamWRule
from mezzo.kernels.ops.adamw import cpu as adamw_cpu
from mezzo.kernels.ops.attention import cpu as attention_cpu
from mezzo.kernels.ops.convolution import cpu as convolution_cpu
from mezzo.kernels.ops.dropout import cpu as dropout_cpu
from mezzo.kernels.ops.gradients import ScaledGradients, norm_and_finite
from mezzo.kernels.ops.linear_training import cpu as training_cpu
from mezzo.kernels.ops.recurrent import cpu as recurrent_cpu
from mezzo.kernels.ops.sgd import SGDRule
from mezzo.kernels.ops.sgd import cpu as sgd_cpu
from mezzo.kernels.weights import AUX_STATE, Weights

STORED = [
    ("none", torch.float32), ("none", torch.float64), ("split", torch.bfloat16), ("fp32", torch.bfloat16),
    ("fp32", torch.float16), ("kahan", torch.bfloat16), ("kahan", torch.float16), ("stochastic", torch.bfloat16),
    ("stochastic", torch.float16), ("split", torch.float16), ("none", torch.bfloat16),
]  # fmt: skip
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = [(), (0,), (1,), (3,), (63,), (64,), (65,), (2, 0, 3), (7, 9), (5, 1, 6), (1025,), (65537,), (70, 1000)]
LAYOUTS = ["plain", "plain", "plain", "offset", "offset", "transposed", "strided", "expanded", "freed", "short"]
HARMS = ["", "", "", "", "shape", "dtype", "alias", "overlap", "device"]
SENTINEL = 77


@dataclass
class Call:
    """One generated call.

    Attributes:
        mode: of the masters.
        weights: with their layouts in memory.
        aux: their aux state.
        moments: by name.
        grads: each in its own dtype.
        arenas: memory around the operands, and which of its bytes are theirs.
    """

    mode: Any
    weights: list[Tensor] = field(default_factory=list)
    aux: list[Tensor] = field(default_factory=list)
    moments: dict[str, list[Tensor]] = field(default_factory=dict)
    grads: list[Tensor] = field(default_factory=list)
    arenas: list[tuple[Tensor, Tensor]] = field(default_factory=list)


def laid(call: Call, values: Tensor, layout: str, rng: random.Random) -> Tensor:
    """Return values as they lie in memory in one way."""
    if layout == "plain":
        return values.clone(memory_format=torch.contiguous_format)
    if layout == "offset":
        lead = rng.randrange(1, 9)
        arena = torch.full((values.numel() + 16,), SENTINEL, dtype=values.dtype)
        call.arenas.append((arena, torch.arange(lead, lead + values.numel())))
        return arena[lead : lead + values.numel()].view(values.shape).copy_(values)
    if layout == "transposed" and values.dim() == 2:
        return values.t().contiguous().t()
    if layout == "strided" and values.dim() > 0:
        whole = torch.full((*values.shape[:-1], 2 * values.shape[-1]), SENTINEL, dtype=values.dtype)
        call.arenas.append((whole, torch.arange(whole.numel()).view(whole.shape)[..., ::2].reshape(-1)))
        return whole[..., ::2].copy_(values)
    if layout == "expanded" and values.dim() > 0 and values.numel() > 0:
        return values[:1].clone().expand(values.shape)
    held = values.clone(memory_format=torch.contiguous_format)
    if layout in ("freed", "short"):
        held.untyped_storage().resize_(0 if layout == "freed" else held.nbytes // 2)
    return held


def drawn(shape: tuple[int, ...], dtype: torch.dtype, rng: random.Random, *, positive: bool = False) -> Tensor:
    """Return random values, some of them special."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    values = torch.randn(shape, generator=generator, dtype=torch.float32)
    if rng.random() < 0.3 and values.numel():
        values.view(-1)[rng.randrange(values.numel())] = rng.choice([0.0, 1e-40, 3e-6, 7e4, float("inf"), float("nan")])
    return (values.abs() if positive else values).to(dtype)


def generated(rng: random.Random) -> Call:
    """Return a call, wrong in about half of the cases."""
    mode, dtype = rng.choice(STORED)
    call = Call(mode)
    is_wrong = rng.random() < 0.5
    layouts = LAYOUTS if is_wrong else ["plain", "plain", "offset", "transposed", "strided"]
    state = rng.choice(FLOATS[:2] if rng.random() < 0.8 else FLOATS)
    names = rng.choice(
        [["exp_avg", "exp_avg_sq"], ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"], ["momentum_buffer"], []]
    )
    call.moments = {name: [] for name in names}
    for _ in range(rng.randrange(1, 5)):
        shape = rng.choice(SHAPES if rng.random() < 0.2 else SHAPES[:-2])
        call.weights.append(laid(call, drawn(shape, dtype, rng), rng.choice(layouts), rng))
        call.grads.append(laid(call, drawn(shape, rng.choice(FLOATS), rng), rng.choice(layouts), rng))
        if mode in AUX_STATE:
            aux = {"split": torch.int16, "fp32": torch.float32}.get(mode, dtype)
            low = drawn(shape, torch.float32, rng) if aux is not torch.int16 else torch.randint(-999, 999, shape)
            call.aux.append(laid(call, low.to(aux), rng.choice(layouts), rng))
        for name in names:
            values = drawn(shape, state, rng, positive=name.endswith("sq"))
            call.moments[name].append(laid(call, values, rng.choice(layouts), rng))
    if is_wrong:
        spoil(call, rng.choice(HARMS), rng)
    return call


def spoil(call: Call, harm: str, rng: random.Random) -> None:
    """Make one operand of a call wrong in one way."""
    lists = [held for held in (call.grads, call.aux, *call.moments.values()) if held]
    held, index = rng.choice(lists), rng.randrange(len(call.weights))
    one = held[index]
    if harm == "shape":
        held[index] = torch.zeros(rng.choice(SHAPES), dtype=one.dtype)
    elif harm == "dtype":
        held[index] = torch.zeros(
            one.shape, dtype=rng.choice([torch.int32, torch.int8, torch.complex64, torch.float64])
        )
    elif harm == "alias":
        other = rng.choice([held for held in (call.weights, *lists) if held])
        held[index] = other[rng.randrange(len(other))]
    elif harm == "overlap" and one.numel() > 0:
        whole = torch.zeros(2 * one.numel() + 1, dtype=one.dtype)
        held[index] = whole[: one.numel()].view(one.shape)
        other = rng.choice(lists)
        there = rng.randrange(len(other))
        if other[there].numel() == one.numel() and other[there].dtype == one.dtype:
            other[there] = whole[one.numel() // 2 : one.numel() // 2 + one.numel()].view(other[there].shape)
    elif harm == "device" and one.numel() > 0:
        held[index] = torch.empty(one.shape, dtype=one.dtype, device="meta")


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor can be read at all, here."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + reach + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.device.type == "cpu" and tensor.untyped_storage().nbytes() >= end


def tensors_of(call: Call) -> list[Tensor]:
    """Return every operand that can be read."""
    lists = (call.weights, call.aux, call.grads, *call.moments.values())
    return [tensor for held in lists for tensor in held if is_readable(tensor)]


def contents(tensors: list[Tensor]) -> list[Tensor]:
    """Return copies of values that change with no operand."""
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


def alike(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two lists hold the same values, NaN being NaN."""
    return all(torch.equal(a.nan_to_num(1.5), b.nan_to_num(1.5)) if a.is_floating_point() else torch.equal(a, b)
               for a, b in zip(one, other, strict=True))  # fmt: skip


def stepped(call: Call, backend: str, rng: random.Random) -> None:
    """Take the step of a call. Writes: its weights, aux state and moments."""
    count = len(call.weights)
    steps = torch.arange(1.0, count + 1)
    weights = Weights(mode=call.mode, values=call.weights, aux=call.aux, seeds=list(range(count)))
    how: dict[str, Any] = {"maximize": rng.random() < 0.3}
    if rng.random() < 0.5:
        how |= {"inv_scale": torch.tensor(0.25), "clip_coef": torch.tensor(0.5), "found_inf": torch.zeros(1)}
    grads = ScaledGradients(values=call.grads, **how)
    dtype = torch.promote_types(call.weights[0].dtype, torch.float32)
    given = operands(weights, call.moments, grads)
    if "exp_avg" in call.moments:
        rule = AdamWRule(beta1=0.9, beta2=0.99, eps=1e-3, amsgrad=len(call.moments) == 3, l2=rng.choice([0.0, 0.1]))
        kernel: Any = adamw_cpu if backend == "cpu" else adamw_reference
        kernel.step_(given, rule, adamw_reference.scalars(steps, replace(rule, lr=0.1, decay=0.01), dtype), steps)
    else:
        momentum = 0.9 if call.moments else 0.0
        other = SGDRule(weight_decay=rng.choice([0.0, 0.1]), momentum=momentum, nesterov=rng.random() < 0.5)
        kernel = sgd_cpu if backend == "cpu" else sgd_reference
        kernel.step_(given, other, sgd_reference.scalars(steps, replace(other, lr=0.1, dampening=0.2), dtype), steps)


def plain_copy(call: Call) -> Call:
    """Return a call with the same values, each in memory of its own."""
    lists = [contents(held) for held in (call.weights, call.aux, call.grads)]
    return Call(call.mode, lists[0], lists[1], {n: contents(held) for n, held in call.moments.items()}, lists[2])


def check(seed: int) -> None:
    """Make one call and look at what it did."""
    call = generated(random.Random(seed))
    readable = tensors_of(call)
    before, around = contents(readable), [arena.clone() for arena, _ in call.arenas]
    is_whole = len(readable) == sum(map(len, (call.weights, call.aux, call.grads, *call.moments.values())))
    twin = plain_copy(call) if is_whole else None
    try:
        stepped(call, "cpu", random.Random(seed))
    except OperandError as error:
        assert "cannot be stepped: " in str(error)
        assert alike(contents(readable), before), f"seed {seed}: refused, and changed something"
        assert all(
            torch.equal(now, then) or now.isnan().any() for (now, _), then in zip(call.arenas, around, strict=True)
        )
        OUTCOMES["refused"] += 1
        return
    assert twin is not None, f"seed {seed}: stepped what cannot be read"
    if len({tensor.untyped_storage().data_ptr() for tensor in readable if tensor.numel()}) == sum(
        t.numel() > 0 for t in readable
    ):
        stepped(twin, "reference", random.Random(seed))
        lists = [
            (call.weights, twin.weights),
            (call.aux, twin.aux),
            *zip(call.moments.values(), twin.moments.values(), strict=True),
        ]
        for got, want in lists:
            if call.weights[0].dtype is torch.float64 or any(t.dtype is torch.float64 for t in got):
                assert alike(contents(got), contents(want)), f"seed {seed}: not what the reference gives"
            else:
                assert same(contents(got), contents(want)), f"seed {seed}: not what the reference gives"
    for (arena, own), then in zip(call.arenas, around, strict=True):
        foreign = torch.ones(arena.numel(), dtype=torch.bool).index_fill(0, own, False)
        assert torch.equal(arena.reshape(-1)[foreign], then.reshape(-1)[foreign]), (
            f"seed {seed}: wrote beside its operands"
        )
    norm_and_finite([grad for grad in call.grads if grad.is_floating_point()])
    OUTCOMES["stepped"] += 1


def main(calls: int) -> None:
    """Make many calls; those that fail are made smaller by hypothesis, down to a seed."""
    root = Tensor.sqrt
    Tensor.sqrt = lambda x: root(x.double()).to(x.dtype)  # type: ignore[method-assign]  # as the kernels' is rounded
    assert registry.choose("adamw", torch.device("cpu"), torch.float32, "cpu").backend == "cpu"
    torch.set_num_threads(2)
    bounded = settings(
        max_examples=calls, deadline=None, database=None, derandomize=calls < 2000,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    bounded(given(st.integers(min_value=0, max_value=1 << 62))(check))()
    products = attention_cpu.products()
    for seed in range(calls // 20):
        check_linear(seed)
        check_norm(seed)
        if dropout_cpu.is_faster():
            check_dropout(seed)
        if products:
            check_attention(seed, 1 + seed % products)
        if recurrent_cpu.products():
            check_recurrent(seed, 4)
            check_recurrent(seed, 3)
        if convolution_cpu.is_faster():
            check_convolution(seed)
        if training_cpu.is_faster():
            check_linear_training(seed)
    print(
        f"{sum(OUTCOMES.values())} calls: {dict(OUTCOMES)}, sanitizers: {os.environ.get('MEZZO_CXXFLAGS', 'none')}",
        flush=True,
    )


def planted() -> None:
    """Tell a kernel of more elements than there are."""
    grad, norms = torch.ones(100), torch.empty(1)
    arrays = [array("q", [200]), array("Q", [grad.data_ptr()]), array("i", [0])]
    addresses = [held.buffer_info()[0] for held in arrays]
    Kernel("gradients", norms="qPPPiP").norms(1, *addresses, 1, norms.data_ptr())


if __name__ == "__main__":
    main(int(sys.argv[1]))
    if "planted" in sys.argv:
        planted()
