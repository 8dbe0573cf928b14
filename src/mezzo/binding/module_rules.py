"""What a rule on a module does at each call: the casts at its edges and the region inside."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections import UserDict
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributions import Distribution
from torch.nn.utils.parametrize import ParametrizationList

from .._torch import (
    TREE_NODES,
    function_modes,
    is_unwatched,
    num_function_modes,
    own_parameters,
    pop_function_mode,
    push_function_mode,
)
from ..casting import AttentionMode, CastMode
from ..errors import CastError, kind_of
from ..formats import LOW_DTYPES, dtype_name
from ..kernels import group_norm, layer_norm, rms_norm, takes_rms_norm, wide_layer_norm
from ..policy import FP32_RULES, ModuleRule, OpRules, Policy, Rule, op_table
from .hand_written import HandWrittenRMSNorm, torchs_forward

_log = logging.getLogger("mezzo.binding")
_LAYER_NORM, _GROUP_NORM, _RMS_NORM = map(torchs_forward, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm))

Precision = Rule | torch.dtype | None
"""What a module computes in: a rule, a 16-bit dtype, or None for the policy's compute dtype."""


class Regions(Protocol):
    """Where rules get their regions from."""

    def region(self, precision: Precision, traced: bool) -> AbstractContextManager[Any]:
        """Return the region in which a precision holds."""
        ...

    def low_dtype(self) -> torch.dtype | None:
        """Return the dtype low ops run in just here; None where casting is off."""
        ...


