"""What a framework asks for call by call, in the order a stepper wants it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..casting import autocast
from ..errors import StepError, StoppedRun, kind_of, shown
from ..formats import LOW_DTYPES, describe, is_number, is_one_of, number_of
from ..optim import parameters
from ..policy import Policy, PolicyLike, as_policy
from ..step import NO_BOUND, Stepper, StepResult, is_bound, prepare

_log = logging.getLogger("mezzo.step")

_WHICH = (
    "optimizers were given whose parameters belong to {count} of the models given so far; one loss scale is kept, so it "
    "must be one. Make it one module, nn.ModuleDict({{...}}), or write the loop with one mezzo.prepare for each model. "
    "Where one is trained after the other, write accelerator.free_memory() in between, or make a Fabric for each."
)
_NONE = "optimizers were given whose parameters belong to none of the models given so far: the model comes later, or is a copy. Make the optimizer from model.parameters() of a model that is given first, or in the same call."


def calls(backward: str, clip: str, stepper: str) -> dict[str, str]:
    """Return what a user of a framework writes for each call of the stepper, the first that fits.

    They are what stands for `amp.backward`, for `amp.step(max_norm=...)`, and where the stepper is found, for the rest.
    """
    kept = {f"amp.{name}()": f"optimizer.{name}()" for name in ("step", "zero_grad")}
    return {"amp.backward(": f"{backward}(", "amp.step(max_norm=...)": clip, **kept, "amp.": f"{stepper}."}


_owners: WeakKeyDictionary[nn.Module, Adapter] = WeakKeyDictionary()
"""Whose steps of a model are taken now, so that another Trainer can go on with it."""


class Adapter:
    """A stepper behind a framework that clips and looks at gradients between backward and step.

    Clipping waits for the step, which does it in fp32 in one pass with the update. What a step does not know (another
    norm, a part of the parameters) is done at once, on true gradients.

    Args:
        policy: as for `mezzo.prepare`.
        words: of the framework, from `calls`, for what errors say to write.

    Attributes:
        result: of the last step; None before the first.
        is_pending: whether a backward waits for its step.
    """

    def __init__(self, policy: PolicyLike, words: Mapping[str, str]) -> None:
        as_policy(policy)  # a word that does not exist is told of before data is loaded
        self.policy, self.words = policy, words
        self.result: StepResult | None = None
        self._stepper: Stepper | None = None
        self._given: tuple[Optimizer, ...] = ()
        self._models: list[nn.Module] = []
        self._clips: dict[int, dict[str, float]] = {}
        self._shown, self._is_shown, self.is_pending = ExitStack(), False, False
        self._saved: Mapping[str, Any] = {}

    @property
    def trains(self) -> bool:
        """Whether a model was given together with its optimizer."""
        return self._stepper is not None

    @property
    def stepper(self) -> Stepper:
        """What `mezzo.prepare` made. Raises: StepError: no model was given together with its optimizer yet."""
        if self._stepper is None:
            raise StepError(
                "there is no stepper: no model was given together with its optimizer yet. Give both to one call: trainer.fit(model), "
                "trainer.train(), fabric.setup(model, optimizer) or accelerator.prepare(model, optimizer)."
            )
        return self._stepper

    def prepare(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """Bind the policy to models, and own the steps of the optimizers; see `mezzo.prepare`.

        Args:
            models: one to train; others are only run. A model may come before its optimizer.
            optimizers: those of one model.

        Raises:
            StepError: optimizers of several models, or of none.
        """
        optimizers = [optimizer for optimizer in optimizers if not self.knows(optimizer)]
        is_extended = self._stepper is not None and bool(optimizers)
        if is_extended:
            models, optimizers = [*models, self.stepper.model], [*self._given, *optimizers]
        known = list({id(m): m for m in (*self._models, *models)}.values())
        trained = _stepped_by(optimizers, known)
        if is_extended:
            self._saved = self.state_dict()
            self._release()
        for model in models:
            if model not in _owners and model is not trained:
                prepare(model, None, _policy_before_training(model, self.policy))
        self._models = known
        if trained is not None:
            self._own_steps(trained, optimizers)

    def _own_steps(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if model in _owners:
            _owners[model].forget()
        stepped = [id(p) for o in optimizers for p in parameters(o)]
        # Each optimizer is stepped by a call of its own, also after one backward for all.
        is_apart = len(set(stepped)) == len(stepped)
        with self._reworded():
            self._stepper = prepare(model, optimizers, self.policy, skip="independent" if is_apart else "together")
        self._given = tuple(optimizers)
        _owners[model] = self
        self.load_state_dict(self._saved)

    def stepped(self, optimizer: Optimizer) -> Optimizer:
        """Return what the stepper steps in place of an optimizer: itself, or masters around it."""
        return next((s for g, s in zip(self._given, self.stepper.optimizers, strict=True) if g is optimizer), optimizer)

    def knows(self, part: nn.Module | Optimizer) -> bool:
        """Whether a model is bound, or the steps of an optimizer are owned."""
        own = () if self._stepper is None else (*self._given, *self._stepper.optimizers)
        return any(part is known for known in (*self._models, *own))

    def forget(self) -> None:
        """Give the model back as a plain one, and let go of everything."""
        self._shown.close()
        self._clips.clear()
        self._models.clear()
        self._saved = {}
        self._release()

    def _release(self) -> None:
        stepper, self._stepper, self.result, self._given = self._stepper, None, None, ()
        if stepper is not None:
            _owners.pop(stepper.model, None)
            stepper.release()

    def region(self, enabled: bool = True) -> AbstractContextManager[object]:
        """Return the policy's region, for what a framework computes around the model, or before there is one. Syncs: no."""
        home = next((p.device for model in self._models for p in model.parameters()), None)
        policy = as_policy(self.policy).replace(modules=())
        return autocast(home, enabled=enabled, policy=policy if home is None else policy.resolve(home))

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add the gradients of a loss; see `Stepper.backward`. Syncs: where a clip waits for a step that was not taken."""
        if self._clips:  # of what is there, and nothing where it was dropped
            clipped = [p.grad for o in self.stepper.optimizers if id(o) in self._clips for p in parameters(o)]
            if any(grad is not None and bool(grad.any()) for grad in clipped):
                self.show_clipped()
            self._clips.clear()
        self._shown.close()
        with self._reworded():
            self.stepper.backward(loss, **kwargs)
        self.is_pending = True

    def show(self) -> None:
        """Have `.grad` hold true gradients until the next backward or step, to look at or to edit. Syncs: no."""
        self._shown.close()
        with self._reworded():
            self._shown.enter_context(self.stepper.unscaled_grads())
        self._shown.callback(setattr, self, "_is_shown", False)
        self._is_shown = True

    def show_clipped(self) -> None:
        """Have `.grad` hold true gradients, clipped by what the next step was to clip. Syncs: no."""
        self.show()
        for optimizer in self.stepper.optimizers:
            for name, bound in self._clips.pop(id(optimizer), {}).items():
                clip = torch.nn.utils.clip_grad_norm_ if name == "max_norm" else torch.nn.utils.clip_grad_value_
                clip(parameters(optimizer), bound)

    def hide(self, optimizer: Optimizer) -> None:
        """Have `.grad` hold what the step of an optimizer that is under way takes again, which knows how to clip."""
        self._shown.close()
        self._clips.pop(id(optimizer), None)

    def clip(self, optimizer: Optimizer, **bound: float) -> None:
        """Have the next step of an optimizer clip: `max_norm` or `clip_value` of `Stepper.step`."""
        if id(optimizer) in self._clips:  # a second clip is of what the first leaves
            self.show_clipped()
        self._clips[id(optimizer)] = bound

    def clip_norm(
        self,
        parameters: Iterable[Tensor] | Tensor,
        max_norm: float,
        norm_type: float = 2,
        clip_now: Callable[..., Tensor] = torch.nn.utils.clip_grad_norm_,
    ) -> Tensor:
        """Clip the gradients of parameters to a norm.

        Args:
            parameters: of one optimizer, or some of them.
            max_norm: inf only measures.
            norm_type: the step clips by 2 alone.
            clip_now: as torch's function; clips true gradients where the step cannot, and those that somebody looks at.

        Returns:
            The norm of the true gradients before clipping: shape (), fp32. Syncs: no.

        Raises: StepError: `max_norm` is not positive, `norm_type` no number, or something is no parameter.
        """
        _check_bound("max_norm", max_norm)
        if not is_one_of(norm_type, ("inf",)) and not is_number(number_of(norm_type), -float("inf"), float("inf")):
            raise StepError(f"clipping was given norm_type={shown(norm_type)}: write a number, as 2, or float('inf').")
        params = self._counted(parameters)
        owner = self._owner(params) if norm_type == 2 else None
        if owner is None:
            self.show_clipped()
            return (torch.nn.utils.clip_grad_norm_ if norm_type == 2 else clip_now)(params, max_norm, norm_type)
        with self._reworded():
            norm = self.stepper.grad_norm(owner)
        if max_norm < float("inf"):
            self.clip(owner, max_norm=max_norm)
        return norm

    def clip_value(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp the gradients of parameters to a value in both directions. Syncs: no."""
        _check_bound("clip_value", clip_value)
        params = self._counted(parameters)
        owner = self._owner(params)
        if owner is None:
            self.show_clipped()
            torch.nn.utils.clip_grad_value_(params, clip_value)
        else:
            self.clip(owner, clip_value=clip_value)

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> StepResult:
        """Take the step of an optimizer, clipped as asked for since the last; see `Stepper.step`."""
        self._shown.close()
        clip = self._clips.pop(id(optimizer), {})
        one = optimizer if len(self.stepper.optimizers) > 1 else None
        self.is_pending = False
        with self._reworded():
            self.result = self.stepper.step(closure, optimizer=one, **clip)
        return self.result

    @contextmanager
    def _reworded(self) -> Iterator[None]:
        """Have errors and log lines name the framework's calls, whose user has no stepper at hand."""
        _log.addFilter(self._reword)
        try:
            yield
        except (StepError, StoppedRun) as error:
            error.args = tuple(self._translated(arg) if isinstance(arg, str) else arg for arg in error.args)
            if isinstance(error, StoppedRun):
                error.what, error.advice = self._translated(error.what), self._translated(error.advice)
            raise
        finally:
            _log.removeFilter(self._reword)

    def _reword(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = self._translated(record.getMessage()), ()
        return True

    def _translated(self, text: str) -> str:
        return reduce(lambda text, call: text.replace(*call), self.words.items(), text)

    def get_scale(self) -> float:
        """Return the loss scale, as a scaler does; 1 without one. Raises: StepError: there is no stepper. Syncs: as `Stepper.scale`."""
        return self.stepper.scale

    def state_dict(self) -> dict[str, Any]:
        """Return what the run knows beside weights and optimizers, which the framework saves; what was loaded, if nothing is trained. Syncs: yes."""
        return self.stepper.state_dict(weights=False) if self.trains else dict(self._saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` or a scaler's returned, as soon as something is trained. {}: nothing was."""
        if isinstance(state, Mapping) and "_growth_tracker" in state:
            scaling = {name.lstrip("_"): state[name] for name in ("scale", "_growth_tracker") if name in state}
            state = {"format": 1, "policy": None, "scaling": scaling, "counters": None}
        if self.trains and state != {}:
            self.stepper.load_state_dict(state)
        self._saved = {} if self.trains else state

    def _counted(self, given: Iterable[Tensor] | Tensor) -> list[Tensor]:
        """Return the parameters with a gradient of those that a clip was given, under a loss scale only those that are stepped; a StepError for what is none."""
        params = list(given) if isinstance(given, Iterable) and not isinstance(given, Tensor) else [given]
        if wrong := [p for p in params if not isinstance(p, Tensor)]:
            raise StepError(f"clipping was given {kind_of(wrong[0])} in place of parameters: write model.parameters().")
        is_scaled = self.stepper.policy.scaling is not None
        stepped = {id(p) for o in self.stepper.optimizers for p in parameters(o)} if is_scaled else set()
        return [p for p in params if p.grad is not None and (not is_scaled or id(p) in stepped)]

    def _owner(self, params: Sequence[Tensor]) -> Optimizer | None:
        """Return the optimizer whose next step can clip these gradients: all of its own and no other, looked at or clipped by nobody; else None."""
        asked = {id(p) for p in params}
        own = (o for o in self.stepper.optimizers if asked == {id(p) for p in parameters(o) if p.grad is not None})
        return next((o for o in own if not self._is_shown and id(o) not in self._clips), None)


def _check_bound(name: str, bound: object) -> None:
    if not is_bound(bound):
        raise StepError(f"clipping to {name}={describe(bound)}: {NO_BOUND}.")


def _stepped_by(optimizers: Sequence[Optimizer], models: Sequence[nn.Module]) -> nn.Module | None:
    """Return the one model whose parameters optimizers step; a StepError for several or none, and None without optimizers."""
    stepped = {id(p) for o in optimizers for p in parameters(o)}
    found = [m for m in models if any(id(p) in stepped for p in m.parameters())]
    if optimizers and len(found) != 1:
        raise StepError(_WHICH.format(count=len(found)) if found else _NONE)
    return found[0] if found else None


def _policy_before_training(model: nn.Module, policy: PolicyLike) -> Policy:
    """Return the policy of a model without optimizer, under which weights stay fp32: masters of an optimizer that comes later start from them."""
    chosen = as_policy(policy)
    is_kept = chosen.params in LOW_DTYPES and any(p.requires_grad for p in model.parameters())
    return chosen.replace(params=torch.float32, master="none") if is_kept else chosen


def innermost_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside the wrappers of Accelerate and Lightning, which are optimizers by name only."""
    inner = vars(optimizer).get("optimizer", vars(optimizer).get("_optimizer"))
    return innermost_optimizer(inner) if isinstance(inner, Optimizer) else optimizer
