"""Who else takes part in a step: found when the model is prepared, or when DistributedDataParallel first calls it."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..distributed.consensus import RankConsensus
from ..distributed.ddp import around, connect
from ..distributed.fsdp import check_sharded, sharded_modules
from ..distributed.sums import check_averaged, check_storage, check_sums, drop_waiting
from ..kernels.dtensor import is_dtensor
from ..policy import Policy


def consensus_of(model: nn.Module, policy: Policy) -> RankConsensus | None:
    """Return what makes the ranks of a model agree; None if it is not sharded over several.

    Args:
        model: as it was prepared.
        policy: with its compute dtype decided.

    Raises:
        PolicyError: gradients are reduced or weights are gathered in another dtype than the policy says.

    Writes: the communication hook of a DistributedDataParallel model.
    """
    if isinstance(model, DistributedDataParallel):
        return connect(model, policy)
    if sharded_modules(model):
        check_sharded(model, policy)
        check_storage(model, policy)
        return RankConsensus(
            before=lambda: check_averaged(model),
            before_backward=lambda: check_sums(model, policy),
            on_drop=lambda: drop_waiting(model),
        )
    return None


def consensus_around(model: nn.Module, policy: Policy) -> RankConsensus | None:
    """Return the agreement of a DistributedDataParallel wrapper that is calling a model just now; None if none is."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    wrapper = around(model)
    return None if wrapper is None else connect(wrapper, policy)


def waits_for_ranks(model: nn.Module) -> bool:
    """Whether the forward of a model, its wrapper left out, meets other ranks: to gather weights, or for statistics."""
    return any(is_dtensor(p) for p in model.parameters()) or any(
        isinstance(m, nn.SyncBatchNorm) for m in model.modules()
    )
