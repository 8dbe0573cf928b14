"""Binding: a policy made part of a model, so that it holds wherever and however its modules are called."""

from __future__ import annotations

import copyreg
import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

from .._torch import dynamo_graph_break, dynamo_skip_frame, functorch_level, graph_task_id
from ..casting import WideAttention, autocast, bind_frame, bind_reentrant, is_attention, is_large, prefers_wide
from ..errors import PolicyError, StepError
from ..policy import FP32_RULES, CacheName, Policy
from .module_rules import FUSED, Precision, cast_floating, run_ruled, run_unfused

RECORD = "_mezzo_bound"
"""Where a bound module keeps its record: beside its parameters, not in its state dict."""
_WRITTEN = (RECORD, "forward")


AfterForward = Callable[[object], None]
BeforeForward = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], AfterForward | None]


@dataclass(eq=False, kw_only=True)
class Binding:
    """A policy as it is bound to the modules of one model.

    Attributes:
        policy: with its compute dtype decided.
        device_type: of the model's tensors; None for several: the CPU and the accelerator.
        cache: where casts of weights are kept.
        before_forward: called before each forward of the root, or of a module that is called without it, outside
            torch.compile, with module and arguments; what it returns, if anything, is called with the output. It belongs
            to one stepper and is not copied with the model.
        owner: the stepper that was made with it; not copied either.
    """

    policy: Policy
    device_type: str | None
    cache: CacheName = "region"
    before_forward: BeforeForward | None = field(default=None, repr=False)
    owner: weakref.ref[object] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self._op_rules = self.policy.replace(modules=())
        self.widens_attention = self._widens_attention()

    def _widens_attention(self) -> bool:
        """Whether short attention is computed in fp32; `modules=none` is torch's autocast to the bit."""
        policy = self.policy
        if not (policy.is_low and policy.modules and prefers_wide(self.device_type)):
            return False
        return policy.why_engine("cpu", self.cache).engine == "dispatcher"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "before_forward": None, "owner": None}

    @property
    def is_owned(self) -> bool:
        """Whether the stepper that was made with it lives."""
        return self.owner is not None and self.owner() is not None

    def region(self, precision: Precision, traced: bool) -> autocast:
        """Return the region in which a precision holds.

        Args:
            precision: None for the policy's own compute dtype.
            traced: functorch is at work, under which torch's dispatcher does not cast; the function mode does,
                without a cache, since what it would keep are the tracers of one call.
        """
        if precision in FP32_RULES or not self.policy.is_low:
            return autocast(self.device_type, enabled=False)
        dtype = precision if isinstance(precision, torch.dtype) else self.policy.compute
        if traced:
            return autocast(self.device_type, dtype, cache_enabled=False, policy=self._op_rules, cache="persistent")
        return autocast(self.device_type, dtype, policy=self._op_rules, cache=self.cache)

    def resumed(self) -> autocast:
        """Return a region that leaves torch's autocast as it is now and brings the policy's op rules back."""
        low = self.low_dtype()
        return autocast(self.device_type, enabled=False) if low is None else self.region(low, traced=False)

    def low_dtype(self) -> torch.dtype | None:
        """Return the dtype low ops run in just here; None where casting is off."""
        device = self.device_type or "cpu"
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def follow(self, module: nn.Module) -> None:
        """Notice that the model was moved to another device since it was bound."""
        first = next(module.parameters(), None)
        if first is not None and self.device_type is not None and first.device.type != self.device_type:
            self.device_type = None


@dataclass(eq=False, kw_only=True, slots=True)
class Bound:
    """What one module knows of the policy it is bound to.

    Attributes:
        binding: shared by all modules of the model.
        own: the precision its own rule gives it; None without a rule.
        around: the precision of the nearest module above it that has a rule; None where none has.
        is_root: whether it is the module that was prepared.
        inner: a forward of its own that the module had in place of its class's.
        attends: whether short attention inside it is computed in fp32.
        regular: the binding, if inside its region the module does nothing but run its class's forward.
    """

    binding: Binding
    own: Precision = None
    around: Precision = None
    is_root: bool = False
    inner: Callable[..., Any] | None = None
    attends: bool = False
    regular: Binding | Literal[False] = field(init=False)

    def __post_init__(self) -> None:
        is_regular = self.own is None and self.inner is None and not self.attends
        self.regular = is_regular and self.binding


