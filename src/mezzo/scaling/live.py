"""The loss scale of a run, and the scale that each loss was multiplied by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .state import LossScale


@dataclass(slots=True)
class Captured:
    """The scale of the losses of one iteration.

    Attributes:
        scale: shape (), fp32; the run's own tensor, replaced by a copy when that one moves.
    """

    scale: Tensor


class LiveScale:
    """Holds the state of the loss scale: numbers until a first loss shows the device, then tensors that stay put.

    Captured CUDA graphs hold the tensors' addresses, so a move writes into them.

    Args:
        state: the first state, in numbers.

    Attributes:
        state: the state now.
        captured: the scale of the losses of this iteration; None until there is a device.
    """

    def __init__(self, state: LossScale) -> None:
        self.state = state
        self.captured: Captured | None = None

    def on(self, device: torch.device) -> Captured:
        """Return the scale of this iteration's losses; the first call decides the device. Syncs: no."""
        if self.captured is None:
            with torch.inference_mode(False):  # a loss scaled there first must not make the state unwritable
                self.state = self.state.to(device)
            assert isinstance(self.state.scale, Tensor)
            self.captured = Captured(self.state.scale)
        return self.captured

    @torch.no_grad()
    def move(self, state: LossScale) -> None:
        """Take a new state, numbers or tensors; losses that were scaled before keep theirs. Syncs: no."""
        if self.captured is None:
            self.state = state
            return
        scale = self.captured.scale
        self.captured.scale = scale.clone()
        self.captured = Captured(scale)
        for name in ("scale", "growth_tracker", "skipped_in_a_row"):
            value = getattr(state, name)
            own: Tensor = getattr(self.state, name)
            if isinstance(value, Tensor):
                own.copy_(value)
            else:
                own.fill_(value)
