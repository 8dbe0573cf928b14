"""Who else takes part in a step: found when the model is prepared, or when DistributedDataParallel first calls it; told of each step and compared."""

from __future__ import annotations

import logging
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..binding import innermost
from ..distributed import (
    Group,
    RankConsensus,
    RankSetup,
    ShardWrapper,
    Signals,
    Wrapper,
    around,
    check_sharded,
    check_storage,
    connect,
    digest_of_piece,
    holding,
    is_distributed,
    living,
    refuse_flat,
    sharded_modules,
)
from ..errors import PolicyError
from ..formats import LOW_DTYPES, describe
from ..kernels import AUX_STATE, any_dtensor, is_dtensor, num_shards
from ..loss_scale import LossScale
from ..optim import MasterOptimizer, keeps_masters, local_optimizer, parameters
from ..policy import Policy
from ..stamp import versions_of
from .load_hooks import LoadHooks

_log = logging.getLogger("mezzo.step")


def wrapper_of(model: nn.Module, policy: Policy) -> Wrapper | None:
    """Return what spreads a model, as it was prepared, over ranks; None if nothing does yet.

    Raises:
        PolicyError: gradients are reduced or weights are gathered in another dtype than the policy says.

    Writes: the communication hook of a DistributedDataParallel model.
    """
    if (replicas := _replicas_in(model, policy)) is not None:
        return replicas
    if sharded_modules(model):
        check_sharded(model, policy)
        check_storage(model, policy)
    return ShardWrapper(model, policy) if any_dtensor(model.parameters()) else None


def wrapper_around(model: nn.Module, policy: Policy) -> Wrapper | None:
    """Return the DistributedDataParallel wrapper that holds a model; None if none does. Raises: as `wrapper_of`. Writes: its communication hook."""
    refuse_flat(model, looks_around=True)
    ddp = holding(model, DistributedDataParallel)
    return _replicas_in(model, policy) if ddp is None else connect(ddp, policy)


def _replicas_in(model: nn.Module, policy: Policy) -> Wrapper | None:
    """Return what spreads a DistributedDataParallel model, or one whose parts are, over the ranks of the first; None if nothing does. Writes: their communication hooks."""
    wrappers = [connect(part, policy) for part in model.modules() if isinstance(part, DistributedDataParallel)]
    if not wrappers or isinstance(model, DistributedDataParallel):
        return next(iter(wrappers), None)
    whole = Wrapper()
    whole.process_group, whole.device = wrappers[0].process_group, wrappers[0].device
    return whole


def warn_alone(model: nn.Module) -> None:
    """Log that other ranks are there and that the steps of this one will not be theirs."""
    if dist.get_rank() == 0:
        _log.warning(
            "%d ranks run, and nothing averages the gradients of this %s: each rank trains a model of its own. Call "
            "DistributedDataParallel(model), or shard it with fully_shard; if its gradients are averaged elsewhere, or ranks "
            "hold parts of one model, write amp.consensus = mezzo.distributed.RankConsensus()",
            dist.get_world_size(), type(model).__name__,
        )  # fmt: skip


def setup_of(model: nn.Module, optimizers: Sequence[Optimizer], policy: Policy) -> RankSetup:
    """Return what this rank was prepared with. Syncs: no."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    ddp = holding(model, DistributedDataParallel)
    return RankSetup(
        policy=str(policy),
        model=[f"'{name}' {describe(value)}" for name, value in (*model.named_parameters(), *model.named_buffers())],
        optimizers=[line for optimizer in optimizers for line in _lines(optimizer, names)],
        masters=_masters(optimizers),
        moments=[tensor for optimizer in optimizers for tensor in _moments(optimizer)],
        is_stage=_is_stage(model),
        replicas=() if ddp is None else tuple(dist.get_process_group_ranks(ddp.process_group)),
    )


def _lines(optimizer: Optimizer, names: Mapping[Tensor, str]) -> Iterator[str]:
    for index, group in enumerate(optimizer.param_groups):
        own, params = f"{type(optimizer).__name__}, group {index}", group["params"]
        yield f"{own}: {len(params)} parameters"
        yield from (f"{own}: parameter {k} is {names.get(p, 'none of the model')}" for k, p in enumerate(params))
    yield from option_lines(optimizer)


def _is_stage(model: nn.Module) -> bool:
    """Whether a stage of torch's pipelines over several ranks holds a model, or a part of it. Takes a while where there are any."""
    home, own = "torch.distributed.pipelining.stage", set(model.modules())
    objects: list[Any] = living(object) if home in sys.modules else []
    stages = [one for one in objects if type(one).__module__ == home and hasattr(one, "submod") and one.group_size > 1]
    return any(not own.isdisjoint(stage.submod.modules()) for stage in stages)


