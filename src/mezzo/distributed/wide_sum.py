"""Gradients that are sent in 16 bit or less and summed in fp32: each rank receives one part of all others', adds up, rounds once.

That is a reduce-scatter; where every rank needs the whole sum, the parts are gathered behind it. A ring sends as many bytes, and
rounds after each addition. In fp8 they are blocks of 128 with a power of two each, and the next step sends what rounding took away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ConfigError
from ..formats import FP8, LOW_DTYPES, dtype_name
from .group import Group, all_gather_rows

BLOCK = 128
"""Elements that share a scale: 1 + 1/128 bytes an element."""
_TOP = 9
"""448, the largest number of e4m3, is 0.875 times two to this."""


def split(values: Tensor, num_ranks: int, multiple: int = 1) -> Tensor:
    """Return values in one row for each rank, zeros behind the last. Shape (num_ranks, P), P a multiple. Syncs: no."""
    missing = -values.numel() % (num_ranks * multiple)
    flat = torch.nn.functional.pad(values, (0, missing)) if missing else values
    return flat.view(num_ranks, -1)


def add_up(rows: Tensor) -> Tensor:
    """Return the sum over ranks of what each sent: shape (N, P), 16 bit, to shape (P,), fp32. Syncs: no."""
    return torch.sum(rows, dim=0, dtype=torch.float32)


class Codec:
    """In what form gradients are sent, on the way to their sum and from there: in a dtype of 16 bit, as they are."""

    multiple = 1
    """What the length of a row must be a multiple of."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def num_bytes(self, numel: int, num_ranks: int) -> int:
        """Return the bytes of a bucket's values, in as many rows as ranks. Host only."""
        return numel * self.dtype.itemsize

    def pack(self, rows: Tensor) -> Tensor:
        """Return what is sent, one row to each rank. Syncs: no."""
        return rows

    def add_up(self, received: Tensor) -> Tensor:
        """Return the sum in fp32 of one row from each rank. Syncs: no."""
        return add_up(received)

    def pack_sum(self, mean: Tensor) -> Tensor:
        """Return what every rank is sent of it, rounded once. Syncs: no."""
        return mean.to(self.dtype)

    def unpack(self, rows: Tensor) -> Tensor:
        """Return the values of such rows. Syncs: no."""
        return rows


def encode(rows: Tensor) -> Tensor:
    """Return values in fp8, blocks of a row first, then the exponents of their scales: 255 for a block with an inf or NaN.

    Shape (N, P), fp32, P a multiple of `BLOCK`, to shape (N, P + P / 128), uint8. Syncs: no.
    """
    blocks = rows.view(len(rows), -1, BLOCK)
    largest = blocks.abs().amax(-1)
    mantissa, exponent = torch.frexp(largest)
    # The least power of two under which the largest value is no larger than 448; not below 2^-126, whose bits are a scale's.
    stored = (exponent - _TOP + (mantissa > 0.875) + 127).clamp(1, 254)
    stored = torch.where(largest.isfinite(), stored, 255).to(torch.int32)
    small = (blocks * _power_of_two(254 - stored.clamp(max=253)).unsqueeze(-1)).to(torch.float8_e4m3fn)
    return torch.cat([small.view(torch.uint8).flatten(1), stored.to(torch.uint8)], dim=1)


def decode(packed: Tensor) -> Tensor:
    """Return the values that `encode` packed: shape (N, P), fp32; inf or NaN all over a block that had one. Syncs: no."""
    num_blocks = packed.shape[1] // (BLOCK + 1)
    values = packed[:, : num_blocks * BLOCK].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    scales = _power_of_two(packed[:, num_blocks * BLOCK :].to(torch.int32))
    return (values.view(len(packed), -1, BLOCK) * scales.unsqueeze(-1)).flatten(1)


def _power_of_two(stored: Tensor) -> Tensor:
    """Return 2^(e - 127) for exponents as fp32 stores them, int32; inf for 255."""
    return (stored << 23).view(torch.float32)


