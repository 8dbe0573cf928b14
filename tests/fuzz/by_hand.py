"""Mixed precision as one would write it by hand in plain torch: what a prepared model is compared with."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import Network
from .recipes import Recipe

GROWTH, BACKOFF = 2.0, 0.5


def fp32_norm(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a norm that computes in fp32 and hands on 16 bit."""

    class Norm(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float()).to(torch.get_autocast_dtype("cpu"))

    Norm.__name__ = Norm.__qualname__ = f"Fp32{kind.__name__}"
    Norm.__module__ = __name__
    return Norm


Fp32LayerNorm, Fp32GroupNorm, Fp32RMSNorm = map(fp32_norm, (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm))
NORMS = {nn.LayerNorm: Fp32LayerNorm, nn.GroupNorm: Fp32GroupNorm, nn.RMSNorm: Fp32RMSNorm}


class ByHand:
    """A training loop in plain torch: torch.autocast, fp32 masters beside 16-bit weights, a loss scale.

    Args:
        model: its own copy.
        recipe: what the policy stands for; `Recipe()` for the fp32 oracle.
        make: torch's optimizer, from parameters.
        scaling: of the policy, if it scales.
    """

    def __init__(self, model: Network, recipe: Recipe, make: Callable[[Any], Any], scaling: Any) -> None:
        self.model, self.recipe = model, recipe
        for module in model.modules() if recipe.compute is not None else ():
            module.__class__ = NORMS.get(type(module), type(module))
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        self.optimizer = make([p for p in model.parameters() if p.requires_grad])
        self.config = scaling if recipe.scaling else None
        self.restart_scale()
        self.before: dict[str, Tensor] | None = None
        self.is_open = False

    def restart_scale(self) -> None:
        """Start the loss scale anew."""
        self.scale = self.config.init_scale if self.config is not None else 1.0
        self.clean = 0

    # -- forward and backward

    def forward(self, x: Tensor, model: nn.Module | None = None) -> Tensor:
        """Return the output of the model, or of a copy of it, under torch's autocast."""
        model = self.model if model is None else model
        if self.recipe.compute is None:
            return model(x)
        with torch.autocast("cpu", self.recipe.compute, cache_enabled=False):
            out = model(x)
        return out.float() if self.recipe.output else out

    def open(self) -> None:
        """Remember the buffers before the step."""
        if self.before is None:
            self.before = {name: b.clone() for name, b in self.model.named_buffers()}

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a scaled loss."""
        self.is_open = True
        (loss * self.scale if self.config is not None else loss).backward()

    def params(self) -> list[nn.Parameter]:
        """Return the model's parameters that the optimizer steps."""
        models = {id(m): p for p, m in self.masters.items()}
        return [models.get(id(p), p) for group in self.optimizer.param_groups for p in group["params"]]

    def true_grads(self) -> dict[str, Tensor]:
        """Return the gradients without the scale, in fp32."""
        names = {p: name for name, p in self.model.named_parameters()}
        return {names.get(p, "gone"): p.grad.float() / self.scale for p in self.params() if p.grad is not None}

    def edit(self, change: Callable[[Mapping[str, Tensor]], None]) -> bool:
        """Let user code change true gradients; return whether they were finite before."""
        names = {name: p for name, p in self.model.named_parameters()}
        grads = {name: g for name, g in self.true_grads().items() if name != "gone"}
        was_finite = self.is_finite()
        change(grads)
        for name, grad in grads.items():
            names[name].grad.copy_(grad * self.scale)
        return was_finite

    def is_finite(self) -> bool:
        """Whether every gradient is."""
        return all(bool(p.grad.isfinite().all()) for p in self.params() if p.grad is not None)

    def is_sound(self) -> bool:
        """Whether every weight and buffer is finite."""
        return all(bool(t.isfinite().all()) for t in (*self.model.parameters(), *self.model.buffers()))

    # -- the step

    def clamp(self, value: float) -> None:
        """Clamp the gradients, in their dtype, as torch does."""
        for p in self.params():
            if p.grad is not None:
                p.grad.clamp_(*(torch.tensor(sign * value * self.scale).to(p.grad.dtype) for sign in (-1, 1)))

    def step(self, *, skips: bool, coefficient: Tensor | None) -> None:
        """Take the step, with gradients times a coefficient, or leave it."""
        if skips:
            self.restore()
        else:
            lent: dict[nn.Parameter, Any] = {p: p.grad for p in self.params() if p.grad is not None}
            for p in lent:
                self.masters.get(p, p).grad = p.grad.float() / self.scale
                if coefficient is not None:
                    self.masters.get(p, p).grad.mul_(coefficient)
            self.optimizer.step()
            with torch.no_grad():
                for p, master in self.masters.items():
                    p.copy_(rounded(master, p.dtype, self.recipe.rounds))
            for p, grad in lent.items():
                self.masters.get(p, p).grad = None
                p.grad = grad
        self.before, self.is_open = None, False

    def restore(self) -> None:
        """Give the buffers the values they had before the step."""
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if self.before is not None and name in self.before:
                    buffer.copy_(self.before[name])

    def move_scale(self, *, is_bad: bool) -> None:
        """Move the loss scale after a step whose loss was finite."""
        if self.config is None:
            return
        if is_bad:
            self.scale, self.clean = max(self.scale * BACKOFF, self.config.min_scale), 0
            return
        self.clean += 1
        if self.clean >= self.config.growth_interval:
            self.scale, self.clean = self.scale * GROWTH, 0

    def drop(self, set_to_none: bool) -> None:
        """Drop the gradients, and what the forwards wrote if it is not finite."""
        for p in self.model.parameters():
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.detach_().zero_()
        for p in self.params():
            p.grad = None if set_to_none else p.grad
        if self.is_open and not self.is_sound():
            self.restore()
        self.before, self.is_open = None, False

    # -- storage

    def store(self, dtypes: Mapping[str, torch.dtype], grads: torch.dtype | None) -> None:
        """Store weights in the dtypes that the policy gave them, with masters of what they were."""
        if not self.recipe.rounds:
            return
        for name, p in self.model.named_parameters():
            if p in self.masters and dtypes[name] is torch.float32:
                master = self.masters.pop(p)
                p.grad, p.data = None, master.detach().clone()
                self._step_instead(master, p)
            elif dtypes[name] is not p.dtype:
                self.masters[p] = master = nn.Parameter(p.detach().clone())
                p.grad, p.data = None, rounded(p.detach(), dtypes[name], self.recipe.rounds)
                if grads is not None:
                    p.grad_dtype = grads
                self._step_instead(p, master)

    def _step_instead(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Have the optimizer step another tensor with the same state."""
        for group in self.optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
        if old in self.optimizer.state:
            self.optimizer.state[new] = self.optimizer.state.pop(old)

    def master(self, p: nn.Parameter) -> Tensor:
        """Return the fp32 value of a parameter."""
        return self.masters.get(p, p).detach()

    def set_master(self, p: nn.Parameter, value: Tensor) -> None:
        """Give a parameter another value, and its master the one that the new weight has."""
        with torch.no_grad():
            p.copy_(value)
            if p in self.masters:
                self.masters[p].copy_(p)

    def save(self) -> Any:
        """Return everything a run needs to go on."""
        masters = {name: self.master(p).clone() for name, p in self.model.named_parameters()}
        return copy.deepcopy((self.model.state_dict(), masters, self.optimizer.state_dict(), self.scale, self.clean))

    def load(self, saved: Any) -> None:
        """Go on from there."""
        weights, masters, optimizer, self.scale, self.clean = copy.deepcopy(saved)
        self.model.load_state_dict(weights)
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                self.master(p).copy_(masters[name])
        self.optimizer.load_state_dict(optimizer)
        self.before = None


def rounded(master: Tensor, dtype: torch.dtype, rounds: str) -> Tensor:
    """Return the 16-bit weight of a master: to the nearest, ties to even, or away from zero as split masters have it."""
    if rounds != "away" or dtype is torch.float32:
        return master.to(dtype)
    bits = master.detach().contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def norm_of(grads: list[Tensor]) -> float:
    """Return the L2 norm of gradients, in fp64."""
    return math.sqrt(sum(float(g.double().square().sum()) for g in grads))
