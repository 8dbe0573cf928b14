"""Gradients of one direction of an LSTM layer by torch's own kernels: the definition, for somebody who watches ops or differentiates twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def products() -> int:
    """Return 0: there is nothing to take in place of torch's. Host only."""
    return 0


def gradients(
    grads: Sequence[Tensor | None], operands: Sequence[Tensor], is_reversed: bool, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Run the layer again and return the gradients of its operands; differentiable where gradients are on.

    Args:
        grads: of its results y [T, B, H], h [B, H] and c [B, H]; None: none.
        operands: x [T, B, D], h [B, H], c [B, H], then w_ih [4 H, D] and w_hh [4 H, H], and both biases [4 H] if it has any.
        is_reversed: time runs backward.
        wanted: of each operand, whether its gradient is.

    Returns:
        of each operand, in its shape and dtype; None where it is not wanted.

    Syncs: no.
    """
    again = torch.is_grad_enabled()
    given = [one if again else one.detach().requires_grad_(want) for one, want in zip(operands, wanted, strict=True)]
    with torch.enable_grad():
        found = zip(_layer(given, is_reversed), grads, strict=True)
        pairs = [(out, grad) for out, grad in found if grad is not None]
        inputs = [one for one, want in zip(given, wanted, strict=True) if want]
        got = iter(
            torch.autograd.grad(
                [out for out, _ in pairs], inputs, [grad for _, grad in pairs], create_graph=again, allow_unused=True
            )
        )
    return [next(got) if want else None for want in wanted]


def _layer(operands: Sequence[Tensor], is_reversed: bool) -> tuple[Tensor, Tensor, Tensor]:
    x, h, c, *weights = operands
    x = x.flip(0) if is_reversed else x
    y, h_n, c_n = torch.lstm(x, (h[None], c[None]), weights, len(weights) == 4, 1, 0.0, True, False, False)
    return y.flip(0) if is_reversed else y, h_n[0], c_n[0]
