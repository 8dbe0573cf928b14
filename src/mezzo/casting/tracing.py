"""What those who trace are told of a region: the compiler, and torch.export, so that the program casts as eager does.

Export traces above torch's autocast, and keeps a region only where its entry and its exit are nodes of the graph: these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._torch import (
    add_graph_node,
    constant_when_compiled,
    enter_autocast,
    exit_autocast,
    on_trace_end,
    predispatch_recorder,
)

_entries: list[Any] = []
"""The entry nodes of the regions that the strict exporter is inside."""


def record_entry(switches: Sequence[tuple[str, torch.dtype, bool]]) -> Any:
    """Write the entry of a region into the graph that is being exported, if one is; return what records the exit, for `record_exit`.

    Each switch is a device type, a dtype, and whether torch's autocast is to cast there when the program runs.
    """
    if torch.compiler.is_dynamo_compiling():
        for device_type, _, _ in switches:
            _restore_dtype_after_trace(device_type)
        if torch.compiler.is_exporting():
            for device_type, dtype, enabled in switches:
                _add_entry(device_type, dtype, enabled)
        return None
    recorder = predispatch_recorder()
    if recorder is not None:
        for device_type, dtype, enabled in switches:
            recorder.__torch_function__(enter_autocast, (), (device_type, dtype, enabled, False))
    return recorder


def record_exit(recorder: Any, count: int) -> None:
    """Write the exit of a region of `count` devices into the graph that is being exported, if one is."""
    if recorder is not None:
        for _ in range(count):
            recorder.__torch_function__(exit_autocast, (), ())
    elif torch.compiler.is_dynamo_compiling() and torch.compiler.is_exporting():
        for _ in range(count):
            _add_exit()


@constant_when_compiled
def _restore_dtype_after_trace(device_type: str) -> None:
    """Undo what tracing sets, if the trace ends inside the region, at a break of the graph.

    The compiler sets the dtype for real as it traces. It undoes the switch by itself, the dtype not (torch 2.13).
    """
    dtype = torch.get_autocast_dtype(device_type)
    on_trace_end(lambda: torch.set_autocast_dtype(device_type, dtype))


@constant_when_compiled
def _add_entry(device_type: str, dtype: torch.dtype, enabled: bool) -> None:
    _entries.append(add_graph_node(enter_autocast, device_type, dtype, enabled, False))


@constant_when_compiled
def _add_exit() -> None:
    add_graph_node(exit_autocast, _entries.pop())
