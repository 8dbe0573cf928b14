"""One update of the weights, with the learning rate's schedule after it, and their moving average, which is steadier than the last of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import get_ema_multi_avg_fn

from .. import Policy, Stepper, prepare
from ..distributed import comm_stats
from ..formats import dtype_name
from ..optim import AdamW
from .config import TrainConfig
from .dist_context import DistContext, maybe_no_sync
from .model import parameter_groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """What one update did: where it was not applied, gradients held inf or NaN, and nothing was changed.

    The loss is as it was computed, the scale what the gradients carried, their norm that of the true ones before clipping.
    """

    applied: bool
    loss: float
    scale: float
    grad_norm: float
    lr: float


class Updater:
    """Owns the optimizer of a run and its schedule, which only updates that were applied move.

    Args:
        model: the classifier, on its device; its forward runs under the policy from now on.
        policy: resolved for that device.
        config: learning rate, weight decay, clipping.
        updates: of the whole run.
        world: the ranks that share each batch.

    Raises: PolicyError: the policy does not fit the model. Writes: the model's parameters, as `prepare` does.
    """

    def __init__(
        self, model: nn.Module, policy: Policy, config: TrainConfig, *, updates: int, world: DistContext
    ) -> None:
        from transformers import get_scheduler

        groups = parameter_groups(model, config.weight_decay)
        optimizer = AdamW(groups, lr=config.learning_rate, master=policy.master, state_dtype=policy.state)
        self.amp = prepare(model, optimizer, policy)
        self.world = world
        self.model = self.world.wrap(self.amp.model)
        rising = round(config.warmup_share * updates)
        self._schedule: LRScheduler = get_scheduler(config.schedule, optimizer, rising, updates)
        self.amp.on_applied(self._schedule.step)
        self._max_norm = config.max_norm

    def step(self, *forwards: Callable[[], Tensor]) -> Update:
        """Apply the gradients of a loss, unless they hold inf or NaN.

        Args:
            forwards: each computes its part of the sum, over all parts and ranks, that is the loss: shape (), fp32; called
                again where the policy says on_overflow=retry.

        Raises:
            NonFiniteStep, LossScaleExhausted: too many updates in a row with inf or NaN, or weights that hold them.

        Writes: weights, optimizer, schedule, scale. Syncs: yes.
        """
        losses: list[Tensor] = []

        def closure() -> Tensor:
            self.amp.zero_grad()
            total = torch.zeros((), device=self.world.device)
            for index, forward in enumerate(forwards, start=1):
                with maybe_no_sync(self.model, index < len(forwards)):
                    loss = forward()
                    # Averaging divides by the number of ranks.
                    self.amp.backward(loss * self.world.size)
                total += loss.detach()
            losses.append(total)
            return total

        lr = float(self._schedule.get_last_lr()[0])
        retries = self.amp.policy.guard.on_overflow == "retry"
        if not retries:
            closure()
        result = self.amp.step(closure if retries else None, max_norm=self._max_norm)
        loss = self.world.sum(losses[-1].cpu()).item()
        update = Update(applied=result.applied, loss=loss, scale=result.scale, grad_norm=result.grad_norm, lr=lr)
        self.amp.zero_grad()
        return update

    @property
    def comm(self) -> dict[str, Any]:
        """What this rank handed to gradient all-reduces so far; empty on one rank."""
        if not isinstance(self.model, DistributedDataParallel):
            return {}
        stats = comm_stats(self.model)
        return {
            "reductions": {dtype_name(dtype): count for dtype, count in stats.num_by_dtype.items()},
            "payload_bytes": stats.payload_bytes,
            "wire_bytes": stats.wire_bytes,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return model, optimizer, loss scale and schedule. Syncs: yes."""
        return {"step": self.amp.state_dict(), "schedule": self._schedule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; under another policy it is converted, and the log says so.

        Writes: model, optimizer, loss scale, schedule. Syncs: yes.
        """
        self.amp.load_state_dict(state["step"])
        self._schedule.load_state_dict(state["schedule"])


class Average:
    """The exponential moving average of a run's trainable weights, in fp32; of their masters where they are 16 bit.

    Updates that were skipped do not move it.

    Args:
        amp: takes the steps of the run, with one optimizer.
        decay: part of the average that stays at an update, in [0, 1); it forgets the start in a few 1 / (1 - decay) updates.

    Source: Polyak and Juditsky 1992, with exponential weights.
    """

    def __init__(self, amp: Stepper, decay: float) -> None:
        self._amp, self._move = amp, get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]  # torch's own
        named = amp.model.named_parameters(remove_duplicate=False)
        self._names = {name: p for name, p in named if p.requires_grad}
        self._averages = {p: master.clone() for p, master in self._masters().items()}
        amp.on_applied(self._update)

    @torch.no_grad()
    def _masters(self) -> dict[Tensor, Tensor]:
        (optimizer,) = self._amp.optimizers
        return {p: optimizer.master(p).detach() for p in self._names.values()}  # type: ignore[attr-defined]  # AdamW's

    @torch.no_grad()
    def _update(self) -> None:
        masters = self._masters()
        self._move([self._averages[p] for p in masters], list(masters.values()), None)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Have the model hold the average inside the block, in the dtypes of its weights.

        Writes: weights, and sets them back bit for bit. Syncs: no.
        """
        kept = [p.detach().clone() for p in self._averages]
        self._write(list(self._averages.values()))
        try:
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        for p, value in zip(self._averages, values, strict=True):
            p.copy_(value)

    def weights(self) -> dict[str, Tensor]:
        """Return the model's state dict in fp32, trainable weights averaged. Syncs: no."""
        return self._amp.export_weights() | {name: self._averages[p].clone() for name, p in self._names.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes: the averages by name, not copied. Syncs: no."""
        return {name: self._averages[p] for name, p in self._names.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned. Writes: the averages. Syncs: no."""
        for name, p in self._names.items():
            self._averages[p].copy_(state[name])
