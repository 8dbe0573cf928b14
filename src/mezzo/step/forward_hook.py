"""What happens before a forward of the model: its changes are followed, and ranks, buffers and batch looked at where they count."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from .._torch import own_modules
from ..binding import AfterForward
from ..distributed import is_running
from ..errors import PolicyError, StepError
from ..formats import LOW_DTYPES
from .engine import Engine
from .leftovers import refuse_no_params


class ForwardHook:
    """Called before each forward of a prepared model, or of a module that is called without it."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._model = engine, engine.root
        self._optimizers, self._layouts = engine.optimizers, engine.gradients.layouts
        self._with_frozen = engine.policy.params in LOW_DTYPES  # one that is unfrozen is stored in another dtype then
        self._may_be_captured = bool(self._optimizers) and engine.may_capture
        self._seen_in = [-1, -1]  # the steps in which a forward came last, without gradients and with them
        self.snapshot()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AfterForward | None:
        """Open the buffers' transaction; before the root, notice other ranks; before it or the first part of a step, what changed. Returns what must be called with the output."""
        engine = self._engine
        if engine.replay.is_running:
            return None
        if self._may_be_captured and torch.is_grad_enabled():
            engine.refuse_capture("a forward of the prepared model")
        if module is self._model and is_running():
            engine.ranks.note_forward()
        is_first = self._seen_in[torch.is_grad_enabled()] != engine.num_steps
        if module is self._model or is_first:  # a look takes the whole model, and so is not had before each part
            self._seen_in[torch.is_grad_enabled()] = engine.num_steps
            self.apply_changes()
        buffers, note, watch = engine.buffers, None, None
        if buffers.slots or any(buffers.registries):
            if buffers.slots and engine.gradients.is_abandoned:
                engine.give_buffers_up()
            note = buffers.begin()
        if engine.guard.may_stop and torch.is_grad_enabled():
            with_loss = engine.ranks.consensus is None and not engine.is_stepping
            watch = engine.recovery.keep(module, args, kwargs, with_loss=with_loss)
        return partial(_call_both, note, watch) if note is not None and watch is not None else note or watch

    def apply_changes(self) -> None:
        """Take what changed of the model since the last snapshot into the policy. Writes: as `Engine.follow_changes`."""
        if self.is_changed():
            refuse_no_params(self._optimizers)
            self._layouts.refuse_changed()
            self._engine.follow_changes()
            self.snapshot()

    def apply_changes_traced(self) -> None:
        """Do as `apply_changes`, but leave a refusal to the step: the compiler would raise it as an internal error of its own."""
        self._engine.refusal = None
        try:
            self.apply_changes()
        except (StepError, PolicyError) as error:
            self._engine.refusal = error

    def snapshot(self) -> None:
        """Take modules, groups and frozen parameters as they are now for what is known. Host only."""
        self._registries = [own_modules(module) for module in self._model.modules()]
        self._structure, self._held = self._structure_now(), self._held_now()
        self._layouts.note()
        self._frozen = [p for p in self._model.parameters() if not p.requires_grad] if self._with_frozen else []

    def is_changed(self) -> bool:
        """Whether a module, a group, what one holds, a frozen parameter or, before a backward, the size of a weight is not as it was. Host only."""
        return (
            self._structure_now() != self._structure
            or (not self._engine.is_stepping and self._held_now() != self._held)  # else masters may be in their place
            or (torch.is_grad_enabled() and [p.nbytes for p in self._layouts.noted] != self._layouts.num_bytes)
            or any([p.requires_grad for p in self._frozen])
        )

    def _structure_now(self) -> list[nn.Module | int | None]:
        """Return the children of all modules, and the sizes of all groups. Host only."""
        children = [child for registry in self._registries if registry for child in registry.values()]
        held = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        return children + [len(params) if hasattr(params, "__len__") else -1 for params in held]

    def _held_now(self) -> list[int]:
        """Return the ids of all that the groups hold: another parameter may take one's place. Host only."""
        return [id(p) for one in self._optimizers for group in one.param_groups for p in group["params"]]


def weakly(hook: ForwardHook, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a hook as the model may hold it: without keeping the hook, and with it the model, alive."""
    reference = weakref.ref(hook)

    def call(*args: Any) -> Any:
        return None if (alive := reference()) is None else method(alive, *args)

    return call


def _call_both(first: AfterForward, second: AfterForward, output: object) -> None:
    first(output)
    second(output)
