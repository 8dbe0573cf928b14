"""One decision on all ranks: what any of them found holds for each, and what must be equal is compared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import DistributedError
from ..kernels import numbers_on, to_host
from ..loss_scale import host_decides
from .group import TIMEOUT, Group
from .rank_consistency import Number, RankSetup, Signals, audit, handshake, read_signals, refuse_setup
from .wrapper import Wrapper

_ALWAYS = 3
"""The first steps are all compared: a wrong start shows there."""
_PARTS = "Where ranks hold different parts of one model, write RankConsensus(group, has_parts=True)."


class RankConsensus:
    """Makes a training step decide the same on every rank of a group.

    Every rank takes the same steps; each step sends one short vector. Before the first backward pass the ranks compare what
    they were prepared with. Loss scale, counters and whole parameters are compared in the first three steps, in every
    `every`-th, in those whose gradients the wrapper did not average, and in those before which one rank loaded or wrote something.

    Args:
        group: the process group of all ranks that hold any part of the model; None is the default group.
        timeout: how long to wait for the others before saying who is missing.
        every: steps from one comparison to the next; 0 compares nothing.
        wrapper: what spreads the model; left out, nothing does, or nothing yet.
        has_parts: the ranks hold different parts of a model. Where the parts differ in shape, or are stages of
            torch.distributed.pipelining, they are known without it.

    Attributes:
        group: of ranks; its `timeout` may be written.
        num_steps: taken so far.
        has_parts: whether the ranks hold different parts of a model, as the stages of a pipeline do, and not copies.
        num_copies: how many ranks of the group hold each part.
        signals: what this rank tells the others with what it finds next.

    Raises:
        DistributedError: torch.distributed is not initialised.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: timedelta = TIMEOUT,
        every: int = 100,
        wrapper: Wrapper | None = None,
        has_parts: bool = False,
    ) -> None:
        self.group = Group(group, timeout=timeout)
        self.every = every
        self.num_steps = 0
        self.has_parts = has_parts
        self.num_copies = 1
        self.wrapper = Wrapper() if wrapper is None else wrapper
        self._is_checked = False
        self.signals = Signals()
        self._unread: tuple[Tensor, torch.Event | None, Signals] | None = None
        self._wants_audit = False

    def attach(self, wrapper: Wrapper) -> RankConsensus:
        """Take over the ranks of a wrapper that was found; the limit that was set stays. Returns: this."""
        self.group = Group(wrapper.process_group, timeout=self.group.timeout, home=wrapper.device)
        self.wrapper = wrapper
        wrapper.use(self.group)
        self._is_checked = False
        return self

    def mean(self, loss: Tensor | float) -> Tensor:
        """Return the mean of a loss over the ranks that hold copies, in its dtype; called on all. Raises: DistributedError. Syncs: yes."""
        own = torch.as_tensor(loss).detach()
        if self.has_parts:
            return own
        return self.group.sum_(self.group.to_device(own.clone())).to(own.device) / self.group.size

    def handshake(self, describe_setup: Callable[[], RankSetup]) -> None:
        """Compare, the first time, what the ranks were prepared with, and give all the first one's masters.

        Raises:
            DistributedError: ranks differ; says in what. Raised on all of them.

        Writes: the first time, what lies beside 16-bit weights that the wrapper has copied from the first rank.
        Syncs: the first time.
        """
        if not self._is_checked:
            own = describe_setup()
            self.has_parts = handshake(self.group, own, self.wrapper, has_parts=self.has_parts)
            self.num_copies = len({*own.replicas} & {*self.group.ranks}) or 1
            self._is_checked = True

    def combine(self, flags: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
        """Agree on what was found and add up what each rank holds a part of.

        Args:
            flags: shape (F,), fp32, not 0 where something was found; F equal on all ranks.
            squares: shape (S,), fp32: sums over this rank's part of tensors that lie in parts on several ranks; S equal.

        Returns:
            Flags, 1.0 where any rank found something, and the sums over all ranks; the same bits on every rank.

        Raises:
            DistributedError: a rank is lost, or the ranks are told different steps; raised on all of them, on accelerators one step late.

        Syncs: on the CPU, with the slowest rank; else no.
        """
        self.wrapper.check_step()
        self._read_signals()
        self.num_steps += 1
        sent, self.signals = self.signals, Signals()
        told = torch.cat([numbers_on(sent.numbers(), flags.device), sent.weights.to(flags)])
        both = self.group.to_device(torch.cat([(flags != 0).to(torch.float32), squares, told]))
        summed = self.group.sum_small(both, by_exchange=self.wrapper.gathers).to(flags.device)
        self._unread = (*to_host(summed[-len(told) :]), sent)
        if host_decides(flags.device):
            self._read_signals()
        return (summed[: len(flags)] != 0).to(torch.float32), summed[len(flags) : -len(told)]

    def _read_signals(self) -> None:
        """Take in what the ranks told each other with the last step, which has arrived by now."""
        if self._unread is None:
            return
        (vector, event, sent), self._unread = self._unread, None
        if event is not None:
            event.synchronize()
        wants_audit, differs, is_unscaled = read_signals(vector.tolist(), self.group.size)
        self._wants_audit |= wants_audit
        if is_unscaled:
            raise DistributedError(
                f"step {self.num_steps - 1} has gradients of external_backward() without the loss scale that it divides them by: the loss of no rank took "
                "it. Give the schedule loss_fn=lambda out, y: amp.scaled(loss(out, y))."
            )
        if differs:
            hint = "Call amp.step with the same arguments, and give the optimizers the same options, on all ranks."
            refuse_setup(self.group, f"step {self.num_steps - 1} is", sent.call, hint)

    def audit(
        self,
        numbers: Mapping[str, Number],
        params: Callable[[], Mapping[str, Tensor]],
        stepped: Collection[Tensor] = (),
    ) -> None:
        """Compare what must be equal on all ranks, if this step is one to do so.

        Args:
            numbers: by what they are called in a message, such as "the loss scale".
            params: returns what each rank has a whole copy of, by name; asked only if this step compares.
            stepped: parameters that this step was about: one whose gradient was not averaged makes it compare.

        Raises:
            DistributedError: ranks differ; says in what, and which ranks stand against which. Raised on all of them.

        Syncs: yes, in a step that compares.
        """
        is_due = self.num_steps <= _ALWAYS or self.num_steps % max(self.every, 1) == 0
        is_due = is_due or self._wants_audit or not self.wrapper.has_averaged(stepped)
        self._wants_audit = False
        if self.every and is_due:
            why = partial(self._why_apart, stepped)
            audit(self.group, self.num_steps, numbers, {} if self.has_parts else params(), why)
        self.wrapper.end_step()

    def _why_apart(self, stepped: Collection[Tensor]) -> str:
        why = self.wrapper.why_apart(stepped)
        return f"{why} {_PARTS}" if self._is_checked and not self.wrapper.compares_models else why

    def watching(self) -> AbstractContextManager[None]:
        """Return a block in which the error of a lost rank becomes a DistributedError that names it."""
        return self.group.watching()
