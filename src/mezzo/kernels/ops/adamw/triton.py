"""The AdamW step on CUDA: one launch over all tensors; the folder defines it."""

import ctypes
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...backends.triton import launch, launch_scalars
from ...backends.triton.tiles import (
    FP32,
    block_of,
    is_nan,
    load,
    load_pointer,
    mix,
    narrow,
    random_key,
    read_grad,
    read_master,
    store_fp32,
    store_low,
    write_master,
    write_mean,
)
from ...operands import Operands
from .. import adamw as reference
from . import AdamWRule


@triton.jit
def powers_less_one(count, log_beta):
    """Return beta^count - 1 in fp64: what rounds in the exponential is divided out by its logarithm."""
    x = count * log_beta
    power = tl.exp(x)
    is_lost = (power == 1.0) | (power == 0.0)
    return tl.where(
        is_lost, tl.where(power == 0.0, -1.0, x), (power - 1.0) * (x / tl.log(tl.where(is_lost, 0.5, power)))
    )


@triton.jit(do_not_specialize=["tensors"])
def adamw_scalars_kernel(
    p_step, p_scalars, tensors, high1, middle1, low1, high2, middle2, low2, high_lr, middle_lr, low_lr, decay, SIZE: tl.constexpr,
):  # fmt: skip
    """Compute the three numbers of SIZE parameters from the steps that each has taken; the host's numbers are fp64, in three parts."""
    indices = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = indices < tensors
    count = tl.load(p_step + indices, mask=mask, other=1.0).to(tl.float64)
    none = tl.full((SIZE,), 0.0, tl.float64)
    over1 = powers_less_one(count, none + high1 + middle1 + low1)
    over2 = powers_less_one(count, none + high2 + middle2 + low2)
    size = (none + high_lr + middle_lr + low_lr) / over1
    tl.store(p_scalars + 3 * indices, tl.full((SIZE,), 0.0, tl.float32) + decay, mask=mask)
    tl.store(p_scalars + 3 * indices + 1, size.to(tl.float32), mask=mask)
    tl.store(p_scalars + 3 * indices + 2, tl.sqrt(-over2).to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["tensors", "count"])
def adamw_step_kernel(
    p_addresses, p_sizes, p_seeds, p_offsets, p_blocks, p_scalars, p_step, p_inv_scale, p_clip, p_found,
    tensors, count, lerp1, keep2, add2, eps, l2,
    MODE: tl.constexpr, VALUE: tl.constexpr, GRAD: tl.constexpr, MEAN: tl.constexpr,
    AMSGRAD: tl.constexpr, L2: tl.constexpr, MAXIMIZE: tl.constexpr, SCALED: tl.constexpr, GUARDED: tl.constexpr,
    NEAR: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Step one block. Loads widen to fp32, fp32 arithmetic, IEEE division and root, stores as tiles.py says."""
    if GUARDED:
        if tl.load(p_found) != 0:
            return
    tensor, indices, mask = block_of(p_blocks, p_sizes, count, SIZE, ALIGNED)
    p_addresses += tensor
    value = load_pointer(p_addresses, ALIGNED)
    aux = load_pointer(p_addresses + tensors, ALIGNED)
    grad = load_pointer(p_addresses + 2 * tensors, ALIGNED)
    means = load_pointer(p_addresses + 3 * tensors, ALIGNED)
    squares = load_pointer(p_addresses + 4 * tensors, ALIGNED)
    peaks = load_pointer(p_addresses + 5 * tensors, ALIGNED)
    seed, step = tl.load(p_seeds + tensor), tl.load(p_step + tensor)
    b_index = (indices + tl.load(p_offsets + tensor)).to(tl.uint32)  # in the tensor that this one is a part of
    p_scalars += 3 * tensor
    decay, size, unbias = tl.load(p_scalars), tl.load(p_scalars + 1), tl.load(p_scalars + 2)

    b_master = read_master(value, aux, indices, mask, MODE, VALUE) * decay
    b_grad = read_grad(grad, indices, mask, p_inv_scale, p_clip, GRAD, SCALED, MAXIMIZE)
    if L2:
        b_grad = tl.fma(b_master, l2, b_grad)
    b_mean = load(means, indices, mask, MEAN)
    b_mean = tl.fma(b_grad - b_mean, lerp1, b_mean if NEAR else b_grad)
    b_square = tl.fma(b_grad * add2, b_grad, load(squares, indices, mask, MEAN) * keep2)
    b_peak = b_square
    if AMSGRAD:
        b_before = load(peaks, indices, mask, MEAN)
        b_peak = tl.where((b_before > b_square) | is_nan(b_before), b_before, b_square)
    b_spread = tl.div_rn(tl.sqrt_rn(b_peak), unbias) + eps
    b_master = b_master + tl.div_rn(b_mean * size, b_spread)

    b_random = mix(b_index ^ random_key(seed, step, 1))
    write_master(value, aux, indices, mask, b_master, mix(b_index ^ random_key(seed, step, 0)), MODE, VALUE)
    write_mean(means, indices, mask, b_mean, b_random, MEAN)
    write_mean(squares, indices, mask, b_square, b_random >> 16, MEAN)
    if AMSGRAD:
        if MEAN == FP32:
            store_fp32(peaks, indices, mask, b_peak)
        else:
            store_low(peaks, indices, mask, narrow(b_peak, MEAN))


def scalars(step: Tensor, rule: AdamWRule, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers of `reference.scalars`, in one launch where the rate is a number of the host's. Syncs: no."""
    if isinstance(rule.lr, Tensor) or dtype is not torch.float32 or not (rule.beta1 > 0 and rule.beta2 > 0):
        return reference.scalars(step, rule, dtype)
    parts = [part for number in (math.log(rule.beta1), math.log(rule.beta2), float(rule.lr)) for part in _parts(number)]
    return launch_scalars(adamw_scalars_kernel, step, *parts, 1 - float(rule.lr) * rule.decay)


def _parts(number: float) -> tuple[float, float, float]:
    """Return three fp32 numbers whose sum is an fp64 one."""
    high = ctypes.c_float(number).value
    middle = ctypes.c_float(number - high).value
    return high, middle, number - high - middle


def step_(operands: Operands, rule: AdamWRule, scalars: Tensor, step: Tensor) -> None:
    """Take one AdamW step; arguments and writes are those of `reference.step_`. Syncs: no.

    Every operation is IEEE's and products are fused only where `tl.fma` says so, as in the compiled CPU step.
    Under the interpreter the results are the reference's bits, with the nearest square root.
    """
    if operands.unwalkable:
        reference.step_(operands, rule, scalars, step, operands.unwalkable)
    weight = ctypes.c_float(1 - rule.beta1).value
    near = weight < 0.5  # torch's lerp starts from the nearer end
    numbers = (weight if near else weight - 1, rule.beta2, 1 - rule.beta2, rule.eps, rule.l2)
    launch(adamw_step_kernel, operands, scalars, step, numbers, AMSGRAD=rule.amsgrad, L2=rule.l2 != 0, NEAR=near)
