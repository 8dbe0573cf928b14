"""Where the compiled linear layer is the faster one, and may be taken: the door to it."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from ...._torch import is_unwatched
from ... import registry
from ...operands import is_readable

ROWS = 16
"""Rows up to which a weight may take longer to read than to multiply with."""
SMALLEST = 2**20
"""Elements of a weight from which reading it outweighs the call."""


def reads_faster(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether the compiled linear layer is faster than torch's for these operands, reads them as they are, and is seen by nobody.

    It is for inference: bf16 on the CPU, a few rows, a large weight without gaps, no gradient to come, and nothing
    at work that wants to see each op of torch.

    Args:
        input: any shape [..., K].
        weight: [N, K].
        bias: [N], or None.

    Host only.
    """
    given = (input, weight) if bias is None else (input, weight, bias)
    return (
        is_unwatched()  # first: a tracer would record the comparisons of shapes
        and weight.dim() == 2
        and weight.numel() >= SMALLEST
        and input.dim() > 0
        and 0 < input.numel() <= ROWS * weight.shape[1]
        and input.shape[-1] == weight.shape[1]
        and (bias is None or bias.shape == weight.shape[:1])
        and not (torch.is_grad_enabled() and any([one.requires_grad for one in given]))
        and all([one.dtype is torch.bfloat16 and is_readable(one) for one in given])
        and input.numel() <= weight.shape[1] * _kernel().most_rows()
    )


def small_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `input @ weight.T + bias` of operands for which `reads_faster` says yes.

    Products are summed in fp32 and rounded once.

    Args:
        input: [..., K], bf16.
        weight: [N, K], bf16.
        bias: [N], bf16, or None.

    Returns:
        [..., N], bf16.

    Syncs: no.
    """
    out: Tensor = _kernel().linear(input, weight, bias)
    return out


def _kernel() -> ModuleType:
    return registry.choose("linear", torch.device("cpu"), torch.bfloat16).module
