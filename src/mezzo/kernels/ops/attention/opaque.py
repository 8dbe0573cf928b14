"""Attention as two ops that torch.compile calls and does not open."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...._torch import flash_attention, flash_attention_backward
from ...registry import compiled


@torch.library.custom_op("mezzo::attention", mutates_args=())
def opaque(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return attention, and the log-sum-exp of the scores of each query; arguments as for `attention`. Syncs: no."""
    found: tuple[Tensor, Tensor] = flash_attention(query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale)
    return found


@opaque.register_fake
def _(*operands: Any) -> tuple[Tensor, ...]:
    *inputs, mask, is_causal, scale = operands
    return flash_attention(*inputs, 0.0, is_causal, attn_mask=mask, scale=scale)  # type: ignore[no-any-return]  # shapes


@torch.library.custom_op("mezzo::attention_backward", mutates_args=())
def _gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, mask: Tensor | None,
    is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    found: tuple[Tensor, Tensor, Tensor]
    if (kernel := compiled("attention")) is None:  # what was compiled elsewhere is loaded here
        given = grad, query, key, value, out, logsumexp, 0.0, is_causal
        found = flash_attention_backward(*given, attn_mask=mask, scale=scale)
    else:
        found = kernel.backward(grad, query, key, value, out, logsumexp, mask, is_causal, scale)
    return found


@_gradients.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, ...]:
    """Lay the gradients out as the kernel does."""
    rows = [one.transpose(1, 2) for one in (query, key, value)]
    return tuple(torch.empty_like(one, memory_format=torch.contiguous_format).transpose(1, 2) for one in rows)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, *options = inputs
    ctx.save_for_backward(query, key, value, *output, mask)
    ctx.options = options


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return (*_gradients(grad, *ctx.saved_tensors, *ctx.options), None, None, None)


opaque.register_autograd(_backward, setup_context=_keep)
