"""A bound module's forward: the region it runs in, and what is called around the model."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import GeneratorType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling, is_exporting

from .._torch import (
    dynamo_count_apart,
    dynamo_pass_through,
    dynamo_skip_alone,
    dynamo_skip_frame,
    frame_callback,
    functorch_level,
    graph_task_id,
    is_unwatched,
    replaces_tensors,
    saved_tensors_hooks,
    tracing_state,
)
from ..casting import (
    ExportedModel,
    ProductWatch,
    autocast,
    bind_recompute,
    has_own_attention,
    is_in_exported_model,
    is_large,
    run_attention,
)
from ..kernels import is_emulated
from ..policy import FP32_RULES, CacheName, Policy
from .hand_written import class_of, with_module_first
from .module_rules import Precision, cast_nest, has_module_rules, in_steps, run_ruled, when_traced, without_module_rules
from .module_weights import ParameterEntry, WideTensors, first_entry, largest_matrix
from .refusals import BOUND, REFUSALS, copying, keeps_gradients, leaves_dtypes, refuse_symbolic_trace

Forward = Callable[..., Any]
AfterForward = Callable[[object], None]
BeforeForward = Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], AfterForward | None]


@dataclass(eq=False, kw_only=True)
class Binding:
    """A policy as it is bound to the modules of one model.

    Attributes:
        policy: with its compute dtype decided.
        device_type: of the model's tensors; None for several: the CPU and the accelerator.
        cache: where casts of weights are kept.
        before_forward: called before each forward of the root, or of a module that is called without it, outside torch.compile, with
            module and arguments; what it returns, if anything, with the output. It is one stepper's, which may leave a copy of the model another.
        owner: the stepper that was made with it; not copied either.
        before_trace: called before a compiler traces a forward of the root, outside its graph; not copied.
        widens: whether weights that a policy before stored in 16 bit are stored in fp32 again, since now nothing casts what meets them.
    """

    policy: Policy
    device_type: str | None
    cache: CacheName = "region"
    before_forward: BeforeForward | None = field(default=None, repr=False)
    owner: weakref.ref[Any] | None = field(default=None, repr=False)
    before_trace: Callable[[], None] | None = field(default=None, repr=False)
    widens: bool = False

    def __post_init__(self) -> None:
        self._op_rules, self._is_low = without_module_rules(self.policy), self.policy.is_low
        device = self.device_type or "cpu"
        self._traced_rules = when_traced(self._op_rules, device)  # a compiler traces `region`
        self._regions: dict[tuple[torch.dtype | None, CacheName], autocast] = {}
        self.fuses = self._is_low and has_module_rules(self.policy)  # `modules=none` is torch's autocast to the bit
        fuses_on_cpu = self.fuses and has_own_attention(self.device_type)
        self.has_own_ops = fuses_on_cpu and self._dispatches("cpu", self.cache)
        self.emulates = fuses_on_cpu and is_emulated(self.policy.compute)
        # On an accelerator seeing each op would take the host longer than the casts.
        self.keeps_casts = self._is_low and device != "cpu" and self.cache == "persistent" and self._dispatches(device)
        self.region_key = f"{self.policy!s} {self.device_type} {self.cache}"

    def _dispatches(self, device: str, cache: CacheName = "region") -> bool:
        return self.policy.why_engine(device, cache).engine == "dispatcher"

    def __getstate__(self) -> dict[str, Any]:
        watch = self.stepper._note_copy() if self.is_trained else None
        return {**self.__dict__, "before_forward": watch, "owner": None, "before_trace": None, "_regions": {}}

    @property
    def stepper(self) -> Any:
        """The stepper that was made with it, if it lives."""
        return None if self.owner is None else self.owner()

    @property
    def is_trained(self) -> bool:
        """Whether that stepper has optimizers, which know the weights in the dtype that they have."""
        return self.stepper is not None and len(self.stepper.optimizers) > 0

    def region(self, precision: Precision, traced: bool) -> autocast:
        """Return the region in which a precision holds; None stands for the policy's own compute dtype.

        Where it is traced functorch or torch.jit.trace is at work, past whom torch's dispatcher does not cast; the function mode does,
        without a cache, since what it would keep are the tracers of one call.
        """
        if precision in FP32_RULES or not self._is_low:
            return autocast(self.device_type, enabled=False)
        dtype = precision if isinstance(precision, torch.dtype) else self.policy.compute
        if traced:
            return autocast(self.device_type, dtype, cache_enabled=False, policy=self._traced_rules, cache="persistent")
        return self.kept_region(dtype, "region" if self.keeps_casts else self.cache)

    def kept_region(self, dtype: torch.dtype | None, cache: CacheName) -> autocast:
        """Return a region, made once: entered again each time, it keeps what it is inside of by thread."""
        found = None if is_compiling() else self._regions.get((dtype, cache))
        region = found or autocast(self.device_type, dtype, policy=self._op_rules, cache=cache)
        if not is_compiling():
            self._regions[dtype, cache] = region
        return region

    def resumed(self) -> autocast:
        """Return a region that leaves torch's autocast as it is now and brings the policy's op rules back."""
        low = self.low_dtype()
        return autocast(self.device_type, enabled=False) if low is None else self.region(low, traced=False)

    def low_dtype(self) -> torch.dtype | None:
        """Return the dtype low ops run in just here; None where casting is off."""
        device = self.device_type or "cpu"
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def follow(self, first: nn.Parameter | None) -> None:
        """Notice by its first parameter that the model was moved to another device since it was bound."""
        if first is None or self.device_type is None or (first.is_cpu and self.device_type == "cpu"):
            return
        if first.device.type != self.device_type:
            self.device_type, self._traced_rules = None, when_traced(self._op_rules, first.device.type)
            self._regions.clear()


@dataclass(eq=False, kw_only=True, slots=True)
class Bound:
    """What one module knows of the policy it is bound to.

    Attributes:
        binding: shared by all modules of the model.
        own: the precision its own rule gives it; None without a rule.
        around: the precision of the nearest module above it that has a rule; None where none has.
        is_root: whether it is the module that was prepared.
        inner: what is called in place of the class's forward: one that the module had, or one op that computes the same.
        stays: whether `inner` runs also where the class has got another forward since.
        attends: whether attention inside it runs mezzo's way.
        idle: calls that met no attention, in evaluation and in training; far below 0 once there was one.
        is_regular: whether inside the binding's region the module does nothing but run its forward.
        traced_key: the key of regions where a compiler traces the class's forward and the own rule, without a look at this; empty where there is more.
        breaks: whether a compiler's graph that had the module's region in it broke inside: from then on those inside have it around them.
        first: where the module's first parameter stands, once somebody asked.
        products: what is known of its products, once somebody asked.
        kept: casts of the module's weights that are kept, and what they are casts of.
        wide: tensors in the module that its forward may not narrow for good; None before somebody asked, False where there are none.
    """

    binding: Binding
    own: Precision = None
    around: Precision = None
    is_root: bool = False
    inner: Callable[..., Any] | None = None
    stays: bool = False
    attends: bool = False
    is_regular: bool = True
    traced_key: str = ""
    idle: list[int] = field(default_factory=lambda: [0, 0], init=False, repr=False)
    breaks: bool = field(default=False, init=False, repr=False)
    first: ParameterEntry | None = field(default=None, init=False, repr=False)
    products: ProductWatch | None = field(default=None, init=False, repr=False)
    kept: tuple[object, tuple[Tensor, Tensor | None]] | None = field(default=None, init=False, repr=False)
    wide: WideTensors | Literal[False] | None = field(default=None, init=False, repr=False)

    def first_parameter(self, module: nn.Module) -> nn.Parameter | None:
        """Return the first of the module's parameters, sought anew where it no longer stands where it did. Host only."""
        if self.first is None or self.first[1] not in self.first[0]:
            self.first = first_entry(module)
        return None if self.first is None else self.first[0][self.first[1]]

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Leave out where the first parameter stands, kept casts, and what is known of products: a copy has its own."""
        own = ("first", "kept", "products", "wide")
        return None, {name: None if name in own else getattr(self, name) for name in self.__slots__}


class _Here(threading.local):
    """Which binding's region this thread is in, and whether functorch was at work when it was entered; `plain` is the binding where it was not."""

    def __init__(self) -> None:
        # Not on the class: there the compiler guards on whether a thread has its own, and fails when it gets them.
        self.binding: Binding | None = None
        self.plain: Binding | None = None
        self.traced = self.outside = False


