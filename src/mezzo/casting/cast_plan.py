"""What a region does when it is entered: decided once for each way of asking, then looked up."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .._torch import constant_when_compiled
from ..errors import RegionError, RegionTypeError, did_you_mean, shown
from ..formats import LOW_DTYPES, dtype_name, is_one_of, parse_dtype
from ..policy import CacheName, Policy, as_policy, why_engine
from .cast_cache import WeightCastCache, weight_casts
from .index_writes import take_index_writes
from .op_rule_table import OpRuleTable, op_rule_table


class Switch(NamedTuple):
    """What torch's autocast state is set to on one device."""

    device_type: str
    dtype: torch.dtype
    enabled: bool


def current_switch(device_type: str) -> Switch:
    """Return torch's autocast state on a device."""
    return Switch(device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type))


@dataclass(frozen=True, kw_only=True, slots=True)
class CastPlan:
    """What a region does when it is entered."""

    switches: tuple[Switch, ...]
    op_rules: OpRuleTable | None
    caches: bool
    store: WeightCastCache | None
    warning: str | None = None

    @property
    def recorded(self) -> list[tuple[str, torch.dtype, bool]]:
        """What an exported graph is told: the function mode's casts are in the graph, and torch's then stay off."""
        return [(device, dtype, enabled and self.op_rules is None) for device, dtype, enabled in self.switches]


@constant_when_compiled
def device_types(device_type: str | torch.device | None) -> tuple[str, ...]:
    """Return the devices a region acts on: the one named, else the accelerator and the CPU."""
    if device_type is None or isinstance(device_type, str | torch.device):
        return _read_device_types(device_type)
    hint = ""
    if isinstance(device_type, int):
        hint = " torch.cuda.amp takes `enabled` first: that is mezzo.cuda.amp.autocast."
    raise RegionTypeError(
        f"autocast(device_type): a device type such as 'cpu' or 'cuda' is wanted, not a {type(device_type).__name__}.{hint}"
    )


@functools.cache
def _read_device_types(device_type: str | torch.device | None) -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device_type is None:
        return ("cpu",) if accelerator is None or accelerator.type == "cpu" else (accelerator.type, "cpu")
    name = device_type.type if isinstance(device_type, torch.device) else device_type.split(":")[0]
    if name == "gpu":
        return ("cuda",) if accelerator is None else (accelerator.type,)
    if not _has_autocast(name):
        known = [d for d in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(d)]
        raise RegionError(
            f"autocast({device_type!r}): torch has no autocasting for this device. Invalid device string: '{name}'.{did_you_mean(name, known)}"
        )
    return (name,)


def _has_autocast(device_type: str) -> bool:
    try:
        return torch.amp.is_autocast_available(device_type)
    except RuntimeError:
        return False


def _is_missing(device_type: str) -> bool:
    """Whether torch disables a region for want of the device: CUDA only; the others it enters as they are."""
    return device_type == "cuda" and not torch.cuda.is_available()


def _obstacle(device_type: str, dtype: torch.dtype) -> str | None:
    """Return why a region that should cast casts nothing on a device, None if it does cast."""
    if _is_missing(device_type):
        return (
            f"autocast({device_type!r}): this machine has no {device_type} device, so the region is disabled and casts "
            "nothing. Write autocast('cpu'), leave device_type out, or pass enabled=False."
        )
    if dtype not in LOW_DTYPES and dtype.is_floating_point:
        return (
            f"autocast(dtype={dtype}): a region casts to fp16 or bf16, not {dtype_name(dtype)}, so it is disabled. "
            f"{device_type.upper()} Autocast only supports dtypes of torch.bfloat16, torch.float16 currently. Write one "
            "of them, or enabled=False to run everything as it is."
        )
    return None


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
    policy: Policy | None,
    cache: CacheName,
) -> str:
    rules = policy if policy is not None else Policy()
    required = [rule.pattern for rule in rules.modules if rule.required]
    if required:
        raise RegionError(
            f"autocast(policy=...) has rules for modules ({', '.join(required)}), and a region has no model to bind "
            "them to. Write mezzo.prepare(model, optimizer, policy)."
        )
    pairs = zip(devices, defaults or (None,) * len(devices), strict=True)
    decided = [_switch(device, default, dtype, enabled, policy) for device, default in pairs]
    switches = tuple(switch for switch, _ in decided)
    warning = next((obstacle for _, obstacle in decided if obstacle is not None), None)
    live = tuple(switch.device_type for switch in switches if switch.enabled)
    for device in live:
        take_index_writes(device)
    by_mode = any(why_engine(rules, device, cache).engine == "mode" for device in live)
    name = f"plan_{next(_numbers)}"
    plan = CastPlan(
        switches=switches,
        op_rules=op_rule_table(rules.op_rules, live) if by_mode else None,
        caches=cache_enabled is not False,
        store=weight_casts if cache == "persistent" else None,
        warning=warning,
    )
    setattr(_plans, name, plan)
    return name


@constant_when_compiled
def _name_of(devices: Any, defaults: Any, dtype: object, enabled: bool, caches: Any, policy: Any, cache: Any) -> str:
    if not is_one_of(cache, ("region", "persistent")):
        raise RegionError(f"cache={shown(cache)} is unknown.{did_you_mean(cache, ('region', 'persistent'))}")
    chosen = None if policy is None else as_policy(policy)
    return _make_plan(devices, defaults, _as_dtype(dtype), enabled, caches, chosen, cache)


def _as_dtype(dtype: object) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if isinstance(dtype, str):
        return parse_dtype(dtype)
    raise RegionTypeError(
        f"autocast(dtype): a dtype such as torch.bfloat16 or 'bf16' is wanted, not a {type(dtype).__name__}."
    )


def plan_of(*key: Any) -> CastPlan:
    """Return the plan for what `autocast` was given; made once for each way of asking."""
    plan: CastPlan = getattr(_plans, _name_of(*key))
    return plan


def _switch(
    device_type: str, default: torch.dtype | None, dtype: torch.dtype | None, enabled: bool, policy: Policy | None
) -> tuple[Switch, str | None]:
    """Return what a device is set to, and why it casts nothing there if it should."""
    if enabled and dtype is None and policy is not None and not _is_missing(device_type):
        dtype = policy.resolve(device_type).compute
        enabled = dtype is not torch.float32
    chosen = default if default is not None and (dtype is None or not enabled) else dtype
    assert chosen is not None
    obstacle = _obstacle(device_type, chosen) if enabled else None
    if enabled and obstacle is None:
        _check_dtype(device_type, chosen)
    return Switch(device_type, chosen, enabled and obstacle is None), obstacle
