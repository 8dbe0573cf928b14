"""A moving average of the weights, which is steadier than the last of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from .. import Stepper


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
    def shown(self) -> Iterator[None]:
        """Have the model hold the average inside the block, in the dtypes of its weights.

        Writes: weights, and sets them back bit for bit. Syncs: no.
        """
        params = list(self._averages)
        kept = [p.detach().clone() for p in params]
        self._write([self._averages[p] for p in params])
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
        averaged = {name: self._averages[p].clone() for name, p in self._names.items()}
        return {**self._amp.export_weights(), **averaged}

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes: the averages by name, not copied. Syncs: no."""
        return {name: self._averages[p] for name, p in self._names.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned. Writes: the averages. Syncs: no."""
        for name, p in self._names.items():
            self._averages[p].copy_(state[name])
