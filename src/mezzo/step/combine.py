"""What several optimizers and ranks find together: flags of all, and norms that count each gradient once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..distributed import RankConsensus
from ..kernels import any_dtensor, is_dtensor, move, num_shards, numbers_on
from ..loss_scale import Flag
from .gradients import OptimizerGrads


class Findings(NamedTuple):
    """What is not finite in a step.

    Attributes:
        early: something seen before the step: in gradients before an edit, in a penalty, in the scale.
        loss: a loss, before it was scaled.
        buffers: a buffer that the forward wrote.
        optimizers: gradients of each optimizer that has any.
        elsewhere: gradients of any optimizer on any rank.
    """

    early: Flag
    loss: Flag
    buffers: Flag
    optimizers: Sequence[Flag]
    elsewhere: Flag = False


@torch.no_grad()
def combine(
    own: Findings,
    grads: Sequence[OptimizerGrads],
    device: torch.device,
    consensus: RankConsensus | None,
    num_optimizers: int,
) -> tuple[Findings, list[Tensor]]:
    """Return the findings of all ranks, and the norms of the true gradients: of each optimizer, and of all at the end.

    Syncs: no on one rank or on accelerators; else with the slowest rank.
    """
    if consensus is None and not any(any_dtensor(one.params) for one in grads):
        return own, _norms(grads, None, device, False)
    has_parts = consensus is not None and consensus.has_parts
    squares = _squares(grads, device, num_optimizers, has_parts, _num_ranks(grads, consensus))
    flags = torch.zeros(3 + num_optimizers, device=device)
    for index, flag in enumerate((own.early, own.loss, own.buffers)):
        flags[index] = flag
    for one, flag in zip(grads, own.optimizers, strict=True):
        flags[3 + one.index] = flag
    if consensus is not None:
        flags, squares = consensus.combine((flags != 0).to(torch.float32), squares)
    early, loss, buffers = (flags[:3] != 0).unbind()
    # Squares of shards that are finite one by one may add up to more than fp32 holds.
    everywhere = (flags[3:] != 0) | ~squares[:-1].isfinite()
    found = Findings(early, loss, buffers, [everywhere[one.index] for one in grads], everywhere.any())
    return found, _norms(grads, squares, device, has_parts)


def _num_ranks(grads: Sequence[OptimizerGrads], consensus: RankConsensus | None) -> int:
    """Return how many ranks hold the model of this one, in shards together or, where it lies on no mesh, in copies. Host only."""
    sizes = [p.device_mesh.size() for one in grads if any_dtensor(one.params) for p in one.params if is_dtensor(p)]
    if not sizes:
        return 1 if consensus is None else consensus.num_copies
    return max(sizes) if consensus is None or consensus.has_parts else consensus.group.size


def _squares(
    grads: Sequence[OptimizerGrads], device: torch.device, num_optimizers: int, has_parts: bool, num_ranks: int
) -> Tensor:
    """Return, for each optimizer and for all, the sum of squares over this rank's part of sharded gradients.

    A shard that several of the `num_ranks` have counts once over all of them.
    """
    squares = torch.zeros(num_optimizers + 1, device=device)
    seen: set[Tensor] = set()
    for one in grads:
        shares = _shares(one.params, has_parts, num_ranks)
        new = [0.0 if p in seen else share for p, share in zip(one.params, shares, strict=True)] if seen else shares
        each = one.check.tensor_norms.square()
        own = move(_weighted(each, shares), device)
        squares[one.index] = own
        squares[num_optimizers] += own if new == shares else move(_weighted(each, new), device)
        if len(grads) > 1:
            seen.update(one.params)
    return squares


def _shares(params: Sequence[Tensor], has_parts: bool, num_ranks: int) -> list[float]:
    """Return what a rank's squares count for over all ranks; 0 for that of a weight which each has whole."""
    known: dict[tuple[int, object], float] = {}  # most parameters of a model are sharded alike
    shares = []
    for p in params:
        if not is_dtensor(p):
            shares.append(has_parts / num_ranks)
            continue
        key = id(p.device_mesh), p.placements
        if key not in known:
            known[key] = num_shards(p) / num_ranks
        shares.append(known[key])
    return shares


def _weighted(squares: Tensor, shares: Sequence[float]) -> Tensor:
    """Return the sum of squares, each times its share, in as many launches for any number of them. Syncs: no."""
    if any(share != 1.0 for share in shares):
        squares = squares * numbers_on(tuple(shares), squares.device)
    return squares.sum()


def _norms(
    grads: Sequence[OptimizerGrads], squares: Tensor | None, device: torch.device, has_parts: bool
) -> list[Tensor]:
    """Return the norm of each optimizer's true gradients, and at the end of all, each gradient counted once.

    `squares` are of what lies in shards, for each optimizer and for all; None where everything is whole. With `has_parts` the ranks
    hold different weights, so that every gradient is a part of all.
    """
    if len(grads) == 1 and (squares is None or not (has_parts or any_dtensor(grads[0].params))):
        return [move(grads[0].check.norm, device)]
    whole: dict[Tensor, Tensor] = {}
    norms = []
    for one in grads:
        each = zip(one.params, one.check.tensor_norms.unbind(), strict=True)
        own = {p: move(norm, device) for p, norm in each if not (has_parts or is_dtensor(p))}
        whole.update(own)
        is_whole = len(own) == len(one.params)
        square = None if squares is None or is_whole else squares[one.index]
        norms.append(move(one.check.norm, device) if square is None else _joined(own, square))
    return norms if len(grads) == 1 else [*norms, _joined(whole, None if squares is None else squares[-1])]


def _joined(norms: Mapping[Tensor, Tensor], square: Tensor | None) -> Tensor:
    chunks = [*norms.values(), *([] if square is None else [square.sqrt()])]
    joined: Tensor = torch.linalg.vector_norm(torch.stack(chunks))
    return joined
