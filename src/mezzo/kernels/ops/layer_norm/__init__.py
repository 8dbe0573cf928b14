"""Layer and RMS norm of 16-bit activations, with fp32 arithmetic in both directions and 16-bit memory in between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...registry import choose

SMALL = {"training": 1 << 24, "inference": 1 << 20}
"""Elements below which a norm on an accelerator is torch's own ops on widened inputs. Beside an H100 an autograd function in Python took the host 350 us
both ways and they 205, while the device had time: a step of BERT, of 1.6 and of 12.6 million elements a norm, took 0.79 to 0.89 of the time with them.
Their 46 further bytes an element are 257 us of an H100 at 2^24."""
SMALL_ON_CPU = 1 << 16
"""Likewise of a layer norm on the CPU, where torch's ops start at once: 101 us forward and backward for 128 rows of 256, the function 141."""
_num_captures = 0


@contextmanager
def for_capture() -> Iterator[None]:
    """Have norms of any size inside the block run by the fewest launches, for a step that a graph of the device launches. Host only."""
    global _num_captures  # noqa: PLW0603  # of the process: threads of backward passes recompute checkpoints
    _num_captures += 1
    try:
        yield
    finally:
        _num_captures -= 1


class _Norm(torch.autograd.Function):
    """Layer or RMS norm that keeps its 16-bit input for backward and computes in fp32.

    torch's own kernel of layer norm does the same forward, but sums the gradients of weight and bias in 16 bit on the CPU: over
    4096 rows they come out 12 % wrong in bf16 (torch 2.13). A cast before the kernel fixes that and keeps a second,
    fp32 copy of the input.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float, is_centred: bool,
        low: torch.dtype,
    ) -> Tensor:  # fmt: skip
        out, mean, rstd = _implementation(x).forward(x, shape, weight, bias, eps, is_centred, low)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        ctx.shape, ctx.eps, ctx.is_centred = shape, eps, is_centred
        return out  # type: ignore[no-any-return]  # a module of its registry

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        needs_x, _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        mask = [needs_x, needs_weight, needs_bias]
        found = _implementation(x).backward(grad, x, ctx.shape, mean, rstd, weight, bias, mask, ctx.eps, ctx.is_centred)
        each = zip(found, (x, weight, bias), mask, strict=True)
        of_x, of_weight, of_bias = (own.to(of.dtype) if needed else None for own, of, needed in each)
        return of_x, None, of_weight, of_bias, None, None, None


def as_fp32(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor in fp32. Syncs: no."""
    return tensor if tensor is None or tensor.dtype is torch.float32 else tensor.float()


def _implementation(x: Tensor) -> ModuleType:
    return choose("layer_norm", x.device, x.dtype).module


