"""What a prepared model refuses, compilers and quantizers that cannot follow a policy, and casts of what is trained; and how it is copied."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..casting import weight_casts
from ..errors import StepError, listed
from ..formats import dtype_name

_log = logging.getLogger("mezzo.binding")
_warned: WeakSet[nn.Module] = WeakSet()
"""Modules of which the log said that their forward's cast is left out."""


BOUND = "_mezzo_bound"
"""Where a bound module keeps its `Bound`: beside its parameters, not in its state dict."""


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


def refuse_symbolic_trace() -> NoReturn:
    """Raise the StepError for arguments that stand for values: the graph that they are traced into would not hold the region."""
    raise StepError(
        "torch.fx.symbolic_trace was given a prepared model, and its graph would not hold the policy: functions would run in fp32. Trace it "
        "before mezzo.prepare, which takes the traced model, or call amp.release() first; torch.export takes prepared models."
    )


REFUSALS: dict[str, Any] = {
    "__prepare_scriptable__": _refuse_script,
    "qconfig": property(_no_qconfig, _refuse_quantization),
}
"""Of every bound class."""


def copying(
    kind: type[nn.Module], bound: Callable[[], type[nn.Module]], remake: Callable[..., Any]
) -> dict[str, Callable[..., Any]]:
    """Return the methods of the `bound` class below one that copy a module, or give its class a forward, as those of torch.fx do; `remake` calls a function and binds the class of what it returns. Host only."""

    def reduce(module: nn.Module, protocol: Any) -> Any:
        reduced = kind.__reduce_ex__(module, protocol)
        if type(module) is not bound() or isinstance(reduced, str):
            return reduced
        return (remake, tuple(kind if one is bound() else one for one in (reduced[0], *reduced[1])), *reduced[2:])

    def copied(module: nn.Module, name: str, *memo: dict[int, Any]) -> Any:
        made, own = getattr(kind, name)(module, *memo), vars(module).get(BOUND)
        if own is None or BOUND in vars(made):
            return made
        vars(made)[BOUND] = copy.deepcopy(own, {id(module): made, **memo[0]}) if memo else own
        return remake(lambda: made)

    def recompile(module: Any) -> Any:
        object.__setattr__(module, "__class__", kind)
        try:
            return module.recompile()
        finally:
            object.__setattr__(module, "__class__", bound())

    methods: dict[str, Any] = {name: partialmethod(copied, name) for name in ("__copy__", "__deepcopy__")}
    methods["recompile"] = recompile
    return {"__reduce_ex__": reduce, **{name: own for name, own in methods.items() if hasattr(kind, name)}}


def leaves_dtypes(module: nn.Module, function: Callable[[Tensor], Tensor], bound: Any, *, is_running: bool) -> bool:
    """Return whether a cast of parameters that a stepper trains is to be left out: one by the model's own forward.

    Routers of mixtures of experts cast their layer to fp32 at each call. The policy decides in which dtype it runs, as
    torch.autocast does; the log says so once.

    Raises:
        StepError: another dtype outside of a forward, fp64, or another device with it, before anything is changed.

    Writes: kept casts are dropped where torch swaps weights. Host only.
    """
    if torch.__future__.get_swap_module_params_on_conversion():  # torch swaps no weight that somebody refers to
        bound.kept = None
        weight_casts.clear()
    if not bound.binding.is_trained:
        return False
    trained = {name: p for name, p in module.named_parameters() if p.is_floating_point() and p.requires_grad}
    for kind, device in {(p.dtype, p.device) for p in trained.values()}:
        cast = function(torch.empty(0, dtype=kind, device=device))
        if cast.dtype is kind:
            continue
        names = [name for name, p in trained.items() if p.dtype is kind]
        if is_running and cast.device == device and cast.dtype is not torch.float64:
            _say_left_out(module, cast.dtype, kind, bound.binding)
            return True
        raise StepError(
            f"{len(names)} parameters ({listed(names)}) that a stepper trains would be stored in {dtype_name(cast.dtype)} instead of "
            f"{dtype_name(kind)}, behind the back of its policy, {bound.binding.policy!s}, and of its optimizers. Call "
            "amp.release() first (under a framework, release() of its stepper), which gives the plain model back, to be cast and prepared again; nothing was changed."
        )
    return False


@contextmanager
def keeps_gradients(module: nn.Module, function: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Convert the gradients of weights that torch swaps in the block, which swaps no gradient that a step has a stamp of, and keep their dtype.

    Writes: `.grad` and `grad_dtype` of those weights. Syncs: as the function does.
    """
    always = torch.__future__.get_swap_module_params_on_conversion()
    swapped = [p for p in module.parameters() if always or hasattr(p, "__tensor_flatten__")]
    own = {p: p.grad_dtype for p in swapped if p.grad_dtype is not p.dtype}
    grads = {p: grad for p in swapped if (grad := p.grad) is not None}
    for p in grads:
        p.grad = None
    moved: dict[Tensor, Tensor] = {}
    try:
        yield
        with torch.no_grad():
            moved = {p: function(grad) for p, grad in grads.items()}
    finally:
        for p, dtype in own.items():
            p.grad_dtype = dtype
        for p, grad in grads.items():
            p.grad = _with_data(grad, moved.get(p, grad))


def _with_data(grad: Tensor, moved: Tensor) -> Tensor:
    """Return a gradient that has the memory of another one; a plain one itself, so that its stamp holds. Writes: `grad.data`. Host only."""
    if moved is grad or hasattr(grad, "__tensor_flatten__"):
        return moved
    grad.data = moved
    return grad


def _say_left_out(module: nn.Module, asked: torch.dtype, kind: torch.dtype, binding: Any) -> None:
    if module in _warned:
        return
    _warned.add(module)
    name = next((name for name, inner in binding.stepper.model.named_modules() if inner is module), "")
    ops = "its ops run as the policy says, as under torch.autocast"
    if binding.low_dtype() is None:
        ops = "autocast is off here, where only inputs of that dtype fit them"
    _log.warning(
        "the model's forward casts the weights of %s (%s) to %s; they stay in %s, in which they are trained, and %s. Write %s=%s in the policy to have it that way.",
        name or "the root", type(module).__name__, dtype_name(asked), dtype_name(kind), ops,
        name if "." in name else f"module:{name}" if name else "*", dtype_name(asked),
    )  # fmt: skip
