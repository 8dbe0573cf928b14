"""The training step as other libraries have it, each as its own documentation writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .workload import Setting

LossOf = Callable[[nn.Module, Any], Tensor]
StepOf = Callable[[Any], Tensor]


def accelerate_step(
    setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: LossOf, max_norm: float | None
) -> StepOf:
    """Return the step of accelerate's Accelerator in mixed precision. Writes: `model`."""
    from accelerate import Accelerator

    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[setting.dtype]
    accelerator = Accelerator(mixed_precision=name, cpu=setting.device.type == "cpu")
    wrapped, stepped = accelerator.prepare(model, optimizer)

    def step(batch: Any) -> Tensor:
        with accelerator.autocast():
            loss = loss_of(wrapped, batch)
        accelerator.backward(loss)
        if max_norm is not None:
            accelerator.clip_grad_norm_(wrapped.parameters(), max_norm)
        stepped.step()
        stepped.zero_grad()
        return loss.detach()

    return step


def fabric_step(
    setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: LossOf, max_norm: float | None
) -> StepOf:
    """Return the step of Lightning Fabric in mixed precision. Writes: `model`."""
    from lightning.fabric import Fabric

    name: Any = {torch.float16: "16-mixed", torch.bfloat16: "bf16-mixed"}[setting.dtype]
    fabric = Fabric(accelerator=setting.device.type, devices=1, precision=name)
    wrapped, stepped = fabric.setup(model, optimizer)

    def step(batch: Any) -> Tensor:
        with fabric.autocast():
            loss = loss_of(wrapped, batch)
        fabric.backward(loss)
        if max_norm is not None:
            fabric.clip_gradients(wrapped, stepped, max_norm=max_norm)
        stepped.step()
        stepped.zero_grad()
        return loss.detach()

    return step


STEPS: dict[str, Callable[[Setting, nn.Module, torch.optim.Optimizer, LossOf, float | None], StepOf]] = {
    "accelerate": accelerate_step,
    "fabric": fabric_step,
}
