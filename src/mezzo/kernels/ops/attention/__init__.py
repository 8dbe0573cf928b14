"""Attention in bf16 on the CPU: torch's kernel forward, gradients by one of mezzo's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...._torch import (
    constant_when_compiled,
    dispatch_modes,
    flash_attention,
    flash_attention_backward,
    is_unwatched,
    math_attention,
)
from ...dtensor import is_wrapped
from ...registry import compiled

WIDEST = 128
"""Elements of a head up to which torch's kernel and this one were compared."""
LONGEST_IN_PAIRS = 256
"""Keys up to which pairs of bf16 (AVX512-BF16) are faster than both of torch's kernels; tiles (AMX) are at every length."""


def takes_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> bool:
    """Whether `attention` takes these operands, computes their gradients faster than torch, and is seen by nobody. Host only.

    Query, key and value may be any tensors of the CPU; with `enable_gqa` several heads of queries may share one of keys.
    """
    if not ((torch.compiler.is_compiling() or is_unwatched()) and query.dim() == key.dim() == value.dim() == 4):
        return False
    batch, heads, queries, width = query.shape
    kv_heads, keys = key.shape[1:3]
    return (
        0 < width <= WIDEST
        and query.numel() > 0 < key.numel()
        and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1  # as torch's kernel takes for granted
        and key.shape == value.shape == (batch, kv_heads, keys, width)
        and (kv_heads == heads or (enable_gqa and heads % kv_heads == 0))
        and (mask is None or (not is_causal and _is_mask(mask, (batch, heads, queries, keys))))
        and ((products := _products()) == 2 or (products == 1 and keys <= LONGEST_IN_PAIRS))
    )


def _is_mask(mask: Tensor, scores: tuple[int, ...]) -> bool:
    """Whether a mask is one for scores of a shape, and wants no gradient."""
    is_plain = (
        type(mask) is Tensor and mask.is_cpu and not mask.requires_grad and mask.dim() in (2, 4) and mask.stride(-1) < 2
    )
    sizes = zip(mask.shape[::-1], scores[::-1], strict=False)
    fits = all(own == 1 or own == size for own, size in sizes)  # noqa: PLR1714  # the compiler finds no size that varies in a tuple
    return is_plain and fits and mask.dtype in (torch.bool, torch.bfloat16, torch.float32)


@constant_when_compiled
def _products() -> int:
    kernel = compiled("attention")
    return 0 if kernel is None else int(kernel.products())


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None
) -> Tensor:
    """Return softmax(scale q k' + mask) v of operands for which `takes_attention` says yes, rounded as torch's kernel rounds.

    For backward wait the operands, the result, and a number for each query. Query and result are [B, H, T, D], key and value [B, G, S, D],
    H a multiple of G, bf16; the mask is [B or 1, H or 1, T or 1, S or 1] or without the first two, bool (True is seen), or bf16 or fp32,
    which are added. With `is_causal` query i sees keys up to i; `scale` None is D ** -0.5. Syncs: no.
    """
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.where(mask, 0.0, -torch.inf).to(torch.bfloat16)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if torch.compiler.is_compiling():
        from .opaque import opaque  # registering an op imports the compiler

        return opaque(query, key, value, mask, is_causal, scale)[0]  # type: ignore[no-any-return]  # torch types it loosely
    out: Tensor = _Attention.apply(query, key, value, mask, is_causal, scale)  # type: ignore[no-untyped-call]  # torch's own
    return out


class _Attention(torch.autograd.Function):
    """torch's kernel, with gradients by the one that runs fastest here; torch's own where somebody watches ops."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
    ) -> Tensor:
        out: Tensor
        out, logsumexp = flash_attention(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
        ctx.save_for_backward(query, key, value, out, logsumexp, mask)
        ctx.options = is_causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, logsumexp, mask = ctx.saved_tensors
        is_causal, scale = ctx.options
        if torch.is_grad_enabled():
            found = _differentiable(grad, (query, key, value), mask, is_causal, scale)
        elif dispatch_modes() or is_wrapped(grad):
            given = grad, query, key, value, out, logsumexp, 0.0, is_causal
            found = flash_attention_backward(*given, attn_mask=mask, scale=scale)
        else:
            found = compiled("attention").backward(grad, query, key, value, out, logsumexp, mask, is_causal, scale)
        return (*found, None, None, None)


def _differentiable(
    grad: Tensor, inputs: tuple[Tensor, ...], mask: Tensor | None, is_causal: bool, scale: float
) -> list[Tensor | None]:
    """Return gradients that can be differentiated again: of torch's formula, whose scores are all kept."""
    shared = inputs[0].shape[1] != inputs[1].shape[1]
    out = math_attention(*inputs, mask, 0.0, is_causal, None, scale=scale, enable_gqa=shared)[0]
    wanted = [one for one in inputs if one.requires_grad]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=True))
    return [next(found) if one.requires_grad else None for one in inputs]