class _Outside:
    """What a checkpoint recomputes was called from outside the model, and is so again."""

    def __enter__(self) -> None:
        self._before, _here.outside = _here.outside, True

    def __exit__(self, *_: object) -> None:
        _here.outside = self._before


_here = _Here()


def enter_thread() -> None:
    """Give this thread its state, which torch.compile cannot make. Host only."""
    _set_thread_state(_here.binding, _here.traced)


@dynamo_skip_frame
def _set_thread_state(binding: Binding | None, traced: bool) -> None:
    _here.binding, _here.traced, _here.plain = binding, traced, None if traced else binding


@dynamo_skip_frame
def _is_traced() -> bool:
    return not is_compiling() and (functorch_level() is not None or tracing_state() is not None)


@dynamo_skip_frame
def _is_recompute() -> bool:
    """Whether a checkpointed part is run again inside a backward pass: in autocast's state of its first run, as the nesting shows, unlike a module in a hook."""
    if is_compiling() or _here.outside or graph_task_id() == -1:
        return False
    torch.autocast_increment_nesting()
    return bool(torch.autocast_decrement_nesting() > 0)


def _is_inside(binding: Binding, traced: bool) -> bool:
    if is_dynamo_compiling() and is_exporting():
        return is_in_exported_model() and torch.is_autocast_enabled(binding.device_type or "cpu")
    return _here.binding is binding and traced is _here.traced


