"""What happens before a forward of the model: its changes are followed, and ranks, buffers and batch looked at where they count."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from .._torch import active_ddp, own_modules
from ..binding import AfterForward, BeforeForward
from ..distributed import is_running
from ..formats import LOW_DTYPES
from .engine import Engine
from .ranks import wrapper_around


class ForwardHook:
    """Called before each forward of a prepared model, or of a module that is called without it.

    Args:
        engine: of the model.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._model = engine.root
        self._groups = engine.optimizers
        self._with_frozen = engine.policy.params in LOW_DTYPES  # one that is unfrozen is stored in another dtype then
        self._may_be_captured = bool(self._groups) and engine.gradients.home.type != "cpu"
        self.look()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AfterForward | None:
        """Open the buffers' transaction; before the root, notice other ranks and what changed.

        Returns:
            What must be called with its output.
        """
        engine = self._engine
        if engine.replay.is_running:
            return None
        if self._may_be_captured and torch.is_grad_enabled():
            engine.refuse_capture("a forward of the prepared model")
        if module is self._model:
            if engine.consensus is None and is_running() and active_ddp() is not None:
                engine.join(wrapper_around(engine.model, engine.policy, is_calling=True))
            if engine.consensus is not None:
                engine.consensus.note_forward()
            if self.is_changed():
                engine.follow_changes()
                self.look()
        buffers, note, watch = engine.buffers, None, None
        if buffers.slots or any(buffers.registries):
            if buffers.slots and engine.gradients.is_abandoned:
                engine.give_buffers_up()
            note = buffers.begin()
        if engine.guard.may_stop and torch.is_grad_enabled():
            with_loss = engine.consensus is None and not engine.is_stepping
            watch = engine.recovery.keep(module, args, kwargs, with_loss=with_loss)
        return partial(_call_both, note, watch) if note is not None and watch is not None else note or watch

    def look(self) -> None:
        """Take modules, groups and frozen parameters as they are now for what is known. Host only."""
        self._registries = [own_modules(module) for module in self._model.modules()]
        self._children = self._all_children()
        self._sizes = self._all_sizes()
        self._frozen = [p for p in self._model.parameters() if not p.requires_grad] if self._with_frozen else []

    def is_changed(self) -> bool:
        """Whether a module, a group or a frozen parameter is not as it was: a few microseconds. Host only."""
        return (
            self._all_children() != self._children
            or self._all_sizes() != self._sizes
            or any([p.requires_grad for p in self._frozen])
        )

    def _all_children(self) -> list[nn.Module | None]:
        return [child for registry in self._registries if registry for child in registry.values()]

    def _all_sizes(self) -> list[int]:
        return [len(group["params"]) for optimizer in self._groups for group in optimizer.param_groups]


def weakly(hook: ForwardHook) -> BeforeForward:
    """Return a hook as the model may hold it: without keeping it, and with it the model, alive."""
    reference = weakref.ref(hook)

    def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AfterForward | None:
        alive = reference()
        return None if alive is None else alive(module, args, kwargs)

    return before_forward


def _call_both(first: AfterForward, second: AfterForward, output: object) -> None:
    first(output)
    second(output)
