"""One training step and one forward, each written once for all variants: they differ in precision and nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from .. import GradScaler, Stepper, autocast, prepare
from ..formats import dtype_name
from ..policy import CacheName
from ..train import parameter_groups
from .variant import Variant
from .workload import Session, Setting

Batch = TypeVar("Batch")
Tensors = TypeVar("Tensors", bound=tuple[Tensor, ...])
StepOf = Callable[[Batch], Tensor]
LossOf = Callable[[nn.Module, Batch], Tensor]
Scaler = torch.amp.GradScaler | GradScaler
INIT_SCALE = 2.0**16
WARM_UP_STEPS = 5
"""More than the first steps, whose invariants mezzo looks at closely."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How a workload trains, whatever the variant: AdamW or SGD, matrices alone decayed, gradients not clipped where there is no `max_norm`.

    `init_scale` is of variants that have a loss scale, and `cache` how long a prepared model keeps 16-bit copies of fp32 weights.
    """

    optimizer: Literal["AdamW", "SGD"]
    lr: float
    weight_decay: float = 0.0
    max_norm: float | None = None
    init_scale: float = INIT_SCALE
    cache: CacheName = "region"

    def make_optimizer(self, model: nn.Module, capturable: bool = False) -> torch.optim.Optimizer:
        """Return torch's fused optimizer, which `mezzo.prepare` takes over as it is; for a captured step where asked."""
        groups = parameter_groups(model, self.weight_decay)
        if self.optimizer == "SGD":
            return torch.optim.SGD(groups, lr=self.lr, fused=True)
        return torch.optim.AdamW(groups, lr=self.lr, fused=True, capturable=capturable)


def _foreign_optimizer(
    variant: Variant, setting: Setting, model: nn.Module, training: Training
) -> torch.optim.Optimizer:
    """Return the optimizer of a library that steps 16-bit weights. Writes: the weights, which become 16 bit."""
    library = import_module(variant.imports[0])
    if variant.optimizer == "flashoptim":
        library.cast_model(model, dtype=setting.dtype)
        groups = parameter_groups(model, training.weight_decay)
        found = library.FlashAdamW(groups, lr=training.lr, master_weight_bits=24)
    else:
        model.to(setting.dtype)
        groups = parameter_groups(model, training.weight_decay)
        found = library._AdamW(groups, lr=training.lr, bf16_stochastic_round=True)
    assert isinstance(found, torch.optim.Optimizer)
    return found


def region_of(variant: Variant, setting: Setting) -> Callable[[], contextlib.AbstractContextManager[object]]:
    """Return what makes the region of a variant, anew for each step as a training loop does."""
    kind = setting.device.type
    if variant.region == "torch":
        return lambda: torch.autocast(kind, dtype=setting.dtype, enabled=variant.enabled)
    if variant.region == "mezzo":
        return lambda: autocast(kind, dtype=setting.dtype, enabled=variant.enabled, cache=variant.cache)
    return contextlib.nullcontext


def scaler_of(variant: Variant, setting: Setting, init_scale: float = INIT_SCALE) -> Scaler | None:
    """Return the loss scaler of a variant, or None."""
    kind = {"torch": torch.amp.GradScaler, "mezzo": GradScaler}.get(variant.scaler)
    return None if kind is None else kind(setting.device.type, init_scale, enabled=variant.enabled)


def training_step(
    variant: Variant, setting: Setting, model: nn.Module, loss_of: LossOf[Batch], training: Training
) -> StepOf[Batch]:
    """Return the training step of a variant: a function of a batch that steps once and returns the detached loss, shape (), unread.

    The model is fp32, on the device, and trained in place. Writes: `model`. Syncs: no, unless the variant's own step does.
    """
    if variant.optimizer == "torch":
        optimizer = training.make_optimizer(model, variant.captured)
    else:
        optimizer = _foreign_optimizer(variant, setting, model, training)
    amp = None
    if variant.policy:
        amp = prepare(model, optimizer, policy_of(variant, setting), cache=training.cache)
    if variant.compiled:
        model.compile()
    if amp is not None:
        return _prepared(amp, loss_of, training.max_norm, captured=variant.captured)
    if variant.wrapper != "none":
        return _wrapped(variant, setting, model, optimizer, loss_of, training.max_norm)
    region, scaler = region_of(variant, setting), scaler_of(variant, setting, training.init_scale)
    return _in_region(model, optimizer, loss_of, region, scaler, training.max_norm)


