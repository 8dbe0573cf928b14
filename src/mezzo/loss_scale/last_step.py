"""What a scaled step did, told when asked."""

from __future__ import annotations

from torch import Tensor

from .scale_state import ScaleSnapshot


class LastStep:
    """Whether the last step was applied, and which scale its gradients carried; read from the device when asked.

    Args:
        found_nonfinite: whether inf or NaN was found; a 0-d tensor is read on first use.
        captured: the scale of the losses; None for a run without scaling.
    """

    def __init__(self, found_nonfinite: Tensor | bool, captured: ScaleSnapshot | None) -> None:
        self._found = found_nonfinite
        self._captured = captured

    @property
    def applied(self) -> bool:
        """Whether the optimizer changed the weights. Syncs: yes, if nothing has read the finding yet."""
        self._found = bool(self._found)
        return not self._found

    @property
    def scale(self) -> float:
        """The scale the gradients were divided by, also after `update` moved it. Syncs: yes."""
        return 1.0 if self._captured is None else float(self._captured.scale)

    def __repr__(self) -> str:
        return f"LastStep(applied={self.applied}, scale={self.scale:g})"
