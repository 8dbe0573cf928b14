"""One decision on all ranks: what any of them found holds for each, and what must be equal is compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .group import TIMEOUT, Group
from .rank_consistency import Number, audit

_ALWAYS = 3
"""The first steps are all compared: a wrong start shows there."""


class RankConsensus:
    """Makes a training step decide the same on every rank of a group.

    Every rank takes the same steps; each step sends one short vector. Loss scale, counters and whole parameters are
    compared in the first three steps and in every `every`-th.

    Args:
        group: the process group of all ranks that hold any part of the model; None is the default group.
        timeout: how long to wait for the others before saying who is missing.
        every: steps from one comparison to the next; 0 compares nothing.
        before: called before each agreement; raises if the step must not be taken.
        before_backward: called before each backward pass; raises if it must not be run.
        on_drop: called when the gradients of a step are dropped; drops what waits elsewhere.

    Raises:
        DistributedError: torch.distributed is not initialised.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: timedelta = TIMEOUT,
        every: int = 100,
        before: Callable[[], None] | None = None,
        before_backward: Callable[[], None] | None = None,
        on_drop: Callable[[], None] | None = None,
    ) -> None:
        self.group = Group(group, timeout=timeout)
        self.every = every
        self.num_steps = 0
        self._before = before
        self._before_backward = before_backward
        self._on_drop = on_drop

    def check_backward(self) -> None:
        """Raise what speaks against a backward pass now, such as a PolicyError about how its sums would be kept."""
        if self._before_backward is not None:
            self._before_backward()

    def check_step(self) -> None:
        """Raise what speaks against a step now, such as a DistributedError about gradients that were not averaged."""
        if self._before is not None:
            self._before()

    def drop(self) -> None:
        """Drop gradients that wait to be averaged. Syncs: no."""
        if self._on_drop is not None:
            self._on_drop()

    def combine(self, flags: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
        """Agree on what was found and add up what each rank holds a part of.

        Args:
            flags: shape (F,), fp32, not 0 where something was found; F equal on all ranks.
            squares: shape (S,), fp32: sums over this rank's part of tensors that lie in parts on several ranks; S equal.

        Returns:
            Flags, 1.0 where any rank found something, and the sums over all ranks; the same bits on every rank.

        Raises:
            DistributedError: a rank is lost.

        Syncs: on the CPU, with the slowest rank; else no.
        """
        self.check_step()
        self.num_steps += 1
        both = self.group.to_device(torch.cat([(flags != 0).to(torch.float32), squares]))
        summed = self.group.sum_(both).to(flags.device)
        return (summed[: len(flags)] != 0).to(torch.float32), summed[len(flags) :]

    def audit(self, numbers: Mapping[str, Number], params: Callable[[], Mapping[str, Tensor]]) -> None:
        """Compare what must be equal on all ranks, if this step is one to do so.

        Args:
            numbers: by what they are called in a message, such as "the loss scale".
            params: returns what each rank has a whole copy of, by name; asked only if this step compares.

        Raises:
            DistributedError: ranks differ; says in what, and which ranks stand against which. Raised on all of them.

        Syncs: yes, in a step that compares.
        """
        if self.every and (self.num_steps <= _ALWAYS or self.num_steps % self.every == 0):
            audit(self.group, self.num_steps, numbers, params())

    def any(self, is_found: bool) -> bool:
        """Return whether any rank found something; called on all of them. Raises: DistributedError. Syncs: yes."""
        return bool(self.group.max_(self.group.to_device(torch.tensor([float(is_found)]))))

    def watching(self) -> AbstractContextManager[None]:
        """Return a block in which the error of a lost rank becomes a DistributedError that names it."""
        return self.group.watching()
