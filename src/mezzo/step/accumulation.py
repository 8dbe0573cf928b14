"""Gradients on their way to an update: what is known of a step so far, and the gradients of each optimizer."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._torch import foreach_mul_, sparse_values
from ..errors import StepError
from ..formats import dtype_name
from ..kernels import GradientCheck, factor_for, is_dtensor, kept_on_device, local, move, norm_and_finite
from ..read_only import read_only
from ..stamp import Stamp

_log = logging.getLogger("mezzo.step")

Skip = Literal["together", "independent"]
"""What several optimizers do when one has bad gradients: all skip, or that one."""
Flag = Tensor | bool
"""A finding: known to the host, or shape (), not 0 (NaN, for one) if so, on a device that the host does not wait for.

On accelerators it is fp32 from the start, so that packing a step's findings casts nothing."""


def host_decides(device: torch.device) -> bool:
    """Whether the host may read what it finds on a device, since nothing has to be waited for."""
    return device.type == "cpu"


@dataclass(slots=True, eq=False)
class AccumulationState:
    """The gradients of one step, all of which carry the scale that the first backward pass captured.

    Attributes:
        scale: shape (), fp32; None without scaling.
        device: where the flags lie that the host does not know.
        loss_bad: a loss was inf or NaN before scaling.
        gradients_bad: inf or NaN were seen before somebody edited the gradients.
        penalty_bad: inf or NaN were in what `grad` returned, so that a loss made of it is no witness.
        flushed: shape (), fp32: share of the gradients' elements that 16 bit flushed to zero; None: not measured.
        broken: what failed halfway, so that the gradients are no longer those of the loss; else empty.
        stale: parameters whose gradients were used up by an earlier step when this one began, with their stamps.
    """

    scale: Tensor | None
    device: torch.device
    loss_bad: Flag = False
    gradients_bad: Flag = False
    penalty_bad: Flag = False
    flushed: Tensor | None = None
    broken: str = ""
    stale: dict[Tensor, Stamp] = field(default_factory=dict)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss times the scale, and remember whether it was finite. Syncs: no."""
        self.loss_bad = either(self.loss_bad, is_bad(loss, self.device))
        if self.scale is None:
            return loss
        with torch.enable_grad():  # backward runs where gradients are off too, as in torch
            return loss * move(self.scale, loss.device)


def is_bad(number: Tensor, home: torch.device) -> Flag:
    """Return whether a tensor of one element is inf or NaN: on a device NaN if so, else 0. Syncs: only where the host decides."""
    if host_decides(home):
        return not math.isfinite(number.item())
    return move(number.detach() * 0, home).reshape(()).to(torch.float32)  # inf and NaN times 0 are NaN


def either(*flags: Flag) -> Flag:
    """Return whether any of several flags is set: a bool where the host knows all of them. Syncs: no."""
    found: Flag = False
    for flag in flags:
        if isinstance(found, Tensor) and isinstance(flag, Tensor):
            found = torch.maximum(found, flag)
        elif flag is not False:
            found = flag if found is False else True  # one of the two is known to be
    return found


def without(flag: Flag, other: Flag) -> Flag:
    """Return whether a flag is set and another is not. Syncs: no."""
    if not isinstance(other, Tensor):
        return False if other else flag
    if isinstance(flag, Tensor):
        return torch.where(other != 0, torch.zeros_like(flag), flag)
    return flag and other == 0


@kept_on_device
def constant(number: float, device: torch.device) -> Tensor:
    """Return a number on a device: shape (), fp32, one tensor for good, so that no step makes it. Syncs: no."""
    return torch.full((), number, dtype=torch.float32, device=device)


_PROBE = 2.0**24
"""Lifts the smallest fp16 number to 1: a zero that stays one under it is none that fp16 made."""


@contextmanager
def measure_flush(
    pending: AccumulationState, loss: Tensor, params: Sequence[Tensor], probing: AbstractContextManager[None]
) -> Iterator[None]:
    """Measure what share of the gradients that the block makes were flushed to zero by 16 bit.

    The backward pass runs once more, before the block, on a loss that is much larger: an element that is finite and
    not zero there, and zero after the block, was flushed. Nothing is measured where a graph cannot be run twice.

    Args:
        pending: takes the share.
        loss: shape (), scaled.
        params: whose gradients the block makes, from None or zeros.
        probing: entered while the larger loss runs.

    Syncs: no.
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


def _instead(loss: object) -> str:
    if not isinstance(loss, Tensor):
        return "Hand over the tensor that the loss function returned, before .item() or float()."
    if not loss.dtype.is_floating_point:
        return "Counts and other whole or complex numbers have no gradient: write a loss of real numbers."
    return "Write loss.mean()."


