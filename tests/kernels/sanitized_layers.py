"""Layers of which the compiled kernels compute something, on operands at the ends of their memory, beside fp64."""

from __future__ import annotations

import random
from collections import Counter

import torch
import torch.nn.functional as F
from tests.kernels.test_attention import exact
from torch import Tensor

from mezzo._torch import flash_attention
from mezzo.kernels.ops import layer_norm as norm_reference
from mezzo.kernels.ops import recurrent as recurrent_reference
from mezzo.kernels.ops.attention import cpu as attention_cpu
from mezzo.kernels.ops.convolution import cpu as convolution_cpu
from mezzo.kernels.ops.dropout import cpu as dropout_cpu
from mezzo.kernels.ops.layer_norm import cpu as norm_cpu
from mezzo.kernels.ops.linear import cpu as linear_cpu
from mezzo.kernels.ops.linear_training import cpu as training_cpu
from mezzo.kernels.ops.recurrent import cpu as recurrent_cpu

OUTCOMES: Counter[str] = Counter()


def check_linear(seed: int) -> None:
    """Make one product of few rows, its operands at the ends of their memory, and look at it."""
    rng = random.Random(seed)
    rows, inner = rng.randint(1, linear_cpu.most_rows()), rng.choice([1, 7, 32, 65, 300])
    width = rng.choice([1, 3, 33, 64, 203])
    x, weight, bias = [torch.randn(shape).bfloat16() for shape in ((rows, inner), (width, inner), (width,))]
    has_bias, has_large_cache = rng.random() < 0.5, rng.random() < 0.5
    bias *= has_bias
    linear_cpu.has_large_cache = lambda: has_large_cache  # type: ignore[assignment]  # either
    found = linear_cpu.linear(x, weight, bias if has_bias else None)
    wide = F.linear(x.double(), weight.double(), bias.double())
    sums = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    assert bool(((found - wide).abs() <= 2**-8 * wide.abs() + (inner + 1) * 2**-23 * sums).all()), f"seed {seed}"
    OUTCOMES["multiplied"] += 1


def at_the_end(values: Tensor) -> Tensor:
    """Return a copy whose last element is the last of its memory, which begins where no vector would."""
    arena = torch.empty(values.numel() + 1, dtype=values.dtype)
    return arena[1:].view(values.shape).copy_(values)


