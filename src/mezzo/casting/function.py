"""custom_fwd and custom_bwd: the region inside a user's own autograd.Function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch

from ..errors import RegionError, RegionTypeError, check_given, kind_of
from ..formats import as_device
from .mode import eligible, map_tensors, tensors_in
from .region import autocast, region_of

F = TypeVar("F", bound=Callable[..., Any])


def _cast_all(value: Any, dtype: torch.dtype, device: str) -> Any:
    if isinstance(value, dict):
        return type(value)({key: _cast_all(item, dtype, device) for key, item in value.items()})
    return map_tensors(value, lambda t: t.to(dtype) if eligible(t, device) else t)


def _check(call: str, function: object, device_type: str | None) -> None:
    check_given(call, "device_type", device_type, str | None, "a device type such as 'cuda'", RegionTypeError)
    if device_type is not None:
        as_device(device_type)
    if function is not None and (not callable(function) or isinstance(function, type)):
        raise RegionTypeError(f"{call} decorates a function, and was given {kind_of(function)}.")


@overload
def custom_fwd(fwd: F, *, device_type: str | None = None, cast_inputs: torch.dtype | None = None) -> F: ...
@overload
def custom_fwd(
    fwd: None = None, *, device_type: str | None = None, cast_inputs: torch.dtype | None = None
) -> Callable[[F], F]: ...
def custom_fwd(fwd: Any = None, *, device_type: str | None = None, cast_inputs: torch.dtype | None = None) -> Any:
    """Decorate the `forward` of a `torch.autograd.Function` for use in regions; one with a `setup_context` has that decorated too.

    Args:
        fwd: the static method.
        device_type: the device whose region counts; left out, that of the first floating argument.
        cast_inputs: in a region, cast floating inputs to this dtype and run forward outside of it; None runs forward
            in whatever region is in force. Named tuples, lists and dicts of tensors are cast too.

    Returns:
        The method, or a decorator when `fwd` is left out.

    Writes: the region in force onto `ctx`, for `custom_bwd`.
    Syncs: no.
    Source: torch.amp.custom_fwd.
    """
    _check("custom_fwd", fwd, device_type)
    wanted = "a floating dtype such as torch.float32"
    check_given("custom_fwd", "cast_inputs", cast_inputs, torch.dtype | None, wanted, RegionTypeError)
    if cast_inputs is not None and not cast_inputs.is_floating_point:
        raise RegionTypeError(
            f"custom_fwd was given {cast_inputs} for cast_inputs, which cuts fractions off; give {wanted}."
        )
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)

    @functools.wraps(fwd)
    def forward(*args: Any, **kwargs: Any) -> Any:
        ctx, given = (args[:1], args[1:]) if args and hasattr(args[0], "save_for_backward") else ((), args)
        found = (t.device.type for t in tensors_in(given, kwargs) if t.is_floating_point())
        device = device_type or next(found, "cpu")
        dtype = cast_inputs if torch.is_autocast_enabled(device) else None
        region = autocast.current() if dtype is None else autocast.current(enabled=False)
        for one in ctx:  # a forward beside a setup_context has none
            one._mezzo_plan = region._plan
        if dtype is None:
            return fwd(*args, **kwargs)
        count = 1 if fwd.__name__ == "setup_context" else len(given)  # which has the output behind its inputs
        given = (*(_cast_all(value, dtype, device) for value in given[:count]), *given[count:])
        kwargs = {name: _cast_all(value, dtype, device) for name, value in kwargs.items()}
        with region:
            return fwd(*ctx, *given, **kwargs)

    return forward


@overload
def custom_bwd(bwd: F, *, device_type: str | None = None) -> F: ...
@overload
def custom_bwd(bwd: None = None, *, device_type: str | None = None) -> Callable[[F], F]: ...
def custom_bwd(bwd: Any = None, *, device_type: str | None = None) -> Any:
    """Decorate the `backward` of a `torch.autograd.Function` whose forward has `custom_fwd`.

    Backward runs in the region its forward ran in, on whichever thread.

    Args:
        bwd: the static method.
        device_type: taken because torch asks for it; the region is that of forward, on all its devices.

    Returns:
        The method, or a decorator when `bwd` is left out.

    Raises:
        RegionError: at the first backward, if forward, or setup_context, has no `custom_fwd`.

    Syncs: no.
    Source: torch.amp.custom_bwd.
    """
    _check("custom_bwd", bwd, device_type)
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)

    @functools.wraps(bwd)
    def backward(ctx: Any, *args: Any) -> Any:
        plan = getattr(ctx, "_mezzo_plan", None)
        if plan is None:
            raise RegionError(
                "custom_bwd runs backward in the region of its forward, which nobody wrote down: decorate forward with "
                "mezzo.custom_fwd, or, where it is given no ctx, decorate its setup_context so."
            )
        with region_of(plan):  # one of its own: a graph may not write onto what its forward made
            return bwd(ctx, *args)

    return backward
