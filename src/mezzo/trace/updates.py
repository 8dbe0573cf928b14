"""Optimizer updates of 16-bit weights that rounding swallowed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import LOW_DTYPES, dtype_name
from .measure import rerun_wide
from .ops import Call
from .records import LostUpdate, Site


class UpdateWatch:
    """Compares what one optimizer step meant to write, in fp32, with what 16-bit weights hold after it."""

    def __init__(self) -> None:
        self.lost: list[LostUpdate] = []
        self._before: dict[int, Tensor] = {}
        self._intended: dict[int, Tensor] = {}

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep copies of the 16-bit weights an optimizer is about to update.

        mezzo's own optimizers are left out: they keep what the weight cannot hold.
        """
        self._before.clear()
        self._intended.clear()
        if type(optimizer).__module__.startswith("mezzo."):
            return
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.dtype in LOW_DTYPES and p.grad is not None:
                    self._before[id(p)] = p.detach().clone()

    def see(self, call: Call) -> None:
        """Take in one op of the step: which weights would it have changed in fp32? Syncs: no."""
        if not call.facts.writes or not any(id(t) in self._before for t in call.out):
            return
        wide = rerun_wide(call.func, call.facts, call.args, call.kwargs, torch.float32)
        if wide is None or len(wide) != len(call.out):
            return
        for tensor, want in zip(call.out, wide, strict=True):
            before = self._before.get(id(tensor))
            if before is not None:
                meant = want != before.float()
                self._intended[id(tensor)] = self._intended.get(id(tensor), torch.zeros_like(meant)) | meant

    def end(self, optimizer: torch.optim.Optimizer, names: dict[int, str], site: Site) -> None:
        """Count what was lost in the step that ended. Syncs: yes."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                meant = self._intended.get(id(p))
                if meant is None or not bool(meant.any()):
                    continue
                self.lost.append(
                    LostUpdate(
                        name=names[id(p)],
                        dtype=dtype_name(p.dtype),
                        optimizer=type(optimizer).__name__,
                        intended=int(meant.sum()),
                        lost=int((meant & (p.detach() == self._before[id(p)])).sum()),
                        site=site,
                    )
                )
        self._before.clear()
        self._intended.clear()