def named_tensors(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested mappings, sequences and dataclasses, with a name for each. Syncs: no."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(item, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from named_tensors(item, f"{name}[{i}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from named_tensors(getattr(value, field.name), f"{name}.{field.name}")


def cast_nest(value: Any, dtype: torch.dtype, what: str, module: nn.Module) -> Any:
    """Do as `cast_floating` for what a module was given or returns; a CastError for what lies in itself, or deeper than Python follows. Syncs: no."""
    if isinstance(module, ParametrizationList):  # what it computes stands for what is stored
        stored: Any = module.original if module.is_tensor else module.original0
        dtype = stored.dtype if stored.is_floating_point() else dtype
    try:
        return cast_floating(value, dtype)
    except RecursionError as error:
        raise CastError(
            f"{what} of {type(module).__name__} is to be {dtype_name(dtype)}, and is {kind_of(value)} that holds itself, or others thousands "
            "of levels deep, so its tensors cannot be cast. Hand on the tensors in a list, tuple, dict or dataclass."
        ) from error


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Return a value with its fp32, fp16 and bf16 tensors cast; differentiable; fp64 and other types are left alone. Syncs: no.

    They may lie in lists, tuples, dicts, `UserDict`s, `SimpleNamespace`s, distributions, dataclasses and classes registered with torch's pytree.
    """
    if isinstance(value, Tensor):
        castable = value.dtype is torch.float32 or value.dtype in LOW_DTYPES
        return value.to(dtype) if castable and value.dtype is not dtype else value
    if type(value) is tuple or type(value) is list:
        return type(value)([cast_floating(item, dtype) for item in value])
    if type(value) is dict:
        return {key: cast_floating(item, dtype) for key, item in value.items()}
    if value is None or isinstance(value, (bool, int, float, str, torch.Size)):
        return value
    if (node := TREE_NODES.get(type(value))) is not None:
        items, context = node.flatten_fn(value)
        return node.unflatten_fn([cast_floating(item, dtype) for item in items], context)
    return _cast_unregistered(value, dtype)


def _cast_unregistered(value: Any, dtype: torch.dtype) -> Any:
    """Cast the tensors in a dataclass, namespace, distribution, `UserDict`, or subclass of tuple, list or dict, that torch's pytree does not know."""
    is_namespace = isinstance(value, (SimpleNamespace, Distribution))
    if is_namespace or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        names = [*vars(value)] if is_namespace else [f.name for f in dataclasses.fields(value)]
        fields = {name: getattr(value, name) for name in names if hasattr(value, name)}
        cast = copy.copy(value)
        for name, item in cast_floating(fields, dtype).items():
            object.__setattr__(cast, name, item)
        return cast
    if isinstance(value, tuple):
        items = [cast_floating(item, dtype) for item in value]
        if all(item is was for item, was in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*items)
        made = tuple.__new__(type(value), items)  # whatever its own `__new__` takes
        for name, item in getattr(value, "__dict__", {}).items():
            setattr(made, name, item)
        return made
    if isinstance(value, (list, dict, UserDict)):
        nest: Any = copy.copy(value)
        for key, item in list(enumerate(value) if isinstance(value, list) else value.items()):
            nest[key] = cast_floating(item, dtype)
        return nest
    return value


def in_steps(run: Callable[[Callable[..., Any]], Any], generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Yield what a generator does, each step of which `run` calls as a forward. What is sent, thrown and returned goes through."""
    resume, given = generator.send, None
    while True:
        try:
            out = run(lambda *_, call=resume, given=given, **__: call(given))
        except StopIteration as end:
            return end.value
        try:
            resume, given = generator.send, (yield out)
        except GeneratorExit:
            generator.close()
            raise
        except BaseException as error:
            resume, given = generator.throw, error


class ModesAside:
    """Takes function modes of these kinds off inside a block, for ops that they leave alone, if no other one is at work. Host only."""

    def __init__(self, *kinds: type[Any]) -> None:
        self._kinds = kinds

    def __enter__(self) -> list[Any]:
        modes = function_modes() if num_function_modes() else []
        is_known = all([isinstance(mode, self._kinds) for mode in modes])
        self._modes = [pop_function_mode() for _ in modes] if is_known else []
        return self._modes

    def __exit__(self, *_: object) -> None:
        while self._modes:
            push_function_mode(self._modes.pop())


def run_ruled(
    regions: Regions,
    precision: Precision,
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    traced: bool,
) -> Any:
    """Call the forward, which takes the module first, of a module that has a rule. Syncs: no.

    Inside a region where casting is off, "result in the compute dtype" has no meaning and fp32 comes out.
    """
    if precision not in FP32_RULES:
        with regions.region(precision, traced):
            return forward(module, *args, **kwargs)
    low = regions.low_dtype() if precision is Rule.FP32_LOW_OUT else None
    norm = None
    is_eager = not (traced or is_compiling())
    if low is not None and is_eager and len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
        with ModesAside(CastMode, AttentionMode):
            norm = _low_norm(module, forward, args[0], low)
            if norm is not None and num_function_modes() == 0:
                return norm(module, *args)  # all its ops say their dtype: no region needed
    with regions.region(precision, traced):
        if norm is not None:
            return norm(module, *args)
        wide = torch.float32 if low is None else _own_dtype(module)
        out = forward(module, *cast_floating(args, wide), **cast_floating(kwargs, wide))
    return out if low is None else cast_floating(out, low)


_NORMS = ("batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm")


@functools.cache
def without_module_rules(policy: Policy) -> Policy:
    """Return one and the same policy for all that are equal: a compiler makes a graph anew for another one."""
    return policy.replace(modules=())


@functools.cache
def when_traced(policy: Policy, device_type: str) -> Policy:
    """Return a policy whose op rules cast where somebody takes ops apart: functorch, torch.jit.trace, the decompositions of torch.export.

    They take torch's composites as a whole, past its casts of the products inside, and norms apart, whose kernels alone take a 16-bit
    input beside fp32 weights. What the policy itself says of an op goes first.
    """
    rules = policy.op_rules
    products = {name: row.rule for name, row in op_table("mezzo", device_type).items() if row.rule is Rule.LOW}
    wanted = products | dict.fromkeys(_NORMS, Rule.FP32_LOW_OUT)
    added = {name: rule for name, rule in wanted.items() if name not in op_table(rules.table, device_type)}
    return policy.replace(ops=OpRules(table=rules.table, edits=tuple((added | dict(rules.edits)).items())))


@functools.cache
def has_lstm_kernel(dtype: torch.dtype) -> bool:
    """Whether this CPU trains torch's LSTM under autocast to a 16-bit dtype. For fp16 torch chooses a kernel that few CPUs have, and some without backward."""
    with torch.random.fork_rng(devices=[]):
        lstm = nn.LSTM(1, 1, device="cpu")
    try:
        with torch.enable_grad(), torch.autocast("cpu", dtype):
            lstm(torch.zeros(1, 1, 1, device="cpu"))
    except RuntimeError:
        return False
    return True


_WITHOUT_KERNEL = {
    nn.LSTM: Rule.FP32_LOW_OUT,  # where torch chooses one that the CPU has not
    nn.Bilinear: Rule.FP32,  # its weights stay fp32, and its op takes no mixed dtypes
    nn.AdaptiveLogSoftmaxWithLoss: Rule.FP32,  # gathers 16-bit values in a tensor of fp32
}
"""Modules that 16-bit inputs may stop on a CPU, and what lets them run."""
_ADDED = {k: ModuleRule(pattern=k.__name__, precision=rule, required=False) for k, rule in _WITHOUT_KERNEL.items()}


def has_module_rules(policy: Policy) -> bool:
    """Whether a policy has rules for modules, other than those that `with_missing_kernels` added. Host only."""
    return any(rule not in _ADDED.values() for rule in policy.modules)


def with_missing_kernels(policy: Policy, model: nn.Module, device_type: str) -> Policy:
    """Return a policy with a rule, which any rule of its own overrides, for modules of a model that have no 16-bit kernel on a device. Syncs: no."""
    low = policy.compute
    if low is None or not policy.is_low or device_type != "cpu" or policy.op_rules.table != "torch":
        return policy
    there = {kind for kind in _WITHOUT_KERNEL for m in model.modules() if isinstance(m, kind)}
    if nn.LSTM in there and has_lstm_kernel(low):
        there.remove(nn.LSTM)
    for name, precision in ((kind.__name__, _WITHOUT_KERNEL[kind]) for kind in there):
        edit = f"{name}={precision.value}"
        _log.info("this CPU has no %s kernel for nn.%s, so %s is added to the policy", dtype_name(low), name, edit)
    return policy.replace(modules=(*[_ADDED[kind] for kind in there], *policy.modules)) if there else policy


def _low_norm(
    module: nn.Module, forward: Callable[..., Any], x: Tensor, low: torch.dtype
) -> Callable[..., Tensor] | None:
    """Return the form that saves memory in eager mode, of a norm of one tensor that has one."""
    if forward is _LAYER_NORM:
        is_wide = x.dtype is torch.float32 and _own_dtype(module) is torch.float32
        return partial(wide_layer_norm, low) if is_wide else layer_norm if x.dtype is low else None
    if forward is _GROUP_NORM:
        return group_norm if x.dtype is low and x.is_cpu and module.weight is not None else None
    return _rms_norm(module, forward, x, low) if _own_dtype(module) in (torch.float32, x.dtype) else None


def _rms_norm(
    module: nn.Module, forward: Callable[..., Any], x: Tensor, low: torch.dtype
) -> Callable[..., Tensor] | None:
    if isinstance(module, nn.RMSNorm) and forward is _RMS_NORM:
        shape, weight = list(module.normalized_shape), module.weight
        if takes_rms_norm(x, shape, weight, low):
            return lambda module, x: rms_norm(x, shape, weight, module.eps, low, module.training)
    if isinstance(forward, HandWrittenRMSNorm) and is_unwatched() and (own := forward.weight(module)) is not None:
        if takes_rms_norm(x, size := list(own.shape), own, low):
            return lambda module, x: rms_norm(x, size, forward.factors(own), forward.eps, low, module.training)
    return None


def _own_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype the module's own weights can meet: theirs if it is a 16-bit one, else fp32."""
    own = own_parameters(module).values()
    return next((p.dtype for p in own if p is not None and p.dtype in LOW_DTYPES), torch.float32)