class _Here(threading.local):
    """Which binding's region this thread is in, and whether functorch was at work when it was entered.

    `plain` is the binding where it was not: the one attribute that a module without a rule reads at each call.
    """

    def __init__(self) -> None:
        # Not on the class: there the compiler guards on whether a thread has its own, and fails when it gets them.
        self.binding: Binding | None = None
        self.plain: Binding | None = None
        self.traced = False
        self.outside = False


class _Outside:
    """What a checkpoint recomputes was called from outside the model, and is so again."""

    def __enter__(self) -> None:
        self._before, _here.outside = _here.outside, True

    def __exit__(self, *_: object) -> None:
        _here.outside = self._before


_here = _Here()


@dynamo_skip_frame
def _set_thread_state(binding: Binding | None, traced: bool) -> None:
    _here.binding, _here.traced, _here.plain = binding, traced, None if traced else binding


@dynamo_skip_frame
def _is_traced() -> bool:
    return not is_compiling() and functorch_level() is not None


@dynamo_skip_frame
def _is_recompute() -> bool:
    """Whether a checkpointed part is run again inside a backward pass, under torch's autocast state of its first run.

    torch's checkpoint enters that state, which shows in the nesting of autocast; a module called in a hook does not.
    """
    if is_compiling() or _here.outside or graph_task_id() == -1:
        return False
    torch.autocast_increment_nesting()
    return bool(torch.autocast_decrement_nesting() > 0)


def _is_exported() -> bool:
    """Whether strict export traces, which takes a thread's state, written and put back, for a side effect of the model."""
    return torch.compiler.is_exporting() and torch.compiler.is_dynamo_compiling()


def _is_inside(binding: Binding, traced: bool) -> bool:
    if _is_exported():
        return torch.is_autocast_enabled(binding.device_type or "cpu")
    return _here.binding is binding and traced is _here.traced