def _sums_in_fp32(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether torch's own kernel sums in fp32 both ways, and takes these: CUDA's and ROCm's, whose operands have one dtype.

    Source: torch, aten/src/ATen/native/cuda/layer_norm_kernel.cu, acc_type.
    """
    return x.device.type == "cuda" and all(other is None or other.dtype is x.dtype for other in (weight, bias))


def layer_norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
    """Apply a layer norm, its weights of any floating dtype, to a 16-bit input, shape (..., *module.normalized_shape), with fp32 arithmetic; rounded once.

    Syncs: no. Source: Ba et al. 2016.
    """
    weight, bias, eps = module.weight, module.bias, module.eps
    if not (torch.is_grad_enabled() or module.training) and weight is not None and x.is_cpu:
        # In few calls: on a small model they cost as much as the norm.
        return torch.native_layer_norm(x, module.normalized_shape, as_fp32(weight), as_fp32(bias), eps)[0]
    shape = list(module.normalized_shape)
    if _sums_in_fp32(x, weight, bias):
        return F.layer_norm(x, shape, weight, bias, eps)
    if _is_small(x, module.training):
        return torch.layer_norm(x.float(), shape, as_fp32(weight), as_fp32(bias), eps).to(x.dtype)
    return _norm(x, shape, weight, bias, eps, True, x.dtype)


def wide_layer_norm(low: torch.dtype, module: nn.LayerNorm, x: Tensor) -> Tensor:
    """Apply a layer norm of fp32 weights, or none, to an fp32 input, shape (..., *module.normalized_shape), and round its result once, to `low`. Syncs: no."""
    return F.layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps).to(low)


def group_norm(module: nn.GroupNorm, x: Tensor) -> Tensor:
    """Apply a group norm that has weights to a 16-bit input, shape (batch, channels, ...), on the CPU; rounded once.

    By torch's own kernel, whose arithmetic and sums are fp32 beside fp32 weights. Syncs: no. Source: Wu and He 2018.
    """
    return F.group_norm(x, module.num_groups, as_fp32(module.weight), as_fp32(module.bias), module.eps)


def takes_rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, low: torch.dtype) -> bool:
    """Whether `rms_norm` takes these operands in fewer passes than an op for each term. Host only.

    A compiled kernel does; for fp32 weights on an accelerator Triton's, and of fp32 inputs torch's, which is one launch since 2.8.
    """
    choice = choose("layer_norm", x.device, low)
    if x.device.type != "cpu":
        has_kernel = x.dtype is torch.float32 or (x.dtype is low and choice.backend == "triton")
        return has_kernel and (weight is None or weight.dtype is torch.float32)
    return choice.backend == "cpu" and bool(choice.module.fits(x, shape, weight, low))


def rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None, low: torch.dtype, training: bool
) -> Tensor:
    """Apply an RMS norm with fp32 arithmetic to operands for which `takes_rms_norm` says yes; rounded once, to `low`.

    `x` has shape (..., *shape) and fp16, bf16 or fp32, the weight any floating dtype; `eps` None is that of fp32, in which it is added.

    Syncs: no. Source: Zhang and Sennrich 2019.
    """
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    choice = choose("layer_norm", x.device, low)
    is_on_cpu, is_wide = x.device.type == "cpu", x.dtype is torch.float32
    if not is_on_cpu and (is_wide or _is_small(x, training) or not choice.module.fits(x, shape, weight)):
        return torch.rms_norm(x.float(), shape, as_fp32(weight), eps).to(low)
    x = x.clone() if x.is_inference() and torch.is_grad_enabled() else x  # as a cast does, which torch's would be
    return _norm(x, shape, weight, None, eps, False, low)


def _is_small(x: Tensor, training: bool) -> bool:
    """Whether torch's ops are quicker; a checkpoint's first run, without gradients, gives what its second does."""
    size, trains = x.numel(), torch.is_grad_enabled() or training
    if x.device.type != "cpu":
        return size < SMALL["training" if trains else "inference"] and not _num_captures
    return size < SMALL_ON_CPU and trains


def _norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float, is_centred: bool, low: torch.dtype,
) -> Tensor:  # fmt: skip
    if not torch.is_grad_enabled():
        return _implementation(x).forward(x, shape, weight, bias, eps, is_centred, low)[0]  # type: ignore[no-any-return]  # likewise
    out: Tensor = _Norm.apply(x, shape, weight, bias, eps, is_centred, low)  # type: ignore[no-untyped-call]  # torch's own
    return out


def forward(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float, is_centred: bool, low: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalise `x`, shape (..., *shape), fp16 or bf16, of an RMS norm fp32 too; weight and bias have any floating dtype.

    Where `is_centred` the mean is subtracted (layer norm); `low` is the dtype of the result.

    Returns:
        Shape of `x`, rounded once; mean (of an RMS norm empty) and 1/std, shape (..., 1).

    Syncs: no.
    """
    if not is_centred:
        wide = x.float()
        rstd = inverse_rms(wide, shape, eps)
        return torch.rms_norm(wide, shape, as_fp32(weight), eps).to(low), rstd.new_empty(0), rstd
    given = x if x.is_cpu and weight is not None else x.float()  # the CPU's kernel alone takes two dtypes
    out, mean, rstd = torch.native_layer_norm(given, shape, as_fp32(weight), as_fp32(bias), eps)
    return out.to(low), mean, rstd


def backward(
    grad: Tensor, x: Tensor, shape: list[int], mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None,
    mask: list[bool], eps: float, is_centred: bool,
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
