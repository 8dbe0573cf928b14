"""One training step and one forward, each written once for all variants: they differ in precision and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from ..casting import autocast
from ..scaling import GradScaler
from .variant import Variant
from .workload import Setting

Batch = TypeVar("Batch")
Parameters = list[nn.Parameter]


class Scaler(Protocol):
    """What torch's and mezzo's GradScaler have in common."""

    def scale(self, outputs: Tensor) -> Tensor:
        """Multiply the loss by the scale."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale."""

    def step(self, optimizer: torch.optim.Optimizer) -> float | None:
        """Step unless a gradient is not finite."""

    def update(self) -> None:
        """Move the scale."""


def region_of(variant: Variant, setting: Setting) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Return what makes the region of a variant, anew for each step as a training loop does."""
    kind = setting.device.type
    if variant.region == "torch":
        return lambda: torch.autocast(kind, dtype=setting.dtype, enabled=variant.enabled)
    if variant.region == "mezzo":
        return lambda: autocast(kind, dtype=setting.dtype, enabled=variant.enabled, cache=variant.cache)
    return contextlib.nullcontext


def scaler_of(variant: Variant, setting: Setting, init_scale: float = 2.0**16) -> Scaler | None:
    """Return the loss scaler of a variant, or None. An initial scale of 1 never grows within a benchmark."""
    kind = setting.device.type
    if variant.scaler == "torch":
        return torch.amp.GradScaler(kind, init_scale, enabled=variant.enabled)
    if variant.scaler == "mezzo":
        return GradScaler(kind, init_scale, enabled=variant.enabled)
    return None


def training_step(
    variant: Variant,
    setting: Setting,
    model: nn.Module,
    make_optimizer: Callable[[Parameters], torch.optim.Optimizer],
    loss_of: Callable[[nn.Module, Batch], Tensor],
    *,
    max_norm: float | None = None,
) -> Callable[[Batch], Tensor]:
    """Return the training step of a variant.

    Args:
        variant: how to train.
        setting: device and 16-bit dtype.
        model: fp32, on the device; trained in place.
        make_optimizer: makes the optimizer of the trainable parameters.
        loss_of: forward and loss of one batch.
        max_norm: gradients are clipped to this norm; not at all when None.

    Returns:
        A function of a batch that steps once and returns the detached loss, shape (), unread.

    Writes: `model`. Syncs: no, unless the variant's own step does.
    """
    if variant.pure:
        model.to(setting.dtype)
    if variant.compiled:
        model.compile()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(trainable)
    region, scaler = region_of(variant, setting), scaler_of(variant, setting)

    def clip() -> None:
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(trainable, max_norm)

    def plain(batch: Batch) -> Tensor:
        with region():
            loss = loss_of(model, batch)
        torch.autograd.backward(loss)
        clip()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def scaled(batch: Batch) -> Tensor:
        assert scaler is not None
        with region():
            loss = loss_of(model, batch)
        torch.autograd.backward(scaler.scale(loss))
        if max_norm is not None:
            scaler.unscale_(optimizer)
            clip()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return scaled if scaler is not None else plain


def forward(variant: Variant, setting: Setting, model: nn.Module) -> Callable[..., Tensor]:
    """Return the forward of a variant for inference: a region of its own for each call, no gradients.

    Args:
        variant: how to run.
        setting: device and 16-bit dtype.
        model: fp32, on the device, with one tensor as its output; put into evaluation mode.

    Writes: `model`. Syncs: no.
    """
    model.eval()
    if variant.pure:
        model.to(setting.dtype)
    if variant.compiled:
        model.compile()
    region = region_of(variant, setting)

    def call(*inputs: Tensor) -> Tensor:
        if variant.pure:
            inputs = tuple(x.to(setting.dtype) if x.is_floating_point() else x for x in inputs)
        with torch.inference_mode(), region():
            output: Tensor = model(*inputs)
        return output

    return call