@dynamo_graph_break
def _run(bound: Bound, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    traced = _is_traced()
    if not _is_inside(bound.binding, traced):
        return _enter(bound, module, forward, args, kwargs, traced)
    return _run_inside(bound, module, forward, args, kwargs, traced)


@dynamo_graph_break
def _run_inside(
    bound: Bound, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, traced: bool
) -> Any:
    if bound.own is None:
        widens = bound.attends and not traced and not is_compiling() and is_large(args, kwargs)
        with WideAttention() if widens else nullcontext():
            return forward(module, *args, **kwargs)
    return run_ruled(bound.binding, bound.own, module, forward, args, kwargs, traced)


@dynamo_skip_frame
def _open(
    bound: Bound, module: nn.Module, args: tuple[Any, ...], kwargs: Any, traced: bool
) -> tuple[autocast, tuple[Any, ...], Any, AfterForward | None, torch.dtype | None]:
    """Return the region to run a module in, its arguments there, what to call with its output, and the output's dtype."""
    binding, is_eager, after = bound.binding, not is_compiling(), None
    resumes = not bound.is_root and _is_recompute()
    if is_eager:
        binding.follow(module)
        if binding.before_forward is not None and not resumes:
            after = binding.before_forward(module, args, kwargs)
    if is_eager and not resumes:
        (bind_frame if torch.is_grad_enabled() else bind_reentrant)(_Outside)
    if bound.around in FP32_RULES and bound.own is None and not resumes:
        args, kwargs = cast_floating(args, torch.float32), cast_floating(kwargs, torch.float32)
    region = binding.resumed() if resumes else binding.region(bound.around, traced)
    is_inside = resumes or _here.binding is binding
    return region, args, kwargs, after, None if is_inside else binding.policy.output


@dynamo_graph_break
def _enter(
    bound: Bound, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, traced: bool
) -> Any:
    outer, outer_traced = _here.binding, _here.traced
    region, args, kwargs, after, dtype = _open(bound, module, args, kwargs, traced)
    if _is_exported():
        with region:
            out = _run_inside(bound, module, forward, args, kwargs, traced)
        return _close(out, dtype, after)
    _set_thread_state(bound.binding, traced)
    try:
        with region:
            out = _run_inside(bound, module, forward, args, kwargs, traced)
    finally:
        _set_thread_state(outer, outer_traced)
    return _close(out, dtype, after)


@dynamo_skip_frame
def _close(out: Any, dtype: torch.dtype | None, after: AfterForward | None) -> Any:
    """Return a module's output as its caller gets it: in the policy's output dtype, where the caller is outside."""
    out = out if dtype is None else cast_floating(out, dtype)
    if after is not None:
        after(out)
    return out


_classes: dict[type[nn.Module], type[nn.Module]] = {}


def bound_class(original: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass whose forward enters the region of the record that an instance carries.

    An instance without a record behaves as one of `original`.
    """
    if original not in _classes:
        _classes[original] = _make_class(original)
    return _classes[original]


def _make_class(original: type[nn.Module]) -> type[nn.Module]:

    @dynamo_graph_break
    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        bound: Bound | None = self.__dict__.get(RECORD)
        if bound is None:
            return original.forward(self, *args, **kwargs)
        if _here.plain is bound.regular and (is_compiling() or functorch_level() is None):
            return original.forward(self, *args, **kwargs)
        return _run(bound, self, original.forward if bound.inner is None else bound.inner, args, kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        reduced = original.__reduce_ex__(self, protocol)
        if type(self) is subclass and reduced[0] is copyreg.__newobj__:  # type: ignore[attr-defined]  # undocumented
            return (_new_bound, (original,), *reduced[2:])
        return reduced

    kept = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = {"forward": forward, "__reduce_ex__": reduce, "_mezzo_class": original}
    refusals = {"__prepare_scriptable__": _refuse_script, "qconfig": property(_no_qconfig, _refuse_quantization)}
    make: Any = type(original)
    subclass: type[nn.Module] = make(original.__name__, (original,), {**kept, **own, **refusals})
    return subclass


def _refuse_script(module: nn.Module) -> None:
    raise StepError(
        "torch.jit.script was given a prepared model, and its compiler cannot follow a policy. Call amp.release() first, "
        "which gives the plain model back; torch.export takes prepared models."
    )


def _no_qconfig(module: nn.Module) -> None:
    raise AttributeError("qconfig")


def _refuse_quantization(module: nn.Module, qconfig: object) -> None:
    raise StepError(
        "torch.ao.quantization was given a prepared model, and it replaces modules by their exact class, so it would "
        "quantize none of them. Call amp.release() first, which gives the plain model back."
    )


def _new_bound(original: type[nn.Module]) -> nn.Module:
    """Make the empty instance that unpickling and copying fill."""
    subclass = bound_class(original)
    return subclass.__new__(subclass)


@dataclass(eq=False, slots=True)
class _Own:
    """A module's own forward, called as its class's would be: with the module first."""

    forward: Callable[..., Any]

    def __call__(self, _: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


def record(module: nn.Module) -> Bound | None:
    """Return what a module knows of its policy; None if it is not bound."""
    found: Bound | None = module.__dict__.get(RECORD)
    return found


def class_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's class and of the classes above it, as patterns of a policy see them."""
    classes = type(module).__mro__
    return tuple(cls.__name__ for cls in classes if issubclass(cls, nn.Module) and "_mezzo_class" not in vars(cls))


def bind(model: nn.Module, policy: Policy, cache: CacheName = "region") -> Binding:
    """Make a policy part of a model; a model bound before follows the new policy from now on.

    Args:
        model: the root; its modules keep their identity, names and state dict.
        policy: with its compute dtype decided.
        cache: where casts of weights are kept.

    Raises:
        PolicyError: a required module rule matches nothing, or a module that stands in two places of the model has
            different rules there.

    Writes: the class and the record of every module.
    Syncs: no.
    """
    _set_thread_state(_here.binding, _here.traced)  # this thread has it from now on; torch.compile cannot make it
    indices = _indices(model)
    policy.check_modules((fqn, class_names(module)) for module, fqns in indices.items() for fqn in fqns)
    kinds = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    binding = Binding(policy=policy, device_type=kinds.pop() if len(kinds) == 1 else None, cache=cache)
    _bind_all(model, indices, binding)
    return binding


def rebind(model: nn.Module, binding: Binding) -> None:
    """Bind the modules that a bound model has now, after some came or went. Writes: as `bind`."""
    _bind_all(model, _indices(model), binding)


def _indices(model: nn.Module) -> dict[nn.Module, list[str]]:
    indices: dict[nn.Module, list[str]] = {}
    for fqn, module in model.named_modules(remove_duplicate=False):
        indices.setdefault(module, []).append(fqn)
    return indices


def _bind_all(model: nn.Module, indices: dict[nn.Module, list[str]], binding: Binding) -> None:
    own = {fqn: _own_precision(binding.policy, fqn, module) for module, fqns in indices.items() for fqn in fqns}
    for module, fqns in indices.items():
        precisions = {fqn: (own[fqn], _around(own, fqn)) for fqn in fqns}
        _refuse_conflict(module, precisions)
        _bind_one(module, binding, *precisions[fqns[0]], is_root=module is model)


def _own_precision(policy: Policy, fqn: str, module: nn.Module) -> Precision:
    rule = policy.module_rule(fqn, class_names(module))
    return None if rule is None else rule.precision


def _around(own: dict[str, Precision], fqn: str) -> Precision:
    while fqn:
        fqn = fqn.rpartition(".")[0]
        precision = own.get(fqn)
        if precision is not None:
            return precision
    return None


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


def _bind_one(module: nn.Module, binding: Binding, own: Precision, around: Precision, *, is_root: bool) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        if own is not None or is_root:
            raise PolicyError(
                f"a policy cannot be bound to a ScriptModule ({class_names(module)[0]}): its forward is compiled "
                "already. Prepare the module before torch.jit.script, or use torch.compile."
            )
        return
    before, forward = record(module), module.__dict__.pop("forward", None)
    inner = _Own(forward) if forward is not None else None if before is None else before.inner
    if inner is None and isinstance(module, FUSED):
        inner = run_unfused
    attends = binding.widens_attention and own is None and around not in FP32_RULES and _is_innermost_attention(module)
    module.__dict__[RECORD] = Bound(
        binding=binding, own=own, around=around, is_root=is_root, inner=inner, attends=attends
    )
    cls = type(module)
    if hasattr(cls, "_mezzo_class"):
        return
    if is_parametrized(module):  # a class of its own, which remove_parametrizations takes away from above its base
        cls.__bases__ = (bound_class(cls.__bases__[0]),)
    else:
        module.__class__ = bound_class(cls)


def _is_innermost_attention(module: nn.Module) -> bool:
    if not is_attention(class_names(module)):
        return False
    return not any(is_attention(class_names(inner)) for inner in module.modules() if inner is not module)


def remember(model: nn.Module) -> Callable[[], None]:
    """Return a function that gives the modules of a model back class, forward and record as they are now. Host only."""
    kept = [
        (m, type(m), type(m).__bases__, {k: v for k, v in vars(m).items() if k in _WRITTEN}) for m in model.modules()
    ]

    def put_back() -> None:
        for module, cls, bases, written in kept:
            if type(module) is not cls:
                module.__class__ = cls
            if cls.__bases__ != bases:
                cls.__bases__ = bases
            for key in _WRITTEN:
                module.__dict__.pop(key, None)
            module.__dict__.update(written)

    return put_back


def unbind(model: nn.Module) -> None:
    """Take a policy off a model again. Writes: the class, forward and record of every module that has one."""
    for module in model.modules():
        bound, cls = module.__dict__.pop(RECORD, None), type(module)
        if bound is None:
            continue
        if isinstance(bound.inner, _Own):
            module.__dict__["forward"] = bound.inner.forward
        if "_mezzo_class" in vars(cls):
            module.__class__ = vars(cls)["_mezzo_class"]
        else:
            cls.__bases__ = tuple(vars(base).get("_mezzo_class", base) for base in cls.__bases__)


def innermost(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of torch.compile and DistributedDataParallel, whose names patterns match."""
    if isinstance(model, DistributedDataParallel):
        return innermost(model.module)
    inner = getattr(model, "_orig_mod", None)
    return innermost(inner) if isinstance(inner, nn.Module) else model