def close(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return float((found.double() - wanted.double()).norm()) <= tolerance * float(wanted.double().norm()) + 1e-3


def check_linear_training(seed: int) -> None:
    """Take a linear layer and its gradients, their operands at the ends of their memory, and look at them."""
    rng = random.Random(seed)
    rows, inner, width = (
        rng.choice([1, 2, 7, 16, 23, 32, 64, 65, 300, 2050]),
        2 * rng.choice([1, 3, 16, 17, 70, 300]),
        2 * rng.choice([1, 5, 16, 33, 150]),
    )
    dtype = rng.choice([torch.float32, torch.bfloat16])
    x, grad = [at_the_end(torch.randn(rows, size).bfloat16()) for size in (inner, width)]
    weight, bias = at_the_end(torch.randn(width, inner).to(dtype)), at_the_end(torch.randn(width).to(dtype))
    has_bias, needs_input = rng.random() < 0.5, rng.random() < 0.5
    found = training_cpu.forward(x, weight, bias if has_bias else None)
    of_input, of_weight, of_bias = training_cpu.backward(grad, x, weight, needs_input, dtype if has_bias else None)
    wide, low = [one.double() for one in (x, grad)], [one.bfloat16().double() for one in (weight, bias * has_bias)]
    wanted = [F.linear(wide[0], *low), wide[1] @ low[0], wide[1].t() @ wide[0], wide[1].sum(0)]
    pairs = zip((found, of_input, of_weight, of_bias), wanted, strict=True)
    assert all(one is None or close(one, other, 0.01) for one, other in pairs), f"seed {seed}"
    OUTCOMES["trained"] += 1


def check_norm(seed: int) -> None:
    """Take a norm and its gradients, their operands at the ends of their memory, and look at them."""
    rng = random.Random(seed)
    rows, size = rng.choice([1, 2, 63, 64, 65, 200]), rng.choice([1, 3, 32, 63, 64, 65, 300, 1025])
    low = rng.choice([torch.bfloat16, torch.float16])
    x = at_the_end(torch.randn(rows, size).to(rng.choice([low, torch.float32])))
    grad, weight = at_the_end(torch.randn(rows, size).to(low)), at_the_end(torch.randn(size))
    is_centred = rng.random() < 0.5
    given = [size], (weight if rng.random() < 0.7 else None), None, 1e-6, is_centred, low
    found, wanted = (kernel.forward(x, *given) for kernel in (norm_cpu, norm_reference))
    bias = given[1] if is_centred else None
    mask = [True, given[1] is not None, bias is not None]
    with torch.no_grad():
        rest = [size], found[1], found[2], given[1], bias, mask, 1e-6, is_centred
        grads, others = (kernel.backward(grad, x, *rest) for kernel in (norm_cpu, norm_reference))
    pairs = [(found[0], wanted[0]), *zip(grads, others, strict=True)]
    assert size == 1 or all(one is None or close(one, other, 0.01) for one, other in pairs), f"seed {seed}"
    OUTCOMES["normalised"] += 1


def check_dropout(seed: int) -> None:
    """Draw the numbers of a dropout, of a generator that stands anywhere, and look at them."""
    rng = random.Random(seed)
    x = torch.randn(rng.choice([1, 2, 311, 312, 313, 1000, 4001])).to(rng.choice([torch.float32, torch.bfloat16]))
    p, drawn, found = rng.choice([0.1, 0.5, 0.99]), rng.randint(0, 700), []
    for draw in (lambda: torch.dropout(x, p, True), lambda: x * dropout_cpu.noise(x, p)):
        torch.manual_seed(seed)
        torch.rand(drawn)
        found.append((draw(), torch.get_rng_state()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)), f"seed {seed}"
    OUTCOMES["dropped"] += 1


def check_attention(seed: int, products: int) -> None:
    """Take gradients of attention, their operands at the ends of their memory, and look at them."""
    rng = random.Random(seed)
    batch, kv_heads, shared, width = (
        rng.choice([1, 2]),
        rng.choice([1, 2]),
        rng.choice([1, 3]),
        rng.choice([3, 32, 65, 128]),
    )
    queries, keys, is_causal = rng.choice([1, 17, 64, 70]), rng.choice([1, 16, 64, 130]), rng.random() < 0.3
    of_query, of_key = (batch, kv_heads * shared, queries, width), (batch, kv_heads, keys, width)
    query, key, value, grad = (at_the_end(torch.randn(s).bfloat16()) for s in (of_query, of_key, of_key, of_query))
    shapes = [(batch, 1, 1, keys), (1, kv_heads * shared, queries, 1), (queries, keys)]
    mask = None if is_causal or rng.random() < 0.5 else at_the_end(torch.randn(rng.choice(shapes)).bfloat16())
    out, logsumexp = flash_attention(query, key, value, 0.0, is_causal, attn_mask=mask)
    given = at_the_end(out), at_the_end(logsumexp), mask, is_causal, width**-0.5
    attention_cpu.products = lambda: products
    found = attention_cpu.backward(grad, query, key, value, *given)
    wanted = exact([query, key, value], grad, mask, is_causal=is_causal)
    assert all(close(one, true, 0.03) for one, true in zip(found, wanted, strict=True)), f"seed {seed}"
    OUTCOMES["attended"] += 1


def check_recurrent(seed: int, gates: int) -> None:
    """Take an LSTM (4 gates) or a GRU (3) forward and back, its operands at the ends of their memory, and look at it."""
    rng = random.Random(seed)
    steps, batch, inputs, units = (
        rng.choice(one) for one in ([1, 2, 5], [1, 3, 8, 13], [1, 7, 32, 65], [1, 16, 17, 64, 70])
    )
    count, is_reversed = gates * units, rng.random() < 0.5
    shapes = [(steps, batch, inputs), (batch, units), (batch, units), (count, inputs), (count, units)]
    shapes += [(count,)] * (2 * (rng.random() < 0.7))
    given = [(0.3 * torch.randn(shape)).bfloat16() for shape in shapes]
    grads: list[Tensor | None] = [
        at_the_end(torch.randn(shape).bfloat16()) for shape in [(steps, batch, units), *shapes[1:3]]
    ]
    if gates == 3:
        given[2], grads[1] = given[1], None
    y, states, kept = recurrent_cpu.forward([at_the_end(one) for one in given], is_reversed, True)
    assert kept is not None
    sums, first = recurrent_cpu.backward(grads, given, y, states, kept, is_reversed)
    last = states[0 if is_reversed else -1, :, :units]
    wide, of_input, of_h = [one.double() for one in given], sums[0].flatten(0, 1), sums[-1, -1 if is_reversed else 0]
    found = [of_input.t().double() @ wide[0].flatten(0, 1), first + of_h @ given[4] if gates == 3 else first]
    wide_grads, asked = [g if g is None else g.double() for g in grads], [n in (2, 3) for n in range(len(wide))]
    with torch.no_grad():
        wanted = recurrent_reference.gradients(wide_grads, wide, is_reversed, asked)
    out, _, state = recurrent_reference.layer(wide, is_reversed)
    assert close(y, out, 0.01) and close(last, state, 0.01), f"seed {seed}"
    assert all(
        close(one, true, 0.03) for one, true in zip(found, (wanted[3], wanted[2]), strict=True) if true is not None
    ), f"seed {seed}"
    OUTCOMES["remembered"] += 1


def check_convolution(seed: int) -> None:
    """Take gradients of a convolution, their operands at the ends of their memory, and look at them."""
    rng = random.Random(seed)
    batch, inside, outside = rng.choice([1, 2, 5]), rng.choice([1, 8, 17, 40]), rng.choice([1, 16, 33, 64])
    tap_rows, tap_columns = rng.choice([1, 2, 3, 7]), rng.choice([1, 3, 4])
    height, width = rng.randint(tap_rows, 20), rng.randint(tap_columns, 40)
    stride, padding = (rng.randint(1, 3), rng.randint(1, 4)), (rng.randint(0, 8), rng.randint(0, 3))
    x, weight = (
        torch.randn(shape) for shape in ((batch, inside, height, width), (outside, inside, tap_rows, tap_columns))
    )
    x, weight = at_the_end(x.bfloat16()), weight.bfloat16()
    exact, bias = weight.double().requires_grad_(), torch.zeros(outside, dtype=torch.float64).requires_grad_()
    out = F.conv2d(x.double(), exact, bias, stride, padding)
    grad = at_the_end(torch.randn(out.shape).bfloat16())
    found = convolution_cpu.weight_gradient(grad, x, weight, stride, padding, True)
    wanted = torch.autograd.grad(out, (exact, bias), grad.double())
    assert all(one is not None and close(one, true, 0.01) for one, true in zip(found, wanted, strict=True)), (
        f"seed {seed}"
    )
    OUTCOMES["convolved"] += 1
