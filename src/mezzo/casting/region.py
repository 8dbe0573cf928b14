"""The region: a scope in which every op obeys a policy."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from .._torch import UnmanagedAutocast, dynamo_skip_frame, function_modes, num_function_modes
from ..errors import CastError, RegionError, RegionTypeError, as_flag
from ..kernels import is_in_foreign_graph
from ..policy import CacheName, PolicyLike
from ..random_state import accelerator_in_use
from .cast_cache import RegionCache
from .cast_plan import CastPlan, current_switch, device_types, plan_of
from .mode import CastMode, drop_mode
from .products import beside_products, run_in_fp32
from .provenance import traceback_message
from .tracing import enter_switch, exit_switch, record_entry, record_exit

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True, eq=False)
class _Frame:
    """What one entry changed, so that its exit can undo it."""

    saved: Sequence[tuple[str, torch.dtype, bool]]
    mode: CastMode | None
    region: autocast | None = None
    cache_enabled: bool = True
    outer: CastMode | None = None
    outer_suspended: bool = False
    nesting: int = 0
    recorder: Any = None


class _Thread(threading.local):
    """The regions a thread is inside, outermost first."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []


_here = _Thread()


class autocast(UnmanagedAutocast):  # the name torch gives it
    """Context manager or decorator in which ops run in the dtypes of a policy.

    The arguments, defaults and attributes are those of `torch.autocast`, and it is one for `isinstance`; what follows
    the star is mezzo's. An instance may be entered again inside itself, by a recursive function, and by several
    threads at once. torch.export keeps the region, strict and not.

    Args:
        device_type: "cuda", "cpu", ... or a device; "gpu" is the accelerator. Left out, the tensors decide (CPU and
            the accelerator). Where there is no CUDA device, "cuda" warns and casts nothing, as torch does.
        dtype: torch.float16 or torch.bfloat16, or its name; default fp16 on CUDA, bf16 on CPU, as torch has it. Any
            other dtype warns and casts nothing, as torch does.
        enabled: False runs everything as it is, inside an outer region too.
        cache_enabled: False casts a weight at every use. Only the function mode caches; torch's own cache stays off,
            since it hands out stale weights.
        policy: a `Policy`, or what `as_policy` takes; gives the dtype (unless `dtype` does) and the op rules.
        cache: "region" drops casts with the region, "persistent" keeps 16-bit copies of weights beyond it.
        strict: raise where torch would warn and cast nothing.

    Raises:
        RegionError: a device type that does not exist, a dtype the device lacks, or regions left out of order.
        PolicyError: the policy has module rules, which need a model to bind to (`mezzo.prepare`).
        CastError: instead of torch's bare dtype mismatch, naming op, module and dtypes.

    Syncs: no.
    Source: torch.autocast.

    >>> with autocast("cpu", dtype=torch.bfloat16):
    ...     y = torch.ones(2, 2) @ torch.ones(2, 2)
    >>> y.dtype
    torch.bfloat16
    """

    @dynamo_skip_frame
    def __init__(
        self,
        device_type: str | torch.device | None = None,
        dtype: torch.dtype | str | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
        *,
        policy: PolicyLike | None = None,
        cache: CacheName = "region",
        strict: bool = False,
    ) -> None:
        devices, enabled = device_types(device_type), as_flag("autocast", "enabled", enabled, RegionTypeError)
        strict = as_flag("autocast", "strict", strict, RegionTypeError)
        if cache_enabled is not None:
            cache_enabled = as_flag("autocast", "cache_enabled", cache_enabled, RegionTypeError)
        is_decided = enabled and dtype is not None
        defaults = () if is_decided else tuple([torch.get_autocast_dtype(device) for device in devices])
        self._plan = plan_of(devices, defaults, dtype, enabled, cache_enabled, policy, cache)
        self._asked: tuple[Any, ...] | None = (device_type, dtype, enabled, cache_enabled, policy, cache, strict)
        self._traced: list[_Frame] = []  # entries in a graph; those of a thread are the thread's
        if self._plan.warning is not None:
            sentence = self._plan.warning.replace("autocast('cuda')", f"autocast({device_type!r})")
            if strict:
                raise RegionError(sentence)
            if not torch.compiler.is_compiling():
                warnings.warn(sentence, stacklevel=2)

    @classmethod
    def current(cls, *, enabled: bool | None = None) -> autocast:
        """Return a region that repeats what is in force here and now, for a thread, a recompute or a backward.

        Args:
            enabled: overrules whether it casts.

        Syncs: no.
        """
        chosen = None if enabled is None else as_flag("autocast.current", "enabled", enabled, RegionTypeError)
        return _repeat(_innermost_mode(), chosen)

    def __reduce__(self) -> tuple[Callable[..., autocast], tuple[object, ...]]:
        """Copy and pickle as what was asked for: a region's state belongs to the thread that is inside it."""
        if self._asked is None:
            raise RegionError(
                "a region that repeats what is in force belongs to this process; build one with autocast()."
            )
        *positional, policy, cache, strict = self._asked
        return functools.partial(autocast, *positional, policy=policy, cache=cache, strict=strict), ()

    @property
    def engine(self) -> Literal["dispatcher", "mode"]:
        """The engine that carries this region out."""
        return "dispatcher" if self._plan.op_rules is None else "mode"

    @property
    def device(self) -> str:  # type: ignore[override]  # read-only, as the next three
        """The device it casts on, the first of several; torch's name for it."""
        return self._plan.switches[0].device_type

    @property
    def fast_dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype that low ops run in; torch's name for it."""
        return self._plan.switches[0].dtype

    @property
    def _enabled(self) -> bool:  # type: ignore[override]
        return self._plan.switches[0].enabled

    @property
    def _cache_enabled(self) -> bool:  # type: ignore[override]
        return self._plan.caches

    @dynamo_skip_frame
    def __enter__(self) -> autocast:
        plan = self._plan
        mode = _new_mode(plan)
        if not torch.compiler.is_compiling():
            return self._enter_eagerly(mode)
        frame = _Frame(_saved(plan), mode, cache_enabled=torch.is_autocast_cache_enabled())
        frame.recorder = record_entry(plan.recorded)
        for device_type, dtype, enabled in plan.switches:
            enter_switch(device_type, enabled, dtype, False)  # nothing would empty torch's cache behind a graph
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own
        self._traced.append(frame)
        return self

    def _enter_eagerly(self, mode: CastMode | None) -> autocast:
        outer = _innermost_mode()
        frame = _Frame(_saved(self._plan), mode, self, torch.is_autocast_cache_enabled(), outer)
        frame.outer_suspended = outer is not None and outer.suspended
        try:
            frame.nesting = torch.autocast_increment_nesting()
            _here.frames.append(frame)
            torch.set_autocast_cache_enabled(False)
            if outer is not None:
                outer.suspended = True
            if num_function_modes():  # an exporter is a mode
                frame.recorder = record_entry(self._plan.recorded)
            for device_type, dtype, enabled in self._plan.switches:
                torch.set_autocast_enabled(device_type, enabled)
                torch.set_autocast_dtype(device_type, dtype)
            if mode is not None:
                mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own
            return self
        except BaseException:  # Ctrl-C
            _leave_after_interrupt(frame)
            raise

    @dynamo_skip_frame
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if torch.compiler.is_compiling():
            _restore(self._traced.pop(), is_compiling=True)
            return
        frame: _Frame | None = None
        try:
            frame = self._pop()
            is_innermost = _is_innermost(frame)
            _leave(frame)
        except BaseException:  # Ctrl-C
            _leave_after_interrupt(frame or self._pop())
            raise
        if error is None and not is_innermost:
            raise RegionError(
                "regions were left in another order than they were entered, so which dtype held is undecided. "
                "Use `with` for each, and no `await` or `yield` inside a region."
            )
        if error is not None and not isinstance(error, CastError):
            message = traceback_message(error, traceback, casts=self._enabled)
            if message is not None:
                raise CastError(message) from error

    def _pop(self) -> _Frame:
        for frame in reversed(_here.frames):
            if frame.region is self:
                return frame
        raise RegionError("a region was left that this thread has not entered; enter and leave it in one `with`.")

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function` run inside this region at every call."""
        if isinstance(function, type):
            raise RegionTypeError(
                f"autocast(...) was put on the class {function.__name__}, of which it would cover the making of objects and no call "
                "of theirs: put it on forward, or on the method that computes."
            )
        if not callable(function):
            raise RegionTypeError(
                f"autocast()(func) requires a callable, but got {type(function).__name__}: autocast(...) decorates a "
                f"function, not a {type(function).__name__}; or use `with`."
            )
        if runs_later(function):
            raise RegionTypeError(
                f"autocast(...) was put on {getattr(function, '__name__', 'a function')}, a generator or coroutine, whose body "
                "runs when the region has been left. Write `with mezzo.autocast(...):` inside, around code without await or yield."
            )

        @functools.wraps(function)  # torch.jit.script cannot compile this class: write torch.autocast in scripted code
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


def checkpoint_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the two contexts that `torch.utils.checkpoint.checkpoint(..., context_fn=...)` asks for.

    Forward runs as it is; recompute enters the region that is in force now. torch's own engine needs none of this:
    checkpoint restores torch's autocast state by itself.

    Returns:
        The contexts of forward and of recompute.

    Syncs: no.

    >>> import torch
    >>> from torch.utils.checkpoint import checkpoint
    >>> x = torch.ones(2, 2, requires_grad=True)
    >>> with autocast("cpu", dtype=torch.bfloat16):
    ...     y = checkpoint(torch.mm, x, x, use_reentrant=False, context_fn=checkpoint_contexts)
    >>> y.sum().backward()
    >>> x.grad.dtype
    torch.float32
    """
    return nullcontext(), autocast.current()


def runs_later(function: object) -> bool:
    """Whether a function returns before its body has run: a generator or coroutine. Host only."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(is_late(function) for is_late in kinds)


def _is_innermost(frame: _Frame) -> bool:
    """Whether nothing that was entered inside a region is still there when it is left.

    Writes: torch's count of nested regions, which is one lower afterwards.
    """
    is_last = torch.autocast_decrement_nesting() == frame.nesting - 1 and _here.frames[-1] is frame
    return is_last and _innermost_mode() is (frame.mode or frame.outer)


def _leave(frame: _Frame) -> None:
    """Put back what was in force when a region was entered, or have the region inside it do that when it is left."""
    frames = _here.frames
    index = frames.index(frame)
    if inside := frames[index + 1 :]:
        _hand_over(frame, inside)
    else:
        _restore(frame)
        if frame.outer is not None:
            frame.outer.suspended = frame.outer_suspended
        if frame.nesting == 1:
            torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(frame.cache_enabled)
    del frames[index]


def _leave_after_interrupt(frame: _Frame) -> None:
    """Leave a region that Ctrl-C ended on the way in or out, whatever of it was done."""
    if frame.nesting and torch.autocast_increment_nesting() > frame.nesting:  # it counts still
        torch.autocast_decrement_nesting()
    if frame.nesting:
        torch.autocast_decrement_nesting()
    if frame in _here.frames:
        _leave(frame)


def _hand_over(frame: _Frame, inside: Sequence[_Frame]) -> None:
    inner = inside[0]
    before = {device: (device, dtype, enabled) for device, dtype, enabled in (*inner.saved, *frame.saved)}
    inner.saved, inner.cache_enabled = list(before.values()), frame.cache_enabled
    for later in inside:
        later.nesting -= 1
        if later.outer is frame.mode:
            later.outer = frame.outer
    inner.outer, inner.outer_suspended = frame.outer, frame.outer_suspended
    if frame.mode is not None:
        drop_mode(frame.mode)


def _new_mode(plan: CastPlan) -> CastMode | None:
    """Return the interceptor to push, None where torch's dispatcher is the engine."""
    if plan.op_rules is None:
        return None
    # A compiled graph casts at every use, and what a cache sets up cannot be traced.
    if not plan.caches or torch.compiler.is_compiling():
        return CastMode(plan.op_rules, None, make_recompute=_recompute)
    # kept casts are none of a graph that somebody captures, whose replays would not make them anew
    device = None if plan.store is None else accelerator_in_use()
    store = None if device is not None and is_in_foreign_graph(device) else plan.store
    return CastMode(plan.op_rules, RegionCache(store), make_recompute=_recompute, run=run_in_fp32)


def _saved(plan: CastPlan) -> list[tuple[str, torch.dtype, bool]]:
    """Return what torch's state is now, on the devices that entering changes: as `Switch`, but a plain tuple."""
    return [(one[0], torch.get_autocast_dtype(one[0]), torch.is_autocast_enabled(one[0])) for one in plan.switches]


def _restore(frame: _Frame, *, is_compiling: bool = False) -> None:
    if frame.mode is not None:
        drop_mode(frame.mode)
    if frame.recorder is not None or is_compiling:
        record_exit(frame.recorder, len(frame.saved))
    for device_type, dtype, enabled in frame.saved:
        if is_compiling:
            exit_switch(device_type, enabled, dtype, frame.cache_enabled)
            continue
        torch.set_autocast_enabled(device_type, enabled)
        torch.set_autocast_dtype(device_type, dtype)


def _innermost_mode() -> CastMode | None:
    if num_function_modes() == 0:
        return None
    return next((mode for mode in reversed(function_modes()) if isinstance(mode, CastMode)), None)


def _recompute(mode: CastMode) -> AbstractContextManager[object]:
    """Return what a checkpoint's recompute enters: as `mode`, and in fp32 what is in fp32 now."""
    return beside_products(_repeat(mode))


def _repeat(mode: CastMode | None, enabled: bool | None = None) -> autocast:
    devices = tuple(dict.fromkeys((*device_types(None), *(mode.rows if mode is not None else ()))))
    now = map(current_switch, devices)
    cache = None if mode is None else mode.cache
    plan = CastPlan(
        switches=tuple(one if enabled is None else one._replace(enabled=enabled) for one in now),
        op_rules=None if mode is None or mode.suspended or enabled is False else mode.op_rules,
        caches=cache is not None,
        store=None if cache is None else cache.store,
    )
    return region_of(plan)


def region_of(plan: CastPlan) -> autocast:
    """Return a region that carries out a plan. Host only."""
    region = autocast.__new__(autocast)
    region._plan, region._asked, region._traced = plan, None, []
    return region
