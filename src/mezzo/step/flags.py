"""What a step found: 0-d tensors on the device, without a branch on the host, and the same once the host reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from ..distributed import RankConsensus
from ..kernels import any_dtensor, is_dtensor, norm_and_finite, num_shards
from ..loss_scale import is_unusable
from .accumulation import AccumulationState, OptimizerGrads, Skip, either, move

Reason = Literal["gradients", "loss", "buffers"]
"""What was not finite first in a step that was skipped."""
T = TypeVar("T", Tensor, float)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepFlags(Generic[T]):
    """The finding of one step: 0-d tensors on the device, or the numbers that the host has read.

    Attributes:
        gradients_bad: inf or NaN in a gradient, or a norm whose square fp32 cannot hold.
        loss_bad: inf or NaN in a loss that backward was given, before scaling.
        buffers_bad: inf or NaN in a buffer that the forward wrote.
        scale: that the losses were multiplied by; 1 without scaling.
        grad_norm: L2 norm of all true gradients before clipping, each counted once.
        flushed: share of the gradients' elements that 16 bit flushed to zero, where it was measured; else 0.
        norms: of the true gradients of each optimizer that has any.
        skipped: of each of those, 1.0 where it must leave everything as it is.
    """

    gradients_bad: T
    loss_bad: T
    buffers_bad: T
    scale: T
    grad_norm: T
    flushed: T
    norms: tuple[T, ...]
    skipped: tuple[T, ...]

    def pack(self: StepFlags[Tensor]) -> Tensor:
        """Return all of it as one vector: fp32, on the device. Syncs: no."""
        return torch.stack([*(getattr(self, name) for name in _SCALARS), *self.norms, *self.skipped])

    @staticmethod
    def unpack(vector: Tensor) -> StepFlags[float]:
        """Return what a packed vector, which is on the host by now, says."""
        numbers: list[float] = vector.numpy().tolist()
        first = len(_SCALARS)
        half = first + (len(numbers) - first) // 2
        scalars = dict(zip(_SCALARS, numbers[:first], strict=True))
        return StepFlags(**scalars, norms=tuple(numbers[first:half]), skipped=tuple(numbers[half:]))

    @property
    def void(self: StepFlags[Tensor]) -> Tensor:
        """Whether any optimizer skips: shape (), bool."""
        return either(*(skip != 0 for skip in self.skipped))

    @property
    def applied(self: StepFlags[float]) -> bool:
        """Whether every optimizer took its step."""
        return not any(self.skipped)

    @property
    def reason(self: StepFlags[float]) -> Reason | None:
        """What was not finite first; None after a step that was taken."""
        if self.applied:
            return None
        return "loss" if self.loss_bad else "gradients" if self.gradients_bad else "buffers"


_SCALARS = tuple(f.name for f in fields(StepFlags) if f.name not in ("norms", "skipped"))


@torch.no_grad()
def check_grads(
    grads: Sequence[OptimizerGrads],
    pending: AccumulationState,
    written: Sequence[Tensor],
    skip: Skip,
    consensus: RankConsensus | None,
    num_optimizers: int,
) -> StepFlags[Tensor]:
    """Say what is wrong with the gradients of a step, if anything, and which optimizers may take it.

    Args:
        grads: of each optimizer that has any; at least one.
        pending: what is known of the step so far.
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
    found = [move(one.check.found_nonfinite, home) != 0 for one in grads]
    squares, has_parts = None, consensus is not None and consensus.has_parts
    if consensus is not None or any(any_dtensor(one.params) for one in grads):
        squares = _squares(grads, home, num_optimizers, has_parts)
        everywhere = torch.zeros(num_optimizers, device=home)
        for one, flag in zip(grads, found, strict=True):
            everywhere[one.index] = flag
        if consensus is not None:
            flags = torch.stack([either(no, *early), loss, buffers]).to(torch.float32)
            findings, squares = consensus.combine(torch.cat([flags, everywhere]), squares)
            agreed, loss, buffers = (flag != 0 for flag in findings[:3].unbind())
            early, everywhere = (agreed,), findings[3:]
        # Squares of shards that are finite one by one may add up to more than fp32 holds.
        everywhere = (everywhere != 0) | ~squares[:-1].isfinite()
        found = [everywhere[one.index] for one in grads]
        gradients = either(everywhere.any(), *early)
    else:
        gradients = either(*found, *early)
    if skip == "together":
        skips = [either(gradients, loss, buffers).to(torch.float32)] * len(grads)
    else:
        # A bad loss belongs to the optimizers whose gradients it spoilt; if it spoilt none, to all.
        skips = [either(bad, *early, buffers, loss & ~gradients).to(torch.float32) for bad in found]
    norms, norm = _norms(grads, squares, home, has_parts)
    return StepFlags(
        gradients_bad=gradients,
        loss_bad=loss,
        buffers_bad=buffers,
        scale=torch.ones((), device=home) if pending.scale is None else pending.scale,
        grad_norm=norm,
        flushed=no if pending.flushed is None else pending.flushed,
        norms=tuple(norms),
        skipped=tuple(skips),
    )


def _squares(grads: Sequence[OptimizerGrads], home: torch.device, num_optimizers: int, has_parts: bool) -> Tensor:
    """Return, for each optimizer and for all, the sum of squares over this rank's part of sharded gradients.

    A shard that several ranks have counts once over all of them.
    """
    squares = torch.zeros(num_optimizers + 1, device=home)
    seen: set[Tensor] = set()
    for one in grads:
        for p, norm in zip(one.params, one.check.tensor_norms.unbind(), strict=True):
            if has_parts or is_dtensor(p):
                copies = p.device_mesh.size() / num_shards(p) if is_dtensor(p) else 1.0
                square = move(norm.square(), home) / copies
                squares[one.index] += square
                squares[num_optimizers] += 0 if p in seen else square
                seen.add(p)
    return squares


def _norms(
    grads: Sequence[OptimizerGrads], squares: Tensor | None, home: torch.device, has_parts: bool
) -> tuple[Sequence[Tensor], Tensor]:
    """Return the norm of each optimizer's true gradients, and of all, each gradient counted once.

    Args:
        grads: of the optimizers.
        squares: of what lies in shards, for each optimizer and for all; None where everything is whole.
        home: where to.
        has_parts: the ranks hold different weights, so that every gradient is a part of all.
    """
    if len(grads) == 1 and (squares is None or not (has_parts or any_dtensor(grads[0].params))):
        norm = move(grads[0].check.norm, home)
        return [norm], norm
    whole: dict[Tensor, Tensor] = {}
    norms = []
    for one in grads:
        own = {
            p: move(norm, home)
            for p, norm in zip(one.params, one.check.tensor_norms.unbind(), strict=True)
            if not (has_parts or is_dtensor(p))
        }
        whole.update(own)
        is_whole = len(own) == len(one.params)
        square = None if squares is None or is_whole else squares[one.index]
        norms.append(move(one.check.norm, home) if square is None else _joined(own, square))
    return norms, norms[0] if len(grads) == 1 else _joined(whole, None if squares is None else squares[-1])


def _joined(norms: Mapping[Tensor, Tensor], square: Tensor | None) -> Tensor:
    chunks = [*norms.values(), *([] if square is None else [square.sqrt()])]
    joined: Tensor = torch.linalg.vector_norm(torch.stack(chunks))
    return joined
