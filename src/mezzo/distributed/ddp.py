"""DistributedDataParallel: whole copies of a model, whose gradients are reduced in the policy's reduce dtype."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._torch import active_ddp, comm_hooks, delayed_params, is_joining
from ..errors import ConfigError, DistributedError, PolicyError, listed
from ..formats import dtype_name
from ..policy import Policy
from .group import Group
from .reducer import Accumulator, CommStats, GradientReducer
from .wrapper import UNKNOWN, Wrapper

_connected: weakref.WeakKeyDictionary[DistributedDataParallel, ReplicaWrapper] = weakref.WeakKeyDictionary()

_COMPRESSING = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}


def refuse_joining(joined: object, call: str) -> None:
    """Refuse a backward pass that not all ranks would step behind, where a wrapper or optimizer runs inside of join. Raises: DistributedError. Host only."""
    if is_joining(joined):
        raise DistributedError(
            f"amp.backward was called inside `with {call}:`, where a rank may run out of batches, and amp.step takes a "
            f"decision of all ranks. Give each rank as many batches (DistributedSampler pads, drop_last=True cuts), and leave {call.partition('(')[0].removeprefix('ddp.')}() out."
        )


class ReplicaWrapper(Wrapper):
    """Whole copies of a model on all ranks, held equal by averaging their gradients.

    By `reducer`; None where the wrapper has another hook, or reduces as torch does again.
    """

    compares_models = True

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.process_group, self.device = ddp.process_group, ddp.device
        self.reducer: GradientReducer | None = None
        self._ddp = weakref.ref(ddp)
        self._params = {n: p for n, p in _replicated(ddp).items() if p.requires_grad}
        self._was_called = self._is_spent = False

    def reduce_as(self, policy: Policy) -> None:
        """Have gradients reduced as a policy says from now on, and begin anew if another one did before. Writes: hooks of parameters."""
        sums_apart, before = policy.grads is torch.float32, self.reducer
        if before is not None and before.dtype is policy.reduce and (before.accumulator is not None) is sums_apart:
            return
        self.let_go()
        accumulator = None
        if sums_apart:
            accumulator = Accumulator(self._params.values(), lambda: self._has("require_backward_grad_sync"))
        group, is_static = Group(self.process_group), lambda: self._has("static_graph")
        self.reducer = GradientReducer(group, policy.reduce, accumulator, is_static)

    def let_go(self) -> None:
        """Leave reductions to torch. Writes: hooks of parameters."""
        if self.reducer is not None and self.reducer.accumulator is not None:
            self.reducer.accumulator.end()
        self.reducer = None

    def _has(self, attribute: str) -> bool:
        return bool(getattr(self._ddp(), attribute, False))

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
        """Refuse a backward pass that not all ranks would step behind, inside `with ddp.join():`, or that would not be averaged. Raises: DistributedError."""
        if (ddp := self._ddp()) is not None:
            refuse_joining(ddp, "ddp.join()")
        waits_for_all = self._was_called and not self._has("find_unused_parameters")
        averages = waits_for_all and self._has("require_backward_grad_sync")
        if averages and (frozen := [name for name, p in self._params.items() if not p.requires_grad]):
            raise DistributedError(
                f"{listed(frozen)} {'was' if len(frozen) == 1 else 'were'} frozen after DistributedDataParallel took the model, which waits "
                "for gradients of all and would leave others unaveraged. Write DistributedDataParallel(model, find_unused_parameters=True), or wrap the model again."
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

    def has_averaged(self, stepped: Iterable[Tensor]) -> bool:
        """Whether the gradients of all trainable parameters, and of those stepped, were averaged since the last step. Host only."""
        return not self._left_out() and not self._late(stepped)

    def _late(self, stepped: Iterable[Tensor]) -> set[int]:
        """Return the ids of parameters stepped that came after the wrapper took the model, and were not averaged."""
        known = set(map(id, self._params.values()))
        return set() if self.reducer is None else set(map(id, stepped)) - self.reducer.averaged - known

    def _left_out(self) -> dict[str, Tensor]:
        reducer = self.reducer
        return {} if reducer is None else {n: p for n, p in self._params.items() if id(p) not in reducer.averaged}

    def copied(self, tensors: Mapping[Tensor, Tensor]) -> list[Tensor]:
        """Return those tensors whose keys are parameters of the model, in its order. Host only."""
        return [tensors[p] for p in self._params.values() if p in tensors]

    def why_apart(self, stepped: Iterable[Tensor]) -> str:
        """Say why weights may differ after a step of some parameters, and what to do. Host only."""
        left_out, ddp, came_late = self._left_out(), self._ddp(), self._late(stepped)
        if self.reducer is None:
            return f"{UNKNOWN} Where weights are averaged now and then, as in local SGD, write amp.consensus.every = 0."
        if late := [name for name, p in _replicated(ddp).items() if id(p) in came_late] if ddp is not None else []:
            return (
                f"DistributedDataParallel averages nothing of {listed(late)}, which came or were unfrozen after it took the model. "
                "Write ddp = DistributedDataParallel(amp.model) once more behind the change."
            )
        if ddp is not None and (ignored := ddp.parameters_to_ignore):
            return f"DistributedDataParallel was told to leave out {listed(sorted(ignored))}: where they are each rank's own, write amp.consensus.every = 0."
        if not left_out:
            return "Their gradients were averaged in this step: do not load a checkpoint, or write weights or optimizer state, on one rank only."
        unused = [name for name, p in left_out.items() if p.grad is None]
        if unused and len(unused) < len(self._params):
            return (
                f"The loss does not use {listed(unused)}, so DistributedDataParallel did not average the gradients that share "
                "a bucket with theirs. Write DistributedDataParallel(model, find_unused_parameters=True), or freeze them."
            )
        past = "The model was called past its DistributedDataParallel wrapper, so no gradient was averaged. Call the wrapper, as in ddp(x), not the model inside it."
        return UNKNOWN if self._was_called else past


def _replicated(ddp: DistributedDataParallel) -> dict[str, Tensor]:
    ignored = ddp.parameters_to_ignore
    return {name: p for name, p in ddp.module.named_parameters() if name not in ignored}


def connect(ddp: DistributedDataParallel, policy: Policy) -> ReplicaWrapper:
    """Have a wrapped model's gradients reduced as a policy says, and return what its steps must know of it.

    Args:
        ddp: the wrapper; a communication hook of the caller's own stays in place and owns the reductions.
        policy: `reduce` is the dtype of what is sent, `grads` that of sums over micro-batches.

    Raises:
        PolicyError: the wrapper has a hook of torch's that sends another dtype, any hook beside `grads` other than its weights, or casts weights or writes gradients itself.

    Writes: the wrapper's communication hook. Syncs: no.
    """
    wrapper = _connected.get(ddp)
    if wrapper is None:
        _refuse_own_ways(ddp)
        wrapper = ReplicaWrapper(ddp)
        if _has_own_hook(ddp, policy):
            return wrapper
        try:
            ddp.register_comm_hook(wrapper, _hook)
        except RuntimeError as error:
            raise PolicyError(
                "the DistributedDataParallel model sends gradients by another hook already (of an optimizer inside of backward, or built "
                f"into torch), and the policy's reduce={dtype_name(policy.reduce)} would not be kept. Leave it out."
            ) from error
        _connected[ddp] = wrapper
    wrapper.reduce_as(policy)
    return wrapper


def _hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with classes; ours are strings
    """Reduce a bucket, as DistributedDataParallel calls its hooks: with the wrapper's reducer, or as torch does."""
    if state.reducer is not None:
        return state.reducer.reduce(bucket)
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    return allreduce_hook(state.process_group, bucket)


