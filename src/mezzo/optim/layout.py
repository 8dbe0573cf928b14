"""Tensors seen in the order of their memory, so that a kernel may walk them straight."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import local_tensors

Order = tuple[int, ...] | None


def memory_order(tensor: Tensor) -> Order:
    """Return the order of dimensions that makes a tensor contiguous; None if it is, or if there is none.

    >>> memory_order(torch.empty(2, 3)), memory_order(torch.empty(2, 3).t()), memory_order(torch.empty(4, 4)[::2])
    (None, (1, 0), None)
    """
    if tensor.is_contiguous():
        return None
    strides = tensor.stride()
    order = tuple(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    return order if tensor.permute(order).is_contiguous() else None


def memory_orders(tensors: Sequence[Tensor]) -> list[Order]:
    """Return the `memory_order` of each."""
    if all([tensor.is_contiguous() for tensor in tensors]):
        return [None] * len(tensors)
    return [memory_order(tensor) for tensor in tensors]


def aligned(tensors: Sequence[Tensor], orders: Sequence[Order]) -> Sequence[Tensor]:
    """Return views of tensors of one dtype, dimensions reordered, complex ones as pairs of real numbers.

    Of sharded tensors the parts that lie on this rank. Syncs: no.
    """
    tensors = local_tensors(tensors)
    if any(orders):
        tensors = [t if order is None else t.permute(order) for t, order in zip(tensors, orders, strict=True)]
    return [torch.view_as_real(t) for t in tensors] if tensors and tensors[0].is_complex() else tensors