@dynamo_pass_through
def _run(bound: Bound, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: Any) -> Any:
    traced = _is_traced()
    run = _run_inside if _is_inside(bound.binding, traced) else _enter
    out = run(bound, module, forward, args, kwargs, traced)
    if type(out) is GeneratorType and not is_compiling():
        return in_steps(lambda step: _run(bound, module, step, args, kwargs), out)
    return out


@dynamo_pass_through
def _run_inside(bound: Bound, module: nn.Module, forward: Forward, args: Any, kwargs: Any, traced: bool = False) -> Any:
    if bound.own is None:
        if not bound.attends or traced or is_exporting() or not is_large(args, kwargs):
            return forward(module, *args, **kwargs)
        return run_attention(bound.idle, module, forward, args, kwargs)
    return run_ruled(bound.binding, bound.own, module, forward, args, kwargs, traced)


@dynamo_skip_frame
def _open(
    bound: Bound, module: nn.Module, args: tuple[Any, ...], kwargs: Any, traced: bool, between: bool
) -> tuple[AbstractContextManager[object], tuple[Any, ...], Any, AfterForward | None, torch.dtype | None]:
    """Return the region to run a module in, its arguments there, what to call with its output, and the output's dtype.

    What is called between the graphs of a compiler gets no mode for products: the compiler would meet it in each frame below.
    """
    binding, is_eager, after = bound.binding, not is_compiling(), None
    if any([isinstance(arg, torch.fx.Proxy) for arg in (*args, *kwargs.values())]) and binding.policy.is_low:
        refuse_symbolic_trace()
    resumes = not bound.is_root and _is_recompute()
    if is_eager:
        bound.breaks = bound.breaks or between
        binding.follow(bound.first_parameter(module))
        if binding.before_forward is not None and not resumes:
            after = binding.before_forward(module, args, kwargs)
        bound.wide = WideTensors.of(module) if bound.wide is None else bound.wide
    elif bound.is_root and binding.before_trace is not None:
        binding.before_trace()
    if is_eager and not resumes and not (torch.is_grad_enabled() and saved_tensors_hooks() is None):
        bind_recompute(_Outside)
    if bound.around in FP32_RULES and bound.own is None and not resumes:
        args, kwargs = [cast_nest(given, torch.float32, "an input", module) for given in (args, kwargs)]
    region: AbstractContextManager[object] = binding.resumed() if resumes else binding.region(bound.around, traced)
    if binding.emulates and not (resumes or between) and is_unwatched():
        bound.products = bound.products or ProductWatch(largest_matrix(module))
        region = bound.products.around(region, module.training, args, kwargs)
    if bound.wide and is_eager and not traced:
        region = bound.wide.around(region)
    outer = _here.binding
    is_inside = resumes or outer is binding or (outer is not None and outer.region_key == bound.traced_key)
    return region, args, kwargs, after, None if is_inside else binding.policy.output