def disconnect(model: nn.Module) -> bool:
    """Have the connected wrapper of a model send gradients as torch does, and return whether there is one. Writes: hooks of parameters."""
    wrappers = _around(model)
    for wrapper in wrappers:
        wrapper.let_go()
    return bool(wrappers)


def _around(model: nn.Module) -> list[ReplicaWrapper]:
    inner = {*model.modules()}
    return [wrapper for ddp, wrapper in _connected.items() if model in ddp.module.modules() or ddp in inner]


def _refuse_own_ways(ddp: DistributedDataParallel) -> None:
    if ddp.mixed_precision is not None:
        raise PolicyError(
            "the DistributedDataParallel model has mixed_precision, and the policy casts weights too: two mechanisms would, each its own way. Leave mixed_precision out."
        )
    if delayed_params(ddp):
        raise PolicyError(
            "the DistributedDataParallel model has delay_all_reduce_named_params, which writes gradients before each forward that amp.backward did not make. Leave it out."
        )


def _has_own_hook(ddp: DistributedDataParallel, policy: Policy) -> bool:
    others = {dtype_name(p.dtype) for p in _replicated(ddp).values() if p.requires_grad and policy.grads is not p.dtype}
    for given, _ in comm_hooks(ddp):
        name = getattr(given, "__name__", type(given).__name__)
        sent = _COMPRESSING.get(name)
        if policy.grads is not None and others:
            raise PolicyError(
                f"the policy declares grads={dtype_name(policy.grads)}, and {name}, a hook of its own, has DistributedDataParallel take "
                f"gradients in the dtype of their weights, {' and '.join(sorted(others))}. Leave the hook out, or grads out of the policy."
            )
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
    return next((wrapper.reducer.comm_stats for wrapper in _around(model) if wrapper.reducer is not None), None)


def comm_stats(ddp: nn.Module) -> CommStats:
    """Return what a wrapped model has sent so far on this rank; the object goes on counting. Host only.

    Args:
        ddp: a DistributedDataParallel model, prepared or around a prepared one that has run forward.

    Raises:
        ConfigError: it is none, or has a communication hook of its own.
    """
    connected = _connected.get(ddp) if isinstance(ddp, DistributedDataParallel) else None
    if connected is None or connected.reducer is None:
        raise ConfigError(
            f"reductions are counted for a DistributedDataParallel model that mezzo prepared, and this {type(ddp).__name__} "
            "is none. Write mezzo.prepare(DistributedDataParallel(model), optimizer, policy)."
        )
    return connected.reducer.comm_stats
