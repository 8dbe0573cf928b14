"""Gradients of one direction of a layer of an LSTM or a GRU by torch's own kernels: the definition, for somebody who watches ops or differentiates twice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def products() -> int:
    """Return 0: there is nothing to take in place of torch's. Host only."""
    return 0


def is_gru(operands: Sequence[Tensor]) -> bool:
    """Whether operands of a layer, as `gradients` takes them, are those of a GRU, by the rows of a weight. Host only."""
    return operands[4].shape[0] == 3 * operands[1].shape[-1]


def gradients(
    grads: Sequence[Tensor | None], operands: Sequence[Tensor], is_reversed: bool, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Run the layer again and return the gradients of its operands; differentiable where gradients are on.

    Args:
        grads: of its results y [T, B, H], h [B, H] and c [B, H]; None: none. A GRU's c is its h.
        operands: x [T, B, D], h [B, H], c [B, H], then w_ih [4 H, D] and w_hh [4 H, H], and both biases [4 H] if it has any;
            of a GRU 3 H, and c is h as it was before it was rounded, which is read.
        is_reversed: time runs backward.
        wanted: of each operand, whether its gradient is.

    Returns:
        of each operand, in its shape and dtype; None where it is not wanted.

    Syncs: no.
    """
    again = torch.is_grad_enabled()
    given = [one if again else one.detach().requires_grad_(want) for one, want in zip(operands, wanted, strict=True)]
    with torch.enable_grad():
        found = zip(layer(given, is_reversed), grads, strict=True)
        pairs = [(out, grad) for out, grad in found if grad is not None]
        inputs = [one for one, want in zip(given, wanted, strict=True) if want]
        got = iter(
            torch.autograd.grad(
                [out for out, _ in pairs], inputs, [grad for _, grad in pairs], create_graph=again, allow_unused=True
            )
        )
    return [next(got) if want else None for want in wanted]


def layer(operands: Sequence[Tensor], is_reversed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the last h and the last c of a layer, given what `gradients` is given. Syncs: no."""
    x, h, c, *weights = operands
    x = x.flip(0) if is_reversed else x
    flags = len(weights) == 4, 1, 0.0, True, False, False
    if is_gru(operands):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # the state may be fp32
            y, h_n = torch.gru(x, c[None], weights, *flags)
        c_n = h_n
    else:
        y, h_n, c_n = torch.lstm(x, (h[None], c[None]), weights, *flags)
    return y.flip(0) if is_reversed else y, h_n[0], c_n[0]
