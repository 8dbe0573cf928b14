"""Showing true gradients for a while: divided by the loss scale on the way in, multiplied on the way out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .update import multiply_


@contextmanager
def true_gradients(params: Sequence[Tensor], scale: Tensor | None) -> Iterator[None]:
    """Have `.grad` hold the true gradients inside the block.

    fp16 gradients are replaced by fp32 ones inside the block, since dividing in fp16 would flush the small ones.

    Args:
        params: parameters, with or without gradients.
        scale: shape (), fp32: that the gradients carry; None: they are true already.

    Writes: gradients. Syncs: no.
    """
    if scale is None:
        yield
        return
    narrow = {p: p.grad for p in params if p.grad is not None and p.grad.dtype is torch.float16}
    for p, grad in narrow.items():
        _replace(p, grad.float())
    multiply_([p.grad for p in params if p.grad is not None], scale.reciprocal())
    try:
        yield
    finally:
        multiply_([p.grad for p in params if p.grad is not None], scale)
        for p, grad in narrow.items():
            wide = p.grad
            _replace(p, None if wide is None else grad.copy_(wide), torch.float16)


def _replace(param: Tensor, grad: Tensor | None, dtype: torch.dtype = torch.float32) -> None:
    param.grad = None
    param.grad_dtype = dtype
    param.grad = grad
