"""Where a program stands when an op runs: phase, module, line, step, loss scale."""

from __future__ import annotations

import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._torch import (
    DispatchMode,
    HigherOrderOperator,
    OpOverload,
    autograd_node,
    dispatch_modes,
    is_compiler_loaded,
    next_node_number,
    node_number,
    storage_id,
    without_dispatch_modes,
    without_function_modes,
)
from ..distributed import is_running
from ..formats import LOW_DTYPES
from .frames import Owner, caller, locate
from .modules import ModuleStack, Place
from .ops import CASTS, has_no_values, node_op, plain, takes_itself_apart
from .records import Phase, Site

_OPERATORS = {"truediv": "div", "floordiv": "floor_divide", "invert": "bitwise_not"}
_READS = frozenset({"numpy", "tolist", "array"})
_FROM_NUMBERS = {"tensor": 0, "new_tensor": 1}
_LOOPS = frozenset({"while_loop", "map_impl", "associative_scan", "flex_attention"})
_ZEROS = frozenset({"zero_", "_foreach_zero_"})
_WRITES = frozenset({"fill_", "mul_", "__imul__", "__setitem__"})
"""Functions that set something to 0 where their last argument is."""
_CLEARS = _ZEROS | _WRITES | {"__set__"}
_SITES_KEPT = 400_000


class Names(TorchFunctionMode):
    """Keeps what the dispatcher does not see: the public name of the torch function that runs, and the region.

    Attributes:
        current: name of the function that runs; empty where torch calls itself.
        assigned: the number that `tensor[index] = number`, while it runs, hands on as a tensor; else None.
        backward_dtype: what the region around the running `backward` casts to; None outside regions.
        on_read: called with a tensor before it becomes an array or a list.
        on_cleared: called with the arguments of what sets something to 0, or to None as gradients are, before it.
        on_numbers: called with a 16-bit tensor and the numbers of Python's that it was made of.
        in_region: whether the last function was called in a region.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current = ""
        self.assigned: float | None = None
        self.in_region = False
        accelerator = torch.accelerator.current_accelerator()
        self._devices = {"cpu", "cpu" if accelerator is None else accelerator.type}
        self.backward_dtype: torch.dtype | None = None
        self.on_read: Callable[[Tensor], None] | None = None
        self.on_cleared: Callable[[object], None] = lambda cleared: None
        self.on_numbers: Callable[[Tensor, Any], None] = lambda tensor, data: None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run a function under its own name."""
        name = getattr(func, "__name__", "")
        above, self.current = (self.current, self.assigned), public_name(name)
        self.in_region = True in map(torch.is_autocast_enabled, self._devices)
        self.assigned = float(args[2]) if self.current == "setitem" and isinstance(args[2], int | float) else None
        if self.current in _READS and self.on_read is not None and args and isinstance(args[0], Tensor):
            self.on_read(args[0])
        if name in _CLEARS and _is_cleared_by(name, args):
            self.on_cleared(args[:1])
        if self.current == "backward":
            given = args[0] if isinstance(args[0], Tensor) else next(iter(args[0]))
            device = given.device.type
            self.backward_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        try:
            if isinstance(func, HigherOrderOperator) and (calls := _plain_control_flow(func)) is not None:
                with self:  # which sees the functions that are called
                    return calls(*args, **(kwargs or {}))
            made = func(*args, **(kwargs or {}))
            given = _FROM_NUMBERS.get(self.current, len(args))
            if given < len(args) and made.dtype in LOW_DTYPES:
                self.on_numbers(made, args[given])
            return made
        finally:
            (self.current, self.assigned), self.backward_dtype = above, None


def _plain_control_flow(op: HigherOrderOperator) -> Callable[..., Any] | None:
    """Return what a control-flow op computes, as calls of its functions; None for other ops.

    Uncompiled, these ops refuse dispatch modes, and a weight that a branch reads from outside gets no gradient.
    """
    name = op.name()  # type: ignore[no-untyped-call]  # torch's own
    if name == "cond":
        return lambda holds, yes, no, operands: (yes if holds else no)(*operands)
    if name == "scan":
        generic_scan = sys.modules[type(op).__module__].generic_scan
        return lambda combine, carry, xs, inputs: generic_scan(combine, carry, xs, additional_inputs=inputs)
    kernels = op.py_kernels if name in _LOOPS else {}
    return next((kernel for key, kernel in kernels.items() if key.name == "CompositeExplicitAutograd"), None)


def _is_cleared_by(name: str, args: tuple[Any, ...]) -> bool:
    zero = isinstance(args[-1], int | float) and args[-1] == 0 if args else False
    return name in _ZEROS or (name in _WRITES and zero) or (name == "__set__" and args[1:] == (None,))


