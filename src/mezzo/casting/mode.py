"""The interceptor: every public torch function called in a region passes through it and is cast by its rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .._torch import (
    HigherOrderOperator,
    dynamo_skip_frame,
    function_modes,
    pop_function_mode,
    push_function_mode,
    saved_tensors_hooks,
)
from ..errors import CastError, ForbiddenOpError
from ..kernels import linear, small_linear, takes_linear, takes_small_linear
from ..policy import OpRow, Rule
from .cast_cache import RegionCache
from .frame import bind_recompute
from .op_rule_table import OpRuleTable
from .provenance import mismatch_message
from .tracing import enter_switch, exit_switch

_BIASES = "torch.nn.attention.bias"  # of masks without values; to import it is to import the compiler
_UNTRACKED_HANDLES = (torch.Tensor.data.__get__, torch.Tensor.numpy)  # type: ignore[attr-defined]  # a descriptor
_KEEP_STATISTICS = {F.batch_norm: 1, F.instance_norm: 1, torch.batch_norm: 3, torch.instance_norm: 3}
"""Ops that write running statistics, and where these stand among their arguments."""


def eligible(value: object, device_type: str) -> bool:
    """Whether autocasting may cast a value: a floating tensor on the device, fp64 left alone. Syncs: no."""
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.device.type == device_type
        and value.dtype is not torch.float64
        and type(value).__module__ != _BIASES
    )


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to a tensor, or to the tensors in a list or tuple of them. Syncs: as the function."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)) and value and any(isinstance(item, Tensor) for item in value):
        items = [map_tensors(item, function) for item in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    return value


def tensors_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among arguments, one level of lists deep. Host only."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _statistics(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the running statistics that a norm is about to write. Host only."""
    at, flag = _KEEP_STATISTICS[func], kwargs.get("training", kwargs.get("use_input_stats", func is F.instance_norm))
    given = [*args[at : at + 2], kwargs.get("running_mean"), kwargs.get("running_var")]
    return [one for one in given if one is not None] if (args[5] if len(args) > 5 else flag) else []


