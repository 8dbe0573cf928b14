"""One update of the weights: scale, backward, unscale, clip, step, rescale, and the schedule after it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..casting import autocast
from ..errors import NonFiniteStep
from ..policy import Policy
from ..scaling import GradScaler
from .config import TrainConfig
from .model import parameter_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What one update did.

    Attributes:
        applied: False if gradients held inf or NaN, and nothing was changed.
        scale: the loss scale the gradients carried.
        grad_norm: of the true gradients, before clipping.
        lr: learning rate of the update.
    """

    applied: bool
    scale: float
    grad_norm: float
    lr: float


def warmup_then_decay(updates: int, warmup: float) -> Any:
    """Return the factor of the learning rate as a function of updates done: up to 1, then down to 0, in lines.

    Args:
        updates: of the whole run.
        warmup: share of them that rises.
    """
    rising = max(1, round(warmup * updates))

    def factor(done: int) -> float:
        return (done + 1) / rising if done < rising else (updates - done) / max(1, updates - rising)

    return factor


class Updater:
    """Owns the optimizer of a run, its schedule and its loss scale.

    Args:
        model: the classifier, on its device.
        policy: resolved for that device.
        config: learning rate, weight decay, clipping.
        updates: of the whole run.
        device: of the model.
    """

    def __init__(
        self, model: nn.Module, policy: Policy, config: TrainConfig, *, updates: int, device: torch.device
    ) -> None:
        groups = parameter_groups(model, config.weight_decay)
        self._model, self._policy, self._device, self._max_norm = model, policy, device, config.max_norm
        self._optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)
        factor = warmup_then_decay(updates, config.warmup)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, factor)
        scaling = policy.scaling
        numbers = {} if scaling is None else asdict(scaling)
        self._scaler = GradScaler(device.type, enabled=scaling is not None, patience=policy.guard.patience, **numbers)
        self._skipped_in_a_row = 0

    def region(self) -> autocast:
        """Return the region for forward and loss."""
        return autocast(self._device, policy=self._policy)

    def step(self, loss: Tensor) -> Update:
        """Apply the gradients of a loss, unless they hold inf or NaN.

        Args:
            loss: shape (), fp32.

        Returns:
            What was done.

        Raises:
            NonFiniteStep: without a loss scale, too many updates in a row with inf or NaN.
            LossScaleExhausted: the same with one.

        Writes: weights, optimizer, schedule, scale. Syncs: yes.
        """
        scale, lr = self._scaler.get_scale(), float(self._schedule.get_last_lr()[0])
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's own
        self._scaler.unscale_(self._optimizer)
        norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_norm))
        applied = self._apply() if self._scaler.is_enabled() else self._apply_finite(norm)
        self._optimizer.zero_grad()
        if applied:
            self._schedule.step()
        return Update(applied=applied, scale=scale, grad_norm=norm, lr=lr)

    def _apply(self) -> bool:
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return self._scaler.last_step.applied

    def _apply_finite(self, norm: float) -> bool:
        if math.isfinite(norm):
            self._skipped_in_a_row = 0
            self._optimizer.step()
            return True
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= self._policy.guard.patience:
            raise NonFiniteStep(
                f"{self._skipped_in_a_row} updates in a row had inf or NaN in their gradients, and without a loss scale "
                "nothing will change that. Lower --lr, or look for the cause with `mezzo doctor`."
            )
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return optimizer, schedule and scale. Syncs: yes."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "scaler": self._scaler.state_dict(),
            "skipped_in_a_row": self._skipped_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; a run that scales now and did not before starts with a fresh scale.

        Writes: optimizer, schedule, scale. Syncs: yes.
        """
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])
        if state["scaler"] and self._scaler.is_enabled():
            self._scaler.load_state_dict(state["scaler"])
        self._skipped_in_a_row = state["skipped_in_a_row"]