def policy_of(variant: Variant, setting: Setting) -> str:
    """Return the text of a variant's policy.

    >>> policy_of(Variant(name="any", policy="{dtype}-master"), Setting(device=torch.device("cpu"), dtype=torch.bfloat16))
    'bf16-master'
    """
    return variant.policy.format(dtype=dtype_name(setting.dtype))


def _prepared(amp: Stepper, loss_of: LossOf[Batch], max_norm: float | None, *, captured: bool) -> StepOf[Batch]:
    def step(batch: Batch) -> Tensor:
        loss = loss_of(amp.model, batch)
        amp.backward(loss)
        amp.step(max_norm=max_norm)
        amp.zero_grad()
        return loss.detach()

    return amp.capture(step) if captured else step


def _in_region(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: LossOf[Batch],
    region: Callable[[], contextlib.AbstractContextManager[object]],
    scaler: Scaler | None,
    max_norm: float | None,
) -> StepOf[Batch]:
    def step(batch: Batch) -> Tensor:
        with region():
            loss = loss_of(model, batch)
        torch.autograd.backward(loss if scaler is None else scaler.scale(loss))
        if max_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _wrapped(
    variant: Variant,
    setting: Setting,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: LossOf[Batch],
    max_norm: float | None,
) -> StepOf[Batch]:
    """Return the step as the documentation of accelerate, or of Lightning Fabric, writes it."""
    library: Any
    if variant.wrapper == "accelerate":
        from accelerate import Accelerator

        library = Accelerator(mixed_precision=dtype_name(setting.dtype), cpu=setting.device.type == "cpu")
        wrapped, stepped = library.prepare(model, optimizer)
        clip = partial(library.clip_grad_norm_, list(wrapped.parameters()), max_norm)
    else:
        from lightning.fabric import Fabric

        precision: Any = f"{dtype_name(setting.dtype).removeprefix('fp')}-mixed"
        library = Fabric(accelerator=setting.device.type, devices=1, precision=precision)
        wrapped, stepped = library.setup(model, optimizer)
        clip = partial(library.clip_gradients, wrapped, stepped, max_norm=max_norm)

    def step(batch: Batch) -> Tensor:
        with library.autocast():
            loss = loss_of(wrapped, batch)
        library.backward(loss)
        if max_norm is not None:
            clip()
        stepped.step()
        stepped.zero_grad()
        return loss.detach()

    return step


def mean_square(output: Tensor) -> Tensor:
    """Return the mean of the squares of a tensor, in fp32, shape (). Syncs: no."""
    return output.float().square().mean()


def repeated(
    unit: Callable[[int], Tensor],
    units: int,
    *,
    loss: Callable[[Tensor], Tensor] = lambda last: last,
    warm_up: int = WARM_UP_STEPS,
    batches: Sequence[tuple[Tensor, ...]] = (),
) -> Session:
    """Return the session whose run calls a unit with 0, 1, ... and makes its loss of what the last one returned. Syncs: no."""

    def run(times: int) -> Tensor:
        for number in range(times):
            last = unit(number)
        return loss(last)

    data_bytes = sum(part.nbytes for batch in batches for part in batch)
    return Session(warm_up=lambda: run(warm_up), run=lambda: run(units), units=units, data_bytes=data_bytes)


def training_session(
    variant: Variant,
    setting: Setting,
    model: nn.Module,
    batches: Sequence[Tensors],
    loss_of: LossOf[Tensors],
    training: Training,
    steps: int,
) -> Session:
    """Return the training of a variant: `steps` a round, over batches whose tensors are on the device, in turn.

    Writes: `model`, fp32, on the device. Syncs: no, unless the variant's own step does.
    """
    step = training_step(variant, setting, model, loss_of, training)
    return repeated(lambda number: step(batches[number % len(batches)]), steps, batches=batches)


def forward(variant: Variant, setting: Setting, model: nn.Module, cache: CacheName = "region") -> Callable[..., Tensor]:
    """Return the forward of a variant for inference: a region of its own for each call, no gradients.

    The model is fp32, on the device, has one tensor as its output, and is put into evaluation mode. A loss scaler has nothing to
    do here: torch-amp is torch-autocast. Writes: `model`. Syncs: no.
    """
    model.eval()
    if variant.pure:
        model.to(setting.dtype)
    if variant.policy:
        prepare(model, None, policy_of(variant, setting), cache=cache)
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
