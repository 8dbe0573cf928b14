"""Norms by torch's own kernels, on inputs widened where one does not take two dtypes or sums in 16 bit."""

from __future__ import annotations

import torch
from torch import Tensor

from . import as_fp32


def forward(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float, is_centred: bool = True,
    low: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalise.

    Args:
        x: shape (..., *shape), fp16 or bf16; of an RMS norm fp32 too.
        shape: of what is normalised together.
        weight: of that shape, any floating dtype.
        bias: likewise.
        eps: added to the variance.
        is_centred: whether the mean is subtracted (layer norm), or not (RMS norm).
        low: dtype of the result; None: that of `x`.

    Returns:
        Shape of `x`, rounded once; mean (of an RMS norm empty) and 1/std, shape (..., 1).

    Syncs: no.
    """
    if not is_centred:
        wide = x.float()
        rstd = inverse_rms(wide, shape, eps)
        return torch.rms_norm(wide, shape, as_fp32(weight), eps).to(low or x.dtype), rstd.new_empty(0), rstd
    given = x if x.is_cpu and weight is not None else x.float()  # the CPU's kernel alone takes two dtypes
    out, mean, rstd = torch.native_layer_norm(given, shape, as_fp32(weight), as_fp32(bias), eps)
    return out.to(low or x.dtype), mean, rstd


def backward(
    grad: Tensor, x: Tensor, shape: list[int], mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None,
    mask: list[bool], eps: float, is_centred: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of input, weight and bias in fp32, those that `mask` asks for; differentiable. Syncs: no."""
    if not is_centred:
        wide, dims = x.float(), list(range(x.dim() - len(shape)))
        rstd = inverse_rms(wide, shape, eps)  # again: what was kept knows nothing of `x`
        x_hat = wide * rstd
        grad_weight = (grad.float() * x_hat).sum(dims) if dims else grad.float() * x_hat
        return gradient(grad.float(), x_hat, rstd, as_fp32(weight), len(shape), is_centred), grad_weight, None
    found: tuple[Tensor, Tensor | None, Tensor | None] = torch.ops.aten.native_layer_norm_backward(
        grad.float(), x.float(), shape, mean.float(), rstd.float(), as_fp32(weight), as_fp32(bias), mask
    )
    return found


def inverse_rms(x: Tensor, shape: list[int], eps: float) -> Tensor:
    """Return 1 / sqrt(mean of squares + eps), shape (..., 1). Syncs: no. Source: Zhang and Sennrich 2019."""
    return x.square().mean(list(range(-len(shape), 0)), keepdim=True).add(eps).rsqrt()


def gradient(
    grad: Tensor, x_hat: Tensor, rstd: Tensor, weight: Tensor | None, num_dims: int, is_centred: bool
) -> Tensor:
    """Return the gradient of the input of a norm over the last dimensions from what it normalised to; differentiable. Syncs: no."""
    dims = list(range(-num_dims, 0))
    grad = grad if weight is None else grad * weight
    across = grad.mean(dims, keepdim=True) if is_centred else 0.0
    return (grad - across - x_hat * (grad * x_hat).mean(dims, keepdim=True)) * rstd
