"""DistributedDataParallel: whole copies of a model, whose gradients are reduced in the policy's reduce dtype."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._torch import active_ddp, comm_hooks, is_joining
from ..errors import ConfigError, DistributedError, PolicyError, listed
from ..formats import dtype_name
from ..policy import Policy
from .group import Group
from .reducer import Accumulator, CommStats, GradientReducer, hook
from .wrapper import UNKNOWN, Wrapper

_connected: weakref.WeakKeyDictionary[DistributedDataParallel, ReplicaWrapper] = weakref.WeakKeyDictionary()

_COMPRESSING = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}


class ReplicaWrapper(Wrapper):
    """Whole copies of a model on all ranks, held equal by averaging their gradients; no reducer where they have another hook."""

    compares_models = True

    def __init__(self, ddp: DistributedDataParallel, reducer: GradientReducer | None) -> None:
        self.process_group, self.device = ddp.process_group, ddp.device
        self.reducer = reducer
        self._ddp = weakref.ref(ddp)
        self._params = {n: p for n, p in _replicated(ddp).items() if p.requires_grad}
        self._was_called = self._is_spent = False
        self._unknown: set[int] = set()

    def is_another(self, module: nn.Module) -> bool:
        """Whether a module that calls the model is another wrapper than this. Host only."""
        return module is not self._ddp()

    def use(self, group: Group) -> None:
        """Reduce within the limit of a group."""
        if self.reducer is not None:
            self.reducer.group = group

    def note_forward(self) -> None:
        """Take note of whether it is the wrapper that calls the model. Syncs: no."""
        self._was_called |= active_ddp() is self._ddp()

    def check_backward(self) -> None:
        """Refuse a backward pass inside `with ddp.join():`, whose step not all ranks would take. Raises: DistributedError."""
        ddp = self._ddp()
        if ddp is not None and is_joining(ddp):
            raise DistributedError(
                "amp.backward was called inside `with ddp.join():`, where a rank may run out of batches, and amp.step takes a "
                "decision of all ranks. Give each rank as many batches (DistributedSampler pads, drop_last=True cuts), "
                "and leave join() out."
            )
        if self._is_spent and self.reducer is not None:
            self.reducer.averaged.clear()
            self._is_spent = False

    def check_step(self) -> None:
        """Refuse a step on gradients that were never averaged. Raises: DistributedError."""
        if self.reducer is not None and self.reducer.accumulator is not None:
            self.reducer.accumulator.check_averaged()

    def end_step(self) -> None:
        """Take note that the gradients so far are spent."""
        self._is_spent, self._was_called = True, False

    @property
    def is_averaged(self) -> bool:
        """Whether the gradients of all trainable parameters were averaged since the last step."""
        return not self._left_out()

    def has_averaged(self, params: Iterable[Tensor]) -> bool:
        """Whether the gradients of some parameters were averaged since the last step; `why_apart` names those that were not. Host only."""
        if self.reducer is not None:
            self._unknown = set(map(id, params)) - self.reducer.averaged - set(map(id, self._params.values()))
        return not self._unknown

    def _left_out(self) -> dict[str, Tensor]:
        reducer = self.reducer
        return {} if reducer is None else {n: p for n, p in self._params.items() if id(p) not in reducer.averaged}

    def copied(self, tensors: Mapping[Tensor, Tensor]) -> list[Tensor]:
        """Return those tensors whose keys are parameters of the model, in its order. Host only."""
        return [tensors[p] for p in self._params.values() if p in tensors]

    def why_apart(self) -> str:
        """Say why weights may differ after a step, and what to do."""
        left_out, ddp = self._left_out(), self._ddp()
        if self.reducer is None:
            return UNKNOWN
        if late := [name for name, p in _replicated(ddp).items() if id(p) in self._unknown] if ddp is not None else []:
            return (
                f"DistributedDataParallel averages nothing of {listed(late)}, which came or were unfrozen after it took the model. "
                "Write ddp = DistributedDataParallel(amp.model) once more behind the change."
            )
        if not left_out:
            return "Their gradients were averaged in this step: do not load a checkpoint, or write weights or optimizer state, on one rank only."
        unused = [name for name, p in left_out.items() if p.grad is None]
        if unused and len(unused) < len(self._params):
            return (
                f"The loss does not use {listed(unused)}, so DistributedDataParallel did not average the gradients that share "
                "a bucket with theirs. Write DistributedDataParallel(model, find_unused_parameters=True), or freeze them."
            )
        if not self._was_called:
            return (
                "The model was called past its DistributedDataParallel wrapper, so no gradient was averaged. Call the wrapper, "
                "as in ddp(x), not the model inside it."
            )
        return UNKNOWN


def _replicated(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    ignored = ddp.parameters_to_ignore
    return {name: p for name, p in ddp.module.named_parameters() if name not in ignored}


def connect(ddp: DistributedDataParallel, policy: Policy) -> ReplicaWrapper:
    """Have a wrapped model's gradients reduced as a policy says, and return what its steps must know of it.

    Args:
        ddp: the wrapper; a communication hook of the caller's own stays in place and owns the traffic.
        policy: `reduce` is the dtype of what is sent, `grads` that of sums over micro-batches.

    Raises:
        PolicyError: the wrapper has a hook of torch's that sends another dtype.

    Writes: the wrapper's communication hook. Syncs: no.
    """
    before = _connected.get(ddp)
    if before is not None and before.reducer is not None:
        before.reducer.dtype = policy.reduce
        return before
    if _has_own_hook(ddp, policy):
        return ReplicaWrapper(ddp, None)
    accumulator = None
    if policy.grads is torch.float32:
        accumulator = Accumulator(ddp.module.parameters(), lambda: bool(ddp.require_backward_grad_sync))
    reducer = GradientReducer(Group(ddp.process_group), policy.reduce, accumulator, lambda: bool(ddp.static_graph))
    ddp.register_comm_hook(reducer, hook)
    _connected[ddp] = ReplicaWrapper(ddp, reducer)
    return _connected[ddp]


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


def around(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel wrapper whose forward is calling a model just now; None if none does."""
    ddp: DistributedDataParallel | None = active_ddp()
    return ddp if ddp is not None and ddp.module is model else None


def comm_stats_around(model: nn.Module) -> CommStats | None:
    """Return what the connected wrapper of a model has sent so far on this rank; None if nothing connected wraps it."""
    connected = (w.reducer.comm_stats for ddp, w in _connected.items() if w.reducer and model in ddp.module.modules())
    return next(connected, None)


def comm_stats(ddp: nn.Module) -> CommStats:
    """Return what a wrapped model has sent so far on this rank; the object goes on counting.

    Args:
        ddp: a DistributedDataParallel model, prepared or around a prepared one that has run forward.

    Raises:
        ConfigError: it is none, or has a communication hook of its own.
    """
    connected = _connected.get(ddp) if isinstance(ddp, DistributedDataParallel) else None
    if connected is None or connected.reducer is None:
        raise ConfigError(
            f"traffic is counted for a DistributedDataParallel model that mezzo prepared, and this {type(ddp).__name__} "
            "is none. Write mezzo.prepare(DistributedDataParallel(model), optimizer, policy)."
        )
    return connected.reducer.comm_stats
