"""DistributedDataParallel: whole copies of a model, whose gradients are reduced in the policy's reduce dtype."""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .._torch import active_ddp, comm_hooks
from ..errors import ConfigError, PolicyError
from ..formats import dtype_name
from ..policy import Policy
from .accumulate import Accumulator
from .consensus import RankConsensus
from .group import Group
from .reducer import CommStats, GradientReducer, hook

_reducers: weakref.WeakKeyDictionary[DistributedDataParallel, GradientReducer] = weakref.WeakKeyDictionary()

_COMPRESSING = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}


def connect(ddp: DistributedDataParallel, policy: Policy) -> RankConsensus:
    """Have a wrapped model's gradients reduced as a policy says, and return what makes its ranks agree.

    Args:
        ddp: the wrapper; a communication hook of the caller's own stays in place and owns the traffic.
        policy: `reduce` is the dtype of what is sent, `grads` that of sums over micro-batches.

    Raises:
        PolicyError: the wrapper has a hook of torch's that sends another dtype.

    Writes: the wrapper's communication hook. Syncs: no.
    """
    before = _reducers.get(ddp)
    if before is not None:
        before.dtype = policy.reduce
        return _agreement(ddp, before)
    if _has_own_hook(ddp, policy):
        return RankConsensus(ddp.process_group)
    accumulator = None
    if policy.grads is torch.float32:
        accumulator = Accumulator(ddp.module.parameters(), lambda: bool(ddp.require_backward_grad_sync))
    reducer = GradientReducer(Group(ddp.process_group), policy.reduce, accumulator)
    ddp.register_comm_hook(reducer, hook)
    _reducers[ddp] = reducer
    return _agreement(ddp, reducer)


def _agreement(ddp: DistributedDataParallel, reducer: GradientReducer) -> RankConsensus:
    check = None if reducer.accumulator is None else reducer.accumulator.check_averaged
    return RankConsensus(ddp.process_group, before=check)


def _has_own_hook(ddp: DistributedDataParallel, policy: Policy) -> bool:
    for given, _ in comm_hooks(ddp):
        name = getattr(given, "__name__", type(given).__name__)
        sent = _COMPRESSING.get(name)
        if sent is not None and sent is not policy.reduce:
            raise PolicyError(
                f"the policy declares reduce={dtype_name(policy.reduce)}, and the DistributedDataParallel model has {name}, "
                f"which sends {dtype_name(sent)}. Leave the hook out, or write reduce={dtype_name(sent)}."
            )
    return bool(comm_hooks(ddp))


def around(module: nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel wrapper whose forward is calling a module just now; None if none does."""
    ddp: DistributedDataParallel | None = active_ddp()
    return ddp if ddp is not None and ddp.module is module else None


def comm_stats_around(model: nn.Module) -> CommStats | None:
    """Return what the connected wrapper of a model has sent so far on this rank; None if nothing connected wraps it."""
    inside = (reducer.comm_stats for ddp, reducer in _reducers.items() if model in ddp.module.modules())
    return next(inside, None)


def comm_stats(ddp: nn.Module) -> CommStats:
    """Return what a wrapped model has sent so far on this rank; the object goes on counting.

    Args:
        ddp: a DistributedDataParallel model, prepared or around a prepared one that has run forward.

    Raises:
        ConfigError: it is none, or has a communication hook of its own.
    """
    reducer = _reducers.get(ddp) if isinstance(ddp, DistributedDataParallel) else None
    if reducer is None:
        raise ConfigError(
            f"traffic is counted for a DistributedDataParallel model that mezzo prepared, and this {type(ddp).__name__} "
            "is none. Write mezzo.prepare(DistributedDataParallel(model), optimizer, policy)."
        )
    return reducer.comm_stats
