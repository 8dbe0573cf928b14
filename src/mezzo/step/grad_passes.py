"""Passes over the gradients of a step beside its update: measured, shown as they are, multiplied, clamped, counted."""

from __future__ import annotations

import logging
import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer

from .._torch import foreach_mul_, profiler_enabled, sparse_values
from ..errors import StepError, did_you_mean, kind_of, listed, shown
from ..formats import LARGEST, number_of
from ..kernels import factor_for, is_dtensor, local, move
from ..loss_scale import AccumulationState, assign_grad_, real_values
from ..stamp import Stamp

_log = logging.getLogger("mezzo.step")
_ZERO_GRAD = Optimizer.zero_grad  # torch's, whatever somebody puts in its place later
HALF_SHOWN = "a `with amp.unscaled_grads():` that was interrupted, so that some gradients may lack the loss scale"
_PROBE = 2.0**24
"""Lifts the smallest fp16 number to 1: a zero that stays one under it is none that fp16 made."""


@contextmanager
def measure_flush(
    pending: AccumulationState, loss: Tensor, params: Sequence[Tensor], probing: AbstractContextManager[None]
) -> Iterator[None]:
    """Measure what share of the gradients that the block makes, from None or zeros, were flushed to zero by 16 bit.

    The backward pass runs once more, before the block, inside `probing`, on a loss that is much larger: an element that is finite and
    not zero there, and zero after the block, was flushed. Nothing is measured where a graph cannot be run twice.

    Writes: `pending`, which takes the share. Syncs: no.
    """
    whole = [p for p in params if p.requires_grad and not is_dtensor(p)]
    try:
        with probing:
            large = torch.autograd.grad(loss * _PROBE, whole, retain_graph=True, allow_unused=True)
    except RuntimeError as failure:
        _log.info("what fp16 flushed could not be measured: %s", failure)
        large = ()
    yield
    made = [(g, p.grad) for p, g in zip(whole, large, strict=False) if g is not None and p.grad is not None]
    dense = [(g, grad) for g, grad in made if g.layout is torch.strided and grad.layout is torch.strided]
    if dense:
        lost = [move(((g != 0) & g.isfinite() & (grad == 0)).sum(), pending.device) for g, grad in dense]
        pending.flushed = torch.stack(lost).sum() / sum(grad.numel() for _, grad in dense)


@contextmanager
def true_gradients(params: Sequence[Tensor], pending: AccumulationState) -> Iterator[None]:
    """Have `.grad` hold the true gradients inside the block, divided by the scale that they carry, if any: fp16 ones in fp32, where small ones stay.

    Writes: gradients; `pending`, which stays broken where it is interrupted on the way in or out. Syncs: no.
    """
    if (scale := pending.scale) is None:
        yield
        return
    pending.broken = HALF_SHOWN  # until they are put back
    narrow = {p: p.grad for p in params if p.grad is not None and p.grad.dtype is torch.float16}
    shown: dict[Tensor, Tensor | None] | None = None

    def put_back() -> None:
        nonlocal shown
        if (was_shown := shown) is not None:
            for p in params:
                if p.grad is not None and p.grad is not was_shown[p]:  # the caller's own, which is not to be written
                    p.grad = p.grad.detach().clone()
            shown = None  # where Ctrl-C ends what follows, dtypes are put back and the step stays broken
            multiply_([p.grad for p in params if p.grad is not None], scale)
        for p, grad in narrow.items():
            if (wide := p.grad) is not grad:
                assign_grad_(p, None if wide is None else grad.copy_(wide), torch.float16)
        if was_shown is not None:
            pending.broken = ""

    try:
        for p, grad in narrow.items():
            assign_grad_(p, grad.float(), torch.float32)
        multiply_([p.grad for p in params if p.grad is not None], scale.reciprocal())
        shown = {p: p.grad for p in params}
        yield
        put_back()
    except BaseException:  # Ctrl-C may have ended that, too
        if not sys.is_finalizing():  # a program that ends inside the block; torch aborts where a tensor is made then
            put_back()
        raise


class ShownGrads(dict[str, Tensor]):
    """True gradients by name, each to be edited in place."""

    def __missing__(self, name: str) -> Tensor:
        raise StepError(f"no gradient in this step is that of a parameter {name!r}.{did_you_mean(name, self)}")

    def __setitem__(self, name: str, grad: object) -> None:
        raise StepError(f"grads[{name!r}] = ... would leave the gradient as it is. Write grads[{name!r}].copy_(...).")


def add_up_parts_(params: Iterable[Tensor]) -> bool:
    """Add up gradients of which each rank of a mesh has one term, as sequence parallelism leaves those of norms.

    Returns whether there were any. Writes: `.grad`. Syncs: as torch's `redistribute`.
    """
    held = [(p, p.grad) for p in params if is_dtensor(p) and p.grad is not None]
    partial = [(p, grad) for p, grad in held if is_dtensor(grad) and grad.placements != p.placements]
    for p, grad in partial:
        p.grad = grad.redistribute(placements=p.placements)
    return bool(partial)


def has_own_zero_grad(optimizer: Optimizer) -> bool:
    """Whether an optimizer drops gradients otherwise than torch's do. Host only."""
    return type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in vars(optimizer)


