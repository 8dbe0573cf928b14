"""The learning rate of a step, where the step is computed."""

from __future__ import annotations

import torch
from torch import Tensor


def rate_on(device: torch.device, lr: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a learning rate on a device.

    One that lies on the host is read there and written by a kernel: copying it would have the host wait.

    Args:
        device: where the step is computed.
        lr: shape () or (1,); there, or on the CPU.
        dtype: of the result.

    Returns:
        Shape ().

    Syncs: no.
    """
    rate = lr.detach().reshape(())
    if rate.device.type != "cpu" or device.type == "cpu" or torch.compiler.is_compiling():
        return rate.to(device, dtype)
    return torch.full((), rate.to(dtype).item(), dtype=dtype, device=device)
