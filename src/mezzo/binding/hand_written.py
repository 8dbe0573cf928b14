"""Modules that models write out op by op, and that are one op: known by what they compute, and run as that op."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import own_modules, own_parameters, without_dispatch_modes
from ..formats import LOW_DTYPES

STATELESS = frozenset({*vars(nn.Module()), "_mezzo_bound", "_is_hf_initialized"})
"""Attributes that no forward reads: those of every module, the policy's `Bound` and a note of transformers'."""


def class_of(module: nn.Module) -> Any:
    """Return a module's class as it was before it was bound. Host only."""
    return getattr(type(module), "_mezzo_class", type(module))


def torchs_forward(kind: type[nn.Module]) -> Any:
    """Return the forward that torch wrote for one of its classes; None where another one was put in its place. Host only."""
    is_torchs = getattr(kind.forward, "__globals__", {}).get("__name__") == kind.__module__
    return kind.forward if is_torchs else None


def with_module_first(kind: type[nn.Module], bound: Callable[[], type[nn.Module]]) -> Any:
    """Return what has a class's forward as a function that takes the module first, of the `bound` class below it: the class, where that is a plain function. Host only."""
    if inspect.isfunction(inspect.getattr_static(kind, "forward", None)):
        return kind
    return SimpleNamespace(forward=lambda module, *args, **kwargs: super(bound(), module).forward(*args, **kwargs))


