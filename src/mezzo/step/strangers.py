"""What the calling code has and mezzo.prepare was not given: a GradScaler that multiplied a loss, optimizers, averages of weights; and losses that it spoilt."""

from __future__ import annotations

import logging
import re
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dis import opname
from itertools import chain
from traceback import walk_stack
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch import constant_factor
from ..casting import variables_of
from ..errors import StepError, listed
from ..formats import LOW_DTYPES, dtype_name
from ..kernels import local
from ..loss_scale import GradScaler
from ..optim import parameters, wrapped_optimizer
from ..stamp import Stamp, version_of

_log = logging.getLogger("mezzo.step")
_SHORT = 32
_ROUNDED = ("BinaryCrossEntropyBackward0", "ToCopyBackward0", "SigmoidBackward0")
_named: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_AVERAGES = re.compile("Averag|E[Mm]A|Ema")
NO_SCALER = (
    "After mezzo.prepare there is no GradScaler: the stepper scales where the policy says so. Write amp.backward(loss), then "
    "amp.step()."
)


def is_called_by_scaler() -> bool:
    """Whether a method of a GradScaler is among the calls that led here. Host only."""
    callers = (variables_of(frame).get("self") for frame, _ in walk_stack(sys._getframe()))
    return any(isinstance(caller, torch.amp.GradScaler) for caller in callers)


def is_call(frame: FrameType) -> bool:
    """Whether what a frame reads just now is an attribute that it calls at once: `a.b(...)`, not `a.b`. Host only."""
    code, at = frame.f_code.co_code, frame.f_lasti
    name = opname[code[at]]
    return name == "LOAD_METHOD" or (name == "LOAD_ATTR" and sys.version_info >= (3, 12) and code[at + 1] % 2 == 1)


class AverageByHand:
    """Called before forwards of a copy of a model; says once that its weights are averaged in 16 bit, whose masters stayed behind.

    That is, they were written time and again, and are not what the model's are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._version: int | None = None
        self._num_written = 0

    def __deepcopy__(self, memo: object) -> AverageByHand:
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def __call__(self, module: nn.Module, args: object, kwargs: object) -> None:
        """Compare the first weight in 16 bit. Syncs: where it was written, until it is said."""
        name, weight = next(((n, p) for n, p in module.named_parameters() if p.dtype in LOW_DTYPES), ("", None))
        if weight is None or self._num_written > 1 or self._version == version_of(weight):
            return
        was, self._version = self._version, version_of(weight)
        model = self._model()
        source = None if model is None else dict(model.named_parameters()).get(name)
        if was is None or source is None or torch.equal(local(source), local(weight)):
            return
        self._num_written += 1
        if self._num_written == 2:
            _log.warning(
                "a copy of the prepared model is averaged by hand in %s, which rounds away what is added to its weights. Write "
                "target = copy.deepcopy(model).float(), and average what amp.export_weights() returns into it.",
                dtype_name(weight.dtype),
            )


def warn_of_average(dtype: torch.dtype) -> bool:
    """Say what is lost where an average of weights is about to copy 16-bit ones, whose masters stay behind; return whether one is. Host only."""
    inits = [frame for frame, _ in walk_stack(sys._getframe()) if frame.f_code.co_name == "__init__"]
    made = [type(variables_of(frame).get("self")).__name__ for frame in inits]
    name = next(filter(_AVERAGES.search, made), None)
    if name is not None:
        _log.warning(
            "%s copies weights in %s without their masters, and rounds away what it adds to them. Write "
            "plain = copy.deepcopy(model).float(), %s(plain, ...), and plain.load_state_dict(amp.export_weights()) before each update "
            "from plain.", name, dtype_name(dtype), name,
        )  # fmt: skip
    return name is not None


def warn_of_earlier(model: nn.Module, dtype: torch.dtype) -> None:
    """Say which averages within reach of the calling code hold a model's weights, now 16 bit, whose masters they will not see. Syncs: where one has their shapes."""
    own, weights = set(model.modules()), [local(p.detach()) for p in model.parameters()]
    kinds = {type(one) for one in _in_reach() if issubclass(type(one), nn.Module) and one not in own
             and _AVERAGES.search(type(one).__name__) and _are_rounded(weights, one)}  # fmt: skip
    for name in sorted(kind.__name__ for kind in kinds):
        _log.warning(
            "%s was made before mezzo.prepare, and its weights follow the model's as these are rounded to %s. Write "
            "plain = copy.deepcopy(model).float(), and before each update, from plain, plain.load_state_dict(amp.export_weights()); "
            "or take the policy '%s', whose weights are fp32.", name, dtype_name(dtype), dtype_name(dtype),
        )  # fmt: skip


def _are_rounded(weights: Sequence[Tensor], average: nn.Module) -> bool:
    held = [local(p.detach()) for p in average.parameters()]
    are_alike = [p.shape for p in held] == [p.shape for p in weights] and not any(p.is_meta for p in (*held, *weights))
    return are_alike and all(torch.equal(p.to(weight), weight) for p, weight in zip(held, weights, strict=True))


