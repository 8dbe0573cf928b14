"""A run for the sake of looking at it: under a policy and without a trace left in the model, or by the methods of a stepper that somebody covers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from ..binding import named_tensors
from ..distributed import sharded_modules
from ..errors import ConfigError, kind_of
from ..formats import describe
from ..policy import Policy
from ..step import Stepper
from ..step.prepare import prepare
from ..trace import preserve_state

LossFn = Callable[[nn.Module, Any], Tensor]


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter, the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def call(model: nn.Module, batch: Any) -> Any:
    """Call a model on a batch: a dict is named arguments, a tuple or list positional ones, all else one argument. Raises: ConfigError: it takes others."""
    named = batch if isinstance(batch, Mapping) else {}
    placed = () if named is batch else batch if isinstance(batch, (tuple, list)) else (batch,)
    if isinstance(model, nn.Module) and (why := why_not_called(model.forward, *placed, **named)):
        raise ConfigError(
            f"the batch does not fit the model: {type(model).__name__}.forward() does not take it: {why}. A tuple or list is its "
            "positional arguments, a dict its named ones. Write loss_fn=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]) for inputs and targets."
        )
    return model(*placed, **named)


def check_trial(call: str, batch: object, loss_fn: object) -> None:
    """Refuse a batch that is a loader and a loss that cannot be called as `loss_fn(model, batch)`. Host only. Raises: ConfigError."""
    if isinstance(batch, DataLoader):
        raise ConfigError(f"{call} was given DataLoader for batch; give one batch: next(iter(loader)).")
    if loss_fn is None:
        return
    given = f"{call} was given {getattr(loss_fn, '__name__', kind_of(loss_fn))} for loss_fn"
    if not callable(loss_fn) or isinstance(loss_fn, Policy):
        raise ConfigError(
            f"{given}; it takes a function of (model, batch) that returns the loss. A policy is given by its name: policy=..."
        )
    home = getattr(loss_fn, "__module__", None) or ""
    if home.startswith("torch.nn.") or type(loss_fn).__module__.startswith("torch.nn."):
        raise ConfigError(
            f"{given}, which takes outputs and targets. Write lambda model, batch: loss_fn(model(batch[0]), batch[1])."
        )
    if why_not_called(loss_fn, None, None):
        raise ConfigError(f"{given}, which takes other arguments than (model, batch). Write lambda model, batch: ...")


def why_not_called(function: Callable[..., object], *given: object, **named: object) -> str:
    """Return what does not fit where a function is called with arguments; empty if they fit, or it is one of C, which does not say. Host only."""
    try:
        inspect.signature(function).bind(*given, **named)
    except (TypeError, ValueError) as error:
        return str(error) if isinstance(error, TypeError) else ""
    return ""


def loss_of(model: nn.Module, batch: Any, loss_fn: LossFn | None) -> Tensor:
    """Return the loss: `loss_fn`'s, else the sum of the mean squares of every floating output, in fp32.

    Raises: ConfigError: what `loss_fn` returns is no tensor of one number. Syncs: as the model does.
    """
    if loss_fn is not None:
        loss: object = loss_fn(model, batch)
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss
        got, hint = (describe(loss), " Write .mean() or .sum().") if isinstance(loss, Tensor) else (kind_of(loss), "")
        raise ConfigError(f"loss_fn returned {got} instead of the loss, a tensor of one number.{hint}")
    outputs = [t for _, t in named_tensors(call(model, batch), "output") if t.is_floating_point()]
    return torch.stack([t.float().square().mean() for t in outputs]).sum() if outputs else torch.zeros(())


def scale_of(policy: Policy | None, model: nn.Module) -> float:
    """Return the loss scale a policy starts with on the device of a model, 1 without one."""
    scaling = None if policy is None else policy.resolve(device_of(model)).scaling
    return 1.0 if scaling is None else scaling.init_scale


def backward(loss: Tensor, scale: float) -> None:
    """Go backward from a loss times a loss scale, outside of any region, where something wants gradients. Writes: gradients. Syncs: no."""
    if loss.requires_grad:
        with torch.autocast(loss.device.type, enabled=False):
            (loss * scale).backward()  # type: ignore[no-untyped-call]  # torch's own


class _Detaching(TorchFunctionMode):
    """Has `deepcopy` take computed tensors, as a pruned module or one that remembers its output keeps them, for plain ones; torch's raises."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not Tensor.__deepcopy__ or args[0].is_leaf:
            return function(*args, **(kwargs or {}))
        args[1][id(args[0])] = copied = function(args[0].detach(), args[1])  # type: ignore[no-untyped-call]  # torch's own
        return copied


def copied(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of a model, without DistributedDataParallel; tensors that it has computed and keeps are detached there. Raises: ConfigError: it is sharded. Syncs: no."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if sharded_modules(inner):
        raise ConfigError(
            f"{type(inner).__name__} is sharded, and a copy is what is looked at. Give it before fully_shard."
        )
    with _Detaching():
        return copy.deepcopy(inner, {} if memo is None else memo)


@contextmanager
def bind_copy(model: nn.Module, policy: Policy | None) -> Iterator[nn.Module]:
    """Yield the model bound to a policy, a prepared copy, or itself where there is no policy; it is left as it was. Raises: PolicyError: they do not fit; ConfigError: the block went backward through the model in place of the copy."""
    with preserve_state(model):
        if policy is None:
            yield model
            return
        bound = copied(model)
        prepare(bound, None, policy)
        yield bound
        went = [any(p.grad is not None for p in one.parameters()) for one in (model, bound)]
        if went == [True, False]:
            raise ConfigError(
                "loss_fn(model, batch) went through a model of its caller's, not through the one it is given, a copy bound to the policy, "
                "so nothing is known of that. Write it with the name of its first argument, as in lambda model, batch: model(batch).mean()."
            )


def cover(amp: Stepper, **covers: Callable[..., Any]) -> Callable[[], None]:
    """Have functions called in the place of a stepper's methods of their names, each with that method before its arguments.

    Others may cover the same methods, before and after, and leave in any order. Returns a function that ends it.

    Writes: attributes of the stepper.
    """
    held, is_on = vars(amp), True
    before = {name: held[name] for name in covers if name in held}

    def over(method: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **options: function(method, *args, **options) if is_on else method(*args, **options)

    own = {name: over(getattr(amp, name), function) for name, function in covers.items()}
    held.update(own)

    def leave() -> None:
        nonlocal is_on
        is_on = False
        for name in [name for name, method in own.items() if held.get(name) is method]:
            del held[name]
            if name in before:
                held[name] = before[name]

    return leave