def hand_written_gelu(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward that runs a GELU written op by op as torch's own; None for any other module, bound or not. Syncs: no.

    A class that has "gelu" in its name, and instances without state, is one if in fp64 it has the values and the gradients of
    `F.gelu`, in training and evaluation. Its forward is called to see, on an empty copy.
    """
    original = class_of(module)
    if "gelu" not in original.__name__.casefold() or original.__module__.startswith("torch.nn."):
        return None
    has_state = not vars(module).keys() <= STATELESS or own_modules(module) or own_parameters(module)
    return None if has_state or next(module.buffers(), None) is not None else _gelu_of(original, original.forward)


@functools.cache
def _gelu_of(original: type[nn.Module], forward: Callable[..., Any]) -> Callable[..., Any] | None:
    empty = [_empty(original, is_training) for is_training in (True, False)]
    size = torch.logspace(-8, 4, 97, dtype=torch.float64, device="cpu")
    x = torch.cat([-size.flip(0), size.new_zeros(1), size]).view(5, 39)
    for approximate in ("tanh", "none"):
        fused = functools.partial(F.gelu, approximate=approximate)
        if all(_agree(functools.partial(forward, instance), fused, [x], 1e-7) for instance in empty):
            return functools.partial(run_gelu, approximate)
    return None


def _empty(original: type[nn.Module], is_training: bool) -> nn.Module:
    instance = original.__new__(original)
    vars(instance).update(vars(nn.Module()), training=is_training)
    return instance


@without_dispatch_modes()
def _agree(function: Callable[..., Any], known: Callable[..., Tensor], inputs: list[Tensor], tolerance: float) -> bool:
    """Whether two functions agree, values and gradients, on fp64 tensors of the CPU. Random state is left as it was.

    The tolerance is for constants' digits (some write sqrt(2 / pi) as 0.79788456), and for what a forward computes in fp32.
    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        try:
            pairs = zip(*(_value_and_gradients(of, inputs) for of in (function, known)), strict=True)
            return all(a.shape == b.shape and torch.allclose(a.double(), b, tolerance, tolerance) for a, b in pairs)
        except Exception:  # whatever a stranger's forward raises: it is not this function
            return False


def _value_and_gradients(function: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    given = [one.clone().requires_grad_() for one in inputs]
    out = function(*given)
    return [out, *torch.autograd.grad(out.sum(), given)]


def run_gelu(approximate: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a GELU: of a 16-bit tensor as one op, which computes in fp32, rounds once, to the input's dtype, and keeps its input alone. Syncs: no."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and args[0].dtype in LOW_DTYPES:
        return F.gelu(args[0], approximate=approximate)
    return class_of(module).forward(module, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class HandWrittenRMSNorm:
    """The forward of a class that writes an RMS norm op by op: x / sqrt(mean of squares + eps) * (weight + offset).

    `name` is the weight's, `state` the attributes with which an instance was seen to compute this.
    """

    name: str
    eps: float
    offset: float
    state: tuple[tuple[str, Any], ...]

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the forward as it is written."""
        return class_of(module).forward(module, *args, **kwargs)

    def weight(self, module: nn.Module) -> Tensor | None:
        """Return the weight of an instance that still is what it was; None of any other. Host only."""
        has_changed = any(vars(module).get(name) != value for name, value in self.state)
        return None if has_changed or len(own_parameters(module)) != 1 else own_parameters(module).get(self.name)

    def factors(self, weight: Tensor) -> Tensor:
        """Return what is multiplied with. Syncs: no."""
        return weight.float() + self.offset if self.offset else weight


_PLAIN = (int, float, str, type(None), torch.dtype, torch.Size)
"""Kinds of attributes that stay what they are until somebody assigns another."""


def hand_written_rms_norm(module: nn.Module) -> HandWrittenRMSNorm | None:
    """Return what a module, bound or not, computes that writes an RMS norm of its last dimension op by op; None of any other. Syncs: no.

    A class that has "norm" in its name, and an instance with one parameter, of one dimension, and plain attributes otherwise, is one
    if it has the values and the gradients of the formula, in training and evaluation. Its forward is called to see, on empty copies.
    """
    original = class_of(module)
    state = tuple(sorted((name, value) for name, value in vars(module).items() if name not in STATELESS))
    (name, weight), *others = [*own_parameters(module).items(), ("", None), ("", None)][:2]
    is_other = "norm" not in original.__name__.casefold() or original.__module__.startswith("torch.nn.")
    has_more = others[0][0] or own_modules(module) or next(module.buffers(), None) is not None
    if is_other or has_more or weight is None or weight.dim() != 1 or not all(isinstance(v, _PLAIN) for _, v in state):
        return None
    return _rms_norm_of(original, original.forward, name, weight.numel(), state)


@functools.lru_cache(maxsize=256)
def _rms_norm_of(
    original: type[nn.Module], forward: Callable[..., Any], name: str, size: int, state: tuple[tuple[str, Any], ...]
) -> HandWrittenRMSNorm | None:
    random = torch.Generator("cpu").manual_seed(0)
    x = torch.randn((5, 3, size), generator=random, dtype=torch.float64, device="cpu")
    weight = torch.randn((size,), generator=random, dtype=torch.float64, device="cpu")

    def called(is_training: bool, scales: Tensor, x: Tensor, weight: Tensor) -> Any:
        instance = _empty(original, is_training)
        vars(instance).update(state)
        own_parameters(instance)[name] = weight  # type: ignore[assignment]  # in place of a parameter
        return forward(instance, x * scales)

    epsilons = [value for _, value in state if isinstance(value, float) and 0 < value < 1]
    for eps, offset in itertools.product(epsilons, (0.0, 1.0)):
        scales = torch.tensor([0.3 * eps**0.5, eps**0.5, 3 * eps**0.5, 1, 1e4], dtype=torch.float64).view(5, 1, 1)

        def known(
            x: Tensor, weight: Tensor, eps: float = eps, offset: float = offset, scales: Tensor = scales
        ) -> Tensor:
            return F.rms_norm(x * scales, [size], weight + offset, eps)

        ways = (functools.partial(called, is_training, scales) for is_training in (True, False))
        if size > 1 and all(_agree(way, known, [x, weight], 1e-5) for way in ways):
            return HandWrittenRMSNorm(name, eps, offset, state)
    return None
