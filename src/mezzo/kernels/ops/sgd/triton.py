"""The SGD step on CUDA: one launch over all tensors; the folder defines it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...backends.triton import launch, launch_scalars
from ...backends.triton.tiles import (
    block_of,
    load,
    load_pointer,
    mix,
    random_key,
    read_grad,
    read_master,
    write_master,
    write_mean,
)
from ...operands import Operands
from .. import sgd as reference
from . import SGDRule


@triton.jit(do_not_specialize=["tensors"])
def sgd_scalars_kernel(p_step, p_scalars, tensors, rate, keep, add, SIZE: tl.constexpr):
    """Write the three numbers of SIZE parameters: in the first step of each there is no sum yet."""
    indices = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    mask = indices < tensors
    is_first = tl.load(p_step + indices, mask=mask, other=1.0) == 1.0
    none = tl.full((SIZE,), 0.0, tl.float32)
    tl.store(p_scalars + 3 * indices, none + rate, mask=mask)
    tl.store(p_scalars + 3 * indices + 1, tl.where(is_first, 0.0, none + keep), mask=mask)
    tl.store(p_scalars + 3 * indices + 2, tl.where(is_first, 1.0, none + add), mask=mask)


@triton.jit(do_not_specialize=["tensors", "count"])
def sgd_step_kernel(
    p_addresses, p_sizes, p_seeds, p_offsets, p_blocks, p_scalars, p_step, p_inv_scale, p_clip, p_found,
    tensors, count, weight_decay, momentum,
    MODE: tl.constexpr, VALUE: tl.constexpr, GRAD: tl.constexpr, MEAN: tl.constexpr,
    DECAYS: tl.constexpr, SUMS: tl.constexpr, NESTEROV: tl.constexpr,
    MAXIMIZE: tl.constexpr, SCALED: tl.constexpr, GUARDED: tl.constexpr, SIZE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Step one block. Loads widen to fp32, fp32 arithmetic, stores as tiles.py says."""
    if GUARDED:
        if tl.load(p_found) != 0:
            return
    tensor, indices, mask = block_of(p_blocks, p_sizes, count, SIZE, ALIGNED)
    p_addresses += tensor
    value = load_pointer(p_addresses, ALIGNED)
    aux = load_pointer(p_addresses + tensors, ALIGNED)
    grad = load_pointer(p_addresses + 2 * tensors, ALIGNED)
    seed, step = tl.load(p_seeds + tensor), tl.load(p_step + tensor)
    b_index = (indices + tl.load(p_offsets + tensor)).to(tl.uint32)  # in the tensor that this one is a part of
    p_scalars += 3 * tensor
    rate, keep, add = tl.load(p_scalars), tl.load(p_scalars + 1), tl.load(p_scalars + 2)

    b_master = read_master(value, aux, indices, mask, MODE, VALUE)
    b_grad = read_grad(grad, indices, mask, p_inv_scale, p_clip, GRAD, SCALED, MAXIMIZE)
    if DECAYS:
        b_grad = tl.fma(b_master, weight_decay, b_grad)
    if SUMS:
        sums = load_pointer(p_addresses + 3 * tensors, ALIGNED)
        b_sum = tl.fma(b_grad, add, load(sums, indices, mask, MEAN) * keep)
        write_mean(sums, indices, mask, b_sum, mix(b_index ^ random_key(seed, step, 1)), MEAN)
        b_grad = tl.fma(b_sum, momentum, b_grad) if NESTEROV else b_sum
    b_master = tl.fma(b_grad, rate, b_master)
    write_master(value, aux, indices, mask, b_master, mix(b_index ^ random_key(seed, step, 0)), MODE, VALUE)


def scalars(step: Tensor, rule: SGDRule, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers of `reference.scalars`, in one launch where the rate is a number of the host's. Syncs: no."""
    if isinstance(rule.lr, Tensor) or dtype is not torch.float32:
        return reference.scalars(step, rule, dtype)
    return launch_scalars(sgd_scalars_kernel, step, -float(rule.lr), float(rule.momentum), 1.0 - rule.dampening)


def step_(operands: Operands, rule: SGDRule, scalars: Tensor, step: Tensor) -> None:
    """Take one SGD step; arguments and writes are those of `reference.step_`. Syncs: no.

    Products are fused only where `tl.fma` says so, as in the compiled CPU step; under the interpreter the results are
    the reference's bits.
    """
    if operands.unwalkable:
        reference.step_(operands, rule, scalars, step, operands.unwalkable)
    decays, sums = rule.weight_decay != 0, rule.momentum != 0
    numbers = (rule.weight_decay, rule.momentum)
    launch(sgd_step_kernel, operands, scalars, step, numbers, DECAYS=decays, SUMS=sums, NESTEROV=rule.nesterov)
