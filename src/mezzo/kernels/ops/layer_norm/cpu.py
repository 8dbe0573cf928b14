"""Norms on the CPU in one pass forward and one backward, fp32 arithmetic over what lies in 16 bit; `cpu.cpp` computes them.

Layer norm forward is torch's own kernel, as the folder calls it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...._torch import has_no_memory, is_unwatched
from ....formats import LOW_DTYPES
from ...backends.cpp.build import Kernel
from ...dtensor import PLAIN, is_wrapped
from ...operands import FORMATS, addresses_of, addresses_or_none, check_read
from .. import layer_norm as reference
from . import as_fp32

_kernel = Kernel("layer_norm", rms_forward="PPPPqqfiii", backward="PPPPPPPqqiii")


def fits(x: Tensor, shape: list[int], weight: Tensor | None, low: torch.dtype) -> bool:
    """Whether the kernel takes operands as `rms_norm` does, and is seen by nobody. Host only."""
    return (
        type(x) in PLAIN
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, low)
        and x.numel() > 0
        and list(x.shape[-len(shape) :]) == shape
        and (weight is None or (type(weight) in PLAIN and weight.device.type == "cpu" and list(weight.shape) == shape))
        and (weight is None or weight.dtype is torch.float32 or weight.dtype in LOW_DTYPES)
        and not (x.is_neg() or has_no_memory(x) or (weight is not None and weight.is_neg()))
        and is_unwatched()
    )


def forward(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float, is_centred: bool, low: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalise; arguments and results are those of `reference.forward`. Syncs: no."""
    if is_centred or not fits(x, shape, weight, low):
        return reference.forward(x, shape, weight, bias, eps, is_centred, low)
    out = torch.empty_like(x, dtype=low, memory_format=torch.contiguous_format)
    rstd = torch.empty((*x.shape[: -len(shape)], *[1] * len(shape)), dtype=torch.float32, device="cpu")
    given = [x.contiguous(), _factors(weight, shape), out, rstd]
    sizes, formats = (rstd.numel(), math.prod(shape)), (FORMATS[x.dtype], FORMATS[low])
    _kernel.rms_forward(*addresses_of(given), *sizes, eps, *formats, torch.get_num_threads())
    return out, rstd.new_empty(0), rstd


def backward(
    grad: Tensor, x: Tensor, shape: list[int], mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None,
    mask: list[bool], eps: float, is_centred: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients; arguments and results are those of `reference.backward`, that of the input in its dtype. Syncs: no.

    Any number of threads gives the same bits. Raises: OperandError: an operand that is not what forward kept.
    """
    is_seen = torch.is_grad_enabled() or is_wrapped(grad) or not is_unwatched()
    if is_seen or (is_centred and not fits(x, shape, weight, grad.dtype)):
        return reference.backward(grad, x, shape, mean, rstd, weight, bias, mask, eps, is_centred)
    low, factors = grad.dtype if grad.dtype in LOW_DTYPES else torch.bfloat16, _factors(weight, shape)
    rows = (*grad.shape[: -len(shape)], *[1] * len(shape))
    for name, one, wanted, dtype in (
        ("gradient", grad, (*rows[: -len(shape)], *shape), low),
        ("input", x, grad.shape, torch.float32 if x.dtype is torch.float32 else low),
        ("1/RMS", rstd, rows, torch.float32),
        ("weight", factors, shape, torch.float32),
        *([("mean", mean, rows, torch.float32)] if is_centred else []),
    ):
        check_read("a layer norm" if is_centred else "an RMS norm", name, one, wanted, dtype)
    grad, x, rstd, mean = grad.contiguous(), x.contiguous(), rstd.contiguous(), mean.contiguous()
    grad_x = torch.empty_like(x)
    grads = torch.empty((1 + is_centred, *shape), dtype=torch.float32, device="cpu")
    addresses = addresses_or_none([grad, x, factors, rstd, grad_x, grads, mean if is_centred else None])
    formats = FORMATS[x.dtype], FORMATS[grad.dtype]
    _kernel.backward(*addresses, rstd.numel(), math.prod(shape), *formats, torch.get_num_threads())
    return grad_x, None if weight is None else grads[0], grads[1] if is_centred and bias is not None else None


def _factors(weight: Tensor | None, shape: list[int]) -> Tensor:
    factors = as_fp32(weight)
    return torch.ones(shape, device="cpu", dtype=torch.float32) if factors is None else factors.contiguous()
