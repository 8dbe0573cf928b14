"""The stepper: owns the order scale, backward, check, unscale, clip, update, rescale, and says what happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import StepError
from ..policy import Policy
from ..scaling.state import LossScale, NoScaling
from .bind import Binding
from .buffers import Buffers
from .decision import Agreement, Decision, decide, move_scale
from .direct import forbid_direct_steps
from .gradients import Gradients
from .guard import Counters, Guard
from .pending import Pending
from .result import StepResult
from .update import (
    Clip,
    Order,
    Share,
    Skip,
    clamp_,
    decides_on_device,
    multiply_,
    parameters,
    step_,
)


class Stepper:
    """Takes the steps of a prepared model; made by `mezzo.prepare`.

    The order of calls is `zero_grad`, any number of `backward(loss)`, then `step()`. What is called out of order
    raises a `StepError` that names the right call. The scale that the first `backward` of a step captured is the
    one its gradients are divided by, whatever happens to the scale meanwhile.

    Attributes:
        model: the bound model.
        optimizers: as given to `prepare`.
        policy: with its compute dtype decided.
        agree: makes the findings of a step the same on all ranks; None on one rank.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], policy: Policy, binding: Binding, *, skip: Skip
    ) -> None:
        self.model = model
        self.optimizers = tuple(optimizers)
        self.policy = policy
        self.agree: Agreement | None = None
        self._skip: Skip = skip
        self._names = name_parameters(model, self.optimizers)
        self._gradients = Gradients(model, self.optimizers, self._names, policy.loss)
        self._loss_scale = _start(policy, self._gradients.home)
        self._buffers = Buffers(model)
        self._guard = Guard(policy, self._nonfinite_weights)
        self._is_stepping = False
        self._callbacks: list[tuple[Callable[[], object], Optimizer | None]] = []
        binding.before_forward = self._buffers.begin
        for optimizer in self.optimizers:
            forbid_direct_steps(optimizer, self)

    def backward(
        self,
        loss: Tensor,
        *,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Sequence[Tensor] | None = None,
    ) -> None:
        """Add a loss's gradients to those of this step; called once for each micro-batch and each loss.

        An inf or NaN in any of them voids the step.

        Args:
            loss: one number, at least as wide as the policy's loss dtype, not scaled.
            retain_graph: as in torch.
            create_graph: as in torch; the graph is that of the scaled loss, so prefer `grad` for penalties.
            inputs: as in torch: accumulate into these leaves only.

        Raises:
            StepError: a loss without graph or in a narrow dtype, gradients of the last step not dropped, or gradients
                that somebody else changed since the last `backward`.

        Writes: gradients. Syncs: no.
        """
        self._gradients.backward(
            loss, self._scale(), retain_graph=retain_graph, create_graph=create_graph, inputs=inputs
        )

    def grad(
        self,
        outputs: Tensor,
        inputs: Tensor | Sequence[Tensor],
        *,
        create_graph: bool = False,
        retain_graph: bool | None = None,
        allow_unused: bool = False,
    ) -> tuple[Tensor, ...]:
        """Return true gradients of a number with respect to inputs, for penalties and inspection.

        The backward pass runs scaled, so that 16-bit gradients survive; what comes out is divided again and connected
        to the graph, so that a penalty made of it can go into the loss of `backward`.

        Args:
            outputs: one number with its graph, not scaled.
            inputs: tensors it was made of.
            create_graph: connect the result to the graph.
            retain_graph: as in torch.
            allow_unused: inputs that were not used give zeros, instead of an error.

        Returns:
            For each input its gradient, in the input's shape; fp32 for 16-bit inputs where the loss is scaled.

        Raises:
            StepError: as for `backward`.

        Syncs: no.
        """
        wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        return self._gradients.grad(
            outputs,
            wanted,
            self._scale(),
            create_graph=create_graph,
            retain_graph=retain_graph,
            allow_unused=allow_unused,
        )

    def unscaled_grads(self) -> AbstractContextManager[dict[str, Tensor]]:
        """Show the true gradients of this step inside a `with` block, to look at or to edit.

        They are in `.grad` of each parameter, and the block's value has them by name; fp16 ones are shown in fp32.
        What is edited counts, but an inf or NaN that was there before still voids the step. More `backward(loss)` may
        follow after the block.

        Raises:
            StepError: before `backward(loss)`, inside itself, or after somebody else changed gradients.

        Writes: gradients, divided on the way in and multiplied on the way out; exact for powers of two.
        Syncs: no.
        """
        return self._gradients.unscaled()

    def step(
        self,
        closure: Callable[[], Tensor | float] | None = None,
        *,
        max_norm: float | None = None,
        clip_value: float | None = None,
        optimizer: Optimizer | None = None,
    ) -> StepResult:
        """Take the step: check, unscale, clip, update, and move the loss scale; or leave everything as it was.

        Args:
            closure: computes the loss again: `amp.zero_grad()`, forward, `amp.backward(loss)`, return the loss. For
                optimizers that evaluate it several times (LBFGS, SAM), and for on_overflow="retry".
            max_norm: clip the true gradients to this L2 norm, as torch.nn.utils.clip_grad_norm_ does; over all
                optimizers, or each by itself with skip="independent".
            clip_value: clamp the true gradients to this value in both directions.
            optimizer: step this one only; the others keep their gradients.

        Returns:
            What happened, read from the device when asked.

        Raises:
            StepError: called in the wrong order, gradients changed by somebody else, or none at all.
            NonFiniteStep: an earlier step, or this one if the host decided it, showed inf or NaN that no loss
                scale mends.
            LossScaleExhausted: likewise, the scale is at its floor, or too many steps in a row were skipped.

        Writes: weights, optimizer state, buffers of a skipped step, the loss scale.
        Syncs: no, with mezzo.optim and torch's fused optimizers without hooks or `on_applied`; else once.
        """
        clip = Clip(max_norm=max_norm, value=clip_value)
        self._guard.check()
        if closure is not None:
            raise StepError("closures come with the next commit")
        pending = self._gradients.require("step()")
        return self._take(self._gradients.shares(optimizer), pending, clip)

    def on_applied(self, function: Callable[[], object], optimizer: Optimizer | None = None) -> Callable[[], object]:
        """Have a function called after each step that was taken: a scheduler's step, an EMA update, a counter.

        The host must know then, so every step is read once.

        Args:
            function: called without arguments.
            optimizer: after this one's steps; left out, after steps that every optimizer with gradients took.

        Returns:
            The function, so that this can decorate it.
        """
        self._callbacks.append((function, optimizer))
        return function

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all optimizers and of the model, and with them the step in the making.

        Args:
            set_to_none: as in torch; False writes zeros.

        Syncs: no.
        """
        self._gradients.zero(set_to_none)

    def counters(self) -> Counters:
        """Return how many steps were seen, applied and skipped. Syncs: with the last step."""
        return self._guard.settle()

    @property
    def scale(self) -> float:
        """The loss scale that the next step will use; 1.0 without scaling. Syncs: yes."""
        return float(self._loss_scale.scale)

    def _scale(self) -> Tensor | None:
        scale = self._loss_scale.scale
        return scale if isinstance(scale, Tensor) else None

    def _take(self, shares: list[Share], pending: Pending, clip: Clip) -> StepResult:
        restores = self.policy.guard.restore_buffers
        written = self._buffers.written() if restores else []
        decision = decide(shares, pending, written, self._skip, self.agree)
        verdict = decision.verdict(shares, self._names, count=self._guard.is_troubled)
        self._guard.push(verdict)
        by_host = bool(self._callbacks) or not all(decides_on_device(share.optimizer) for share in shares)
        skipped = verdict.facts().skipped if by_host else None
        self._update(shares, decision, skipped, clip)
        void = decision.is_void if skipped is None else any(skipped)
        self._buffers.settle(void if restores else False)
        self._loss_scale = move_scale(self._loss_scale, decision, self.policy.scaling)
        self._gradients.close()
        if skipped is not None:
            self._call_back({id(share.optimizer): not skip for share, skip in zip(shares, skipped, strict=True)})
            self._guard.check()
        return StepResult(verdict, self._guard.settle)

    def _update(self, shares: list[Share], decision: Decision, skipped: Sequence[bool] | None, clip: Clip) -> None:
        scale = decision.scale
        if clip.value is not None:
            clamp_([grad for share in shares for grad in share.grads], clip.value, scale)
        if scale is not None and _is_shared(shares):
            # An optimizer that divides in place would do so for the next one too.
            multiply_([grad for share in shares for grad in share.grads], scale.reciprocal())
            scale = None
        self._is_stepping = True
        try:
            for place, share in enumerate(shares):
                if skipped is None or not skipped[place]:
                    norm = share.check.norm if self._skip == "independent" else decision.norm
                    skip = decision.skips[place] if skipped is None else None
                    step_(
                        share.optimizer, share.grads, Order(scale=scale, coefficient=clip.coefficient(norm), skip=skip)
                    )
        finally:
            self._is_stepping = False

    def _call_back(self, applied: Mapping[int, bool]) -> None:
        for function, optimizer in self._callbacks:
            if all(applied.values()) if optimizer is None else applied.get(id(optimizer), False):
                function()

    def _nonfinite_weights(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        counts = {name: int((~p.detach().isfinite()).sum()) for p, name in self._names.items()}
        return {name: count for name, count in counts.items() if count}, self._buffers.nonfinite()


def name_parameters(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[Tensor, str]:
    """Return each parameter of model and optimizers with its name."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    for place, optimizer in enumerate(optimizers):
        for index, p in enumerate(parameters(optimizer)):
            names.setdefault(p, f"optimizer {place} parameter {index}")
    return names


def _start(policy: Policy, device: torch.device) -> LossScale | NoScaling:
    return NoScaling() if policy.scaling is None else LossScale.start(policy.scaling, device)


def _is_shared(shares: Sequence[Share]) -> bool:
    params = [p for share in shares for p in share.params]
    return len(set(params)) < len(params)
