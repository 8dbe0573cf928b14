"""Layer and RMS norm on CUDA: one launch forward, two backward, 16 bit in memory; the folder defines them.

torch's kernel for CUDA takes operands of one dtype, so that fp32 weights had 16-bit activations copied to fp32 and back, four
times: 58 bytes an element, forward and backward. Here it is 10, and the partial sums of the weights' gradients.

Both launches are ops of torch's dispatcher, which traces and recorders see as any other.
"""

from __future__ import annotations

import functools
import math
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...._torch import is_unwatched
from ....formats import LOW_DTYPES
from ...backends.triton import start
from ...backends.triton.tiles import narrow
from ...dtensor import PLAIN
from ...operands import FORMATS
from .. import layer_norm as reference

LONGEST = 4096 if torch.version.hip else 8192
"""Elements that are normalised together, up to which a program holds them in at most 64 registers a thread."""
MOST_PROGRAMS = 1024
"""Of backward, each with sums of its own for the gradients of weight and bias."""
ROWS = 8
"""That a program of backward takes at least: its sums are then at most 2 bytes an element, written and read."""


@triton.jit(do_not_specialize=["size"])
def layer_norm_kernel(
    p_x, p_weight, p_bias, p_out, p_mean, p_rstd, size, eps,
    FORMAT: tl.constexpr, CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Normalise a row; one program each."""
    row = tl.program_id(0)
    size = size // 16 * 16 if ALIGNED else size  # what lets the compiler make vectors
    indices = tl.arange(0, SIZE)
    mask = indices < size
    at = row * size.to(tl.int64) + indices
    x = tl.load(p_x + at, mask=mask, other=0.0).to(tl.float32)
    if CENTRED:
        mean = tl.sum(x, 0) / size
        tl.store(p_mean + row, mean)
        x = tl.where(mask, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / size + eps)
    out = x * rstd
    if HAS_WEIGHT:
        out = out * tl.load(p_weight + indices, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        out = out + tl.load(p_bias + indices, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_out + at, narrow(out, FORMAT).to(p_out.dtype.element_ty, bitcast=True), mask=mask)
    tl.store(p_rstd + row, rstd)


@triton.jit(do_not_specialize=["rows", "size"])
def layer_norm_backward_kernel(
    p_grad, p_x, p_weight, p_mean, p_rstd, p_grad_x, p_sums, rows, size,
    FORMAT: tl.constexpr, CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Take every n-th row of n programs: gradients of the input, and the sums of those of weight and bias."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    size = size // 16 * 16 if ALIGNED else size  # what lets the compiler make vectors
    indices = tl.arange(0, SIZE)
    mask = indices < size
    weight = tl.load(p_weight + indices, mask=mask, other=0.0).to(tl.float32) if HAS_WEIGHT else 1.0
    weight_sum = tl.zeros((SIZE,), tl.float32)
    bias_sum = tl.zeros((SIZE,), tl.float32)
    for row in range(program, rows, programs):
        at = row * size.to(tl.int64) + indices
        grad = tl.load(p_grad + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.load(p_x + at, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(p_rstd + row)
        if CENTRED:
            x = tl.where(mask, x - tl.load(p_mean + row), 0.0)
            bias_sum += grad
        x_hat = x * rstd
        weight_sum += grad * x_hat
        grad *= weight
        grad_x = grad - x_hat * (tl.sum(grad * x_hat, 0) / size)
        if CENTRED:
            grad_x -= tl.sum(grad, 0) / size
        grad_x *= rstd
        tl.store(p_grad_x + at, narrow(grad_x, FORMAT).to(p_grad_x.dtype.element_ty, bitcast=True), mask=mask)
    own = program * size.to(tl.int64) + indices
    tl.store(p_sums + own, weight_sum, mask=mask)
    if CENTRED:
        tl.store(p_sums + programs * size.to(tl.int64) + own, bias_sum, mask=mask)


@functools.cache
def constants(size: int) -> dict[str, Any]:
    """Return what both kernels are compiled for: a power of two, and 4 elements a thread, or 8. Host only."""
    block = max(256, triton.next_power_of_2(size))
    warps = min(32, block // (256 if torch.version.hip else 128))
    return {"SIZE": block, "ALIGNED": size % 16 == 0, "num_warps": warps}


def _num_programs(rows: int) -> int:
    return min(MOST_PROGRAMS, -(-rows // ROWS))


def _forward(
    is_centred: bool, x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if x.dtype not in LOW_DTYPES:  # somebody repeats the op in a wider dtype
        if is_centred:
            return torch.native_layer_norm(x, shape, weight, bias, eps)
        rstd = reference.inverse_rms(x, shape, eps)
        return torch.rms_norm(x, shape, weight, eps), rstd.new_empty(0), rstd
    out, mean, rstd = _forward_memory(is_centred, x, shape, weight, bias, eps)
    size = math.prod(shape)
    start(
        layer_norm_kernel, rstd.numel(), x.device,
        x, x if weight is None else weight, x if bias is None else bias, out, mean if is_centred else rstd, rstd, size, eps,
        FORMAT=FORMATS[x.dtype], CENTRED=is_centred, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
        **constants(size),
    )  # fmt: skip
    return out, mean, rstd


def _forward_memory(
    is_centred: bool, x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty((*x.shape[: -len(shape)], *[1] * len(shape)), dtype=torch.float32)
    return torch.empty_like(x), rstd.new_empty(rstd.shape if is_centred else 0), rstd


def _backward(
    is_centred: bool, grad: Tensor, x: Tensor, shape: list[int], mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, size = rstd.numel(), math.prod(shape)
    if x.dtype not in LOW_DTYPES:
        x_hat = (x - mean if is_centred else x) * rstd
        grad_x = reference.gradient(grad, x_hat, rstd, weight, len(shape), is_centred)
        terms = torch.stack([grad * x_hat, grad][: 1 + is_centred]).view(-1, rows, size)
        programs = torch.arange(rows, device=x.device, dtype=torch.int64) % _num_programs(rows)
        return grad_x, terms.new_zeros(len(terms), _num_programs(rows), size).index_add_(1, programs, terms)
    grad_x, sums = _backward_memory(is_centred, grad, x, shape, mean, rstd, weight)
    start(
        layer_norm_backward_kernel, _num_programs(rows), x.device,
        grad, x, x if weight is None else weight, mean if is_centred else rstd, rstd, grad_x, sums, rows, size,
        FORMAT=FORMATS[x.dtype], CENTRED=is_centred, HAS_WEIGHT=weight is not None, **constants(size),
    )  # fmt: skip
    return grad_x, sums


def _backward_memory(
    is_centred: bool, grad: Tensor, x: Tensor, shape: list[int], mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), rstd.new_empty((1 + is_centred, _num_programs(rstd.numel()), math.prod(shape)))


_library: Any = torch.library.Library("mezzo", "DEF")  # type: ignore[no-untyped-call]  # torch's own
for _way, _arguments, _kernel, _memory in (
    ("", "Tensor x, int[] shape, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)", _forward, _forward_memory),
    ("_backward", "Tensor grad, Tensor x, int[] shape, Tensor mean, Tensor rstd, Tensor? weight) -> (Tensor, Tensor)", _backward, _backward_memory),
):  # fmt: skip
    for _name, _is_centred in ((f"layer_norm{_way}", True), (f"rms_norm{_way}", False)):
        _library.define(f"{_name}({_arguments}")
        _library.impl(_name, partial(_kernel, _is_centred), "CompositeExplicitAutograd")
        torch.library.register_fake(f"mezzo::{_name}", partial(_memory, _is_centred), lib=_library)


def fits(x: Tensor, shape: list[int], *weights: Tensor | None) -> bool:
    """Whether a program holds a row, and the addresses of tensors are those of their values; torch objects to wrong operands. Syncs: no."""
    given = [weight for weight in weights if weight is not None]
    if x.numel() == 0 or math.prod(shape) > LONGEST or list(x.shape[-len(shape) :]) != shape:
        return False
    if any([list(one.shape) != shape or not one.is_contiguous() or one.device != x.device for one in given]):
        return False
    return not any([type(one) not in PLAIN and hasattr(one, "__tensor_flatten__") for one in (x, *given)])


def forward(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float, is_centred: bool, low: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalise in one launch; arguments and results are those of `reference.forward`. Syncs: no."""
    if not fits(x, shape, weight, bias) or x.dtype is not low:
        return reference.forward(x, shape, weight, bias, eps, is_centred, low)
    if is_unwatched():
        return _forward(is_centred, x.contiguous(), shape, weight, bias, eps)
    op = torch.ops.mezzo.layer_norm if is_centred else torch.ops.mezzo.rms_norm
    return op(x.contiguous(), shape, weight, bias, eps)  # type: ignore[no-any-return]  # torch's own


def backward(
    grad: Tensor, x: Tensor, shape: list[int], mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None,
    mask: list[bool], eps: float, is_centred: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients; arguments and results are those of `reference.backward`, that of the input in its dtype. Syncs: no."""
    if torch.is_grad_enabled() or not fits(x, shape, weight, bias):
        return reference.backward(grad, x, shape, mean, rstd, weight, bias, mask, eps, is_centred)
    run: Any = partial(_backward, is_centred)
    if not is_unwatched():
        run = torch.ops.mezzo.layer_norm_backward if is_centred else torch.ops.mezzo.rms_norm_backward
    grad_x, sums = run(grad.contiguous(), x.contiguous(), shape, mean, rstd, weight)
    found: tuple[Tensor, ...] = sums.sum(1).view(-1, *shape).unbind() if any(mask[1:]) else ()
    return grad_x, found[0] if found else None, found[1] if len(found) > 1 else None
