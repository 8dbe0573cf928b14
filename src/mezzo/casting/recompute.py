"""Activation checkpointing under the function mode: recompute runs in the region its forward ran in."""

from __future__ import annotations

import contextlib
from typing import Any

from .region import autocast


def checkpoint_contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """Return the two contexts that `torch.utils.checkpoint.checkpoint(..., context_fn=...)` asks for.

    Forward runs as it is; recompute enters the region that is in force now. torch's own engine needs none of this:
    checkpoint restores torch's autocast state by itself.

    Returns:
        The contexts of forward and of recompute.

    Syncs: no.

    >>> import torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> x = torch.ones(2, 2, requires_grad=True)
    >>> with autocast("cpu", dtype=torch.bfloat16):
    ...     y = checkpoint(torch.mm, x, x, use_reentrant=False, context_fn=checkpoint_contexts)
    >>> y.sum().backward()
    >>> x.grad.dtype
    torch.float32
    """
    return contextlib.nullcontext(), autocast.current()
