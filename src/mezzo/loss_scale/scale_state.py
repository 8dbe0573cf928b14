"""The loss scale of a run, the scale that each loss was multiplied by, and what the last step made of it, read when it has arrived."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .._torch import is_capturing
from ..kernels import to_host
from .state import LossScale


class ScaleState:
    """Holds the state of the loss scale: numbers until a first loss shows the device, then tensors that stay put.

    Captured CUDA graphs hold the tensors' addresses, so a move writes into them.
    """

    def __init__(self, state: LossScale) -> None:
        self.state = state
        self._captured: Tensor | None = None

    @property
    def tensor(self) -> Tensor | None:
        """The scale itself, shape (), fp32, always at the same address; None before there is a device. Host only."""
        return self.state.scale if isinstance(self.state.scale, Tensor) else None

    def to(self, device: torch.device) -> None:
        """Put the state on a device, unless it is on one. Syncs: no."""
        if self.tensor is None:
            with torch.inference_mode(False):  # a loss scaled there first must not make the state unwritable
                self.state = self.state.to(device)

    def captured(self) -> Tensor:
        """Return the scale of this iteration's losses, shape (), fp32: one copy, which stays when the run's scale moves. Syncs: no."""
        if self._captured is None:
            assert self.tensor is not None
            with torch.inference_mode(False):
                self._captured = self.tensor.clone()
        return self._captured

    def assign(self, name: str, value: Tensor | None, start: float) -> None:
        """Take a tensor of the caller's, shape (), for a field of the state: what torch's scaler does by assignment.

        None takes the state off its device; of the scale itself, back to `start`. Syncs: no; yes with None, on an accelerator.
        """
        self._captured = None
        if value is None:
            numbers = self.state.numbers()
            self.state = replace(numbers, scale=start) if name == "scale" else numbers
            return
        self.to(value.device)
        own = getattr(self.state, name)
        is_alike = value.dtype is own.dtype and value.shape == own.shape
        self.state = replace(self.state, **{name: value if is_alike else value.detach().to(own.dtype).reshape(())})

    def move(self, state: LossScale) -> None:
        """Take a new state, numbers or tensors; losses that were scaled before keep theirs. Syncs: no."""
        self._captured = None
        if self.tensor is None:
            self.state = state
        else:
            self.state.write_(state)


class LastStep:
    """Whether the last step was applied, and which scale its gradients carried, both read from the device when asked. `captured` is None for a run without scaling."""

    def __init__(self, found_nonfinite: Tensor | bool, captured: Tensor | None) -> None:
        self._found, self._captured = found_nonfinite, captured

    @property
    def applied(self) -> bool:
        """Whether the optimizer changed the weights. Syncs: yes, if nothing has read the finding yet."""
        self._found = bool(self._found)
        return not self._found

    @property
    def scale(self) -> float:
        """The scale the gradients were divided by, also after `update` moved it. Syncs: yes."""
        return 1.0 if self._captured is None else float(self._captured)

    def __repr__(self) -> str:
        return f"LastStep(applied={self.applied}, scale={self.scale:g})"


class AsyncFlag:
    """Carries one flag at a time to the host and says it once it has arrived; late, never waiting.

    Where the device has no events to ask, every `interval`-th flag is read the plain way, which waits.
    """

    def __init__(self, interval: int = 25) -> None:
        self._interval = interval
        self._count = 0
        self._arriving: tuple[Tensor, torch.Event | None] | None = None

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
        if self._arriving is not None and (self._arriving[1] is None or self._arriving[1].query()):
            is_set, self._arriving = bool(self._arriving[0]), None
        if self._arriving is None:
            self._arriving = to_host(flag)
        return is_set
