"""The stepper: owns the order scale, backward, check, unscale, clip, update, rescale, and says what happened."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._torch import dynamo_disable
from ..errors import StepAttributeError, StepError, StepTypeError, as_flag, did_you_mean, kind_of, misfit_of, shown
from ..optim import stepped_optimizer
from .capture import CapturedStep, P, R
from .capture_rules import refuse_in_graph
from .closure import step_by_closure
from .foreign import ARGUMENTS, OF_BACKWARD, OF_GRAD, OF_STEPPER
from .grad_passes import check_flags, check_inputs
from .prepared_run import PreparedRun
from .result import StepResult
from .update import Clip, clip_bound_of

_NO_CLIP = Clip()


def answers_misfits(
    call: str, words: Mapping[str, str | Callable[[Any], str]]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have calls that do not fit a function's arguments told what to write, by a StepTypeError in place of Python's TypeError; see `misfit_of`.

    A compiled training loop calls them as they are: traced, they would be compiled line by line, and step by the reference.
    """

    def answers(function: Callable[P, R]) -> Callable[P, R]:
        @dynamo_disable
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # raised inside
                    raise
                raise StepTypeError(f"{call} {misfit_of(function, kwargs, words)}") from None

        return called

    return answers


def _refused(what: str) -> Callable[..., NoReturn]:
    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise StepTypeError(f"mezzo.prepare returns one stepper, which cannot be {what}")

    return refuse


class StepObserver(Protocol):
    """What is told of every step, around it."""

    def before_step(self) -> None:
        """Called with the gradients of the step, as they are carried."""

    def after_step(self, result: StepResult) -> None:
        """Called with what happened, which the host has not read yet."""