def option_lines(optimizer: Optimizer, among: Container[str] | None = None) -> Iterator[str]:
    """Yield a line for each option of an optimizer's groups that is no tensor, or for some by name. Host only."""
    for index, group in enumerate(optimizer.param_groups):
        plain = {k: v for k, v in group.items() if isinstance(v, int | float | str | tuple | None)}
        own = f"{type(optimizer).__name__}, group {index}"
        yield from (f"{own}: {key}={value}" for key, value in sorted(plain.items()) if among is None or key in among)


def _masters(optimizers: Sequence[Optimizer]) -> dict[Tensor, Tensor]:
    """Return what lies beside 16-bit parameters that are whole on this rank."""
    masters = ((p, o.aux_state(p)[1]) for o in optimizers if keeps_masters(o) for p in parameters(o))
    return {p: beside for p, beside in masters if beside is not None and not is_dtensor(p)}


def master_of(optimizer: Optimizer | None, param: Tensor) -> Tensor:
    """Return the value that a parameter stands for, as `HasMasters.master` does; itself where nothing keeps masters.

    That of a ZeroRedundancyOptimizer lies on one rank, which gives it to all: called on all of them, with the same parameters in
    one order. Raises: DistributedError. Syncs: only then, and with the slowest rank.
    """
    inner = None if optimizer is None else local_optimizer(optimizer)
    if inner is None or not keeps_masters(inner) or (inner is not optimizer and param.dtype not in LOW_DTYPES):
        return param.detach()
    if inner is optimizer:
        return inner.master(param)
    bits = torch.zeros(param.shape, dtype=torch.int32, device=param.device)  # on all ranks but one
    if any(param is p for p in parameters(inner)):
        bits.copy_(inner.master(param).view(torch.int32))
    group = Group(optimizer.process_group)  # type: ignore[union-attr]  # a ZeroRedundancyOptimizer's
    return torch.empty_like(param, dtype=torch.float32).copy_(group.sum_(group.to_device(bits)).view(torch.float32))


def copied_tensors(names: Mapping[Tensor, str], optimizers: Sequence[Optimizer], num_ranks: int) -> dict[str, Tensor]:
    """Return what some of the ranks have copies of, by name: parameters whole or in parts, and what lies beside whole 16-bit ones. Host only."""
    copied = [p for p in names if not is_dtensor(p) or num_shards(p) < p.device_mesh.size() == num_ranks]
    beside = {f"{names[p]} (master)": aux for p, aux in _masters(optimizers).items()}
    return {**{names[p]: p for p in copied}, **beside}


