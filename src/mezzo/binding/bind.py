"""Binding: a policy made part of a model, so that it holds wherever and however its modules are called."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from inspect import isgeneratorfunction
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

from .._torch import is_graphed, own_modules
from ..casting import is_attention, runs_later
from ..distributed import class_names
from ..errors import PolicyError
from ..formats import LOW_DTYPES
from ..policy import FP32_RULES, CacheName, Policy, names_around
from .forward import Binding, Bound, bound_class, bound_of, enter_thread
from .hand_written import STATELESS, class_of
from .module_rules import Precision
from .own_ops import CALL_FORWARD, TRACED_AS_WRITTEN, in_place_of_forward
from .refusals import BOUND

_log = logging.getLogger("mezzo.binding")
_WRITTEN = (BOUND, "forward")
_warned: WeakSet[nn.Module] = WeakSet()  # modules whose forward was looked at since it was assigned


@dataclass(eq=False, slots=True)
class _Own:
    """A module's own forward, called as its class's would be: with the module first."""

    forward: Callable[..., Any]

    def __call__(self, _: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


def bind(model: nn.Module, policy: Policy, cache: CacheName = "region") -> Binding:
    """Make a policy, its compute dtype decided, part of a model; a model bound before follows the new policy from now on.

    Its modules keep their identity, names and state dict.

    Raises:
        PolicyError: a required module rule matches nothing, a module that stands in two places of the model has
            different rules there, or a forward returns before its body has run.

    Writes: the class of every module, and its `Bound`. Syncs: no.
    """
    enter_thread()
    names = _names(model)
    policy.check_modules((fqn, class_names(module)) for module, fqns in names.items() for fqn in fqns)
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    binding = Binding(policy=policy, device_type=kinds.pop() if len(kinds) == 1 else None, cache=cache)
    before = [bound.binding for module in names if (bound := bound_of(module)) is not None]
    binding.widens = not policy.is_low and any(one.widens or one.policy.params in LOW_DTYPES for one in before)
    rebind(model, binding)
    return binding


def _names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return the names of each module, of which one that stands in several places has several."""
    names: dict[nn.Module, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(fqn)
    return names


def rebind(model: nn.Module, binding: Binding) -> None:
    """Bind the modules that a model has now, of which some may have come since it was bound. Writes: as `bind`."""
    names = _names(model)
    own: dict[str, Precision] = {}
    for module, fqns in names.items():
        rules = {fqn: binding.policy.module_rule(fqn, class_names(module)) for fqn in fqns}
        own |= {fqn: rule.precision for fqn, rule in rules.items() if rule is not None}
    for module, fqns in names.items():
        around = {fqn: next((own[outer] for outer in names_around(fqn) if outer in own), None) for fqn in fqns}
        precisions = {fqn: (own.get(fqn), around[fqn]) for fqn in fqns}
        _refuse_conflict(module, precisions)
        _bind_one(module, binding, *precisions[fqns[0]], is_root=module is model)


def _refuse_conflict(module: nn.Module, precisions: dict[str, tuple[Precision, Precision]]) -> None:
    (first, precision), *others = precisions.items()
    for other, different in others:
        if different != precision:
            raise PolicyError(
                f"'{first}' and '{other}' are one {class_names(module)[0]} in two places, and the policy gives it "
                f"{_spell(precision)} in one and {_spell(different)} in the other. Give both places the same rule."
            )


def _spell(precisions: tuple[Precision, Precision]) -> str:
    precision = next((p for p in precisions if p is not None), None)
    return "the compute dtype" if precision is None else str(precision).removeprefix("torch.")


def _refuse_unbindable(module: nn.Module, is_ruled: bool, is_root: bool, is_low: bool) -> None:
    """Refuse, by a PolicyError, a module whose forward no policy can reach, `is_ruled` if it is the root or has a rule of its own."""
    if is_ruled and isinstance(module, torch.jit.ScriptModule):
        raise PolicyError(
            f"a policy cannot be bound to a ScriptModule ({class_names(module)[0]}): its forward is compiled "
            "already. Prepare the module before torch.jit.script, or use torch.compile."
        )
    if is_graphed(module.__dict__.get("forward")):
        raise PolicyError(
            f"a policy cannot be bound to what torch.cuda.make_graphed_callables made of a {class_names(module)[0]}: it replays "
            "a graph that was captured without it. Prepare the model as it was, and write step = amp.capture(function), which captures whole steps."
        )
    late = class_of(module).forward if is_ruled and is_low else None
    if runs_later(late) and not (is_root and isgeneratorfunction(late)):
        raise PolicyError(
            f"a policy cannot be bound to the forward of {class_names(module)[0]}, a generator or coroutine, whose body runs when "
            "forward has returned. Give it another name, and write a forward that returns the list of what it yields."
        )


def _bind_one(module: nn.Module, binding: Binding, own: Precision, around: Precision, *, is_root: bool) -> None:
    _refuse_unbindable(module, own is not None or is_root, is_root, binding.policy.is_low)
    if isinstance(module, torch.jit.ScriptModule):
        return
    cls, before = type(module), bound_of(module)
    is_bound = hasattr(cls, "_mezzo_class")  # a forward assigned since calls the bound one, and stays outside
    forward = None if is_bound else module.__dict__.pop("forward", None)
    inner = None if before is None else before.inner
    if forward is not None:
        inner = _Own(forward)
    elif not isinstance(inner, _Own):
        inner = in_place_of_forward(module, binding, own)
    attends = binding.has_own_ops and own is None and around not in FP32_RULES and _is_innermost_attention(module)
    is_regular = own is None and not attends
    is_as_written = not attends and not is_root and (inner is None or inner in TRACED_AS_WRITTEN)
    traced_key = binding.region_key if is_as_written else ""
    traced = (traced_key, own if is_as_written else None)
    module.__dict__[BOUND] = Bound(
        binding=binding, own=own, around=around, is_root=is_root, inner=inner, attends=attends,
        stays=isinstance(inner, _Own) or inner in CALL_FORWARD, is_regular=is_regular, traced_key=traced_key,
    )  # fmt: skip
    if is_parametrized(module):  # a class of its own, which remove_parametrizations takes away from above its base
        base, *others = cls.__bases__
        cls.__bases__ = (bound_class(getattr(base, "_mezzo_class", base), *traced), *others)
    elif is_bound and "_mezzo_class" not in vars(cls):  # one that somebody made above it, perhaps for many modules
        cls.__bases__ = tuple(
            bound_class(base._mezzo_class, "", None) if hasattr(base, "_mezzo_class") else base
            for base in cls.__bases__
        )
    else:
        object.__setattr__(module, "__class__", bound_class(class_of(module), *traced))  # whatever its own refuses


def _is_innermost_attention(module: nn.Module) -> bool:
    if not is_attention(class_of(module)):
        return False
    return not any(is_attention(class_of(inner)) for inner in module.modules() if inner is not module)


def warn_of_replaced(model: nn.Module) -> None:
    """Say once in the log which bound modules got a forward since that has none of a bound class to call. Host only."""
    for name, module in model.named_modules():
        bound, forward = bound_of(module), vars(module).get("forward")
        if forward is None or bound is None or not bound.binding.policy.is_low or module in _warned:
            continue
        _warned.add(module)
        if not _holds(forward, type(module).forward, 4):
            _log.warning(
                "the forward of %s was assigned after mezzo.prepare and does not call the one that was there, so the policy's rules for it do not "
                "hold. Assign it before mezzo.prepare.", name or type(module).__name__,
            )  # fmt: skip


def _holds(value: Any, forward: object, depth: int) -> bool:
    """Whether a function is a module's forward, or has it in reach: as what it wraps, closes over or keeps beside."""
    if depth == 0 or getattr(value, "__func__", None) is forward:
        return depth > 0
    kept = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    kept += [*getattr(value, "args", ()), *getattr(value, "__dict__", {}).values()]
    kept += [getattr(value, name, None) for name in ("func", "__self__", "__func__")]
    return any(_holds(one, forward, depth - 1) for one in kept if callable(one))


def is_activation(module: nn.Module) -> bool:
    """Whether what a module computes was settled when it was made: no tensors, no children, and no attributes but those of a library's activations. Host only."""
    is_empty = not own_modules(module) and next(itertools.chain(module.parameters(), module.buffers()), None) is None
    is_plain = vars(module).keys() <= STATELESS or "activation" in class_of(module).__module__.rpartition(".")[2]
    return is_empty and is_plain


def unshare_activations_(model: nn.Module) -> None:
    """Give a model copies of the activations that another prepared model has too, as of a default argument. Writes: children of its modules. Host only."""
    copies: dict[nn.Module, nn.Module] = {}
    for children in [own_modules(module) for module in model.modules()]:
        for name, module in children.items():
            if module is not None and is_prepared(module) and is_activation(module):
                children[name] = copies.setdefault(module, copy.copy(module))
    for made in copies.values():
        unbind(made)


def is_prepared(module: nn.Module) -> bool:
    """Whether a module is part of a prepared model whose stepper lives. Host only."""
    bound = bound_of(module)
    return bound is not None and bound.binding.stepper is not None


def remember_modules(model: nn.Module) -> Callable[[], None]:
    """Return a function that gives the modules of a model back class, forward, `Bound` and children as they are now. Host only."""
    written_in = [(m, {k: vars(m)[k] for k in _WRITTEN if k in vars(m)}) for m in model.modules()]
    kept = [(m, type(m), type(m).__bases__, written, dict(own_modules(m))) for m, written in written_in]

    def put_back() -> None:
        for module, cls, bases, written, children in kept:
            for name in [name for name, child in children.items() if own_modules(module)[name] is not child]:
                own_modules(module)[name] = children[name]
            if type(module) is not cls:
                object.__setattr__(module, "__class__", cls)
            if cls.__bases__ != bases:
                cls.__bases__ = bases
            for key in _WRITTEN:
                module.__dict__.pop(key, None)
            module.__dict__.update(written)

    return put_back


def unbind(model: nn.Module) -> None:
    """Take a policy off a model again. Writes: class, forward and `Bound` of every module that has one."""
    for module in model.modules():
        bound, cls = module.__dict__.pop(BOUND, None), type(module)
        if bound is None:
            continue
        if "forward" in vars(module) and not isinstance(bound.inner, _Own):
            continue  # it calls that of the bound class, which is its original's without a `Bound`
        if isinstance(bound.inner, _Own):
            module.__dict__["forward"] = bound.inner.forward
        if "_mezzo_class" in vars(cls):
            object.__setattr__(module, "__class__", vars(cls)["_mezzo_class"])
        else:
            cls.__bases__ = tuple(vars(base).get("_mezzo_class", base) for base in cls.__bases__)


def innermost(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of torch.compile and DistributedDataParallel, whose names patterns match."""
    if isinstance(model, DistributedDataParallel):
        return innermost(model.module)
    inner = getattr(model, "_orig_mod", None)
    return innermost(inner) if isinstance(inner, nn.Module) else model


def uncompiled(name: str) -> str:
    """Return a name without the levels torch.compile adds.

    >>> uncompiled("layers._orig_mod.0._orig_mod")
    'layers.0'
    """
    return ".".join(part for part in name.split(".") if part != "_orig_mod")