@dynamo_pass_through
def _enter(bound: Bound, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: Any, traced: bool) -> Any:
    outer, outer_traced = _here.binding, _here.traced
    between = not is_compiling() and frame_callback() is not None
    region, args, kwargs, after, dtype = _open(bound, module, args, kwargs, traced, between)
    if is_dynamo_compiling() and is_exporting():  # which takes what is written and put back of a thread for an effect
        with region, ExportedModel():
            out = _run_inside(bound, module, forward, args, kwargs, traced)
        return _close(module, out, dtype, after)
    with region:  # around what says so: a signal's handler in between enters one of its own
        try:
            _set_thread_state(bound.binding, traced)
            out = _run_inside(bound, module, forward, args, kwargs, traced)
        finally:
            _set_thread_state(outer, outer_traced)
    return _close(module, out, dtype, after)


@dynamo_skip_frame
def _close(module: nn.Module, out: Any, dtype: torch.dtype | None, after: AfterForward | None) -> Any:
    """Return a module's output as its caller gets it: in the policy's output dtype, where the caller is outside."""
    out = out if dtype is None else cast_nest(out, dtype, "the output", module)
    if after is not None:
        after(out)
    return out


@functools.cache
def bound_class(original: type[nn.Module], traced_key: str, rule: Precision) -> type[nn.Module]:
    """Return the subclass whose forward enters the region of an instance's `Bound`; without one it behaves as `original`.

    In regions of `traced_key` a compiler traces the forward with its rule, and guards on the class alone: see `Bound`.
    """
    taken = with_module_first(original, lambda: subclass)
    written: Forward = taken.forward
    run_in_one_graph: Forward = dynamo_count_apart(lambda run, *args: run(*args))

    @dynamo_skip_alone
    @functools.wraps(original.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        here = _here.plain
        if is_dynamo_compiling() and here is not None and here.region_key == traced_key:
            if rule is None:
                return taken.forward(self, *args, **kwargs)
            return run_ruled(here, rule, self, taken.forward, args, kwargs, traced=False)
        bound: Bound | None = self._mezzo_bound  # type: ignore[assignment]  # read from `__dict__` it is three guards more
        if bound is None:
            return taken.forward(self, *args, **kwargs)
        is_inside = here is bound.binding and (is_dynamo_compiling() or functorch_level() is None)
        own_forward = bound.inner if bound.inner and (bound.stays or taken.forward is written) else taken.forward
        if is_inside and bound.is_regular:
            return own_forward(self, *args, **kwargs)
        run = _run_inside if is_inside else _run
        if is_dynamo_compiling() or bound.breaks or frame_callback() is None:
            return run(bound, self, own_forward, args, kwargs)
        return run_in_one_graph(run, bound, self, own_forward, args, kwargs)

    if issubclass(original, nn.LSTM | nn.GRU):  # it runs between the compiler's graphs, where mezzo's kernel may
        dynamo_skip_frame(dynamo_count_apart(forward))

    kept = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    remake = functools.partial(_remade, traced_key, rule)
    own = {BOUND: None, "forward": forward, "_mezzo_class": original, **replaces_tensors(original, _convert)}
    own |= {**copying(original, lambda: subclass, remake), **REFUSALS}
    # A registry of the class is told of none of ours.
    base = nn.Module if hasattr(original.__init_subclass__, "__func__") else original
    subclass: type[nn.Module] = type(original)(original.__name__, (base,), {**kept, **own})  # type: ignore[misc]  # of its metaclass
    subclass.__bases__ = (original,)
    return subclass


def _convert(
    module: nn.Module, run: Callable[..., Any], function: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any
) -> Any:
    """Do what `half`, `to` or one of their like does; a dtype that a stepper trains is left alone, and refused outside of a forward."""
    bound = bound_of(module)
    if bound is not None and leaves_dtypes(module, function, bound, is_running=_here.binding is bound.binding):
        return module
    with keeps_gradients(module, function):
        return run(function, *args, **kwargs)


def _remade(traced_key: str, rule: Precision, make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    made = make(*args)
    object.__setattr__(made, "__class__", bound_class(class_of(made), traced_key, rule))
    return made


def bound_of(module: nn.Module) -> Bound | None:
    """Return what a module knows of its policy; None if it is not bound."""
    return module.__dict__.get(BOUND)
