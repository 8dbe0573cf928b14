"""Layer norm by torch's own kernels, on inputs widened where one does not take two dtypes or sums in 16 bit."""

from __future__ import annotations

import torch
from torch import Tensor

from . import as_fp32


def forward(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise.

    Args:
        x: shape (..., *shape), fp16 or bf16.
        shape: of what is normalised together.
        weight: of that shape, any floating dtype.
        bias: likewise.
        eps: added to the variance.

    Returns:
        Shape and dtype of `x`, rounded once; mean and 1/std, shape (..., 1).

    Syncs: no.
    """
    given = x if x.is_cpu and weight is not None else x.float()  # the CPU's kernel alone takes two dtypes
    out, mean, rstd = torch.native_layer_norm(given, shape, as_fp32(weight), as_fp32(bias), eps)
    return out.to(x.dtype), mean, rstd


def backward(
    grad: Tensor, x: Tensor, shape: list[int], mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None,
    mask: list[bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of input, weight and bias in fp32, those that `mask` asks for; differentiable. Syncs: no."""
    found: tuple[Tensor, Tensor | None, Tensor | None] = torch.ops.aten.native_layer_norm_backward(
        grad.float(), x.float(), shape, mean.float(), rstd.float(), as_fp32(weight), as_fp32(bias), mask
    )
    return found