@cache
def public_name(name: str) -> str:
    """Return what a policy calls a torch function or operator.

    >>> public_name("__rtruediv__"), public_name("__matmul__"), public_name("add_"), public_name("layer_norm")
    ('div', 'matmul', 'add', 'layer_norm')
    """
    if not name.startswith("__"):
        return name.strip("_")
    name = name.strip("_")
    for prefix in ("r", "i"):
        stem = name.removeprefix(prefix)
        if stem != name and hasattr(torch, _OPERATORS.get(stem, stem)) and not hasattr(torch, name):
            name = stem
    return _OPERATORS.get(name, name)


def rank() -> int:
    """Return this process's rank, 0 where no process group was started."""
    return torch.distributed.get_rank() if is_running() else 0


class TraceContext:
    """Answers "where are we?" for the op that is running.

    A backward op is placed where the forward op it differentiates was placed. The link is the sequence number
    autograd gives a node when the forward op runs: the node is made just before the op reaches the dispatcher.

    Attributes:
        step: optimizer steps before this one, skipped ones counted.
        loss_scale: factor on the loss of the last backward.
        last_gradient_of: the leaf whose gradient arrived last in this step.
    """

    def __init__(
        self,
        model: nn.Module | None,
        on_output: Callable[[nn.Module, Place, Any], None] = lambda *_: None,
        on_root: Callable[[nn.Module], None] = lambda _: None,
        step: int = 0,
    ) -> None:
        self.modules = ModuleStack(model, self._on_root, on_output)
        self.names = Names()
        self.step = step
        self.loss_scale = 1.0
        self.optimizers: list[torch.optim.Optimizer] = []
        self.is_optimizer_running = self.has_closure = False
        self.last_gradient_of: Tensor | None = None
        self._told_root = on_root
        self._step_ended = False
        self._sites: dict[int | tuple[int, str], Site] = {}
        self.rank = rank()

    def _on_root(self, module: nn.Module) -> None:
        if autograd_node() is None:
            # a process group may be started inside a trace
            self.rank = rank()
            self._begin_step()
        self._told_root(module)

    def _begin_step(self) -> None:
        # where zero_grad was called, whatever scaler is at work skipped the step
        if self._step_ended or (self.last_gradient_of is not None and self.last_gradient_of.grad is None):
            self.step, self._step_ended, self.last_gradient_of = self.step + 1, False, None

    def end_step(self) -> None:
        """Say that an optimizer step was applied or skipped; the next forward belongs to the next step."""
        self._step_ended = True

    def site(self, op: str) -> Site:
        """Return where the running op, given by its plain name, stands."""
        node = autograd_node()
        here = locate(node is not None)
        if node is None or here.is_recompute:
            place = self.modules.place
            # a closure's loss is forward, as in LBFGS
            in_closure = self.has_closure and torch.is_grad_enabled()
            is_update = self.is_optimizer_running and not in_closure and self.modules.is_outside and node is None
            site = self._site("optimizer" if is_update else "forward", place, here.user, here.library, op)
            self._remember(site, next_node_number() - 1)
            return site
        origin = self._origin(node)
        nearer = here.user is not None
        ran = op if nearer else node_op(node.name())
        if origin is None:
            return self._site("backward", Place(), here.user, here.library, ran)
        site = replace(
            origin,
            phase="backward",
            user=here.user if nearer else origin.user,
            library=here.library if nearer else origin.library,
            called=self.names.current if nearer else origin.called,
            op=origin.op if "CopySlices" in node.name() and not nearer else ran,
            step=self.step,
            rank=self.rank,
            own_node=node_op(node.name()) if nearer else "",
        )
        if torch.is_grad_enabled():  # a derivative that is differentiated again stands where the first one did
            self._remember(site, next_node_number() - 1)
        return site

    def _site(self, phase: Phase, place: Place, user: Any, library: Any, op: str) -> Site:
        called = self.names.current
        if called in CASTS and (cause := caller())[0] is Owner.MEZZO:
            called = public_name(cause[1])  # no line of the program's makes the cast of a rule
        return Site(
            phase=phase, root=place.root, module=place.held_by, classes=place.classes, user=user, library=library,
            called=called, op=op, step=self.step, rank=self.rank, is_ruled=bool(place.root) or self.names.in_region,
        )  # fmt: skip

    def _remember(self, site: Site, sequence: int) -> None:
        if len(self._sites) > _SITES_KEPT:
            self._sites = dict(list(self._sites.items())[_SITES_KEPT // 2 :])
        self._sites.setdefault(sequence, site)
        self._sites.setdefault((sequence, site.op), site)

    def _origin(self, node: Any) -> Site | None:
        """Return the site of the forward op that made an autograd node."""
        if "AccumulateGrad" in node.name():
            return None
        sequence = node_number(node)
        if "CopySlices" in node.name():
            # made after its op; the op's own node, which it runs, came just before
            sequence -= 1
        return self._sites.get((sequence, node_op(node.name()))) or self._sites.get(sequence)

    def enter_backward(self, loss: Tensor) -> None:
        """Take note of a backward from `loss`, and of the factor its last op multiplied it by. Syncs: yes."""
        self._begin_step()
        self.loss_scale = _factor(loss)

    def name_of(self, tensor: Tensor) -> str:
        """Return what a tensor is called: parameter, buffer, input or optimizer state; empty if none of them. Syncs: no."""
        found = self.modules.name_of(tensor)
        key = storage_id(tensor)
        for optimizer in self.optimizers if not found else ():
            for parameter, state in optimizer.state.items():
                for name, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, Tensor) and storage_id(value) == key:
                        return f"optimizer state {name} of {self.parameter_name(parameter)}"
        return found

    def parameter_name(self, parameter: Tensor) -> str:
        """Return a parameter's name in the first module that holds it, or its place in an optimizer. Syncs: no."""
        known = self.modules.parameter_name(parameter)
        for optimizer in self.optimizers if not known else ():
            for i, group in enumerate(optimizer.param_groups):
                for j, held in enumerate(group["params"]):
                    if held is parameter:
                        return f"param_groups[{i}]['params'][{j}]"
        return known


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Have compiled code run eagerly, so that its ops are seen one by one; the compiler is not imported for it.

    Writes: torch's stance, or `torch.compile` until it is called, inside of which a stance cannot be taken.
    """
    compile, on = torch.compile, ExitStack()

    def compile_then_run_eagerly(*args: Any, **kwargs: Any) -> Any:
        made = compile(*args, **kwargs)
        if torch.compile is compile_then_run_eagerly:
            torch.compile = compile
            on.enter_context(torch.compiler.set_stance("force_eager"))
        return made

    with on:
        try:
            if is_compiler_loaded():
                on.enter_context(torch.compiler.set_stance("force_eager"))
            else:
                torch.compile = compile_then_run_eagerly
            yield
        finally:
            torch.compile = compile


class OpMode(DispatchMode):
    """Sees every op that reaches torch's dispatcher, and knows where the program stands: `context` says it."""

    def __init__(self, context: TraceContext) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.context = context

    def __torch_dispatch__(
        self,
        func: OpOverload[Any, Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Hand one op to `run_op`, or run it unseen if it is the tool's own."""
        kwargs = kwargs or {}
        if any(map(has_no_values, types)):
            return func(*args, **kwargs)
        if any(map(takes_itself_apart, types)):
            self.before_parts(func, args)
            return NotImplemented
        return self.run_op(func, args, kwargs)

    def before_parts(self, func: OpOverload[Any, Any], args: tuple[Any, ...]) -> None:
        """Take note of an op on tensors that answer it by ops on others: quantised, distributed. Those ops come next, one by one."""

    @abstractmethod
    def run_op(self, func: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op, take in what it reads and makes, and return its results."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let ops of the tool itself pass unseen."""
        with self.alone(), torch.no_grad():
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep ops of the tool itself from every mode: those of the program count its own."""
        with without_function_modes(), without_dispatch_modes() if dispatch_modes() else nullcontext():
            yield

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run a block op by op, compiled models too. Writes: torch's global module hooks, until its end."""
        with self.context.modules.following(), warnings.catch_warnings(), run_eagerly(), self.context.names, self:
            # of compiled models
            warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")
            yield


def _factor(loss: Tensor) -> float:
    """Return the constant number a loss was multiplied by last, as a loss scaler does; 1 if there is none.

    A number below 1 is the weight of a loss: no scaler makes gradients smaller.
    """
    node = loss.grad_fn
    if node is None or node.name() != "MulBackward0":
        return 1.0
    for i, saved in ((1, "_saved_other"), (0, "_saved_self")):
        value = getattr(node, saved, None)
        if node.next_functions[i][0] is None and isinstance(value, Tensor) and value.numel() == 1:
            # a distributed one is read by its part; a whole number has none
            with without_dispatch_modes():  # which get a plain number in place of what autograd saved of one
                own = plain(value)
                return max(float(value if own is None else own), 1.0)
    return 1.0
