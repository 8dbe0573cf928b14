"""A step in the making: what is known about it between its first backward pass and its update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import StepError
from ..formats import dtype_name
from .update import move


@dataclass(slots=True, eq=False)
class Pending:
    """The gradients of one step, all of which carry the scale that the first backward pass captured.

    Attributes:
        scale: shape (), fp32; None without scaling.
        loss_bad: shape (), bool: a loss was inf or NaN before scaling.
        gradients_bad: shape (), bool: inf or NaN were seen before somebody edited the gradients.
        penalty_bad: shape (), bool: inf or NaN were in what `grad` returned, so that a loss made of it is no witness.
        is_broken: a backward pass failed halfway, so that the gradients are part of a sum.
    """

    scale: Tensor | None
    loss_bad: Tensor
    gradients_bad: Tensor
    penalty_bad: Tensor
    is_broken: bool = False

    @classmethod
    def start(cls, scale: Tensor | None, device: torch.device) -> Pending:
        """Return a step without any backward pass yet. Syncs: no."""
        no = torch.zeros((), dtype=torch.bool, device=device)
        return cls(scale=scale, loss_bad=no, gradients_bad=no, penalty_bad=no)

    def take(self, loss: Tensor) -> Tensor:
        """Return a loss times the scale, and remember whether it was finite. Syncs: no."""
        device = self.loss_bad.device
        self.loss_bad = self.loss_bad | move(~loss.detach().isfinite().all(), device)
        return loss if self.scale is None else loss * move(self.scale, loss.device)


_ORDER = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_loss(loss: Tensor, wanted: torch.dtype) -> None:
    """Refuse a loss that backward could not give true gradients for.

    Raises:
        StepError: not one number, no graph, or a dtype narrower than the policy's.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.dtype.is_floating_point:
        what = f"{dtype_name(loss.dtype)}{list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise StepError(f"backward(loss) takes one floating number with its graph, not {what}. Write loss.mean().")
    if not loss.requires_grad:
        raise StepError(
            "backward(loss) was given a loss that no parameter leads to: it was detached, made anew with torch.tensor, "
            "computed under torch.no_grad(), or every parameter is frozen. Hand over the loss as the model made it."
        )
    if _ORDER.index(loss.dtype) < _ORDER.index(wanted):
        raise StepError(
            f"backward(loss) was given a {dtype_name(loss.dtype)} loss, and the policy declares loss={dtype_name(wanted)}: "
            f"its scaled gradient may overflow {dtype_name(loss.dtype)}. Compute it from outputs in "
            f"{dtype_name(wanted)}, as in loss_fn(output.float(), target), or write policy 'loss={dtype_name(loss.dtype)}'."
        )
