"""What those who trace are told of a region: the compiler, and torch.export, so that the program casts as eager does.

Export traces above torch's autocast, and keeps a region only where its entry and its exit are nodes of the graph: these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
_models: list[None] = []
"""One for each prepared model that the strict exporter is inside."""
_undo: list[Callable[[], None]] = []
"""What puts torch's state back as it was before each region that the compiler is inside, innermost last."""
_kept: dict[str, list[Any]] = {}
"""For each device and region that the exporter is inside the node of a `_SwitchBefore`, None where that of an outer one does for it."""


def record_entry(switches: Sequence[tuple[str, torch.dtype, bool]]) -> Any:
    """Write the entry of a region into the graph that is being exported, if one is; return what records the exit, for `record_exit`.

    Each switch is a device type, a dtype, and whether torch's autocast is to cast there when the program runs.
    """
    if torch.compiler.is_dynamo_compiling():
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


def enter_switch(*switch: Any) -> None:
    """Set torch's switches until `exit_switch`, in the graph too: device type, whether it casts, dtype, whether torch's cache is on."""
    _set_in_graph(*switch) if torch.compiler.is_dynamo_compiling() else _set(*switch)


def exit_switch(*switch: Any) -> None:
    """Put back what `enter_switch` changed."""
    _undo_in_graph(*switch) if torch.compiler.is_dynamo_compiling() else _set(*switch)


@constant_when_compiled
def _set_in_graph(*switch: Any) -> None:
    """Set switches as the compiler would, whose own way fails in a part of a graph, such as a checkpoint, torch.cond or a Function (2.13).

    They are put back where the trace ends inside, at a break of the graph.
    """
    device = switch[0]
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()

    def undo() -> None:
        if undo in _undo:
            _undo.remove(undo)
            _set(device, *before)

    _undo.append(undo)
    on_trace_end(undo)
    if torch.compiler.is_exporting():
        on_trace_end(_kept.clear)
        regions = _kept.setdefault(device, [])
        regions.append(None if regions else add_graph_node(_SwitchBefore, device))
    _set(*switch, add_node=add_graph_node)


@constant_when_compiled
def _undo_in_graph(*switch: Any) -> None:
    _set(*switch, add_node=add_graph_node)
    if not torch.compiler.is_exporting():  # whose graph is run without the torch.autocast around
        _undo[-1]()
    elif (kept := _kept[switch[0]].pop()) is not None:
        add_graph_node(id, kept)  # which lives until here


class _SwitchBefore:
    """The switches of a device before a region, put back where the exporter, who runs what it has traced, fails inside: once nobody holds the error."""

    def __init__(self, device: str) -> None:
        self._switch = device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self._nesting = _nesting()

    def __del__(self) -> None:
        if self._nesting == _nesting():  # a region that somebody is in by then puts back what it found
            device, enabled, dtype = self._switch
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _set(device: str, enabled: bool, *rest: Any, add_node: Callable[..., Any] = lambda *_: None) -> None:
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(torch.set_autocast_enabled, (device, enabled))]
    if rest:
        dtype, caches = rest
        calls += [(torch.set_autocast_dtype, (device, dtype)), (torch.set_autocast_cache_enabled, (caches,))]
    for function, args in calls:
        function(*args)
        add_node(function, *args)


@constant_when_compiled
def _add_entry(device_type: str, dtype: torch.dtype, enabled: bool) -> None:
    _entries.append(add_graph_node(enter_autocast, device_type, dtype, enabled, False))


@constant_when_compiled
def _add_exit() -> None:
    add_graph_node(exit_autocast, _entries.pop())


@constant_when_compiled
def is_in_exported_model() -> bool:
    """Whether what the strict exporter traces just now runs inside a prepared model. Torch's switches may be those of a region around."""
    return bool(_models)


class ExportedModel:
    """A prepared model, while the strict exporter is inside it."""

    def __enter__(self) -> None:
        _enter_model()

    def __exit__(self, *_: object) -> None:
        _exit_model()


@constant_when_compiled
def _enter_model() -> None:
    _models.append(None)
    on_trace_end(_models.clear)


@constant_when_compiled
def _exit_model() -> None:
    _models.pop()
