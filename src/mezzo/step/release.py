"""The way back from prepare: a model and its optimizers as they were, or plain again with what was trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..binding import innermost, store_, unbind
from ..distributed import disconnect, sharded_modules
from ..errors import StepError
from ..formats import LOW_DTYPES, dtype_name
from ..kernels import local
from ..optim import MasterWeights, keeps_masters, local_optimizer, parameters, release, wrapped_optimizer
from .ranks import master_of
from .update import allow_direct_steps

_log = logging.getLogger("mezzo.step")


@dataclass(frozen=True, slots=True, eq=False)
class Original:
    """What a model was before it was prepared: the dtype of each parameter and of its gradient, and the optimizers as they were given."""

    dtypes: dict[Tensor, tuple[torch.dtype, torch.dtype | None]]
    optimizers: tuple[Optimizer, ...]


def original(model: nn.Module, optimizers: Sequence[Optimizer]) -> Original:
    """Take down what parameters are. Host only."""
    params = dict.fromkeys((*model.parameters(), *(p for o in optimizers for p in parameters(o))))
    return Original({p: (p.dtype, p.grad_dtype) for p in params}, tuple(optimizers))


def remember_attributes(model: nn.Module, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Return a function that gives the modules of a model their hooks back, and optimizers class, options, state and hooks. Host only."""
    were = [(one, type(one), dict(vars(one))) for inner in optimizers for one in {inner, local_optimizer(inner)}]
    hooks = [value for module in model.modules() for name, value in vars(module).items() if name.endswith("_hooks")]
    found = _held_in([*hooks, *(value for _, _, attributes in were for value in attributes.values())], 3)
    contents = [(held, dict(held) if isinstance(held, dict) else list(held)) for held in found]

    def put_back() -> None:
        for one, kind, attributes in were:
            if type(one) is not kind:
                object.__setattr__(one, "__class__", kind)
            vars(one).clear()
            vars(one).update(attributes)
        for held, content in contents:
            held.clear()
            (held.update if isinstance(held, dict) else held.extend)(content)

    return put_back


def remember_run(model: nn.Module, optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Return a function that gives a run back what it is now: optimizers, and weights and buffers, which are copied to the host. Syncs: yes."""
    optimizers_back = remember_attributes(model, [*optimizers, *map(wrapped_optimizer, optimizers)])
    held = {t: local(t.detach()).to("cpu", copy=True) for t in (*model.parameters(), *model.buffers())}

    @torch.no_grad()
    def put_back() -> None:
        optimizers_back()
        for tensor, value in held.items():
            local(tensor).copy_(value)

    return put_back


def _held_in(values: Iterable[Any], depth: int) -> Iterator[Any]:
    """Yield dicts and lists, and those that they hold down to a depth."""
    for value in values if depth else ():
        if isinstance(value, dict | list):
            yield value
            yield from _held_in(value.values() if isinstance(value, dict) else value, depth - 1)


def remember_weights(model: nn.Module, was: Original) -> Callable[[], None]:
    """Return a function that gives parameters storage and `grad_dtype` back. It holds their memory and copies nothing."""
    values = {p: p.detach() for p in was.dtypes}

    def put_back() -> None:
        stored = {p: v for p, v in values.items() if p.dtype is not v.dtype or _address(p) != _address(v)}
        store_(model, stored)
        _give_grad_dtypes_back({p: grad_dtype for p, (_, grad_dtype) in was.dtypes.items()})

    return put_back


def _address(tensor: Tensor) -> int:
    """Return where a tensor lies; 0 for a sparse or nested one, which is stored elsewhere only in another dtype. Host only."""
    return tensor.data_ptr() if tensor.layout is torch.strided and not tensor.is_nested else 0


def _give_grad_dtypes_back(dtypes: Mapping[Tensor, torch.dtype | None]) -> None:
    """Write down only what differs: what is written once follows `model.float()` no more."""
    for p, dtype in dtypes.items():
        if p.grad_dtype is not dtype:
            p.grad_dtype = dtype


def refuse_sharded(model: nn.Module, optimizers: Sequence[Optimizer], was: Original) -> None:
    """Raise a StepError where `fully_shard` gathers weights in 16 bit, as it goes on to do, that a release stores in fp32. Host only."""
    is_stored_anew = any(p.dtype is not dtype for p, (dtype, _) in was.dtypes.items())
    if any(keeps_masters(local_optimizer(optimizer)) for optimizer in optimizers):  # which become the weights
        is_stored_anew = any(p.dtype in LOW_DTYPES for p in was.dtypes)
    if is_stored_anew and sharded_modules(innermost(model)):
        raise StepError(
            "amp.release() would store 16-bit weights in fp32, and fully_shard goes on to gather them in 16 bit. Write weights = "
            "amp.export_weights() on every rank, build the model anew, and load them into it."
        )


@torch.no_grad()
def release_(model: nn.Module, optimizers: Sequence[Optimizer], was: Original) -> None:
    """Make a prepared model and its optimizers plain again; see `Stepper.release`. Gradients are reduced as torch does it from now on.

    Writes: classes and storage of the model; state and hooks of the optimizers and of a wrapper. Syncs: as `master_of`.
    """
    owners = {p: optimizer for optimizer in optimizers for p in parameters(optimizer)}
    values: dict[Tensor, Tensor] = {}
    grad_dtypes = {}
    for p in {**was.dtypes, **owners}:
        p.grad, owner = None, owners.get(p)
        dtype, grad_dtype = was.dtypes.get(p, (p.dtype, p.grad_dtype))
        if owner is not None and keeps_masters(local_optimizer(owner)) and p.dtype in LOW_DTYPES:
            values[p] = master_of(owner, p).clone()
        elif p.dtype is not dtype:
            is_trained = owner is not None and dtype in LOW_DTYPES  # and moved by less than 16 bit can hold
            values[p] = p.detach() if is_trained else p.detach().to(dtype)
        grad_dtypes[p] = values[p].dtype if p in values else grad_dtype
    inner = innermost(model)
    if disconnect(inner) and values:
        _log.warning(
            "%d weights are stored in %s again, and DistributedDataParallel, which took hold of them as they were, averages their "
            "gradients no more. Write ddp = DistributedDataParallel(model) once more",
            len(values), " and ".join(sorted({dtype_name(value.dtype) for value in values.values()})),
        )  # fmt: skip
    store_(inner, values)
    _give_grad_dtypes_back(grad_dtypes)
    for optimizer, given in zip(optimizers, was.optimizers, strict=True):
        let_go(optimizer, given)
    unbind(inner)


def let_go(optimizer: Optimizer, given: Optimizer) -> None:
    """Make an optimizer what it was given as: without masters, hooks and mezzo's kernels. Writes: class, state, hooks."""
    allow_direct_steps(optimizer)
    if optimizer is given and isinstance(optimizer, MasterWeights):
        optimizer.drop_masters()
    else:
        release(optimizer)


class Released:
    """In the place of a released stepper's engine."""

    def __init__(self, optimizers: tuple[Optimizer, ...]) -> None:
        self.optimizers = optimizers

    def __getattr__(self, name: str) -> NoReturn:
        raise StepError(
            "this stepper was released. Write amp = mezzo.prepare(model, optimizer, policy) to prepare again."
        )
