"""Averaging gradients over ranks in the policy's reduce dtype, and counting the bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..formats import LOW_DTYPES
from .accumulate import Accumulator
from .group import Group

if TYPE_CHECKING:
    from .._torch import GradBucket


@dataclass(kw_only=True, slots=True)
class CommStats:
    """What a rank handed to the gradient all-reduce.

    Attributes:
        num_ranks: that take part.
        num_by_dtype: all-reduces, one for each bucket of gradients, by the dtype they were sent in.
        payload_bytes: of gradients in the dtype they were sent in.
    """

    num_ranks: int
    num_by_dtype: Counter[torch.dtype] = field(default_factory=Counter)
    payload_bytes: int = 0

    @property
    def num_reductions(self) -> int:
        """All-reduces so far."""
        return self.num_by_dtype.total()

    @property
    def wire_bytes(self) -> int:
        """Bytes a rank sends if the all-reduce is a ring: each payload nearly twice, 2 (N - 1) / N times."""
        return 2 * (self.num_ranks - 1) * self.payload_bytes // self.num_ranks


class GradientReducer:
    """The communication hook of a DistributedDataParallel model.

    Gradients are divided by the number of ranks before they are cast, so that an fp16 sum of finite gradients stays
    finite: it is a mean.

    Args:
        group: the ranks.
        dtype: of what is sent; fp64 gradients are reduced as they are.
        accumulator: of earlier micro-batches; None if gradients accumulate where they are.

    Attributes:
        averaged: ids of the parameters whose gradients were averaged; for others to empty.
    """

    def __init__(self, group: Group, dtype: torch.dtype, accumulator: Accumulator | None) -> None:
        self.group = group
        self.dtype = dtype
        self.accumulator = accumulator
        self.comm_stats = CommStats(num_ranks=group.size)
        self.averaged: set[int] = set()

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket of gradients. Writes: the bucket. Syncs: no."""
        buffer: Tensor = bucket.buffer()
        total = self._with_earlier(bucket).div_(self.group.size)
        sent = total.to(self.dtype) if total.dtype is torch.float32 or total.dtype in LOW_DTYPES else total
        self.comm_stats.num_by_dtype[sent.dtype] += 1
        self.comm_stats.payload_bytes += sent.numel() * sent.element_size()
        self.averaged.update(map(id, bucket.parameters()))

        def finish(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            mean: Tensor = done.value()[0]
            return buffer if mean.data_ptr() == buffer.data_ptr() else buffer.copy_(mean)

        averaged: torch.futures.Future[Tensor] = self.group.average(sent).then(finish)
        return averaged

    def _with_earlier(self, bucket: GradBucket) -> Tensor:
        """Return a bucket's gradients, wide enough to be divided, with those of earlier micro-batches added."""
        buffer: Tensor = bucket.buffer()
        wide = buffer.to(torch.float32) if buffer.dtype in LOW_DTYPES else buffer
        if self.accumulator is not None:
            for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                earlier = self.accumulator.take(param)
                if earlier is not None:
                    index = grad.storage_offset() - buffer.storage_offset()
                    wide.as_strided(grad.size(), grad.stride(), index).add_(earlier)
        return wide


def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with classes; ours are strings
    """Call a reducer, as DistributedDataParallel calls its hooks."""
    return state.reduce(bucket)
