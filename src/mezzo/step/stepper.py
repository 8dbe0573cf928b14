"""The stepper: owns the order scale, backward, check, unscale, clip, update, rescale, and says what happened."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from html import escape
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..binding import Binding
from ..distributed import RankConsensus
from ..errors import StepError
from ..optim import stepped_optimizer
from ..policy import Policy
from . import state_dict as checkpoint
from .accumulation import Skip
from .capture import CapturedStep, P, R
from .capture_rules import refuse_in_graph
from .closure import step_by_closure
from .engine import Engine
from .forward_hook import ForwardHook, weakly
from .guard import Counters
from .loading import MastersFollow, load_run_
from .recovery import check_demotion
from .release import Original, Released, release_
from .report import StateReport, refuse_differing
from .result import StepObserver, StepResult
from .update import Clip, forbid_direct_steps


class Stepper:
    """Takes the steps of a prepared model; made by `mezzo.prepare`.

    The order of calls is `zero_grad`, any number of `backward(loss)`, then `step()`. What is called out of order
    raises a `StepError` that names the right call. The scale that the first `backward` of a step captured is the
    one its gradients are divided by, whatever happens to the scale meanwhile.

    Attributes:
        model: the bound model.
        optimizers: that are stepped: those given to `prepare`, or the masters around them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        binding: Binding,
        was: Original,
        follow: MastersFollow,
        *,
        skip: Skip,
    ) -> None:
        self.model = model
        self.optimizers = tuple(optimizers)
        self._observers: tuple[StepObserver, ...] = ()
        self._engine = Engine(model, self.optimizers, binding, was, skip)
        self._was = was
        self._masters_follow = follow
        self._forward_hook = ForwardHook(self._engine)
        binding.before_forward, binding.owner = weakly(self._forward_hook), weakref.ref(self)
        for optimizer in self.optimizers:
            forbid_direct_steps(optimizer, self._engine, self)

    def __repr__(self) -> str:
        if isinstance(self._engine, Released):
            return "Stepper(released)"
        names = ", ".join(type(part).__name__ for part in (self.model, *self.optimizers))
        counters = self.counters()
        done = f"{counters.applied} steps taken, {counters.skipped} skipped, loss scale {self.scale:g}"
        return f"Stepper({names}, policy={str(self.policy)!r}: {done})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: what was done, and what is kept."""
        report = "" if isinstance(self._engine, Released) else self.report()._repr_html_()
        return f"<p><code>{escape(repr(self))}</code></p>{report}"

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
            StepError: a loss without graph or in a narrow dtype, gradients of the last step not dropped, gradients that
                somebody else changed since the last `backward`, or a graph that somebody else captures.
            DistributedError: a rank ended or did not answer while gradients were averaged.
            CastError: the backward of a `torch.autograd.Function` of the caller's met two dtypes.

        Writes: gradients. Syncs: no.
        """
        self._engine.backward(loss, retain_graph, create_graph, inputs)

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
        engine, wanted = self._engine, [inputs] if isinstance(inputs, Tensor) else list(inputs)
        return engine.gradients.grad(
            outputs,
            wanted,
            engine.scale,
            create_graph=create_graph,
            retain_graph=retain_graph,
            allow_unused=allow_unused,
        )

    def external_backward(self) -> AbstractContextManager[None]:
        """Let something else run backward inside the block, such as a schedule of torch.distributed.pipelining.

        What it leaves in `.grad` counts as the gradients of this step, as after `backward(loss)`. Its loss function hands
        over `amp.scaled(loss)`, where there is one.

        Raises:
            StepError: gradients of the last step were not dropped, or somebody else changed gradients.

        Syncs: no.
        """
        engine = self._engine
        engine.refuse_capture("external_backward()")
        engine.find_ranks()
        return engine.gradients.external(engine.scale)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss times the scale of this step; called inside `external_backward()`, for each micro-batch.

        Args:
            loss: one number, at least as wide as the policy's loss dtype.

        Raises:
            StepError: outside of the block, or a loss without graph or in a narrow dtype.

        Syncs: no.
        """
        return self._engine.gradients.scaled(loss)

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
        return self._engine.gradients.unscaled()

    def grad_norm(self, optimizer: Optimizer | None = None) -> Tensor:
        """Return the L2 norm of the true gradients of this step so far, as `step(max_norm=...)` measures it.

        Args:
            optimizer: of this one's gradients only.

        Returns:
            Shape (), fp32, on the device of the gradients.

        Raises:
            StepError: before `backward(loss)`, or after somebody else changed gradients.

        Syncs: no on one rank and for copies; for sharded weights with the slowest rank.
        """
        return self._engine.grad_norm(optimizer and stepped_optimizer(optimizer, self.optimizers))

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
            optimizer: step this one only; the others keep their gradients, which later backward passes add to, and what
                the step used up must be dropped before the backward of this one's next step alone.

        Returns:
            What happened, read from the device when asked.

        Raises:
            StepError: the wrong order, a CUDA graph's capture, gradients changed by somebody else, or none at all.
            NonFiniteStep: an earlier step, or this one if the host decided it, showed inf or NaN that no loss
                scale mends.
            LossScaleExhausted: likewise, the scale is at its floor, or too many steps in a row were skipped.

        Writes: weights, optimizer state, buffers of a skipped step, the loss scale.
        Syncs: no, with mezzo.optim and torch's fused optimizers without hooks or `on_applied`; else once.
        """
        for observer in self._observers:
            observer.before_step()
        engine, clip = self._engine, Clip(max_norm=max_norm, value=clip_value)
        if engine.is_captured:
            refuse_in_graph(closure=closure, optimizer=optimizer, observers=self._observers)
        engine.check_before_step()
        take = engine.run_step if closure is None else partial(step_by_closure, engine, closure)
        result = take(optimizer and stepped_optimizer(optimizer, self.optimizers), clip)
        for observer in self._observers:
            observer.after_step(result)
        return result

    def capture(self, function: Callable[P, R]) -> CapturedStep[P, R]:
        """Return a function that does one whole step as this one does, captured as a graph of the device and replayed.

        In the loop `loss = step(x, y)`, for `step = amp.capture(function)`: the first calls run the function, one captures it, the
        others replay it in one launch. The function runs too where the host must look: in steps that `guard.check_every`
        chooses, and after a skipped one. What a step found is read one call later.

        Args:
            function: calls `amp.zero_grad()`, the model, `amp.backward(loss)` and, once, `amp.step(...)`; reads nothing from the
                device, and finds what changes between calls in its arguments.

        Raises:
            StepError: the model lies on the CPU or on several devices, ranks take part, or the policy needs the host in each step.
        """
        return CapturedStep(function, self._engine, lambda: bool(self._observers))

    def on_applied(self, function: Callable[[], object], optimizer: Optimizer | None = None) -> Callable[[], object]:
        """Have a function called after each step that was taken: a scheduler's step, an EMA update, a counter.

        The host must know then, so every step is read once.

        Args:
            function: called without arguments.
            optimizer: after this one's steps; left out, after steps that every optimizer with gradients took.

        Returns:
            The function, so that this can decorate it.
        """
        self._engine.callbacks.append((function, optimizer and stepped_optimizer(optimizer, self.optimizers)))
        return function

    def observe(self, observer: StepObserver) -> Callable[[], None]:
        """Have an observer called around every step, taken or not. Unlike `on_applied`, this reads nothing.

        Returns:
            A function that ends it.
        """
        self._observers = (*self._observers, observer)
        return lambda: self._leave(observer)

    def _leave(self, observer: StepObserver) -> None:
        self._observers = tuple(known for known in self._observers if known is not observer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all optimizers and of the model, and with them the step in the making.

        Buffers that its forward wrote stay as they are, unless they came out not finite.

        Args:
            set_to_none: as in torch; False writes zeros.

        Syncs: no.
        """
        self._engine.drop(set_to_none)

    @property
    def agree(self) -> NoReturn:
        """The former name of `consensus`."""
        raise AttributeError("amp.agree is now called amp.consensus")

    @property
    def consensus(self) -> RankConsensus | None:
        """What makes decisions equal on all ranks, found by itself for DistributedDataParallel and `fully_shard`.

        None on one rank. Before a wrapper has called the model it decides nothing yet, and its `group.timeout` may be set.
        Assign a `mezzo.distributed.RankConsensus` for ranks that nothing wraps, or to choose group and timeout.
        """
        return self._engine.any_consensus()

    @consensus.setter
    def consensus(self, consensus: RankConsensus | None) -> None:
        check_demotion(self.policy, consensus)
        self._engine.consensus = consensus

    @property
    def policy(self) -> Policy:
        """The policy in force: with its compute dtype decided, and the rules that on_overflow=demote added."""
        return self._engine.policy

    def counters(self) -> Counters:
        """Return how many steps were seen, applied and skipped, and what was demoted. Syncs: with the last step."""
        return self._engine.guard.read().counters

    @property
    def scale(self) -> float:
        """The loss scale that the next step will use; 1.0 without scaling. Syncs: yes."""
        return float(self._engine.loss_scale.scale)

    def state_dict(self, weights: bool = True) -> dict[str, Any]:
        """Return everything a run needs to go on: the one object to save.

        Weights, optimizer states with masters and rounding counts, loss scale, counters, policy and the dtypes
        weights were stored in. torch.load(weights_only=True) reads it back. Gradients are not part of it: save
        between `step` and `backward`.

        Args:
            weights: False leaves out what `model.state_dict()` and `optimizer.state_dict()` hold, for those who save
                these by themselves.

        Syncs: yes.
        """
        run = checkpoint.save_run(self.policy, self._engine.loss_scale, self.counters())
        return {**run, **checkpoint.save_weights(self.model, self.optimizers)} if weights else run

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Go on from a checkpoint, bit for bit where policy and optimizers are those it was made with.

        Under another policy or master mode what was saved is converted, and a checkpoint of a run without mezzo, with
        the keys "model" and "optimizer", is taken too.

        Args:
            state: from `state_dict`; without weights, those of model and optimizers stay.

        Returns:
            A sentence for everything that was converted or is missing; they are logged as well.

        Raises:
            CheckpointError: not a checkpoint, or not one of such a model and optimizers; nothing was changed then.

        Writes: weights, buffers, optimizer states, loss scale, counters; drops gradients. Syncs: yes.
        """
        return load_run_(self._engine, self._masters_follow, state)

    def report(self, strict: bool = False) -> StateReport:
        """Return what is declared beside what is: dtypes of weights, gradients, moments, masters and buffers, and bytes.

        Args:
            strict: refuse a run in which anything is not what was declared.

        Raises:
            InvariantError: with `strict`, something is not.

        Syncs: no.
        """
        report = self._engine.report()
        if strict:
            refuse_differing(report)
        return report

    def export_weights(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Return a plain state dict of the model, its weights rounded once from their masters.

        Args:
            dtype: of floating parameters; buffers stay as they are.

        Syncs: no.
        """
        return checkpoint.export(self.model, self.optimizers, dtype)

    def release(self) -> None:
        """Take the policy off again: a plain model and plain optimizers, which go on in torch.

        Weights with masters become fp32 and take the masters' values; others go back to the dtype they had. Gradients
        are dropped, moments stay. Every later call of this stepper raises.

        Writes: classes, forward and storage of the model; state and hooks of the optimizers. Syncs: with the last step.
        """
        self._engine.drop(set_to_none=True)
        self._masters_follow.remove()
        release_(self.model, self.optimizers, self._was)
        self.optimizers = self._was.optimizers
        self._engine = cast(Engine, Released())
        del self._forward_hook

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StepError(
            "a stepper cannot be pickled or copied, since it belongs to one model in one process. Save amp.state_dict(), "
            "and load it into the stepper that mezzo.prepare makes there."
        )
