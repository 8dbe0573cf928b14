"""The region: a scope in which every op obeys a policy."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from ..errors import CastError, RegionError, did_you_mean
from ..formats import LOW_DTYPES, dtype_name
from ..policy import Policy
from ..policy.engine import CacheName, why_engine
from .cache import RegionCache, ShadowStore, shadows
from .callables import RuleBook, rule_book
from .mode import CastMode
from .provenance import traceback_message

P = ParamSpec("P")
R = TypeVar("R")


def _constant_when_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Do what `torch.compiler.assume_constant_result` does, without importing the compiler with the package."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the mark torch._dynamo looks for
    return function


@dataclass(frozen=True, kw_only=True, slots=True)
class _Switch:
    """What torch's autocast state is set to on one device."""

    device_type: str
    dtype: torch.dtype
    enabled: bool


@dataclass(kw_only=True, slots=True)
class _Frame:
    """What one entry changed, so that its exit can undo it."""

    saved: tuple[_Switch, ...]
    mode: CastMode | None
    thread: int = 0
    cache_enabled: bool = True
    outer: CastMode | None = None
    outer_suspended: bool = False
    nesting: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """What a region does when it is entered."""

    switches: tuple[_Switch, ...]
    book: RuleBook | None
    caches: bool
    store: ShadowStore | None

    def saved(self) -> tuple[_Switch, ...]:
        return tuple(_current(switch.device_type) for switch in self.switches)

    def new_mode(self) -> CastMode | None:
        if self.book is None:
            return None
        cache = RegionCache(self.store) if self.caches else None
        return CastMode(self.book, cache, current=lambda mode: autocast._repeat(mode, None))


@_constant_when_compiled
def _device_types(device_type: str | torch.device | None) -> tuple[str, ...]:
    return _read_device_types(device_type)


def _has_autocast(device_type: str) -> bool:
    try:
        return torch.amp.is_autocast_available(device_type)
    except RuntimeError:
        return False


@functools.cache
def _read_device_types(device_type: str | torch.device | None) -> tuple[str, ...]:
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return ("cpu",) if accelerator is None or accelerator.type == "cpu" else (accelerator.type, "cpu")
    name = device_type.type if isinstance(device_type, torch.device) else str(device_type).split(":")[0]
    if not _has_autocast(name):
        known = [d for d in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(d)]
        raise RegionError(
            f"autocast({device_type!r}): torch has no autocasting for this device.{did_you_mean(name, known)}"
        )
    return (name,)


def _check_device(device_type: str) -> None:
    module = torch.get_device_module(device_type)
    if not module.is_available():
        raise RegionError(
            f"autocast({device_type!r}) was asked for, but this machine has no {device_type} device, so nothing would be "
            f"cast. Write autocast('cpu'), leave device_type out, or pass enabled=False."
        )


def _check_dtype(device_type: str, dtype: torch.dtype) -> None:
    if dtype not in LOW_DTYPES:
        raise RegionError(
            f"autocast(dtype={dtype}): a region casts to fp16 or bf16, not {dtype_name(dtype)}. "
            "Write dtype=torch.bfloat16 or torch.float16, or enabled=False to run in fp32."
        )
    if device_type == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
        raise RegionError("autocast('cuda', dtype=torch.bfloat16): this GPU has no bf16. Write dtype=torch.float16.")


_PLANS: dict[int, _Plan] = {}
"""Every plan made, by number: a compiled function finds its plan here instead of tracing how it is made."""


@functools.cache
def _make_plan(
    devices: tuple[str, ...],
    defaults: tuple[torch.dtype, ...],
    dtype: torch.dtype | None,
    enabled: bool,
    cache_enabled: bool | None,
    policy: Policy | str | None,
    cache: CacheName,
) -> int:
    if cache not in ("region", "persistent"):
        raise RegionError(f"cache={cache!r} is unknown.{did_you_mean(str(cache), ('region', 'persistent'))}")
    chosen = Policy.parse(policy) if isinstance(policy, str) else policy
    rules = chosen if chosen is not None else Policy()
    required = [rule.pattern for rule in rules.modules if rule.required]
    if required:
        raise RegionError(
            f"autocast(policy=...) has rules for modules ({', '.join(required)}), and a region has no model to bind "
            "them to. Write mezzo.prepare(model, optimizer, policy)."
        )
    pairs = zip(devices, defaults, strict=True)
    switches = tuple(_switch(device, default, dtype, enabled, chosen) for device, default in pairs)
    live = tuple(switch.device_type for switch in switches if switch.enabled)
    by_mode = any(why_engine(rules, device, cache).engine == "mode" for device in live)
    _PLANS[len(_PLANS)] = _Plan(
        switches=switches,
        book=rule_book(rules.op_rules, live) if by_mode else None,
        caches=cache_enabled is not False,
        store=shadows if cache == "persistent" else None,
    )
    return len(_PLANS) - 1


