"""The region: a scope in which every op obeys a policy."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, ParamSpec, TypeVar

import torch

from ..errors import CastError, RegionError, did_you_mean
from ..formats import LOW_DTYPES, dtype_name
from ..policy import Policy
from ..policy.engine import CacheName, why_engine
from .cache import RegionCache, shadows
from .mode import CastMode
from .provenance import traceback_message

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Switch:
    """What torch's autocast state is set to on one device."""

    device_type: str
    dtype: torch.dtype
    enabled: bool


@dataclass(kw_only=True, slots=True)
class _Frame:
    """What one entry changed, so that its exit can undo it."""

    thread: int
    saved: tuple[_Switch, ...]
    cache_enabled: bool
    mode: CastMode | None
    outer: CastMode | None
    outer_suspended: bool
    nesting: int


def _device_types(device_type: str | torch.device | None) -> tuple[str, ...]:
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return ("cpu",) if accelerator is None or accelerator.type == "cpu" else (accelerator.type, "cpu")
    name = device_type.type if isinstance(device_type, torch.device) else str(device_type).split(":")[0]
    if not torch.amp.is_autocast_available(name):
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
        if cache not in ("region", "persistent"):
            raise RegionError(f"cache={cache!r} is unknown.{did_you_mean(str(cache), ('region', 'persistent'))}")
        self._policy = Policy.parse(policy) if isinstance(policy, str) else policy
        self._rules = self._policy if self._policy is not None else Policy()
        required = [rule.pattern for rule in self._rules.modules if rule.required]
        if required:
            raise RegionError(
                f"autocast(policy=...) has rules for modules ({', '.join(required)}), and a region has no model to bind "
                "them to. Write mezzo.prepare(model, optimizer, policy)."
            )
        self._cache: CacheName = cache
        self._cache_enabled = cache_enabled is not False
        devices = _device_types(device_type)
        self._switches = tuple(self._switch(device, dtype, enabled) for device in devices)
        live = tuple(switch.device_type for switch in self._switches if switch.enabled)
        by_mode = [device for device in live if why_engine(self._rules, device, cache).engine == "mode"]
        self._mode_devices = live if by_mode else ()
        self._frames: list[_Frame] = []

    def _switch(self, device_type: str, dtype: torch.dtype | None, enabled: bool) -> _Switch:
        if enabled:
            _check_device(device_type)
        default = torch.get_autocast_dtype(device_type)
        if dtype is None and self._policy is not None and enabled:
            dtype = self._policy.resolve(device_type).compute
            if dtype is torch.float32:
                return _Switch(device_type=device_type, dtype=default, enabled=False)
        chosen = default if dtype is None else dtype
        if enabled:
            _check_dtype(device_type, chosen)
        return _Switch(device_type=device_type, dtype=chosen, enabled=enabled)

    @property
    def engine(self) -> Literal["dispatcher", "mode"]:
        """The engine that carries this region out."""
        return "mode" if self._mode_devices else "dispatcher"

    def _new_mode(self) -> CastMode | None:
        if not self._mode_devices:
            return None
        store = shadows if self._cache == "persistent" else None
        cache = RegionCache(store) if self._cache_enabled else None
        return CastMode(self._rules.op_rules, self._mode_devices, cache)

    def __enter__(self) -> autocast:
        outer = _innermost_mode()
        frame = _Frame(
            thread=threading.get_ident(),
            saved=tuple(_current(switch.device_type) for switch in self._switches),
            cache_enabled=torch.is_autocast_cache_enabled(),
            mode=self._new_mode(),
            outer=outer,
            outer_suspended=outer is not None and outer.suspended,
            nesting=torch.autocast_increment_nesting(),
        )
        for switch in self._switches:
            _set(switch)
        torch.set_autocast_cache_enabled(False)
        if outer is not None:
            outer.suspended = True
        if frame.mode is not None:
            frame.mode.__enter__()  # type: ignore[no-untyped-call]  # torch's own
        self._frames.append(frame)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        frame = self._pop()
        if frame.mode is not None:
            frame.mode.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]  # torch's own
        if frame.outer is not None:
            frame.outer.suspended = frame.outer_suspended
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        for switch in frame.saved:
            _set(switch)
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
            with self:
                return function(*args, **kwargs)

        return inside


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
