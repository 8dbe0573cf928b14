"""Modules that models write out op by op, and that are one op: known by what they compute, and run as that op."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import own_modules, own_parameters, without_dispatch_modes
from ..formats import LOW_DTYPES

_STATELESS = frozenset({*vars(nn.Module()), "_mezzo_bound", "_is_hf_initialized"})
"""Attributes that no forward reads: those of every module, the policy's record and a note of transformers'."""


def hand_written_gelu(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward that runs a GELU written op by op as torch's own; None for any other module.

    A class that has "gelu" in its name, and instances without state, is one if in fp64 it has the values and the gradients of
    `F.gelu`, in training and evaluation. Its forward is called to see, on an empty copy.

    Args:
        module: bound or not.

    Syncs: no.
    """
    original: Any = getattr(type(module), "_mezzo_class", type(module))
    if "gelu" not in original.__name__.casefold() or original.__module__.startswith("torch.nn."):
        return None
    has_state = not vars(module).keys() <= _STATELESS or own_modules(module) or own_parameters(module)
    return None if has_state or next(module.buffers(), None) is not None else _gelu_of(original)


@functools.cache
def _gelu_of(original: type[nn.Module]) -> Callable[..., Any] | None:
    empty = [original.__new__(original) for _ in range(2)]
    for instance, is_training in zip(empty, (True, False), strict=True):
        vars(instance).update(vars(nn.Module()), training=is_training)
    for approximate in ("tanh", "none"):
        fused = functools.partial(F.gelu, approximate=approximate)
        if all(_agree(functools.partial(original.forward, instance), fused) for instance in empty):
            return functools.partial(run_gelu, approximate)
    return None


@without_dispatch_modes()
def _agree(function: Callable[..., Any], fused: Callable[..., Any]) -> bool:
    """Whether two functions of one tensor agree in fp64, values and gradients, on the CPU. Random state is left as it was."""
    size = torch.logspace(-8, 4, 97, dtype=torch.float64, device="cpu")
    x = torch.cat([-size.flip(0), size.new_zeros(1), size]).view(5, 39)
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        try:
            (out, slope), (want, wanted_slope) = (_value_and_gradient(of, x) for of in (function, fused))
            return _is_close(out, want) and _is_close(slope, wanted_slope)
        except Exception:  # whatever a stranger's forward raises: it is not this function
            return False


def _value_and_gradient(function: Callable[..., Any], x: Tensor) -> tuple[Tensor, Tensor]:
    given = x.clone().requires_grad_()
    out = function(given)
    return out, torch.autograd.grad(out.sum(), given)[0]


def _is_close(found: Any, wanted: Tensor) -> bool:
    """Whether the difference is the constants' digits: some write sqrt(2 / pi) as 0.79788456."""
    return bool(torch.allclose(found, wanted, rtol=1e-7, atol=1e-7))


def run_gelu(approximate: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a GELU: of a 16-bit tensor as one op, which computes in fp32, rounds once and keeps its input alone.

    Args:
        approximate: as `F.gelu` takes it.
        module: the module.
        args: of the call.
        kwargs: of the call.

    Returns:
        What its own forward gives, in the dtype of the input where that has 16 bit.

    Syncs: no.
    """
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].dtype in LOW_DTYPES:
        return F.gelu(args[0], approximate=approximate)
    return type(module)._mezzo_class.forward(module, *args, **kwargs)  # type: ignore[attr-defined]  # of every bound class
