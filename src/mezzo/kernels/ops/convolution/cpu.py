"""Gradients of a convolution's weight and bias on the CPU, pictures in pairs; `cpu.cpp` computes them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...backends.cpp.batch import int64s
from ...backends.cpp.build import Kernel
from ...operands import addresses_or_none, check_read

_kernel = Kernel("convolution", gradients="PPPPPPi", workspace="Pi:q", is_faster=":i")


def weight_gradient(
    grad: Tensor, input: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int], has_bias: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of weight [O, I, R, C], of which the shape is read, and bias [O] or None, bf16; arguments as for `convolution`.

    Products are summed in fp32 and rounded once; any number of threads gives the same bits. `grad` is [B, O, rows, columns], bf16.

    Raises: OperandError: one that is not what it is said to be. Syncs: no.
    """
    check_read("a convolution", "input", input, (grad.shape[0], weight.shape[1], *input.shape[2:]), torch.bfloat16)
    sizes = zip(input.shape[2:], padding, weight.shape[2:], stride, strict=True)
    shape = [(size + 2 * pad - tap) // step + 1 for size, pad, tap, step in sizes]
    check_read("a convolution", "gradient", grad, (input.shape[0], weight.shape[0], *shape), torch.bfloat16)
    input, grad = input.contiguous(), grad.contiguous()
    found = torch.empty(weight.shape, dtype=torch.bfloat16, device="cpu")
    of_bias = torch.empty(weight.shape[:1], dtype=torch.bfloat16, device="cpu") if has_bias else None
    threads = torch.get_num_threads()
    numbers = int64s([*input.shape, *grad.shape[1:], *weight.shape[2:], *stride, *padding])
    bytes_needed = _kernel.workspace(numbers, threads)
    memory = torch.empty(bytes_needed // 4, dtype=torch.float32, device="cpu")
    *tensors, workspace = addresses_or_none([found, of_bias, input, grad, memory])
    _kernel.gradients(*tensors, numbers, workspace, threads)
    return found, of_bias


@functools.cache
def is_faster() -> bool:
    """Whether it is faster than torch's here: the processor multiplies pairs of bf16, and no tiles. Host only."""
    return bool(_kernel.is_faster())