_ORDER = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_loss(loss: Tensor, wanted: torch.dtype) -> None:
    """Refuse a loss that backward could not give true gradients for.

    Raises:
        StepError: not one number, no graph, or a dtype narrower than the policy's.

    Host only.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.dtype.is_floating_point:
        what = f"{dtype_name(loss.dtype)}{list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise StepError(f"backward(loss) takes one floating number with its graph, not {what}. {_instead(loss)}")
    if loss.is_meta:
        raise StepError(
            "backward(loss) was given a loss on the meta device, where nothing has values: the model was moved there after "
            "mezzo.prepare. Move it before, or amp.release() it, move it, and prepare it again where it has values."
        )
    if not loss.requires_grad:
        raise StepError(
            "backward(loss) was given a loss that no parameter leads to: it was detached, made anew with torch.tensor, "
            "computed under torch.no_grad(), or every parameter is frozen. Hand over the loss as the model made it."
        )
    if _ORDER.index(loss.dtype) < _ORDER.index(wanted):
        raise StepError(
            f"backward(loss) was given a {dtype_name(loss.dtype)} loss, and the policy declares loss={dtype_name(wanted)}: "
            f"its scaled gradient may overflow {dtype_name(loss.dtype)}. Compute it from outputs in "
            f"{dtype_name(wanted)}, as in loss_fn(output.float(), target), or write policy 'loss={dtype_name(loss.dtype)}'."
        )


@read_only
class OptimizerGrads:
    """The gradients of one optimizer in a step.

    Attributes:
        optimizer: whose gradients they are.
        index: which of the prepared optimizers it is.
        params: those with gradients; at least one.
        check: of their gradients.
    """

    optimizer: Optimizer
    index: int
    params: list[Tensor]
    check: GradientCheck

    def is_bad(self, home: torch.device) -> Flag:
        """Return whether their norm is inf or NaN; see `is_bad`."""
        known = self.check.known
        return is_bad(self.check.norm, home) if known is None or not host_decides(home) else not math.isfinite(known)

    @property
    def grads(self) -> list[Tensor]:
        """The gradients. A list made anew, since a step may replace them. Host only."""
        return [p.grad for p in self.params if p.grad is not None]


def grads_of(optimizers: Mapping[int, Optimizer], inv_scale: Tensor | None) -> list[OptimizerGrads]:
    """Return the gradients of each optimizer that has any, checked. Syncs: no."""
    found = []
    for index, optimizer in optimizers.items():
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if params:
            check = norm_and_finite([p.grad for p in params], inv_scale)
            found.append(OptimizerGrads(optimizer=optimizer, index=index, params=params, check=check))
    return found


@dataclass(kw_only=True, slots=True, eq=False)
class GradStats:
    """The gradients behind a result, by parameter.

    Attributes:
        params: that had gradients.
        names: of parameters.
        norms: of each optimizer's gradients, each of shape (number of gradients,), fp32, or as many numbers: the norm of each.
        counts: as `norms`, int64: inf and NaN in each, where they were counted in the step.
        stamps: of each gradient as it was, by the parameter's id.
    """

    params: Sequence[Tensor]
    names: Mapping[Tensor, str]
    norms: Sequence[Tensor | array[float]]
    counts: Sequence[Tensor] | None
    stamps: Mapping[int, Stamp]

    @classmethod
    def of(
        cls, grads: Sequence[OptimizerGrads], names: Mapping[Tensor, str], stamps: Mapping[int, Stamp], count: bool
    ) -> GradStats:
        """Return them, without reading anything.

        Args:
            grads: of each optimizer that has any.
            names: of parameters.
            stamps: of the gradients as they are now.
            count: count inf and NaN in each gradient now; a second pass over the gradients.

        Syncs: no.
        """
        return cls(
            params=[p for one in grads for p in one.params],
            names=names,
            norms=[one.check.norms for one in grads],
            counts=[one.check.count_nonfinite() for one in grads] if count else None,
            stamps=stamps,
        )

    def replayed(self) -> GradStats:
        """Return those of a replay that was just queued; the next one overwrites them. Syncs: no."""
        return replace(self, norms=[torch.as_tensor(norms).clone() for norms in self.norms], counts=None, stamps={})

    def nonfinite(self) -> dict[str, int | None]:
        """Return the parameters whose gradients are not finite, and how many elements are not.

        None stands for at least one: the gradient was gone, or written, before anybody asked.

        Syncs: yes.
        """
        bad = [not math.isfinite(norm) for norms in self.norms for norm in norms.tolist()]
        counts = None if self.counts is None else [count for counts in self.counts for count in counts.tolist()]
        return {
            self.names.get(p, "a parameter"): counts[index] if counts is not None else self._count(p)
            for index, p in enumerate(self.params)
            if bad[index]
        }

    def _count(self, param: Tensor) -> int | None:
        stamp = self.stamps.get(id(param))
        grad = None if stamp is None else stamp.tensor()
        if stamp is None or grad is None or not stamp.is_current(grad):
            return None
        # Of a sharded gradient the part here: one rank may ask alone, so nobody waits for the others.
        values = grad.coalesce().values() if grad.is_sparse else local(grad)
        return int((~values.isfinite()).sum())


@torch.no_grad()
def clamp_(grads: Iterable[Tensor], clip_value: float, scale: Tensor | None) -> None:
    """Clamp gradients, which may carry a scale, to a true value in both directions. Writes: `grads`. Syncs: no.

    Raises:
        StepError: a complex gradient, which has no order; nothing is written then.
    """
    distinct = list(_distinct(grads))
    if any(grad.is_complex() for grad in distinct):
        raise StepError(
            f"step(clip_value={clip_value}) would clamp complex gradients, which are neither larger nor smaller than a "
            "number. Write step(max_norm=...), which clips by their absolute values."
        )
    for grad in distinct:
        values = sparse_values(grad) if grad.is_sparse else grad
        bound = torch.full((), clip_value, device=grad.device)
        bound = bound if scale is None else bound * move(scale, grad.device)
        values.clamp_(min=-bound, max=bound)


@torch.no_grad()
def multiply_(grads: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients of any layouts and devices by one number. Writes: `grads`. Syncs: no."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in _distinct(grads):
        values = sparse_values(grad) if grad.is_sparse else grad
        kinds.setdefault((values.device, values.dtype), []).append(values)
    for (device, dtype), parts in kinds.items():
        foreach_mul_(parts, factor_for(factor, device, dtype))


def _distinct(grads: Iterable[Tensor]) -> Iterable[Tensor]:
    return {id(grad): local(grad) for grad in grads}.values()