@_constant_when_compiled
def _plan_number(*key: Any) -> int:
    return _make_plan(*key)


def _switch(
    device_type: str, default: torch.dtype, dtype: torch.dtype | None, enabled: bool, policy: Policy | None
) -> _Switch:
    if enabled and dtype is None and policy is not None:
        dtype = policy.resolve(device_type).compute
        enabled = dtype is not torch.float32
    chosen = default if dtype is None or not enabled else dtype
    if enabled:
        _check_device(device_type)
        _check_dtype(device_type, chosen)
    return _Switch(device_type=device_type, dtype=chosen, enabled=enabled)


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
        devices = _device_types(device_type)
        defaults = tuple([torch.get_autocast_dtype(device) for device in devices])
        self._plan = _PLANS[_plan_number(devices, defaults, dtype, enabled, cache_enabled, policy, cache)]
        self._frames: list[_Frame] = []

    @classmethod
    def current(cls, *, enabled: bool | None = None) -> autocast:
        """Return a region that repeats what is in force here and now, for a thread, a recompute or a backward.

        Args:
            enabled: overrules whether it casts.

        Syncs: no.
        """
        return cls._repeat(_innermost_mode(), enabled)

    @classmethod
    def _repeat(cls, mode: CastMode | None, enabled: bool | None) -> autocast:
        acting = mode is not None and not mode.suspended and enabled is not False
        devices = tuple(dict.fromkeys((*_device_types(None), *(mode.rows if mode is not None else ()))))
        region = cls.__new__(cls)
        region._plan = _Plan(
            switches=tuple(
                _current(device) if enabled is None else replace(_current(device), enabled=enabled)
                for device in devices
            ),
            book=mode.book if acting and mode is not None else None,
            caches=mode is not None and mode.cache is not None,
            store=mode.cache.store if mode is not None and mode.cache is not None else None,
        )
        region._frames = []
        return region

    @property
    def engine(self) -> Literal["dispatcher", "mode"]:
        """The engine that carries this region out."""
        return "dispatcher" if self._plan.book is None else "mode"

    def __enter__(self) -> autocast:
        plan = self._plan
        mode = plan.new_mode()
        if torch.compiler.is_compiling():
            frame = _Frame(saved=plan.saved(), mode=mode)
        else:
            frame = self._tracked_frame(mode)
        for switch in plan.switches:
            _set(switch)
        if mode is not None:
            mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own
        self._frames.append(frame)
        return self

    def _tracked_frame(self, mode: CastMode | None) -> _Frame:
        outer = _innermost_mode()
        frame = _Frame(
            saved=self._plan.saved(),
            mode=mode,
            thread=threading.get_ident(),
            cache_enabled=torch.is_autocast_cache_enabled(),
            outer=outer,
            outer_suspended=outer is not None and outer.suspended,
            nesting=torch.autocast_increment_nesting(),
        )
        torch.set_autocast_cache_enabled(False)
        if outer is not None:
            outer.suspended = True
        return frame

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
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(frame.cache_enabled)
        if error is not None and not isinstance(error, CastError):
            message = traceback_message(error, traceback)
            if message is not None:
                raise CastError(message) from error

    def _pop(self) -> _Frame:
        here = threading.get_ident()
        index = next((i for i in reversed(range(len(self._frames))) if self._frames[i].thread == here), None)
        if index is None:
            raise RegionError("a region was left that this thread has not entered; enter and leave it in one `with`.")
        frame = self._frames[index]
        in_order = frame.nesting == _nesting() and _innermost_mode() is (frame.mode or frame.outer)
        if not in_order:
            raise RegionError(
                "regions were left in another order than they were entered, so which dtype holds is undecided. "
                "Use `with` for each, and no `await` or `yield` inside a region."
            )
        return self._frames.pop(index)

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
    for switch in frame.saved:
        _set(switch)


def _current(device_type: str) -> _Switch:
    return _Switch(
        device_type=device_type,
        dtype=torch.get_autocast_dtype(device_type),
        enabled=torch.is_autocast_enabled(device_type),
    )


def _set(switch: _Switch) -> None:
    torch.set_autocast_enabled(switch.device_type, switch.enabled)
    torch.set_autocast_dtype(switch.device_type, switch.dtype)


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def _innermost_mode() -> CastMode | None:
    stack = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch's own
    for mode in reversed(stack):
        if isinstance(mode, CastMode):
            return mode
    return None
