"""Numbers that the host puts on a device: kept there from step to step, or held by the graph that reads them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from .._torch import is_capturing, stream_id
from ..errors import ConfigError
from ..formats import LOW_DTYPES

T = TypeVar("T")
_open: GraphTables | None = None
_asked = 0


class GraphTables:
    """What the host fills of a captured graph, for as long as the graph lives; with room for as many numbers as `num_asked` tells.

    While a graph is captured nothing reaches the device, so a table is filled behind it. It lies in memory of before: of the
    graph's own, one block serves many tensors in turn, and a replay would write those over the table. What was on the device
    before the capture may be dropped any time, so none of it is taken.
    """

    def __init__(self, device: torch.device, room: int) -> None:
        self._room = torch.empty(room, dtype=torch.int64, device=device)
        self._used = 0
        self._tables: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Take the tables that are asked for inside the block. Host only."""
        global _open  # noqa: PLW0603  # torch captures one graph at a time too
        _open = self
        try:
            yield
        finally:
            _open = None

    def add(self, numbers: Tensor, device: torch.device) -> Tensor:
        """Return a table on the device that will hold numbers of the host; a ConfigError if there is no room for it. Syncs: no."""
        begin, self._used = self._used, self._used + _padded(numbers)
        if self._used > self._room.numel() or device != self._room.device:
            raise ConfigError(
                f"a step that was captured asked for more tables on {device} than the same step before it ({self._room.numel()} numbers). "
                "Call the captured step again after a few calls of the function itself."
            )
        table = self._room[begin : begin + numbers.numel()]
        self._tables.append((table, numbers))
        return table

    def fill(self) -> None:
        """Fill the tables, once, before the first replay. Syncs: yes."""
        for table, numbers in self._tables:
            table.copy_(numbers)


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. Syncs: only from an accelerator to the host, where it could be read before it is there."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def to_host(vector: Tensor) -> tuple[Tensor, torch.Event | None]:
    """Return a tensor on the host, and what must be waited for before it is read; None: nothing. Syncs: no."""
    if vector.device.type == "cpu":
        return vector, None
    pinned = torch.empty(vector.shape, dtype=vector.dtype, device="cpu", pin_memory=True)
    pinned.copy_(vector, non_blocking=True)
    event = torch.Event(vector.device)
    event.record(torch.accelerator.current_stream(vector.device))  # left out, it is one of the current device
    return pinned, event


def factor_for(factor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a factor of shape () as torch's kernel takes it that multiplies many tensors of a device and dtype at once. Syncs: as `move`.

    On accelerators in their 16-bit dtype, to which torch would round it in any case: otherwise it would launch for each tensor.
    """
    there = move(factor, device)
    return there.to(dtype) if dtype in LOW_DTYPES and device.type != "cpu" else there


def is_in_foreign_graph(device: torch.device) -> bool:
    """Whether what is launched goes into a graph of somebody else, which holds no tables, and would not make kept casts anew. Host only."""
    return _open is None and is_capturing(device)


def on_device(numbers: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    """Return whole numbers as int64 on a device. Syncs: no."""
    held = torch.as_tensor(numbers, dtype=torch.int64, device="cpu")
    if device.type == "cpu":
        return held
    return held.pin_memory().to(device, non_blocking=True) if _open is None else _open.add(held, device)


def kept_on_device(make: Callable[[T, torch.device], Tensor]) -> Callable[[T, torch.device], Tensor]:
    """Cache a function that puts numbers on a device.

    For each stream by itself, since what one fills another may read too early; and never for a graph that is captured. Syncs: no.
    """

    @functools.lru_cache(maxsize=64)
    def known(numbers: T, device: torch.device, stream: int) -> Tensor:
        return make(numbers, device)

    @functools.wraps(make)
    def get(numbers: T, device: torch.device) -> Tensor:
        global _asked  # noqa: PLW0603  # a count
        found = make(numbers, device) if _open is not None else known(numbers, device, stream_number(device))
        _asked += _padded(found)
        return found

    return get


@kept_on_device
def numbers_on(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Return numbers in fp32 on a device, kept there from step to step. Syncs: no."""
    on_host = torch.tensor(numbers, dtype=torch.float32, device="cpu")  # made there, it would wait for the stream
    return move(on_host, device)


@kept_on_device
def table(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return whole numbers as int64 on a device. From step to step they stay the same, or alternate between a few sets. Syncs: no."""
    return on_device(numbers, device)


def num_asked() -> int:
    """Return the whole numbers of all tables that were asked for in this process, kept ones too: what a step asks for is the difference. Host only."""
    return _asked


def _padded(table: Tensor) -> int:
    return -(-table.numel() // 32) * 32  # the next begins at an address that kernels read vectors from


@kept_on_device
def constant(number: float, device: torch.device) -> Tensor:
    """Return a number on a device: shape (), fp32, one tensor for good, so that no step makes it. Syncs: no."""
    return torch.full((), number, dtype=torch.float32, device=device)


def stream_number(device: torch.device) -> int:
    """Return the number of the stream that a device's work goes to; 0 on the CPU. Host only."""
    return 0 if device.type in ("cpu", "meta") else stream_id(device)
