"""The region: a scope in which every op obeys a policy."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from .._torch import dynamo_skip_frame, function_modes, num_function_modes
from ..errors import CastError, RegionError
from ..policy import Policy
from ..policy.parts import CacheName
from .cast_plan import Plan, current_switch, device_types, plan_of
from .mode import CastMode
from .provenance import traceback_message

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class _Frame:
    """What one entry changed, so that its exit can undo it."""

    saved: Sequence[tuple[str, torch.dtype, bool]]
    mode: CastMode | None
    thread: int = 0
    cache_enabled: bool = True
    outer: CastMode | None = None
    outer_suspended: bool = False
    nesting: int = 0


class autocast:  # the name torch gives it
    """Context manager or decorator in which ops run in the dtypes of a policy.

    The arguments and defaults are those of `torch.autocast`; what follows the star is mezzo's. An instance may be
    entered again inside itself, by a recursive function, and by several threads at once.

    Args:
        device_type: "cuda", "cpu", ... or a device; left out, the tensors decide (CPU and the accelerator).
        dtype: torch.float16 or torch.bfloat16; default fp16 on CUDA, bf16 on CPU, as torch has it.
        enabled: False runs everything as it is, inside an outer region too.
        cache_enabled: False casts a weight at every use. Only the function mode caches; torch's own cache stays off,
            since it hands out stale weights.
        policy: a `Policy` or its text; gives the dtype (unless `dtype` does) and the op rules.
        cache: "region" drops casts with the region, "persistent" keeps 16-bit copies of weights beyond it.

    Raises:
        RegionError: a device this machine lacks, a dtype the device lacks, or regions left out of order.
        PolicyError: the policy has module rules, which need a model to bind to (`mezzo.prepare`).
        CastError: instead of torch's bare dtype mismatch, naming op, module and dtypes.

    Syncs: no.
    Source: SPEC A1-A14; torch.autocast.

    >>> with autocast("cpu", dtype=torch.bfloat16):
    ...     y = torch.ones(2, 2) @ torch.ones(2, 2)
    >>> y.dtype
    torch.bfloat16
    """

    def __init__(
        self,
        device_type: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        policy: Policy | str | None = None,
        cache: CacheName = "region",
    ) -> None:
        devices = device_types(device_type)
        is_decided = enabled and dtype is not None
        defaults = () if is_decided else tuple([torch.get_autocast_dtype(device) for device in devices])
        self._plan = plan_of(devices, defaults, dtype, enabled, cache_enabled, policy, cache)
        self._asked: tuple[object, ...] | None = (device_type, dtype, enabled, cache_enabled, policy, cache)
        self._frames: list[_Frame] = []

    @classmethod
    def current(cls, *, enabled: bool | None = None) -> autocast:
        """Return a region that repeats what is in force here and now, for a thread, a recompute or a backward.

        Args:
            enabled: overrules whether it casts.

        Syncs: no.
        """
        return _repeat(_innermost_mode(), enabled)

    def __reduce__(self) -> tuple[Callable[..., autocast], tuple[object, ...]]:
        """Copy and pickle as what was asked for: a region's state belongs to the thread that is inside it."""
        if self._asked is None:
            raise RegionError(
                "a region that repeats what is in force belongs to this process; build one with autocast()."
            )
        return _ask, self._asked

    @property
    def engine(self) -> Literal["dispatcher", "mode"]:
        """The engine that carries this region out."""
        return "dispatcher" if self._plan.book is None else "mode"

    @dynamo_skip_frame
    def __enter__(self) -> autocast:
        plan = self._plan
        mode = plan.new_mode(_repeat)
        if torch.compiler.is_compiling():
            frame = _Frame(plan.saved(), mode)
        else:
            frame = self._tracked_frame(mode)
        for device_type, dtype, enabled in plan.switches:
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own
        self._frames.append(frame)
        return self

    def _tracked_frame(self, mode: CastMode | None) -> _Frame:
        outer = _innermost_mode()
        frame = _Frame(
            self._plan.saved(),
            mode,
            threading.get_ident(),
            torch.is_autocast_cache_enabled(),
            outer,
            outer is not None and outer.suspended,
            torch.autocast_increment_nesting(),
        )
        torch.set_autocast_cache_enabled(False)
        if outer is not None:
            outer.suspended = True
        return frame

    @dynamo_skip_frame
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if torch.compiler.is_compiling():
            _leave(self._frames.pop())
            return
        frame = self._pop()
        _leave(frame)
        if frame.outer is not None:
            frame.outer.suspended = frame.outer_suspended
        if frame.nesting == 1:
            torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(frame.cache_enabled)
        if error is not None and not isinstance(error, CastError):
            message = traceback_message(error, traceback)
            if message is not None:
                raise CastError(message) from error

    def _pop(self) -> _Frame:
        here, frames = threading.get_ident(), self._frames
        index = len(frames) - 1
        while index >= 0 and frames[index].thread != here:
            index -= 1
        if index < 0:
            raise RegionError("a region was left that this thread has not entered; enter and leave it in one `with`.")
        frame = frames[index]
        in_order = torch.autocast_decrement_nesting() == frame.nesting - 1
        if not in_order or _innermost_mode() is not (frame.mode or frame.outer):
            torch.autocast_increment_nesting()
            raise RegionError(
                "regions were left in another order than they were entered, so which dtype holds is undecided. "
                "Use `with` for each, and no `await` or `yield` inside a region."
            )
        return frames.pop(index)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function` run inside this region at every call."""
        if not callable(function):
            raise RegionError(f"autocast(...) decorates a function, not a {type(function).__name__}; or use `with`.")

        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            self.__enter__()
            try:
                out = function(*args, **kwargs)
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
            self.__exit__(None, None, None)
            return out

        return inside


def _leave(frame: _Frame) -> None:
    if frame.mode is not None:
        frame.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
    for device_type, dtype, enabled in frame.saved:
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)


def _innermost_mode() -> CastMode | None:
    if num_function_modes() == 0:
        return None
    stack = function_modes()
    for mode in reversed(stack):
        if isinstance(mode, CastMode):
            return mode
    return None


def _ask(*asked: Any) -> autocast:
    *positional, policy, cache = asked
    return autocast(*positional, policy=policy, cache=cache)


def _repeat(mode: CastMode | None, enabled: bool | None = None) -> autocast:
    acting = mode is not None and not mode.suspended and enabled is not False
    devices = tuple(dict.fromkeys((*device_types(None), *(mode.rows if mode is not None else ()))))
    region = autocast.__new__(autocast)
    region._plan = Plan(
        switches=tuple(
            current_switch(device) if enabled is None else current_switch(device)._replace(enabled=enabled)
            for device in devices
        ),
        book=mode.book if acting and mode is not None else None,
        caches=mode is not None and mode.cache is not None,
        store=mode.cache.store if mode is not None and mode.cache is not None else None,
    )
    region._asked = None
    region._frames = []
    return region
