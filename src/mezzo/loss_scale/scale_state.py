"""The loss scale of a run, and the scale that each loss was multiplied by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .state import LossScale


@dataclass(frozen=True, slots=True)
class ScaleSnapshot:
    """The scale that the losses of one iteration are multiplied by, and their gradients divided by.

    Attributes:
        scale: shape (), fp32; a copy, which stays when the run's scale moves.
    """

    scale: Tensor


class ScaleState:
    """Holds the state of the loss scale: numbers until a first loss shows the device, then tensors that stay put.

    Captured CUDA graphs hold the tensors' addresses, so a move writes into them.

    Args:
        state: the first state, in numbers.

    Attributes:
        state: the state now.
    """

    def __init__(self, state: LossScale) -> None:
        self.state = state
        self._captured: ScaleSnapshot | None = None

    @property
    def tensor(self) -> Tensor | None:
        """The scale itself, shape (), fp32, always at the same address; None before there is a device."""
        return self.state.scale if isinstance(self.state.scale, Tensor) else None

    def index(self, device: torch.device) -> None:
        """Put the state on a device, unless it is on one. Syncs: no."""
        if self.tensor is None:
            with torch.inference_mode(False):  # a loss scaled there first must not make the state unwritable
                self.state = self.state.to(device)

    def captured(self) -> ScaleSnapshot:
        """Return the scale of this iteration's losses. Syncs: no."""
        if self._captured is None:
            assert self.tensor is not None
            with torch.inference_mode(False):
                self._captured = ScaleSnapshot(self.tensor.clone())
        return self._captured

    @torch.no_grad()
    def move(self, state: LossScale) -> None:
        """Take a new state, numbers or tensors; losses that were scaled before keep theirs. Syncs: no."""
        self._captured = None
        if self.tensor is None:
            self.state = state
            return
        for name in ("scale", "growth_tracker", "skipped_in_a_row"):
            value, own = getattr(state, name), getattr(self.state, name)
            if isinstance(value, Tensor):
                own.copy_(value)
            else:
                own.fill_(value)