class Fp8Blocks(Codec):
    """How one bucket of gradients is sent in fp8: with the remainders of the step before, here and of this rank's part of the sum.

    Nothing is lost for good: what rounding took from a step is added to the next. Remainders belong to gradients of one loss
    scale and are not saved.
    """

    multiple = BLOCK

    def __init__(self) -> None:
        super().__init__(FP8)
        self._own: Tensor | None = None
        self._sum: Tensor | None = None

    def num_bytes(self, numel: int, num_ranks: int) -> int:
        """Return the bytes of a bucket's values, in as many rows as ranks, with their exponents. Host only."""
        return -(-numel // (num_ranks * BLOCK)) * num_ranks * (BLOCK + 1)

    def pack(self, rows: Tensor) -> Tensor:
        """Return what is sent: of shape (N, P), fp32, to uint8. Writes: `rows`. Syncs: no."""
        packed, self._own = _rounded(rows, self._own)
        return packed

    def add_up(self, received: Tensor) -> Tensor:
        """Return the sum over ranks of what each sent: shape (P,), fp32. Syncs: no."""
        return decode(received).sum(0)

    def pack_sum(self, mean: Tensor) -> Tensor:
        """Return this rank's part of the mean as it is gathered: shape (P,), fp32, to uint8. Writes: `mean`. Syncs: no."""
        packed, self._sum = _rounded(mean.unsqueeze(0), self._sum)
        return packed[0]

    def unpack(self, rows: Tensor) -> Tensor:
        """Return the mean, one row from each rank, as fp32. Syncs: no."""
        return decode(rows)


def _rounded(rows: Tensor, remainder: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return rows and remainder in fp8, and what that took away: 0 in a block that is not finite. Writes: `rows`."""
    if remainder is not None:
        rows.add_(remainder)
    packed = encode(rows)
    return packed, (rows - decode(packed)).nan_to_num_(0.0, 0.0, 0.0)


@dataclass(slots=True, eq=False)
class _Bucket:
    """Gradients on their way: sums are divided by `divisor` into `target`, shape (n,), which is what `done` gives.

    Attributes:
        codec: in what form they are sent, as the transfer `work` does.
        rows: shape (N, P): what is sent, one row to each rank; then the sums, one row from each.
        received: shape (N, P): the others' rows for this rank.
    """

    codec: Codec
    rows: Tensor
    received: Tensor
    target: Tensor
    divisor: int
    work: dist.Work
    done: torch.futures.Future[Tensor]


class WideSum:
    """Adds up buckets of gradients in fp32 while backward goes on.

    All ranks begin and end transfers in one order, which only the order of buckets decides: a bucket's second half begins when
    the next bucket comes, and ends when the one after that does.
    """

    def __init__(self) -> None:
        self._sent: deque[_Bucket] = deque()
        self._summed: deque[_Bucket] = deque()

    def start(
        self, group: Group, sent: Tensor, target: Tensor, divisor: int, codec: Codec
    ) -> torch.futures.Future[Tensor]:
        """Begin to add a bucket up, and go on with those before it.

        Args:
            group: the ranks; its limit holds on the CPU.
            sent: shape (n,), 16 bit, or fp32 for a codec of less; may be the target.
            target: shape (n,): takes the mean.
            divisor: of the sum, which makes it the mean.
            codec: in what form it is sent.

        Returns:
            What the target will be. A rank that is lost raises torch's RuntimeError.

        Writes: `target`, and those of buckets before it. Syncs: on the CPU, with the slowest rank for these; else no.
        """
        rows = codec.pack(split(sent, group.size, codec.multiple))
        received = torch.empty_like(rows)
        work = group.exchange(received, rows)
        devices: list[int | str | torch.device] = [] if target.device.type == "cpu" else [target.device]
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        self._sent.append(_Bucket(codec, rows, received, target, divisor, work, done))
        self._go_on(group, in_flight=1)
        return done

    def finish(self, group: Group) -> None:
        """End all transfers; called behind the last bucket of a backward pass. In all else as `start`."""
        self._go_on(group, in_flight=0)

    def drop(self) -> None:
        """Forget what a backward pass that failed left on its way."""
        self._sent.clear()
        self._summed.clear()

    def _go_on(self, group: Group, *, in_flight: int) -> None:
        while len(self._sent) > in_flight:
            self._summed.append(_summed(group, self._sent.popleft()))
        while len(self._summed) > in_flight:
            bucket = self._summed.popleft()
            group.wait(bucket.work, bucket.rows)
            bucket.target.copy_(bucket.codec.unpack(bucket.rows).view(-1)[: bucket.target.numel()])
            bucket.done.set_result(bucket.target)


def _summed(group: Group, bucket: _Bucket) -> _Bucket:
    group.wait(bucket.work, bucket.received)
    mean = bucket.codec.add_up(bucket.received).div_(bucket.divisor)
    bucket.work = group.gather_rows(bucket.rows, bucket.codec.pack_sum(mean))
    return bucket


class ShardCollective:
    """What torch's `fully_shard` calls in place of a collective of its own, in memory that this hands out."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what is sent or received. Syncs: no."""
        return torch.empty(*size, dtype=dtype, device=device)


class WideReduceScatter(ShardCollective):
    """In place of the reduce-scatter of 16-bit gradients."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Add up one part of all ranks' gradients: `input_tensor`, shape (N P,), has one for each of N ranks; nothing is left under way.

        Raises:
            ConfigError: torch was told to multiply by a number of the caller's first.

        Writes: `output_tensor`, shape (P,), in the same 16 bit. Syncs: on the CPU, with the slowest rank; else no.
        """
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ConfigError(
                f"sharded gradients in {dtype_name(input_tensor.dtype)} are summed in fp32 by mezzo, and set_gradient_divide_factor "
                "has torch multiply before it adds. Call set_force_sum_reduction_for_comms(True) too, which has it divide behind."
            )
        output_tensor.copy_(_part_of_sum(input_tensor.view(group.size(), -1), group, op))


class WideReplicas(dist.ProcessGroup):
    """The ranks that hold copies of one shard, as torch's `fully_shard` reduces over them: 16-bit gradients are summed in fp32."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # torch lists another form alone
        self._group = group

    def __eq__(self, other: object) -> bool:
        """Whether another is the same ranks: torch, which looks groups up, finds the one that this stands for.

        Where it finds none, its log of an error raises one of its own, which hides the first.
        """
        return other is self or other is self._group

    def __hash__(self) -> int:
        return hash(self._group)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]  # as all_reduce calls it
        """Add up what the ranks have in one dense tensor: as torch's, where torch's would not round in between.

        Sums and means, `opts.reduceOp`, are computed here. The transfer that is returned is over, as far as the host is concerned.

        Writes: `tensors`. Syncs: on the CPU, with the slowest rank; else no.
        """
        (values,) = tensors
        op, group = dist.ReduceOp.SUM if opts is None else opts.reduceOp, self._group
        is_sum = op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG  # noqa: PLR1714  # equal from the left alone
        if values.dtype not in LOW_DTYPES or not is_sum:
            return group.allreduce(tensors, opts)
        rows = split(values.view(-1), group.size())
        whole = torch.empty_like(rows)
        all_gather_rows(whole.view(-1), _part_of_sum(rows, group, op).to(values.dtype), group=group)
        values.copy_(whole.view(-1)[: values.numel()].view(values.shape))
        return _Over()


class _Over(dist.Work):
    """A transfer that has ended."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


def _part_of_sum(rows: Tensor, group: dist.ProcessGroup, op: object) -> Tensor:
    """Return this rank's part of the sum or mean over ranks, fp32; each sends a row to each other."""
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group)
    total = add_up(received)
    return total.div_(group.size()) if op == dist.ReduceOp.AVG else total
