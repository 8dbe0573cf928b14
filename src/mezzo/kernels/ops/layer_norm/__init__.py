"""Layer and RMS norm of 16-bit activations, with fp32 arithmetic in both directions and 16-bit memory in between."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...registry import choose

SMALL = 1 << 14
"""Elements below which a norm is torch's own ops on widened inputs: an autograd function in Python costs 20 us more than
the second copy of so small an input is worth."""


class _Norm(torch.autograd.Function):
    """Layer or RMS norm that keeps its 16-bit input for backward and computes in fp32.

    torch's own kernel of layer norm does the same forward, but sums the gradients of weight and bias in 16 bit on the CPU: over
    4096 rows they come out 12 % wrong in bf16 (torch 2.13). A cast before the kernel mends that and keeps a second,
    fp32 copy of the input.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float, is_centred: bool
    ) -> Tensor:
        out, mean, rstd = _kernel(x).forward(x, shape, weight, bias, eps, is_centred)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.shape, ctx.eps, ctx.is_centred = shape, eps, is_centred
        return out  # type: ignore[no-any-return]  # a module of its registry

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, None, None]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        needs_x, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        mask = [needs_x, needs_weight, needs_bias]
        grad_x, grad_weight, grad_bias = _kernel(x).backward(
            grad, x, ctx.shape, mean, rstd, weight, bias, mask, ctx.eps, ctx.is_centred
        )
        return (
            grad_x.to(x.dtype) if needs_x else None,
            None,
            grad_weight.to(weight.dtype) if needs_weight else None,
            grad_bias.to(bias.dtype) if needs_bias else None,
            None,
            None,
        )


def as_fp32(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor in fp32. Syncs: no."""
    return tensor if tensor is None or tensor.dtype is torch.float32 else tensor.float()


def _kernel(x: Tensor) -> ModuleType:
    return choose("layer_norm", x.device, x.dtype).module


def _sums_in_fp32(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether torch's own kernel sums in fp32 both ways, and takes these: CUDA's and ROCm's, whose operands have one dtype.

    Source: torch, aten/src/ATen/native/cuda/layer_norm_kernel.cu, acc_type.
    """
    return x.device.type == "cuda" and all(other is None or other.dtype is x.dtype for other in (weight, bias))


def layer_norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
    """Apply a layer norm to a 16-bit input with fp32 arithmetic.

    Args:
        module: weight and bias of any floating dtype, or none.
        x: shape (..., *module.normalized_shape); fp16 or bf16.

    Returns:
        The shape and dtype of `x`, rounded once.

    Syncs: no.
    Source: Ba et al. 2016.
    """
    weight, bias, eps = module.weight, module.bias, module.eps
    if not (torch.is_grad_enabled() or module.training) and weight is not None and x.is_cpu:
        # In few calls: on a small model they cost as much as the norm.
        return torch.native_layer_norm(x, module.normalized_shape, as_fp32(weight), as_fp32(bias), eps)[0]
    shape = list(module.normalized_shape)
    if _sums_in_fp32(x, weight, bias):
        return F.layer_norm(x, shape, weight, bias, eps)
    if _is_small(x, module):
        return torch.layer_norm(x.float(), shape, as_fp32(weight), as_fp32(bias), eps).to(x.dtype)
    return _norm(x, shape, weight, bias, eps, True)


def rms_norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    """Apply an RMS norm to a 16-bit input with fp32 arithmetic, where Triton runs.

    Args:
        module: weight of any floating dtype, or none. `eps` of None is that of fp32, in which it is added.
        x: shape (..., *module.normalized_shape); fp16 or bf16.

    Returns:
        The shape and dtype of `x`, rounded once.

    Syncs: no.
    Source: Zhang and Sennrich 2019.
    """
    shape, weight = list(module.normalized_shape), module.weight
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    if _is_small(x, module) or not _kernel(x).fits(x, shape, weight):
        return torch.rms_norm(x.float(), shape, as_fp32(weight), eps).to(x.dtype)
    return _norm(x, shape, weight, None, eps, False)


def _is_small(x: Tensor, module: nn.Module) -> bool:
    """Whether torch's ops are quicker; a checkpoint's first run, without gradients, is to give what its second does."""
    return x.numel() < SMALL and (torch.is_grad_enabled() or module.training)


def _norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float, is_centred: bool
) -> Tensor:
    if not torch.is_grad_enabled():
        return _kernel(x).forward(x, shape, weight, bias, eps, is_centred)[0]  # type: ignore[no-any-return]  # likewise
    out: Tensor = _Norm.apply(x, shape, weight, bias, eps, is_centred)  # type: ignore[no-untyped-call]  # torch's own
    return out
