"""Reading a flag from a device without waiting for it, and telling when nothing can be read at all."""

from __future__ import annotations

import torch
from torch import Tensor

from .._torch import is_capturing


class AsyncFlag:
    """Carries one flag at a time to the host and says it once it has arrived; late, never waiting.

    Where the device has no events to ask, every `interval`-th flag is read the plain way, which waits.
    """

    def __init__(self, interval: int = 25) -> None:
        self._interval = interval
        self._count = 0
        self._arriving: tuple[Tensor, torch.Event] | None = None

    def ask(self, flag: Tensor) -> bool:
        """Send a 0-d bool tensor on its way and return whether one that has arrived was set.

        Syncs: no on CUDA and XPU; elsewhere one read every `interval` calls.
        """
        if is_capturing(flag.device):
            return False  # a captured graph has no host to tell
        if flag.device.type not in ("cuda", "xpu"):
            self._count += 1
            return self._count % self._interval == 0 and bool(flag)
        is_set = False
        if self._arriving is not None and self._arriving[1].query():
            is_set, self._arriving = bool(self._arriving[0]), None
        if self._arriving is None:
            landing = torch.empty((), dtype=torch.bool, pin_memory=True)
            landing.copy_(flag, non_blocking=True)
            event = torch.Event(device=flag.device)
            event.record(torch.accelerator.current_stream(flag.device))  # left out, it is one of the current device
            self._arriving = landing, event
        return is_set