def refuse_stranger(
    optimizer: Optimizer, prepared: Sequence[Optimizer], stamps: Mapping[int, Stamp], names: Mapping[Tensor, str]
) -> None:
    """Refuse the step of an optimizer that was not prepared, where gradients carry the loss scale, as their stamps tell, or prepared ones keep masters of its weights.

    That is a StepError. One of torch's on other 16-bit weights of the model, which has no masters, is named in the log once. Host only.
    """
    if any(optimizer in (known, wrapped_optimizer(known)) for known in prepared):
        return
    held = [(p, grad, stamps.get(id(p))) for p in parameters(optimizer) if (grad := p.grad) is not None]
    scaled = [p for p, grad, stamp in held if stamp is not None and stamp.is_current(grad)]
    kind = type(optimizer)
    instead = "Give every optimizer to mezzo.prepare(model, [...]), and write amp.step(optimizer=...) for one of them"
    for outer in map(wrapped_optimizer, prepared):
        if any(part is optimizer for part in vars(outer).values()):
            instead = f"{type(outer).__name__} was, and steps it: write amp.step(closure), or amp.step() where it takes no closure"
    if scaled:
        raise StepError(
            f"{kind.__name__}.step() was called on the gradients of {listed([names.get(p, 'a parameter') for p in scaled])}, "
            f"which carry the loss scale, and this optimizer was not prepared. {instead}."
        )
    low = [p for p, *_ in held if p in names and p.dtype in LOW_DTYPES]
    kept = {p for one in prepared for p in parameters(one)} if low else set()
    if stepped := [names[p] for p in low if p in kept]:
        raise StepError(
            f"{kind.__name__}.step() was called on {listed(stepped)}, stored in {dtype_name(low[0].dtype)}, of which prepared "
            "optimizers keep what 16 bit cannot hold, and this optimizer was not prepared: it would round its updates away. "
            f"{instead}; or call amp.release() first."
        )
    if low and kind.__module__.startswith("torch.optim") and optimizer not in _named:
        _named.add(optimizer)
        _log.warning(
            "%s steps 16-bit weights of a prepared model and was not prepared: it has no masters, and an update smaller than half "
            "the spacing of a weight is lost. Write amp.backward(loss) and amp.step(), and give every optimizer to mezzo.prepare.",
            kind.__name__,
        )


def refuse_scaled(loss: Tensor) -> None:
    """Refuse, by a StepError, a loss that a GradScaler of the calling code multiplied, since the stepper scales by itself.

    A loss times a tensor is looked at; the scaler is sought in the variables of the functions that called. Syncs: no.
    """
    factor = constant_factor(loss)
    if factor is None:
        return
    for scaler in (one for one in _in_reach() if issubclass(type(one), torch.amp.GradScaler)):
        scale = getattr(scaler, "_scale", None)
        if scaler.is_enabled() and isinstance(scale, Tensor) and _is_from(scaler, scale, factor):
            raise StepError(
                f"backward(loss) was given a loss that {type(scaler).__name__}.scale multiplied. {NO_SCALER}"
            )


def warn_of_probabilities(loss: Tensor) -> bool:
    """Say in the log that a loss is a cross entropy of what a sigmoid rounded to 16 bit, as its graph shows; return whether it is. Host only."""
    todo: list[tuple[Any, int]] = [(loss.grad_fn, 0)] if loss.grad_fn is not None else []
    for node, num_met in todo:
        is_met, following = node.name() == _ROUNDED[num_met], node.next_functions
        if is_met and num_met == len(_ROUNDED) - 1:
            _log.warning(
                "binary_cross_entropy is taken of a sigmoid in 16 bit, which is 1 from logits of 6 (bf16) or 8 (fp16) on: there the loss "
                "may be 100 and the gradient 0. Write binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the values before the "
                "sigmoid, or add 'op:sigmoid=fp32' to the policy."
            )
            return True
        is_on_the_way = is_met or not num_met or len(following) == 1  # behind the loss, shapes and casts alone
        if is_on_the_way and len(todo) < _SHORT:
            todo += [(one, num_met + is_met) for one, _ in following[: 1 if is_met else None] if one is not None]
    return False


def _is_from(scaler: torch.amp.GradScaler, scale: Tensor, factor: Tensor) -> bool:
    if isinstance(scaler, GradScaler):  # mezzo's multiplies with a copy
        return bool(factor == scale.to(factor.device))
    return scale.device == factor.device and scale.data_ptr() == factor.data_ptr()


def _in_reach() -> Iterator[Any]:
    """Return what the functions that called have: variables, members of the object whose methods they are, of what its short lists hold, globals."""
    for frame, _ in walk_stack(sys._getframe(1)):
        variables = variables_of(frame)
        members = _members(variables.get("self"))
        held = [item for one in members if type(one) is list and len(one) < _SHORT for item in one]
        yield from chain(variables.values(), members, *map(_members, held), list(frame.f_globals.values()))


def _members(owner: object) -> list[Any]:
    try:
        return list(object.__getattribute__(owner, "__dict__").values())  # a proxy is not asked for what it stands for
    except AttributeError:
        return []