class CastMode(TorchFunctionMode):
    """The complete engine of a region on one or several devices.

    Args:
        op_rules: the rules, for the devices whose tensors are cast.
        cache: where casts are kept; None casts at every use.
        make_recompute: makes the region that a checkpoint's recompute enters.
        run: runs a ruled op another way, or returns `NotImplemented`; taken where casts of weights outlive the region.

    The switch is torch's own autocast state: a nested `torch.autocast(enabled=False)` or `dtype=` is obeyed. A ruled
    op runs as one unit, with torch's own casting of its parts off. Syncs: no.
    """

    def __init__(
        self,
        op_rules: OpRuleTable,
        cache: RegionCache | None,
        make_recompute: Callable[[CastMode], AbstractContextManager[Any]] | None = None,
        run: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        self.op_rules = op_rules
        self.rows = op_rules.rows
        self.cache = cache
        self.keeps_weights = cache is not None and cache.store is not None  # they are there for a faster kernel, too
        self.make_recompute, self.run = make_recompute, run if self.keeps_weights else None
        self.suspended = False
        self.has_grad = torch.is_grad_enabled()  # a reentrant checkpoint's first run has none
        self._device = next(iter(op_rules.rows))

    @dynamo_skip_frame
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.suspended:
            return func(*args, **kwargs)
        device = self._device if len(self.rows) == 1 else self._device_of(args, kwargs)
        row = self.rows[device].get(func)
        if row is None:
            return self._unruled(func, args, kwargs)
        if not torch.is_autocast_enabled(device) or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        return self._run(func, row, device, args, kwargs)

    def _device_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        for tensor in tensors_in(args, kwargs):
            if tensor.device.type in self.rows and tensor.is_floating_point():
                return tensor.device.type
        return self._device

    def _unruled(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        decomposed = self.op_rules.decomposed.get(func)
        if decomposed is not None:
            with self:
                return decomposed(*args, **kwargs)
        if torch.compiler.is_compiling() and isinstance(func, HigherOrderOperator):
            args = self._parts_inside(args)
        if self.cache is not None and func in _UNTRACKED_HANDLES:
            self.cache.stop_tracking(args[0])
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            self._explain(error, func, None, args, kwargs)
            raise

    def _parts_inside(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Have functions among arguments, as those of torch.cond, traced inside this mode, which is off while it handles a call."""

        def inside(part: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return part(*args, **kwargs)

            return run

        with self:  # else torch 2.13 takes the first change of its modes for a side effect, which no part may have
            pass
        first = [inside(part) if callable(part) and not isinstance(part, type) else part for part in args[:3]]
        return *first, *args[3:]  # among them flex_attention's score_mod, which runs in fp32

    def _run(self, func: Any, row: OpRow, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.make_recompute is not None and self.has_grad and not torch.compiler.is_compiling():
            if not torch.is_grad_enabled() or saved_tensors_hooks() is not None:  # a checkpoint may run
                bind_recompute(self.make_recompute, self)
        low = torch.get_autocast_dtype(device)
        if row.rule is Rule.FORBID:
            raise ForbiddenOpError(f"{row.op} is forbidden here: {row.reason}. Write {row.instead}.")
        target, low_out = self._target(row.rule, device, low, args, kwargs)
        kept = _statistics(func, args, kwargs) if func in _KEEP_STATISTICS else ()
        if target is not None and row.by_dtype:
            given: Any = args[0] if args else kwargs.get("input")
            if eligible(given, device) and given.dtype is not target and kwargs.get("dtype") is None:
                kwargs = {**kwargs, "dtype": target}
        elif target is not None:
            args = tuple(map_tensors(value, lambda t: self._cast(t, target, device)) for value in args)
            kwargs = {
                name: map_tensors(value, lambda t: self._cast(t, target, device)) for name, value in kwargs.items()
            }
        try:
            out = self._call_uncast(func, device, args, kwargs)
        except RuntimeError as error:
            self._explain(error, func, row, args, kwargs)
            raise
        for own, cast in zip(kept, _statistics(func, args, kwargs) if kept else (), strict=True):
            if cast is not own:  # the op writes where it reads
                own.copy_(cast)
        return map_tensors(out, lambda t: self._cast(t, low, device)) if low_out else out

    def _target(
        self, rule: Rule, device: str, low: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.dtype | None, bool]:
        if rule is Rule.LOW:
            return low, False
        if rule is Rule.FP32:
            return torch.float32, False
        if rule is Rule.AS_IS:
            return None, False
        dtypes = {t.dtype for t in tensors_in(args, kwargs) if eligible(t, device)}
        if rule is Rule.PROMOTE:
            return (torch.float32 if torch.float32 in dtypes and len(dtypes) > 1 else None), False
        # The kernels of these ops accumulate 16-bit inputs in fp32 by themselves.
        return (None if dtypes == {low} else torch.float32), True

    def _cast(self, tensor: Tensor, dtype: torch.dtype, device: str) -> Tensor:
        if tensor.dtype is dtype or not eligible(tensor, device):
            return tensor
        if self.cache is None or dtype is torch.float32 or torch.compiler.is_compiling():
            return tensor.to(dtype)
        return self.cache.cast(tensor, dtype)

    def _call_uncast(self, func: Any, device: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.linear and self.keeps_weights:
            if takes_small_linear(*args, **kwargs):
                return small_linear(*args, **kwargs)
            if not torch.is_grad_enabled() and takes_linear(*args, **kwargs):
                return linear(*args, **kwargs)
        if self.run is not None and device == "cpu" and (found := self.run(func, args, kwargs)) is not NotImplemented:
            return found
        is_compiling = torch.compiler.is_compiling()
        (enter_switch if is_compiling else torch.set_autocast_enabled)(device, False)
        try:
            return func(*args, **kwargs)
        finally:
            (exit_switch if is_compiling else torch.set_autocast_enabled)(device, True)

    def _explain(
        self, error: RuntimeError, func: Any, row: OpRow | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        message = mismatch_message(error, getattr(func, "__name__", str(func)), row, (*args, *kwargs.values()))
        if message is not None:
            raise CastError(message) from error


def drop_mode(mode: CastMode) -> None:
    """Take a mode off torch's stack, from below others where it has to be, unless Ctrl-C has ended a block that holds it."""
    above: list[Any] = []
    if not torch.compiler.is_compiling() and all([one is not mode for one in function_modes()]):
        return
    while not torch.compiler.is_compiling() and function_modes()[-1] is not mode:
        above.append(pop_function_mode())
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own
    for other in reversed(above):
        push_function_mode(other)