class Ranks:
    """Who takes a run's steps with this rank: found when the model is prepared, called by a wrapper, or goes backward; told of each step, and compared.

    Attributes:
        consensus: makes findings the same on all ranks; None on one rank, and where nothing has led to the others yet.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        policy: Policy,
        names: Mapping[Tensor, str],
        load_hooks: LoadHooks,
    ) -> None:
        self._model, self._optimizers, self._policy, self._names = model, optimizers, policy, names
        self._load_hooks = load_hooks
        self._num_loads = 0  # steps before which something was loaded
        self._versions: list[int | None] | None = None  # of the parameters, as the last step left them
        self.consensus: RankConsensus | None = None
        self._awaited: RankConsensus | None = None
        self._is_alone = False
        self._join(wrapper_of(model, policy))

    def use(self, consensus: RankConsensus | None) -> None:
        """Have these ranks decide from now on; a PolicyError under a policy that demotes. Host only."""
        if consensus is not None and self._policy.guard.on_overflow == "demote":
            raise PolicyError(
                "guard.on_overflow=demote was asked for on several ranks, and each would demote what overflowed on its own "
                "batch, so their models would differ. Write guard.on_overflow=skip, and add the rule that the error names."
            )
        self.consensus = consensus

    def _join(self, wrapper: Wrapper | None) -> None:
        if wrapper is not None:
            self.use((self.consensus or self._awaited or RankConsensus(wrapper.process_group)).attach(wrapper))
            self._awaited = None

    def expected(self) -> RankConsensus | None:
        """Return what decides for all ranks, or, where several run and nothing wraps the model yet, what will. Host only."""
        if self.consensus is None and self._awaited is None and is_distributed():
            self._awaited = RankConsensus()
        return self.consensus or self._awaited

    def note_forward(self) -> None:
        """Notice a wrapper that has come around the model, and tell it of a forward. Writes: its communication hook. Syncs: no."""
        ddp = around(self._model)
        if ddp is not None and (self.consensus is None or self.consensus.wrapper.is_another(ddp)):
            self._join(connect(ddp, self._policy))
        if self.consensus is not None:
            self.consensus.wrapper.note_forward()

    def find(self) -> None:
        """Look for ranks that nothing has led to yet, and compare with them, once, what this one was prepared with: a DistributedError if they differ.

        Writes: masters, once, where the first rank's weights were copied. Syncs: once.
        """
        if self.consensus is None and not self._is_alone and is_distributed():
            self._join(wrapper_around(self._model, self._policy))
            self._is_alone = self.consensus is None
            if self._is_alone:
                warn_alone(innermost(self._model))
        if self.consensus is not None:
            self.consensus.handshake(lambda: setup_of(innermost(self._model), self._optimizers, self._policy))

    def announce(self, lines: Sequence[str], *, lacks_scale: bool) -> None:
        """Have the others told, with what the step finds, what it is, and whether something was loaded or written since the last. Syncs: no."""
        consensus = self.consensus
        assert consensus is not None  # as the engine has asked
        if consensus.has_parts or not consensus.every:
            consensus.signals = Signals(lacks_scale=lacks_scale)
            return
        is_written = self._versions is not None and versions_of(self._names) != self._versions
        signals = Signals(is_loaded=self._load_hooks.has_loaded, is_written=is_written, call=tuple(lines))
        if whole := [p for p in self._names if not is_dtensor(p)]:  # one piece of which is told in each step
            signals = replace(signals, weights=digest_of_piece(whole, consensus.num_steps))
        consensus.signals = signals

    def compare(self, loss_scale: LossScale, stepped: Sequence[Tensor], *, has_shards: bool) -> None:
        """Compare loss scale, counters and whole weights behind a step, in those that the consensus chooses. Syncs: there."""
        consensus = self.consensus
        assert consensus is not None  # as the engine has asked
        numbers = {
            "the loss scale": loss_scale.scale,
            "the number of clean steps since the loss scale moved": loss_scale.growth_tracker,
            "the number of skipped steps in a row": loss_scale.skipped_in_a_row,
        }
        num_loads = self._num_loads + self._load_hooks.has_loaded
        if has_shards:  # which nobody else has
            numbers["the number of loads"] = num_loads
        consensus.audit(numbers, lambda: copied_tensors(self._names, self._optimizers, consensus.group.size), stepped)
        self._num_loads, self._load_hooks.has_loaded = num_loads, False
        self._versions = versions_of(self._names)


def _moments(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield what is equal on all ranks that hold copies; optimizers that divide their state among ranks keep theirs."""
    if not isinstance(optimizer, MasterOptimizer) and not type(optimizer).__module__.startswith("torch.optim."):
        return
    for p in parameters(optimizer):
        held = [v for k, v in sorted(optimizer.state.get(p, {}).items()) if k not in AUX_STATE.values()]
        yield from (v for v in held if isinstance(v, Tensor) and not is_dtensor(v))


def waits_for_ranks(model: nn.Module) -> bool:
    """Whether the forward of a model, its wrapper left out, meets other ranks: to gather weights, or for statistics."""
    return any_dtensor(model.parameters()) or any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())
