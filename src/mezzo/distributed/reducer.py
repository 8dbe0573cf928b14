"""Averaging gradients over ranks in the policy's reduce dtype: micro-batches summed in fp32 before, bytes counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .._torch import view_base
from ..errors import DistributedError
from ..formats import FP8, LOW_DTYPES
from ..kernels import values
from ..stamp import Stamp, version_of
from .group import Group
from .wide_sum import Codec, Fp8Blocks, WideSum

if TYPE_CHECKING:
    from .._torch import GradBucket


_accumulators: WeakSet[Accumulator] = WeakSet()


def is_summed_apart(param: Tensor) -> bool:
    """Whether micro-batches of a parameter are summed in fp32 beside its gradient, which is 16 bit. Host only."""
    return any(param in accumulator.hooks for accumulator in _accumulators)


@dataclass(slots=True, eq=False)
class _Sum:
    """The micro-batches of one parameter so far, and the emptied gradient they were taken from."""

    value: Tensor
    stamp: Stamp

    def continues(self, grad: Tensor, passes: int) -> bool:
        """Whether a gradient is the one that was emptied, with so many backward passes added since."""
        return self.stamp.is_of(grad) and version_of(grad) == self.stamp.version + passes


class Accumulator:
    """Keeps what unsynchronised micro-batches add to 16-bit gradients, in fp32, until the gradients are averaged.

    DistributedDataParallel wants gradients in the dtype of their weights. A 16-bit sum stops absorbing terms
    after a few dozen micro-batches, so each micro-batch is taken out of the gradient as soon as it is there.

    Args:
        params: those that are 16 bit are accumulated.
        is_averaging: whether the backward pass under way ends in an average over the ranks.

    Writes: `grad_dtype` of 16-bit parameters, which becomes their own.
    """

    def __init__(self, params: Iterable[Tensor], is_averaging: Callable[[], bool]) -> None:
        self._is_averaging = is_averaging
        self._sums: dict[Tensor, _Sum] = {}
        self.hooks: dict[Tensor, RemovableHandle] = {}
        _accumulators.add(self)
        for p in params:
            if p.requires_grad and p.dtype in LOW_DTYPES:
                p.grad_dtype = p.dtype
                self.hooks[p] = p.register_post_accumulate_grad_hook(self._collect)  # type: ignore[no-untyped-call]  # torch's own

    def end(self) -> None:
        """Leave gradients alone from now on, and drop sums. Writes: the hooks of parameters."""
        for handle in self.hooks.values():
            handle.remove()
        self.hooks.clear()
        self._sums.clear()

    @torch.no_grad()
    def _collect(self, param: Tensor) -> None:
        grad, before = param.grad, self._sums.pop(param, None)
        if before is not None and not (grad is not None and before.continues(grad, passes=1)):
            before = None
        if grad is not None and not self._is_averaging():
            wide = grad.to(torch.float32)
            if before is not None:
                wide += before.value
            # A view of a bucket counts what is written to the others too; torch copies what is none into its bucket.
            param.grad = emptied = grad.zero_() if view_base(grad) is None else torch.zeros_like(grad)
            before = _Sum(wide, Stamp.of(emptied))
        if before is not None:
            self._sums[param] = before

    def take(self, param: Tensor) -> Tensor | None:
        """Return the sum of a parameter's earlier micro-batches, once: its shape, fp32. None if there were none.

        Called when the last micro-batch has been added to the emptied gradient. Host only.
        """
        before = self._sums.pop(param, None)
        return None if before is None else before.value

    def check_averaged(self) -> None:
        """Refuse, by a DistributedError, a step whose backward passes all ran inside no_sync(): its gradients were never averaged."""
        waiting = [p for p, kept in self._sums.items() if p.grad is not None and kept.continues(p.grad, passes=0)]
        if waiting:
            raise DistributedError(
                f"step() was called with the gradients of {len(waiting)} parameters still on their own rank: every "
                "backward of this step ran inside no_sync(). Run the last one outside of it."
            )


@dataclass(kw_only=True, slots=True)
class CommStats:
    """What a rank handed to the gradient all-reduce.

    Attributes:
        num_ranks: that take part.
        num_by_dtype: all-reduces, one for each bucket of gradients, by the dtype they were sent in.
        unrounded: dtypes of gradients that were sent as they are, and summed in fp32.
        payload_bytes: of gradients in the dtype they were sent in.
    """

    num_ranks: int
    num_by_dtype: Counter[torch.dtype] = field(default_factory=Counter)
    unrounded: set[torch.dtype] = field(default_factory=set)
    payload_bytes: int = 0

    @property
    def wire_bytes(self) -> int:
        """Bytes a rank sends if the all-reduce is a ring: each payload nearly twice, 2 (N - 1) / N times."""
        return 2 * (self.num_ranks - 1) * self.payload_bytes // self.num_ranks


class GradientReducer:
    """The communication hook of a DistributedDataParallel model.

    Gradients are divided by the number of ranks before they are cast, so that an fp16 sum of finite gradients stays
    finite: it is a mean. Gradients that are 16 bit themselves are sent as they are, summed in fp32 and divided then: that
    loses nothing, whatever `dtype` is.

    Args:
        dtype: of what is sent, fp8 in blocks; fp64 and sparse gradients are reduced as they are.
        accumulator: of earlier micro-batches; None if gradients accumulate where they are.
        is_static: whether the wrapper takes the graph to be the same in each pass, so that buckets are not told apart.

    Attributes:
        averaged: ids of the parameters whose gradients were averaged; for others to empty.
    """

    def __init__(
        self, group: Group, dtype: torch.dtype, accumulator: Accumulator | None, is_static: Callable[[], bool]
    ) -> None:
        self.group, self.dtype, self.accumulator = group, dtype, accumulator
        self._is_static = is_static
        self.comm_stats = CommStats(num_ranks=group.size)
        self._wide_sum = WideSum()
        self._blocks: dict[tuple[int, ...], Fp8Blocks] = {}
        self.averaged: set[int] = set()

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket of gradients: sent as `dtype`, summed in fp32.

        Writes: the bucket. Syncs: on the CPU, with the slowest rank; else no.
        """
        buffer: Tensor = bucket.buffer()
        # 16 bit, and nothing is added to them in fp32: alike on all ranks
        is_low = buffer.dtype in LOW_DTYPES and self.dtype in (buffer.dtype, torch.float32)
        is_unrounded = is_low and self.accumulator is None and self.group.size > 1
        sent = buffer if is_unrounded else self._share(bucket)
        codec = self._codec_of(bucket, sent)
        self.comm_stats.num_by_dtype[codec.dtype] += 1
        self.comm_stats.payload_bytes += codec.num_bytes(values(sent).numel(), self.group.size)
        if is_unrounded:
            self.comm_stats.unrounded.add(sent.dtype)
        self.averaged.update(map(id, bucket.parameters()))
        if bucket.index() == 0:
            self._wide_sum.drop()
        # Of two ranks' rounded shares any sum is rounded once.
        if is_unrounded or codec.dtype is FP8 or (sent.dtype in LOW_DTYPES and self.group.size > 2):
            mean = self._wide_sum.start(self.group, sent, buffer, self.group.size if is_unrounded else 1, codec)
        else:
            mean = self._average(sent, buffer)
        # In the first pass of a static graph torch sends all buckets behind backward, and calls each of them the first.
        if bucket.is_last() or self._is_static():
            self._wide_sum.finish(self.group)
        return mean

    def _share(self, bucket: GradBucket) -> Tensor:
        """Return what this rank gives to the mean, those of earlier micro-batches added, in the dtype it is sent in."""
        buffer: Tensor = bucket.buffer()
        wide = buffer.to(torch.float32) if buffer.dtype in LOW_DTYPES else buffer
        if self.accumulator is not None:
            for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                earlier = self.accumulator.take(param)
                if earlier is not None:
                    index = grad.storage_offset() - buffer.storage_offset()
                    wide.as_strided(grad.size(), grad.stride(), index).add_(earlier)
        wide.div_(self.group.size)
        is_cast = wide.dtype is torch.float32 and self.dtype is not FP8 and not wide.is_sparse
        return wide.to(self.dtype) if is_cast else wide

    def _codec_of(self, bucket: GradBucket, sent: Tensor) -> Codec:
        """Return the form in which a bucket is sent: as it is, or in fp8 with its remainders; torch may lay buckets out anew, which drops them."""
        if self.dtype is not FP8 or sent.dtype is not torch.float32 or sent.is_sparse:
            return Codec(sent.dtype)
        key = tuple(map(id, bucket.parameters()))
        if key not in self._blocks:
            self._blocks = {known: held for known, held in self._blocks.items() if not set(known) & set(key)}
            self._blocks[key] = Fp8Blocks()
        return self._blocks[key]

    def _average(self, sent: Tensor, target: Tensor) -> torch.futures.Future[Tensor]:
        def finish(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            mean: Tensor = done.value()[0]
            return target if target.is_sparse or mean.data_ptr() == target.data_ptr() else target.copy_(mean)

        averaged: torch.futures.Future[Tensor] = self.group.average(sent).then(finish)
        return averaged
