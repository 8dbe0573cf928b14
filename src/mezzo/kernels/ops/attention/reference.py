"""Gradients of attention by torch's own kernel: the definition, for somebody who watches ops and where nothing is compiled."""

from __future__ import annotations

from torch import Tensor

from ...._torch import flash_attention_backward


def products() -> int:
    """Return 0: there is nothing to take in place of torch's. Host only."""
    return 0


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, mask: Tensor | None,
    is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key and value; arguments as for `cpu.backward`. Syncs: no."""
    found: tuple[Tensor, Tensor, Tensor] = flash_attention_backward(
        grad, query, key, value, out, logsumexp, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return found
