"""The update: finding, unscaling, clipping and stepping, decided on the device or, where that cannot be, by the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._torch import foreach_mul_, global_post_hooks, global_pre_hooks, is_fused, sparse_values, step_hooks
from ..errors import StepError
from ..kernels.dtensor import local
from ..kernels.ops.gradients import GradientCheck, norm_and_finite
from ..optim.master_weights import MasterWeights, keeps_masters, parameters

Skip = Literal["together", "independent"]
"""What several optimizers do when one has bad gradients: all skip, or that one."""

_CLIP_EPS = 1e-6
"""Added to the norm by torch.nn.utils.clip_grad_norm_, so that clipping equals torch's."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OptimizerGrads:
    """One optimizer's part in a step.

    Attributes:
        optimizer: it.
        index: which of the prepared optimizers it is.
        params: those with gradients; at least one.
        check: of their gradients.
    """

    optimizer: Optimizer
    index: int
    params: list[Tensor]
    check: GradientCheck

    @property
    def grads(self) -> list[Tensor]:
        """The gradients. A list made anew, since a step may replace them."""
        return [p.grad for p in self.params if p.grad is not None]


def shares_of(optimizers: Mapping[int, Optimizer], inv_scale: Tensor | None) -> list[OptimizerGrads]:
    """Return the part of each optimizer, by its place, that has gradients. Syncs: no."""
    shares = []
    for index, optimizer in optimizers.items():
        params = [p for p in parameters(optimizer) if p.grad is not None]
        if params:
            check = norm_and_finite([p.grad for p in params if p.grad is not None], inv_scale)
            shares.append(OptimizerGrads(optimizer=optimizer, index=index, params=params, check=check))
    return shares


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. Syncs: only from an accelerator to the host."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def decides_on_device(optimizer: Optimizer) -> bool:
    """Whether an optimizer can leave out a step by itself, so that the host need not know.

    Not one with hooks, which would run after steps that did not happen; and not torch's fused SGD before its
    momentum buffers are there: skipping the step that makes them leaves them without values (torch 2.13).
    """
    # The global hooks of torch.profiler and of mezzo's cache only take note; anybody else's may count steps.
    everywhere = (*global_pre_hooks.values(), *global_post_hooks.values())
    if any(hook.__module__.partition(".")[0] not in ("torch", "mezzo") for hook in everywhere):
        return False
    for part in (optimizer, optimizer.inner) if isinstance(optimizer, MasterWeights) else (optimizer,):
        # One pre-hook is the stepper's or the wrapper's own.
        has_hooks = (hooks := step_hooks(part))[1] or len(hooks[0]) > 1
        if has_hooks or not is_fused(part) or _lacks_momentum(part, optimizer):
            return False
    return True


def _lacks_momentum(optimizer: Optimizer, owner: Optimizer) -> bool:
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    params = [p for group in optimizer.param_groups if group["momentum"] != 0 for p in group["params"]]
    state = owner.state if params else {}
    return any(state.get(p, {}).get("momentum_buffer") is None for p in params if p.grad is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """How gradients are clipped.

    Attributes:
        max_norm: to at most this L2 norm; None: not.
        value: to at most this value in both directions; None: not.

    Raises:
        StepError: both, or one that is not positive.
    """

    max_norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be done."""
        if self.max_norm is not None and self.value is not None:
            raise StepError(
                f"step(max_norm={self.max_norm}, clip_value={self.value}): clip by norm or by value, not both."
            )
        for name, bound in (("max_norm", self.max_norm), ("clip_value", self.value)):
            if bound is not None and not bound > 0:
                raise StepError(f"step({name}={bound}) would leave no gradient; write a positive number, or None.")

    def coefficient(self, norm: Tensor) -> Tensor | None:
        """Return what brings gradients of a true norm down to `max_norm`: shape (), fp32, at most 1. Syncs: no."""
        return None if self.max_norm is None else (self.max_norm / (norm + _CLIP_EPS)).clamp(max=1.0)


@torch.no_grad()
def clamp_(grads: Iterable[Tensor], clip_value: float, scale: Tensor | None) -> None:
    """Clamp gradients, which may carry a scale, to a true value in both directions. Writes: `grads`. Syncs: no."""
    for grad in _distinct(grads):
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
    for (device, _), parts in kinds.items():
        foreach_mul_(parts, move(factor, device))


def _distinct(grads: Iterable[Tensor]) -> Iterable[Tensor]:
    return {id(grad): local(grad) for grad in grads}.values()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepScaling:
    """How one optimizer must read its gradients and whether it may step.

    Attributes:
        scale: shape (), fp32: divides the gradients; None: not scaled.
        coefficient: shape (), fp32: multiplies after that; None: not clipped.
        skip: shape (), fp32: 1 leaves everything as it is; None: decided already, step.
    """

    scale: Tensor | None
    coefficient: Tensor | None
    skip: Tensor | None


def step_(optimizer: Optimizer, grads: Sequence[Tensor], order: StepScaling) -> None:
    """Have an optimizer take its step with gradients as they are; see `handing`. Writes: weights and state."""
    with handing(optimizer, grads, order):
        optimizer.step()


@contextmanager
def handing(optimizer: Optimizer, grads: Sequence[Tensor], order: StepScaling) -> Iterator[None]:
    """Have an optimizer find true gradients inside the block.

    Those of mezzo and torch's fused ones read scale, clipping and skipping by themselves; for any other the
    gradients are unscaled and clipped in place, and whether it may step is decided already.

    Args:
        optimizer: the one that will step.
        grads: its gradients.
        order: what to do with them.

    Writes: attributes of the optimizer for the length of the block, or the gradients. Syncs: no.
    """
    if not is_fused(optimizer):
        assert order.skip is None
        factor = _factor(order)
        if factor is not None:
            multiply_(grads, factor)
        yield
        return
    scale, coefficient = order.scale, order.coefficient
    if coefficient is not None and not keeps_masters(optimizer):
        # torch's fused kernels know one divisor.
        scale = coefficient.reciprocal() if scale is None else scale / coefficient
        coefficient = None
    named = {"grad_scale": scale, "found_inf": order.skip, "clip_coef": coefficient}
    given = {name: value for name, value in named.items() if value is not None}
    for name, value in given.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in given:
            delattr(optimizer, name)


def _factor(order: StepScaling) -> Tensor | None:
    if order.scale is None:
        return order.coefficient
    inverse = order.scale.reciprocal()
    return inverse if order.coefficient is None else inverse * order.coefficient
