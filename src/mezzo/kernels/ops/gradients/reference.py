"""Definition of the gradient pass: plain torch, squares summed in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# A running fp32 sum stops absorbing terms once it is 2^24 times as large as they are: a 33-million-element
# gradient summed in one run came out 0.2 % short. Parts this long, then their norms, keep it below 1e-5,
# and a part in fp32 (256 KiB) stays in a core's cache.
CHUNK = 65536


def tensor_norms(grads: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of each gradient.

    Args:
        grads: any shapes, dense, real; one device, one dtype.

    Returns:
        Shape (len(grads),), fp32, that device; inf or NaN where an element is, or where fp32 cannot hold the square.

    Syncs: no.
    """
    return torch.stack([_norm(grad) for grad in grads])


def _norm(grad: Tensor) -> Tensor:
    wide = torch.promote_types(grad.dtype, torch.float32)
    flat = grad.flatten()
    if grad.device.type != "cpu" and len(flat) > CHUNK:
        chunks = _norms_of_rows(flat, wide)
    else:
        found = [torch.linalg.vector_norm(part, dtype=wide) for part in torch.split(flat, CHUNK)]
        chunks = torch.stack(found) if len(found) > 1 else found[0]
    whole: Tensor = torch.linalg.vector_norm(chunks) if chunks.dim() else chunks
    return whole.to(torch.float32)


def _norms_of_rows(flat: Tensor, wide: torch.dtype) -> Tensor:
    """Return the norms of chunks in two launches however many there are, for devices where a launch costs."""
    num_whole = len(flat) // CHUNK * CHUNK
    rows = torch.linalg.vector_norm(flat[:num_whole].view(-1, CHUNK), dim=1, dtype=wide)
    rest = flat[num_whole:]
    return torch.cat([rows, torch.linalg.vector_norm(rest, dtype=wide).view(1)]) if len(rest) else rows
