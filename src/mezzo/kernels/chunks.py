"""Tensors taken piece by piece, so that what is computed on the way stays small beside them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK = 2**18
"""Elements in a piece: in fp64 2 MiB, which stays in a core's cache; on an accelerator enough for a launch."""


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same chunks of tensors of one shape, in the order of their memory.

    Args:
        tensors: of one shape. Where their elements do not lie in the same order without gaps, the only piece is the whole.

    Syncs: no.
    """
    first = tensors[0].detach()
    alike = all([tensor.stride() == first.stride() for tensor in tensors])
    if first.numel() <= CHUNK or not alike or not bool(torch.ops.aten.is_non_overlapping_and_dense(first)):
        yield tuple([tensor.detach() for tensor in tensors])
        return
    flat = [tensor.detach().as_strided((first.numel(),), (1,)) for tensor in tensors]
    yield from zip(*[torch.split(tensor, CHUNK) for tensor in flat], strict=True)
