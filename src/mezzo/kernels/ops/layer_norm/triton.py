"""Layer norm on CUDA: one launch forward, two backward, 16 bit in memory; `reference.py` defines it.

torch's kernel for CUDA takes operands of one dtype, so that fp32 weights had 16-bit activations copied to fp32 and back, four
times: 58 bytes an element, forward and backward. Here it is 10, and the partial sums of the weights' gradients.

Both launches are ops of torch's dispatcher, which traces and recorders see as any other.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ....formats import LOW_DTYPES
from ...backends.triton.launch import on
from ...backends.triton.tiles import narrow
from ...operands import FORMATS
from . import reference

LONGEST = 4096 if torch.version.hip else 8192
"""Elements that are normalised together, up to which a program holds them in at most 64 registers a thread."""
MOST_PROGRAMS = 1024
"""Of backward, each with sums of its own for the gradients of weight and bias."""
ROWS = 8
"""That a program of backward takes at least: its sums are then at most 2 bytes an element, written and read."""


@triton.jit(do_not_specialize=["size"])
def layer_norm_kernel(
    p_x, p_weight, p_bias, p_out, p_mean, p_rstd, size, eps,
    FORMAT: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Normalise a row; one program each."""
    row = tl.program_id(0)
    size = size // 16 * 16 if ALIGNED else size  # what lets the compiler make vectors
    indices = tl.arange(0, SIZE)
    mask = indices < size
    at = row * size.to(tl.int64) + indices
    x = tl.load(p_x + at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / size
    centred = tl.where(mask, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 0) / size + eps)
    out = centred * rstd
    if HAS_WEIGHT:
        out = out * tl.load(p_weight + indices, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        out = out + tl.load(p_bias + indices, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_out + at, narrow(out, FORMAT).to(p_out.dtype.element_ty, bitcast=True), mask=mask)
    tl.store(p_mean + row, mean)
    tl.store(p_rstd + row, rstd)


@triton.jit(do_not_specialize=["rows", "size"])
def layer_norm_backward_kernel(
    p_grad, p_x, p_weight, p_mean, p_rstd, p_grad_x, p_sums, rows, size,
    FORMAT: tl.constexpr, HAS_WEIGHT: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr,
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
        x_hat = tl.where(mask, (x - tl.load(p_mean + row)) * rstd, 0.0)
        weight_sum += grad * x_hat
        bias_sum += grad
        grad *= weight
        along, across = tl.sum(grad * x_hat, 0) / size, tl.sum(grad, 0) / size
        grad_x = (grad - across - x_hat * along) * rstd
        tl.store(p_grad_x + at, narrow(grad_x, FORMAT).to(p_grad_x.dtype.element_ty, bitcast=True), mask=mask)
    own = program * size.to(tl.int64) + indices
    tl.store(p_sums + own, weight_sum, mask=mask)
    tl.store(p_sums + programs * size.to(tl.int64) + own, bias_sum, mask=mask)


def constants(size: int) -> dict[str, Any]:
    """Return what both kernels are compiled for: a power of two, and 4 elements a thread, or 8. Host only."""
    block = max(256, triton.next_power_of_2(size))
    warps = min(32, block // (256 if torch.version.hip else 128))
    return {"SIZE": block, "ALIGNED": size % 16 == 0, "num_warps": warps}


def _num_programs(rows: int) -> int:
    return min(MOST_PROGRAMS, -(-rows // ROWS))


def _forward(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if x.dtype not in LOW_DTYPES:  # somebody repeats the op in a wider dtype
        return torch.native_layer_norm(x, shape, weight, bias, eps)
    out, mean, rstd = _forward_memory(x, shape, weight, bias, eps)
    size = math.prod(shape)
    with on(x.device):
        layer_norm_kernel[(mean.numel(),)](
            x, x if weight is None else weight, x if bias is None else bias, out, mean, rstd, size, eps,
            FORMAT=FORMATS[x.dtype], HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, **constants(size), enable_fp_fusion=False,
        )  # fmt: skip
    return out, mean, rstd


def _forward_memory(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.new_empty((*x.shape[: -len(shape)], *[1] * len(shape)), dtype=torch.float32)
    return torch.empty_like(x), mean, torch.empty_like(mean)


def _backward(
    grad: Tensor, x: Tensor, shape: list[int], mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows, size = mean.numel(), math.prod(shape)
    if x.dtype not in LOW_DTYPES:
        found = torch.ops.aten.native_layer_norm_backward(
            grad, x, shape, mean, rstd, weight, None, [True, False, False]
        )
        terms = torch.stack([grad * ((x - mean) * rstd), grad]).view(2, rows, size)
        programs = torch.arange(rows, device=x.device, dtype=torch.int64) % _num_programs(rows)
        return found[0], terms.new_zeros(2, _num_programs(rows), size).index_add_(1, programs, terms)
    grad_x, sums = _backward_memory(grad, x, shape, mean, rstd, weight)
    with on(x.device):
        layer_norm_backward_kernel[(_num_programs(rows),)](
            grad, x, x if weight is None else weight, mean, rstd, grad_x, sums, rows, size,
            FORMAT=FORMATS[x.dtype], HAS_WEIGHT=weight is not None, **constants(size), enable_fp_fusion=False,
        )  # fmt: skip
    return grad_x, sums


def _backward_memory(
    grad: Tensor, x: Tensor, shape: list[int], mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), mean.new_empty((2, _num_programs(mean.numel()), math.prod(shape)))


_library: Any = torch.library.Library("mezzo", "DEF")  # type: ignore[no-untyped-call]  # torch's own
for _name, _arguments, _kernel, _memory in (
    ("layer_norm", "Tensor x, int[] shape, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)", _forward, _forward_memory),
    ("layer_norm_backward", "Tensor grad, Tensor x, int[] shape, Tensor mean, Tensor rstd, Tensor? weight) -> (Tensor, Tensor)", _backward, _backward_memory),
):  # fmt: skip
    _library.define(f"{_name}({_arguments}")
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mezzo::{_name}", _memory, lib=_library)


def _fits(x: Tensor, shape: list[int], *weights: Tensor | None) -> bool:
    """Whether a program holds a row, and the addresses of tensors are those of their values; torch objects to wrong operands."""
    given = [x, *(weight for weight in weights if weight is not None)]
    return (
        x.numel() > 0
        and math.prod(shape) <= LONGEST
        and list(x.shape[-len(shape) :]) == shape
        and all(list(weight.shape) == shape and weight.is_contiguous() for weight in given[1:])
        and all(one.device == x.device and not hasattr(one, "__tensor_flatten__") for one in given)
    )


def forward(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise in one launch; arguments and results are those of `reference.forward`. Syncs: no."""
    if not _fits(x, shape, weight, bias):
        return reference.forward(x, shape, weight, bias, eps)
    return torch.ops.mezzo.layer_norm(x.contiguous(), shape, weight, bias, eps)


def backward(
    grad: Tensor, x: Tensor, shape: list[int], mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None,
    mask: list[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients; arguments and results are those of `reference.backward`, that of the input in its dtype. Syncs: no."""
    if torch.is_grad_enabled() or not _fits(x, shape, weight, bias):
        return reference.backward(grad, x, shape, mean, rstd, weight, bias, mask)
    grad_x, sums = torch.ops.mezzo.layer_norm_backward(grad.contiguous(), x.contiguous(), shape, mean, rstd, weight)
    weight_sum, bias_sum = sums.sum(1).view(2, *shape) if any(mask[1:]) else (None, None)
    return grad_x, weight_sum, bias_sum
