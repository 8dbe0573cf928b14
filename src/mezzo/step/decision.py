"""The decision of a step: who skips, and what the loss scale makes of it, without a branch on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed.consensus import RankConsensus
from ..kernels.dtensor import any_dtensor, is_dtensor, num_shards
from ..kernels.ops.gradients import norm_and_finite
from ..loss_scale.state import LossScale, NoScaling, next_state
from ..loss_scale.unscale import is_unusable
from ..policy import ScalingConfig
from .accumulation import AccumulationState, either
from .flags import GradStats, StepFlags
from .grad_versions import Mark
from .update import OptimizerGrads, Skip, move


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decision:
    """What a step found and what each optimizer is to do.

    Attributes:
        gradients_bad: shape (), bool.
        loss_bad: shape (), bool.
        buffers_bad: shape (), bool.
        norm: shape (), fp32: of all true gradients, each counted once.
        norms: shape (number of shares,), fp32: of the true gradients of each optimizer.
        skips: shape (number of shares,), fp32: 1 where an optimizer must leave everything as it is.
        scale: shape (), fp32: that the gradients carry; None without scaling.
    """

    gradients_bad: Tensor
    loss_bad: Tensor
    buffers_bad: Tensor
    norm: Tensor
    norms: Tensor
    skips: Tensor
    scale: Tensor | None

    @property
    def is_void(self) -> Tensor:
        """Whether any optimizer skips: shape (), bool."""
        return self.skips.max() != 0

    def verdict(
        self, shares: Sequence[OptimizerGrads], names: Mapping[Tensor, str], marks: Mapping[int, Mark], count: bool
    ) -> StepFlags:
        """Send the findings on their way to the host.

        Args:
            shares: the optimizers' parts.
            names: of parameters.
            marks: of the gradients as they are now.
            count: count inf and NaN in each gradient now; a second pass over the gradients.

        Syncs: no.
        """
        one = torch.ones((), device=self.norm.device)
        found = torch.stack([self.gradients_bad, self.loss_bad, self.buffers_bad]).to(torch.float32)
        numbers = torch.stack([one if self.scale is None else self.scale, self.norm])
        return StepFlags(torch.cat([found, numbers, self.skips]), _evidence(shares, names, marks, count))


def _evidence(
    shares: Sequence[OptimizerGrads], names: Mapping[Tensor, str], marks: Mapping[int, Mark], count: bool
) -> GradStats:
    home = shares[0].check.norm.device
    norms = [move(share.check.tensor_norms, home) for share in shares]
    counts = [move(share.check.count_nonfinite(), home) for share in shares] if count else []
    return GradStats(
        params=[p for share in shares for p in share.params],
        names=names,
        norms=torch.cat(norms),
        counts=torch.cat(counts) if counts else None,
        marks=marks,
    )


@torch.no_grad()
def decide(
    shares: Sequence[OptimizerGrads],
    pending: AccumulationState,
    written: Sequence[Tensor],
    skip: Skip,
    consensus: RankConsensus | None,
    num_optimizers: int,
) -> Decision:
    """Say which optimizers may step.

    Args:
        shares: the parts of optimizers with gradients; at least one.
        pending: the step in the making.
        written: floating buffers that the forward wrote.
        skip: what several optimizers do when one has bad gradients.
        consensus: makes the findings the same on all ranks; None on one rank.
        num_optimizers: how many were prepared, with gradients or without.

    Syncs: no on one rank or on accelerators; else with the slowest rank.
    """
    home = pending.device
    assert pending.loss_bad is not None  # there was a backward pass
    no = torch.zeros_like(pending.loss_bad)
    unusable = None if pending.scale is None else is_unusable(pending.scale) != 0
    early: tuple[Tensor | None, ...] = (pending.gradients_bad, pending.penalty_bad, unusable)
    loss = pending.loss_bad if pending.penalty_bad is None else pending.loss_bad & ~pending.penalty_bad
    buffers = move(norm_and_finite(written).found_nonfinite, home) != 0 if written else no
    found = torch.stack([move(share.check.found_nonfinite, home) for share in shares]) != 0
    squares, has_parts = None, consensus is not None and consensus.has_parts
    if consensus is not None or any(any_dtensor(share.params) for share in shares):
        squares = _squares(shares, home, num_optimizers, has_parts)
        everywhere = torch.zeros(num_optimizers, device=home)
        for share, flag in zip(shares, found.unbind(), strict=True):
            everywhere[share.index] = flag
        if consensus is not None:
            flags = torch.stack([either(no, *early), loss, buffers]).to(torch.float32)
            findings, squares = consensus.combine(torch.cat([flags, everywhere]), squares)
            agreed, loss, buffers = (flag != 0 for flag in findings[:3].unbind())
            early, everywhere = (agreed,), findings[3:]
        # Squares of parts that are finite one by one may add up to more than fp32 holds.
        everywhere = (everywhere != 0) | ~squares[:-1].isfinite()
        found = torch.stack([everywhere[share.index] for share in shares])
        gradients = either(everywhere.any(), *early)
    else:
        gradients = either(found.any(), *early)
    if skip == "together":
        skips = either(gradients, loss, buffers).expand(len(shares))
    else:
        # A bad loss belongs to the optimizers whose gradients it spoilt; if it spoilt none, to all.
        skips = either(found, *early, buffers, loss & ~gradients)
    norms, norm = _norms(shares, squares, home, has_parts)
    return Decision(
        gradients_bad=gradients,
        loss_bad=loss,
        buffers_bad=buffers,
        norm=norm,
        norms=norms,
        skips=skips.to(torch.float32),
        scale=pending.scale,
    )


def _squares(shares: Sequence[OptimizerGrads], home: torch.device, num_optimizers: int, has_parts: bool) -> Tensor:
    """Return, for each optimizer and for all, the sum of squares over this rank's part of sharded gradients.

    A part that several ranks have counts once over all of them.
    """
    squares = torch.zeros(num_optimizers + 1, device=home)
    seen: set[Tensor] = set()
    for share in shares:
        for p, norm in zip(share.params, share.check.tensor_norms.unbind(), strict=True):
            if has_parts or is_dtensor(p):
                copies = p.device_mesh.size() / num_shards(p) if is_dtensor(p) else 1.0
                square = move(norm.square(), home) / copies
                squares[share.index] += square
                squares[num_optimizers] += 0 if p in seen else square
                seen.add(p)
    return squares


def _norms(
    shares: Sequence[OptimizerGrads], squares: Tensor | None, home: torch.device, has_parts: bool
) -> tuple[Tensor, Tensor]:
    """Return the norm of each share's true gradients, and of all, each gradient counted once.

    Args:
        shares: the parts of the optimizers.
        squares: of what lies in parts, for each optimizer and for all; None where everything is whole.
        home: where to.
        has_parts: the ranks hold different weights, so that every gradient is a part of all.
    """
    if len(shares) == 1 and (squares is None or not (has_parts or any_dtensor(shares[0].params))):
        norm = move(shares[0].check.norm, home)
        return norm.unsqueeze(0), norm
    whole: dict[Tensor, Tensor] = {}
    norms = []
    for share in shares:
        own = {
            p: move(norm, home)
            for p, norm in zip(share.params, share.check.tensor_norms.unbind(), strict=True)
            if not (has_parts or is_dtensor(p))
        }
        whole.update(own)
        is_whole = len(own) == len(share.params)
        square = None if squares is None or is_whole else squares[share.index]
        norms.append(move(share.check.norm, home) if square is None else _joined(own, square))
    if len(shares) == 1:
        return norms[0].unsqueeze(0), norms[0]
    return torch.stack(norms), _joined(whole, None if squares is None else squares[-1])


def _joined(norms: Mapping[Tensor, Tensor], square: Tensor | None) -> Tensor:
    parts = [*norms.values(), *([] if square is None else [square.sqrt()])]
    joined: Tensor = torch.linalg.vector_norm(torch.stack(parts))
    return joined


@torch.no_grad()
def move_scale_(state: LossScale | NoScaling, decision: Decision, config: ScalingConfig | None) -> None:
    """Move the loss scale after a step; leave it where it was not to blame.

    The state is written in place, so that a captured CUDA graph finds in each replay what the last one left.

    Writes: `state`. Syncs: no.
    """
    if config is None or isinstance(state, NoScaling):
        return
    moved = next_state(state, decision.gradients_bad, config)
    blameless = decision.loss_bad | (decision.buffers_bad & ~decision.gradients_bad)
    for field in dataclasses.fields(state):
        before, after = getattr(state, field.name), getattr(moved, field.name)
        before.copy_(torch.where(blameless, before, after))
