"""A block that leaves a model as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .. import random_state


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Give gradients, buffers, mode and random state back after the block.

    Writes: what it gives back. Syncs: no.
    """
    grads = {p: p.grad for p in model.parameters()}
    buffers = {b: b.detach().clone() for b in model.buffers()}
    places = {m: dict(m._buffers) for m in model.modules() if m._buffers}
    training = {m: m.training for m in model.modules()}
    for p in grads:
        p.grad = None
    try:
        with random_state.kept(), torch.enable_grad():
            yield
    finally:
        for p, grad in grads.items():
            p.grad = grad
        for module, held in places.items():
            module._buffers.update(held)
        with torch.no_grad():
            for buffer, before in buffers.items():
                buffer.copy_(before)
        for module, mode in training.items():
            module.training = mode
