"""What a region does when it is entered: decided once for each way of asking, then looked up."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from .._torch import constant_when_compiled
from ..errors import RegionError, did_you_mean
from ..formats import LOW_DTYPES, dtype_name
from ..policy import Policy
from ..policy.engine import why_engine
from ..policy.parts import CacheName
from .cache import RegionCache, WeightCastCache, weight_casts
from .mode import CastMode
from .op_rule_table import OpRuleTable, op_rule_table

P = ParamSpec("P")
R = TypeVar("R")


class Switch(NamedTuple):
    """What torch's autocast state is set to on one device."""

    device_type: str
    dtype: torch.dtype
    enabled: bool


def current_switch(device_type: str) -> Switch:
    """Return torch's autocast state on a device."""
    return Switch(device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a region does when it is entered."""

    switches: tuple[Switch, ...]
    book: OpRuleTable | None
    caches: bool
    store: WeightCastCache | None

    def saved(self) -> list[tuple[str, torch.dtype, bool]]:
        """Return what torch's state is now, on the devices that entering changes: as `Switch`, but a plain tuple."""
        return [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
            for device, _, _ in self.switches
        ]

    def new_mode(self, current: Callable[[CastMode], AbstractContextManager[Any]]) -> CastMode | None:
        """Return the interceptor to push, None where torch's dispatcher is the engine."""
        if self.book is None:
            return None
        # A compiled graph casts at every use, and what a cache sets up cannot be traced.
        cache = RegionCache(self.store) if self.caches and not torch.compiler.is_compiling() else None
        return CastMode(self.book, cache, current=current)


@constant_when_compiled
def device_types(device_type: str | torch.device | None) -> tuple[str, ...]:
    """Return the devices a region acts on: the one named, else the accelerator and the CPU."""
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


_numbers = itertools.count()


class _Plans:
    """Every plan made, an attribute each: a compiled function finds its plan here instead of tracing how it is made.

    Not a dict: of that the compiler would know only what it held when it first met it, and more are made meanwhile.
    """


_plans = _Plans()


@functools.cache
def _make_plan(
    devices: tuple[str, ...],
    defaults: tuple[torch.dtype, ...],
    dtype: torch.dtype | None,
    enabled: bool,
    cache_enabled: bool | None,
    policy: Policy | str | None,
    cache: CacheName,
) -> str:
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
    pairs = zip(devices, defaults or (None,) * len(devices), strict=True)
    switches = tuple(_switch(device, default, dtype, enabled, chosen) for device, default in pairs)
    live = tuple(switch.device_type for switch in switches if switch.enabled)
    by_mode = any(why_engine(rules, device, cache).engine == "mode" for device in live)
    name = f"plan_{next(_numbers)}"
    plan = Plan(
        switches=switches,
        book=op_rule_table(rules.op_rules, live) if by_mode else None,
        caches=cache_enabled is not False,
        store=weight_casts if cache == "persistent" else None,
    )
    setattr(_plans, name, plan)
    return name


@constant_when_compiled
def _name_of(*key: Any) -> str:
    return _make_plan(*key)


def plan_of(*key: Any) -> Plan:
    """Return the plan for what `autocast` was given; made once for each way of asking."""
    plan: Plan = getattr(_plans, _name_of(*key))
    return plan


def _switch(
    device_type: str, default: torch.dtype | None, dtype: torch.dtype | None, enabled: bool, policy: Policy | None
) -> Switch:
    if enabled and dtype is None and policy is not None:
        dtype = policy.resolve(device_type).compute
        enabled = dtype is not torch.float32
    chosen = default if default is not None and (dtype is None or not enabled) else dtype
    assert chosen is not None
    if enabled:
        _check_device(device_type)
        _check_dtype(device_type, chosen)
    return Switch(device_type=device_type, dtype=chosen, enabled=enabled)
