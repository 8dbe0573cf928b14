"""Linear layers of few rows, steps of generation, where reading the weight is all there is to do: where the compiled one may be taken."""

from __future__ import annotations

import torch
from torch import Tensor

from ...._torch import is_unwatched
from ... import registry
from ...operands import is_readable

ROWS = 64
"""Rows up to which a weight may take longer to read than to multiply with, or to widen where bf16 is emulated."""
SMALLEST = {False: 2**20, True: 2**16}
"""Elements of a weight from which reading it outweighs the call, by whether torch emulates bf16: there four rows and 256 x 256 take 17 us, not 39."""
LARGE = 2**22
"""Elements of a weight up to which beside emulation half as many rows are enough for fp32 on a widened copy to be the faster way."""


def takes_small_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the compiled linear layer is faster than torch's for these operands, reads them as they are, and is seen by nobody. Host only.

    It is for inference: bf16 on the CPU, a few rows, a large weight without gaps, no gradient to come, and nothing
    at work that wants to see each op of torch.
    """
    given = (input, weight) if bias is None else (input, weight, bias)
    return (
        is_unwatched()  # first: a tracer would record the comparisons of shapes
        and weight.dim() == 2
        and weight.numel() >= SMALLEST[registry.is_emulated(torch.bfloat16)]
        and input.dim() > 0
        and 0 < input.numel() <= ROWS * weight.shape[1]
        and input.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and not (torch.is_grad_enabled() and any([one.requires_grad for one in given]))
        and all([one.dtype is torch.bfloat16 and is_readable(one) for one in given])
        and input.numel() <= weight.shape[1] * _most_rows(weight)
    )


def small_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `input @ weight.T + bias` of operands for which `takes_small_linear` says yes: [..., K], [N, K] and [N] in bf16, summed in fp32 and rounded once. Syncs: no."""
    out: Tensor = registry.compiled("linear").linear(input, weight, bias)
    return out


def _most_rows(weight: Tensor) -> int:
    kernel = registry.compiled("linear")
    rows = 0 if kernel is None else int(kernel.most_rows())
    return rows // 2 if rows > 16 and weight.numel() < LARGE else rows