class Stepper(PreparedRun):
    """Takes the steps of a prepared model; made by `mezzo.prepare`.

    The order of calls is `zero_grad`, any number of `backward(loss)`, then `step()`. What is called out of order
    raises a `StepError` that names the right call. The scale that the first `backward` of a step captured is the
    one its gradients are divided by, whatever happens to the scale meanwhile.

    Attributes:
        model: the bound model.
    """

    _observers: tuple[StepObserver, ...] = ()

    __call__ = _refused("called: write model(x), since the model stays the object it is.")
    __enter__ = __exit__ = _refused(
        "entered: for what no forward holds write with mezzo.autocast(device, policy=amp.policy)."
    )
    __iter__ = _refused(
        "unpacked or looped over: model and optimizer stay the objects they are. Write amp = mezzo.prepare(model, optimizer, policy)."
    )

    load_state_dict = answers_misfits("amp.load_state_dict()", ARGUMENTS)(PreparedRun.load_state_dict)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise StepAttributeError(f"a stepper has no '{name}'. {self._meant(name)}")

        def __setattr__(self, name: str, value: object) -> None:
            if name in ("model", "optimizers", "policy", "scale"):
                raise StepAttributeError(
                    f"amp.{name} was assigned, and stays what mezzo.prepare made of it. Call amp.release(), then "
                    "mezzo.prepare(model, optimizer, policy) with the one that is meant."
                )
            super().__setattr__(name, value)

    def _meant(self, name: str) -> str:
        if name in OF_STEPPER:
            return OF_STEPPER[name]
        if name in dir(self.__dict__.get("model")):
            return f"Write amp.model.{name}: the model stays the object it is."
        if any(name in dir(optimizer) for optimizer in getattr(self.__dict__.get("_engine"), "optimizers", ())):
            return f"Write amp.optimizers[0].{name}, or ask the optimizer that mezzo.prepare was given."
        return did_you_mean(name, (word for word in dir(self) if not word.startswith("_"))).lstrip()

    @answers_misfits("amp.backward()", OF_BACKWARD)
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
        if retain_graph is not None or create_graph is not False:
            check_flags("amp.backward(loss)", retain_graph=retain_graph, create_graph=create_graph)
        inputs = None if inputs is None else check_inputs("amp.backward(loss)", inputs)
        self._engine.backward(loss, retain_graph, create_graph, inputs)

    @answers_misfits("amp.grad()", OF_GRAD)
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
            For each input its gradient, in the input's shape; fp32 for 16-bit inputs.

        Raises:
            StepError: as for `backward`.

        Syncs: no.
        """
        flags = {"retain_graph": retain_graph, "create_graph": create_graph, "allow_unused": allow_unused}
        check_flags("amp.grad(outputs, inputs)", **flags)
        engine, wanted = self._engine, check_inputs("amp.grad(outputs, inputs)", inputs)
        return engine.gradients.grad(outputs, wanted, engine.scale, create_graph, retain_graph, allow_unused)

    def external_backward(self) -> AbstractContextManager[None]:
        """Let something else run backward inside the block, such as a schedule of torch.distributed.pipelining.

        What it leaves in `.grad` counts as the gradients of this step, as after `backward(loss)`. Its loss function hands
        over `amp.scaled(loss)`, where there is one.

        Raises:
            StepError: gradients of the last step were not dropped, or somebody else changed gradients.
            DistributedError: a rank is lost.

        Syncs: no.
        """
        engine = self._engine
        engine.refuse_capture("amp.external_backward()")
        engine.ranks.find()
        return engine.external_backward()

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
        return self._engine.grad_norm(self._known(optimizer, "grad_norm"))

    @answers_misfits("amp.step()", ARGUMENTS)
    def step(
        self,
        closure: Callable[[], Tensor | float] | None = None,
        *,
        max_norm: float | None = None,
        clip_value: float | None = None,
        norm_type: float = 2,
        optimizer: Optimizer | None = None,
    ) -> StepResult:
        """Take the step: check, unscale, clip, update, and move the loss scale; or leave everything as it was.

        Args:
            closure: computes the loss again: `amp.zero_grad()`, forward, `amp.backward(loss)`, return the loss. For
                optimizers that evaluate it several times (LBFGS, SAM), and for on_overflow="retry".
            max_norm: clip the true gradients to this L2 norm, as torch.nn.utils.clip_grad_norm_ does; over all
                optimizers, or each by itself with skip="independent".
            clip_value: clamp the true gradients to this value in both directions.
            norm_type: 2 alone, as in the loops of torch that write it.
            optimizer: step this one only; the others keep their gradients, which later backward passes add to, and what
                the step used up must be dropped before the backward of this one's next step alone.

        Returns:
            What happened, read from the device when asked.

        Raises:
            StepError: the wrong order, a CUDA graph's capture, gradients changed by somebody else, or none at all.
            NonFiniteStep: an earlier step, or this one if the host decided it, showed inf or NaN that no loss
                scale fixes.
            LossScaleExhausted: likewise, the scale is at its floor, or too many steps in a row were skipped.

        Writes: weights, optimizer state, buffers of a skipped step, the loss scale.
        Syncs: no, with mezzo.optim and torch's fused optimizers without hooks or `on_applied`; else once.
        """
        if not (isinstance(norm_type, Real) and norm_type == 2):
            raise StepError(
                f"step(norm_type={shown(norm_type)}): steps clip by the L2 norm alone. Write torch.nn.utils.clip_grad_norm_ with this "
                "norm_type inside `with amp.unscaled_grads():`, and then step without max_norm."
            )
        if torch.is_inference_mode_enabled():  # state made there could never be written again outside
            with torch.inference_mode(False):
                return self.step(closure, max_norm=max_norm, clip_value=clip_value, optimizer=optimizer)
        if closure is None and torch.is_autocast_enabled(kind := self._engine.gradients.device.type):
            with torch.autocast(kind, enabled=False):  # which would cast what a step looks at
                return self.step(max_norm=max_norm, clip_value=clip_value, optimizer=optimizer)
        for observer in self._observers:
            observer.before_step()
        engine = self._engine
        clip = _NO_CLIP
        if max_norm is not None or clip_value is not None:
            clip = Clip(max_norm=clip_bound_of(max_norm), value=clip_bound_of(clip_value))
        if engine.is_captured:
            refuse_in_graph(closure=closure, optimizer=optimizer, observers=self._observers)
        take = engine.run_step if closure is None else partial(step_by_closure, engine, closure)
        with engine.one_thread:
            engine.check_before_step()
            result = take(self._known(optimizer, "step"), clip)
        for observer in self._observers:
            observer.after_step(result)
        return result

    def _known(self, optimizer: Optimizer | None, call: str) -> Optimizer | None:
        """Return what is stepped for an optimizer that a call was given; a StepError where nothing is."""
        found = None if optimizer is None else stepped_optimizer(optimizer, self.optimizers)
        if optimizer is not None and all(found is not known for known in self.optimizers):
            raise StepError(
                f"{call}(optimizer=...) was given {kind_of(optimizer)}, which prepare(model, optimizer) was not given. "
                f"Write one of amp.optimizers: {', '.join(f'[{i}] {type(o).__name__}' for i, o in enumerate(self.optimizers))}."
            )
        return found

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

        Syncs: no; every step does from then on, once, since the host must know whether it was taken.

        Args:
            function: called without arguments.
            optimizer: after this one's steps; left out, after steps that every optimizer with gradients took.

        Returns:
            The function, so that this can decorate it.

        Raises:
            StepTypeError: no function, or one that needs arguments.
            StepError: an optimizer that is not stepped here.
        """
        if not callable(function):
            raise StepTypeError(
                f"amp.on_applied takes a function, and got {type(function).__name__}. Write amp.on_applied(scheduler.step)."
            )
        try:
            inspect.signature(function).bind()
        except TypeError:
            raise StepTypeError(
                f"amp.on_applied calls a function without arguments, and {getattr(function, '__qualname__', function)} needs some. Write "
                "amp.on_applied(lambda: ...) with the call in it, or call it yourself where its arguments are known."
            ) from None
        except ValueError:  # of a builtin, which tells nothing of its arguments
            pass
        self._engine.callbacks.append((function, self._known(optimizer, "on_applied")))
        return function

    def observe(self, observer: StepObserver) -> Callable[[], None]:
        """Have an observer called around every step, taken or not. Syncs: no, nor do the steps for it.

        Returns:
            A function that takes the observer off again.
        """
        if not (hasattr(observer, "before_step") and hasattr(observer, "after_step")):
            raise StepTypeError(
                f"amp.observe takes an object with before_step() and after_step(result), and got {type(observer).__name__}. Write "
                "amp.on_applied(function) for a function."
            )
        self._observers = (*self._observers, observer)

        def leave() -> None:
            self._observers = tuple(known for known in self._observers if known is not observer)

        return leave

    @answers_misfits("amp.zero_grad()", ARGUMENTS)
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all optimizers and of the model, and with them the step in the making.

        Buffers that its forward wrote stay as they are, unless they came out not finite.

        Args:
            set_to_none: as in torch; False writes zeros.

        Syncs: no.
        """
        self._engine.drop(as_flag("amp.zero_grad", "set_to_none", set_to_none, StepError))