def drop(optimizer: Optimizer, set_to_none: bool) -> None:
    """Do what `optimizer.zero_grad` does; torch's own names itself in profiles, which takes longer than the rest of it. Writes: gradients."""
    if not set_to_none or has_own_zero_grad(optimizer) or profiler_enabled():
        optimizer.zero_grad(set_to_none)
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None


def check_flags(call: str, **flags: Any) -> None:
    """Refuse, by a StepError, what is no flag of a backward pass; `retain_graph` may be None. Host only."""
    for name, flag in flags.items():
        if not (isinstance(flag, int) and flag in (0, 1)) and not (flag is None and name == "retain_graph"):
            raise StepError(f"{call} was given {name}={shown(flag)}: write True or False.")


def check_inputs(call: str, inputs: Any) -> list[Tensor]:
    """Return what a backward pass is given as inputs, a tensor or some, as a list; a StepError for anything else. Host only."""
    try:
        found = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    except TypeError:
        found = []
    if not found or not all(isinstance(one, Tensor | GradientEdge) for one in found):
        what = listed([kind_of(one) for one in found]) or shown(inputs)
        raise StepError(
            f"{call} was given inputs of {what}: write a tensor that the loss was made of, or a list of some."
        )
    if still := [index for index, one in enumerate(found) if isinstance(one, Tensor) and not one.requires_grad]:
        raise StepError(
            f"{call} was given inputs of which number {still[0]} has requires_grad=False: call requires_grad_() on it before the forward, or leave it out."
        )
    return found


@torch.no_grad()
def clamp_(grads: Iterable[Tensor], clip_value: float, scale: Tensor | None) -> None:
    """Clamp gradients, which may carry a scale, to a true value in both directions; a StepError if one is complex, which has no order.

    Writes: `grads`. Syncs: no.
    """
    distinct = list(_distinct(grads))
    if any(grad.is_complex() for grad in distinct):
        raise StepError(
            f"step(clip_value={clip_value}) would clamp complex gradients, which are neither larger nor smaller than a "
            "number. Write step(max_norm=...), which clips by their absolute values."
        )
    for grad in distinct:
        values = sparse_values(grad) if grad.is_sparse else grad
        bound = torch.full((), min(float(number_of(clip_value)), LARGEST), device=grad.device)
        bound = bound if scale is None else bound * move(scale, grad.device)
        values.clamp_(min=-bound, max=bound)


@torch.no_grad()
def multiply_(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients of any layouts and devices by one number. Writes: `grads`. Syncs: no."""
    kinds: dict[tuple[torch.device, torch.dtype, type], list[Tensor]] = {}
    for grad in _distinct(grads):
        values = real_values(grad)
        kinds.setdefault((values.device, values.dtype, type(values)), []).append(values)
    for (device, dtype, _), parts in kinds.items():
        foreach_mul_(parts, factor_for(factor, device, dtype))


def _distinct(grads: Iterable[Tensor]) -> Iterable[Tensor]:
    return {id(grad): local(grad) for grad in grads}.values()


@dataclass(kw_only=True, slots=True, eq=False)
class GradStats:
    """The gradients behind a result, by parameter.

    Attributes:
        params: that had gradients.
        names: what errors call each.
        norms: of each optimizer's gradients, each of shape (number of gradients,), fp32, or as many numbers: the norm of each.
        counts: as `norms`, int64: inf and NaN in each, where they were counted in the step.
        stamps: of each gradient as it was, by the parameter's id.
        known: what `nonfinite` returns, of a result that was copied or sent to another process, without the gradients.
    """

    params: Sequence[Tensor] = ()
    names: Mapping[Tensor, str] = field(default_factory=dict)
    norms: Sequence[Tensor | array[float]] = ()
    counts: Sequence[Tensor] | None = None
    stamps: Mapping[int, Stamp] = field(default_factory=dict)
    known: dict[str, int | None] | None = None

    def replayed(self) -> GradStats:
        """Return those of a replay that was just queued; the next one overwrites them. Syncs: no."""
        return replace(self, norms=[torch.as_tensor(norms).clone() for norms in self.norms], counts=None, stamps={})

    def nonfinite(self) -> dict[str, int | None]:
        """Return the parameters whose gradients are not finite, and how many elements are not; None for at least one. Syncs: yes.

        That stands where the gradient was gone, or written, before anybody asked.
        """
        if self.known is not None:
            return self.known
        bad = [not math.isfinite(norm) for norms in self.norms for norm in norms.tolist()]
        counts = None if self.counts is None else [count for counts in self.counts for count in counts.tolist()]
        found = [(index, p) for index, p in enumerate(self.params) if bad[index]]
        return {self.names[p]: self._count(p) if counts is None else counts[index] for index, p in found}

    def gradient(self, param: Tensor) -> Tensor | None:
        """Return a parameter's gradient, if it is still there as it was in the step. Host only."""
        stamp = self.stamps.get(id(param))
        if stamp is None or (grad := stamp.tensor()) is None:
            return None
        return grad if stamp.is_current(grad) else None

    def _count(self, param: Tensor) -> int | None:
        if (grad := self.gradient(param)) is None:
            return None
        # Of a sharded gradient the part here: one rank may ask alone, so nobody waits for the others.
        values = grad.coalesce().values() if grad.is_sparse else local(grad)
        return int((~values.isfinite()).sum())
