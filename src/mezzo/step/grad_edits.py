"""What is done to the gradients of a step between backward and update: measured, shown as they are, multiplied, clamped."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from .._torch import foreach_mul_, sparse_values
from ..errors import StepError
from ..kernels import factor_for, is_dtensor, local, move
from ..loss_scale import AccumulationState

_log = logging.getLogger("mezzo.step")
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


@contextmanager
def true_gradients(params: Sequence[Tensor], scale: Tensor | None) -> Iterator[None]:
    """Have `.grad` hold the true gradients inside the block.

    fp16 gradients are replaced by fp32 ones inside the block, since dividing in fp16 would flush the small ones.

    Args:
        params: parameters, with or without gradients.
        scale: shape (), fp32: that the gradients carry; None: they are true already.

    Writes: gradients. Syncs: no.
    """
    if scale is None:
        yield
        return
    narrow = {p: p.grad for p in params if p.grad is not None and p.grad.dtype is torch.float16}
    for p, grad in narrow.items():
        _replace(p, grad.float())
    multiply_([p.grad for p in params if p.grad is not None], scale.reciprocal())
    try:
        yield
    finally:
        multiply_([p.grad for p in params if p.grad is not None], scale)
        for p, grad in narrow.items():
            wide = p.grad
            _replace(p, None if wide is None else grad.copy_(wide), torch.float16)


def _replace(param: Tensor, grad: Tensor | None, dtype: torch.dtype = torch.float32) -> None:
    param.grad = None
    param.grad_dtype = dtype
    param.grad = grad


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
