"""A process group that never waits for ever: who is in it, where it talks, and who did not answer."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch import default_group, group_store
from ..errors import DistributedError, MezzoError

TIMEOUT = timedelta(minutes=5)
"""How long a decision waits for other ranks unless told otherwise."""

_GRACE = timedelta(seconds=10)
"""How long a roll call waits for ranks that notice a loss later than others."""

_NO_TAG = 2**31 - 1
"""Of a transfer that nobody sends."""

# gloo's threads let go of a transfer after they told of its end. Who lets go last frees its tensors, for which a thread
# needs the interpreter, and aborts a program that ends just then. So the last small ones are held here.
_KEPT, _SMALL = 8, 1 << 16

# gloo raises plain RuntimeErrors, so their text must tell them from errors of the model.
_LOSS_MARKS = (
    "gloo/", "nccl", "timed out", "timeout caused pair closure", "connection closed", "connection reset", "broken pipe",
)  # fmt: skip
# What torch's reducer asserts, where a wrapper is used otherwise than it can.
_ASSERTED = {
    "rebuilt_param_indices_": "DistributedDataParallel around a stage of a pipeline took the micro-batches of one step for several (torch "
    "asserts 'rebuilt_param_indices_'). Write DistributedDataParallel(stage, find_unused_parameters=True), and start again from the last checkpoint.",
    "expect_autograd_hooks_": "DistributedDataParallel(static_graph=True) learns the graph from its first backward pass, which ran inside "
    "no_sync(). Leave static_graph out, or average the first one.",
}
_EVEN = "give each rank as many batches (DistributedSampler, drop_last=True)"


# torch 2.13 has another name for it, and warns at the old one.
all_gather_rows = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Group:
    """Ranks that take decisions together. Where one is lost, whatever they send each other raises a DistributedError.

    Args:
        group: a process group; None is the default one.
        timeout: how long to wait for the others. On accelerators the process group's own timeout holds, since the host
            does not wait there.
        home: of the model. The current device is that of rank 0 on each rank of a program that never sets it.

    Attributes:
        handle: torch's process group.
        timeout: as given.
        ranks: who is in it, by their numbers in the whole run.

    Raises:
        DistributedError: torch.distributed is not initialised.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timeout: timedelta = TIMEOUT, home: torch.device | None = None
    ) -> None:
        if not is_running():
            raise DistributedError(
                "a group of ranks was asked for, and torch.distributed has none. Start with torchrun and call "
                "torch.distributed.init_process_group() first; on one rank nothing has to be agreed."
            )
        self.handle = default_group() if group is None else group
        self.timeout = timeout
        self._home = home if home is not None else self.handle.bound_device_id
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(self.handle))
        self._devices = [kind.split(":")[0] for kind in dist.get_backend_config(self.handle).split(",")]
        self._ended: deque[dist.Work] = deque(maxlen=_KEPT)

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Return a tensor on a device the group can talk from. Syncs: only if that is another device."""
        if tensor.device.type in self._devices:
            return tensor
        own = self._home if self._home is not None else torch.accelerator.current_accelerator()
        return tensor.to(own if own is not None and own.type in self._devices else "cpu")

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add a tensor up over the ranks, in place, and return it. Writes: `tensor`. Syncs: on the CPU, with the slowest rank; else no."""
        return self._all_reduce_(tensor, dist.ReduceOp.SUM)

    def max_(self, tensor: Tensor) -> Tensor:
        """Take the largest of each element over the ranks, in place, and return it; in all else as `sum_`. Syncs: as `sum_`."""
        return self._all_reduce_(tensor, dist.ReduceOp.MAX)

    def sum_small(self, tensor: Tensor, *, by_exchange: bool = False) -> Tensor:
        """Return the sum of a small tensor over the ranks, the same bits on all, by another collective than gradients are reduced by on the CPU.

        gloo ends a process where two collectives of one kind meet in different sizes; those of different kinds wait, and are told so.

        Args:
            tensor: contiguous, in one dimension.
            by_exchange: the ranks may be in `gather` meanwhile.

        Syncs: on the CPU, with the slowest rank; else no.
        """
        if tensor.device.type != "cpu":
            return self.sum_(tensor)
        if not by_exchange:
            return reduce(torch.add, self.gather(tensor))
        rows = tensor.expand(self.size, -1).contiguous()
        found = torch.empty_like(rows)
        with self.watching():
            self.wait(self.exchange(found, rows), found)
        return reduce(torch.add, found.unbind())

    def any(self, is_found: bool) -> bool:
        """Return whether any rank found something; called on all of them. Syncs: yes."""
        return bool(self.max_(self.to_device(torch.tensor([float(is_found)]))))

    def differing(self, values: Tensor) -> list[bool]:
        """Return for each of N whole numbers, shape (N,), int64, on the CPU, whether the ranks hold different ones; the same answer on all. Syncs: yes."""
        # The largest and, negated, the smallest: they agree only if all values do.
        extremes = self.max_(self.to_device(torch.cat([values, -values]))).cpu()
        found: list[bool] = (extremes[: len(values)] != -extremes[len(values) :]).tolist()
        return found

    def gather_text(self, text: str) -> list[str]:
        """Return the text of each rank, in the order of `ranks`; in all else as `gather`."""
        encoded = text.encode()
        sizes = [int(size) for size in self.gather(self.to_device(torch.tensor([len(encoded)])))]
        padded = encoded.ljust(max(*sizes, 1), b"\0")
        rows = self.gather(self.to_device(torch.frombuffer(bytearray(padded), dtype=torch.uint8)))
        return [bytes(row.tolist()[:size]).decode() for row, size in zip(rows, sizes, strict=True)]

    def broadcast_(self, tensor: Tensor) -> None:
        """Write the first rank's tensor over that of the others. Writes: `tensor`, contiguous. Syncs: on the CPU, with the slowest rank; else no."""
        sent = self.to_device(tensor.view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8))
        with self.watching():
            self.wait(dist.broadcast(sent, src=self.ranks[0], group=self.handle, async_op=True), sent)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent.view(tensor.dtype).view_as(tensor))

    def average(self, tensor: Tensor) -> torch.futures.Future[list[Tensor]]:
        """Begin to add a tensor up over the ranks, in place, and return what waits for it; within `timeout` on the CPU.

        Writes: `tensor`. Syncs: no.
        """
        options = dist.distributed_c10d.AllreduceOptions()
        if "cpu" in self._devices:
            options.timeout = self.timeout
        return self.handle.allreduce([tensor], options).get_future()

    def _all_reduce_(self, tensor: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        with self.watching():
            self.wait(dist.all_reduce(tensor, op=op, group=self.handle, async_op=True), tensor)
        return tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensor of each rank, of one shape and dtype on all, in the order of `ranks`. Syncs: on the CPU, with the slowest rank; else no."""
        found = [torch.empty_like(tensor) for _ in self.ranks]
        with self.watching():
            self.wait(dist.all_gather(found, tensor, group=self.handle, async_op=True), tensor)
        return found

    def exchange(self, received: Tensor, rows: Tensor) -> dist.Work:
        """Begin to send one row to each rank, and to receive one from each: both shape (N, P), in the order of `ranks`. Writes: `received`. Syncs: no."""
        work: dist.Work = dist.all_to_all_single(received, rows, group=self.handle, async_op=True)
        return work

    def gather_rows(self, rows: Tensor, row: Tensor) -> dist.Work:
        """Begin to send a row to all ranks: shape (P,), into `rows`, shape (N, P). Writes: `rows`. Syncs: no."""
        work: dist.Work = all_gather_rows(rows.view(-1), row, group=self.handle, async_op=True)
        return work

    def wait(self, work: dist.Work | None, tensor: Tensor) -> None:
        """Wait for a transfer of a tensor, within the limit on the CPU. Syncs: on the CPU, with the slowest rank; else no."""
        assert work is not None  # it is None outside the group only
        if tensor.device.type == "cpu":
            work.wait(self.timeout)
            if tensor.nbytes <= _SMALL:  # as the last of a program is
                self._ended.append(work)
        else:
            work.wait()  # the stream waits; with a time limit NCCL would have the host wait

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Turn the error of a lost rank inside the block into one that names the rank.

        Raises:
            DistributedError: a rank ended, or did not answer in time; or a wrapper is used otherwise than torch can.
        """
        started = time.monotonic()
        try:
            yield
        except (RuntimeError, ValueError) as error:  # torch may fail again while it writes the first error down
            text = f"{error} {error.__context__ or ''}".casefold()
            for mark, sentence in _ASSERTED.items():
                if mark in text:
                    raise DistributedError(sentence) from error
            if isinstance(error, MezzoError) or not any(mark in text for mark in _LOSS_MARKS):
                raise
            raise DistributedError(self._describe_loss(text, time.monotonic() - started)) from error

    def _describe_loss(self, text: str, seconds: float) -> str:
        """Say which rank is lost, given the text of torch's error and the seconds from the beginning of what was interrupted."""
        own, limit = dist.get_rank(), self.timeout.total_seconds()
        # A rank that gives up closes its connections too, but only once its own time is over.
        has_ended = "closed" in text or "reset" in text or "broken" in text
        has_ended = has_ended and seconds < limit / 2
        self._hang_up()
        try:
            missing = self.missing()
        except RuntimeError:
            return (
                f"rank {own} lost the others of {name_ranks(self.ranks)}, and the store they meet at is gone too: the process "
                "that kept it has ended. Its output says why; start again from the last checkpoint."
            )
        # torch's own figure is exact: before it waited, a rank may have computed.
        told = re.search(r"timed out waiting (\d+)ms", text)
        seconds = seconds if told is None else int(told[1]) / 1000
        waited = f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"
        if not missing:
            return (
                f"rank {own} waited {waited} for the others of {name_ranks(self.ranks)}, and all are there now: they do "
                f"not take part in the same collectives in the same order. Call forward, backward and step as often on every rank, open no_sync() on all or on none, and {_EVEN}."
            )
        lost = name_ranks(missing)
        if has_ended:
            return f"{lost} ended, and rank {own} waits for it. The output of {lost} says why; if it holds no error, its batches ran out: {_EVEN}. Start again from the last checkpoint."
        return f"{lost} did not answer rank {own} in {waited}: ended, or stuck. The output of {lost} says why; start again from the last checkpoint."

    def _hang_up(self) -> None:
        # Who waits for this rank only, not for the lost one, would notice no loss. gloo closes all connections where a
        # transfer is late, and has no other call for it.
        if "cpu" in self._devices:
            with suppress(RuntimeError):
                self.handle.recv_anysource([torch.empty(1)], _NO_TAG).wait(timedelta(milliseconds=1))

    def is_first_at(self, key: str) -> bool:
        """Whether no other rank has asked this about a key before. True as well if the ranks' store cannot be reached."""
        try:
            first = group_store(self.handle).compare_set(key, "", str(dist.get_rank()))
        except RuntimeError:
            return True
        return bool(first == str(dist.get_rank()).encode())

    def missing(self) -> list[int]:
        """Call the roll in a broken group: return the ranks that do not answer within a grace period.

        Every rank that notices the loss calls the roll, and is thereby there.

        Raises:
            RuntimeError: the store cannot be reached.
        """
        store = group_store(self.handle)
        roll = dist.PrefixStore("mezzo/roll", store)  # type: ignore[attr-defined]  # documented, but not in __all__
        roll.set(str(dist.get_rank()), "here")
        deadline = time.monotonic() + min(_GRACE, self.timeout).total_seconds()
        missing = list(self.ranks)
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not roll.check([str(rank)])]
            time.sleep(0.05 if missing else 0.0)
        return missing


is_running: Callable[[], bool] = dist.is_initialized if dist.is_available() else lambda: False
"""Whether torch.distributed is initialised in this process."""


def is_distributed() -> bool:
    """Whether other ranks run beside this one. Host only."""
    return is_running() and dist.get_world_size() > 1


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ranks in words.

    >>> name_ranks([1]), name_ranks([0, 1, 2, 5])
    ('rank 1', 'ranks 0-2, 5')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {words}" if words.isdigit() else f"ranks {words}"
