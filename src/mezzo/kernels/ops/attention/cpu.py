"""Gradients of attention on the CPU, block by block of its scores; `cpu.cpp` computes them."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from ...backends.cpp.batch import int64s
from ...backends.cpp.build import Kernel
from ...operands import addresses_or_none, check_read

_kernel = Kernel("attention", backward="PPPPPfiiPi", workspace="P:q", products=":q")


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, mask: Tensor | None,
    is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value, each in its shape and dtype, rounded to nearest; shapes are those of `attention`.

    Products are of bf16, the probabilities and their gradients rounded to it, with sums in fp32; any number of threads
    gives the same bits. `grad` and `out` are as the query, `logsumexp` [B, H, T] of the scores of each, in fp32.

    Raises: OperandError: one that is not what it is said to be. Syncs: no.
    """
    (batch, heads, queries, width), (kv_heads, keys) = query.shape, key.shape[1:3]
    named = {"query": query, "key": key, "value": value, "result": out, "gradient": grad}
    for name, tensor in named.items():
        check_read("attention", name, tensor, key.shape if name in ("key", "value") else query.shape, torch.bfloat16)
    check_read("attention", "log-sum-exp", logsumexp, query.shape[:3], torch.float32)
    read = [one if one.stride(-1) == 1 else one.contiguous() for one in named.values()]
    turned = [one.transpose(1, 2) for one in (query, key, value)]
    grads = [torch.empty_like(one, memory_format=torch.contiguous_format).transpose(1, 2) for one in turned]
    rows, added = [*read, *grads], mask
    if mask is not None:
        # in fp32 as the kernel reads it: [batch, head, key, query], the queries side by side or all one
        by_key = mask.float().reshape((1,) * (4 - mask.dim()) + mask.shape).transpose(-1, -2)
        added = by_key.contiguous().expand((batch, heads, keys, queries))
    strides = [stride for one in rows for stride in one.stride()[:3]] + list(logsumexp.stride())
    sizes = int64s([batch, heads, kv_heads, queries, keys, width])
    threads = min(torch.get_num_threads(), batch * kv_heads)
    memory = torch.empty(threads * _kernel.workspace(sizes) // 4, dtype=torch.float32, device="cpu")
    *tensors, workspace, sums, to_add = addresses_or_none([*rows, memory, logsumexp, added])
    _kernel.backward(
        (ctypes.c_void_p * 8)(*tensors), sums, to_add,
        int64s(strides + ([0] * 4 if added is None else list(added.stride()))), sizes, scale, is_causal, products() == 2,
        workspace, threads,
    )  # fmt: skip
    return grads[0], grads[1], grads[2]


@functools.cache
def products() -> int:
    """Return what multiplies: 2 tiles, 1 pairs of bf16, 0 nothing that the kernel is written for. Host only."""
    return int(_kernel.products())
