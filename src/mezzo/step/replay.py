"""The last batch, kept while its step may be the one that stops the run, and run again to say what went wrong."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from traceback import walk_stack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .. import random_state
from .._torch import functorch_level, graph_task_id, is_capturing, tree_map, version
from ..binding import named_tensors
from ..random_state import RandomState
from .result import Reason

if TYPE_CHECKING:
    # loaded when a run is about to stop, and not before
    from ..trace import Diagnosis, LossTrace

_log = logging.getLogger("mezzo.step")
_OUTSIDE = (
    "Run again op by op, the last batch gives finite outputs: the inf or NaN is made after them, between the model and "
    "amp.backward(loss)."
)
_OUTSIDE_FIX = "Put one step into `with mezzo.diagnose.trace(model) as t:` to have the op named in t.report."
_MOST_CALLS = 64
"""Forwards that are kept of one step; what else is run with gradients on must not pile up."""


def _are_finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors)


def _versions(value: object) -> tuple[int, ...]:
    return tuple(version(t) for _, t in named_tensors(value) if not t.is_inference())


def _fresh(value: Any) -> Any:
    """Return arguments cut from the graph they came with, which backward has freed."""
    return tree_map(lambda v: v.detach().requires_grad_() if isinstance(v, Tensor) and v.requires_grad else v, value)


@dataclass(slots=True, eq=False)
class _Call:
    """One forward, by reference.

    Attributes:
        module: the root, or a module that was called without it, with `args` and `kwargs`.
        random: states of the generators before it.
        versions: of the tensors among the arguments.
        stack: file, line and function of what called it, the nearest first.
        grads: what backward brought to its outputs, by their place.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    random: RandomState
    versions: tuple[int, ...]
    stack: tuple[tuple[str, int, str], ...]
    grads: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether nobody wrote the arguments since."""
        return self.versions == _versions((self.args, self.kwargs))


@dataclass(slots=True, eq=False)
class _Kept:
    """What a step was made of: its forwards, its closure where it had one, and what its loss did outside the model."""

    calls: list[_Call] = field(default_factory=list)
    closure: Callable[[float], object] | None = None
    random: RandomState | None = None
    outside: Diagnosis | None = None

    def __bool__(self) -> bool:
        return bool(self.calls) or self.closure is not None or self.outside is not None


class Replay:
    """Keeps the batch of a step, without copies, and runs it again under the tracer.

    While it `is_idle` nothing is kept or followed, so that no call is needed; `following` is what the loss does, where it is followed just now.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._now, self._last = _Kept(), _Kept()
        self.is_running = False
        self.is_idle = True
        self._ended_outside = self._is_paused = False
        self.following: LossTrace | None = None

    def keep(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[[object], None] | None:
        """Keep a forward of the step in the making; return what must be called with its output.

        None where it cannot be run again: inside a transform of functorch, in a checkpoint's recompute, or while a graph is captured.
        """
        is_nested = functorch_level() is not None or graph_task_id() != -1
        accelerator = random_state.accelerator_in_use()
        if is_nested or (accelerator is not None and is_capturing(accelerator)):
            return None
        self.stop_following()
        self.is_idle = False
        stack = tuple((f.f_code.co_filename, line, f.f_code.co_name) for f, line in walk_stack(sys._getframe(1)))
        call = _Call(module, args, kwargs, random_state.get(), _versions((args, kwargs)), stack)
        self._now.calls = [*self._now.calls[1 - _MOST_CALLS :], call]
        return partial(self._await_grads, call)

    def _await_grads(self, call: _Call, out: object) -> None:
        for index, (_, tensor) in enumerate(named_tensors(out)):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._note, call, index))  # type: ignore[no-untyped-call]  # torch's own

    def _note(self, call: _Call, index: int, grad: Tensor | None) -> None:
        if grad is not None and not self._is_paused:  # None: another output of the same op has one
            known = call.grads.get(index)
            call.grads[index] = grad.detach() if known is None else known + grad.detach()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a block in which gradients that arrive are not those of the step."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def keep_closure(self, closure: Callable[[float], object]) -> None:
        """Keep what runs the step in the making again, given the loss scale its gradients carry."""
        self._now.closure, self._now.random = closure, random_state.get()
        self.is_idle = False

    def follow(self, step: int) -> None:
        """Start to follow what the loss of step number `step`, from 0, does after the model has ended, until its backward has. Writes: the modes of this thread."""
        from ..trace import trace_loss

        self.is_idle = False
        if self.following is None:
            self.following = trace_loss(self._model, step=step)

    def stop_following(self) -> None:
        """Take note of what the loss did outside the model. Writes: the modes of this thread, as they were."""
        if self.following is not None:
            found = self.following.stop()
            if found is not None:
                self.following = None
                self._now.outside = self._now.outside or (found if found.sentence else None)

    def drop(self, *, by_closure: bool = False) -> None:
        """Forget what gradients were dropped of; by its own closure, which stays.

        Forwards without a backward stay too: many loops drop gradients between the two.
        """
        kept = _Kept(calls=[call for call in self._now.calls if not call.grads])
        if by_closure:
            kept.closure, kept.random = self._now.closure, self._now.random
        self._now = kept

    def close(self) -> None:
        """End the step in the making; it is the last one now."""
        self.stop_following()
        if self._now or self._last:
            self._now.calls = [call for call in self._now.calls if call.grads] or self._now.calls
            self._now, self._last = _Kept(), self._now

    def forget(self) -> None:
        """Let go of the last step: it was taken."""
        if self._last:
            self._last = _Kept()
        self.is_idle = not (self._now or self._last) and self.following is None

    def run(self, step: int, scale: float, reason: Reason | None) -> Diagnosis | None:
        """Run the last batch, of step number `step`, from 0, again under the tracer; None where there is none, or it cannot be run again.

        The reason is what was not finite; None where that may have been on another rank. Syncs: at every op.
        """
        from ..trace import rerun_traced

        kept = self._last or self._now
        can_run = bool(kept.calls) or kept.closure is not None
        if not can_run or not all(call.is_whole for call in kept.calls):
            return kept.outside
        self.is_running, self._ended_outside = True, False
        try:
            found = rerun_traced(self._model, partial(self._again, kept, reason, scale), step=step, scale=scale)
        except Exception as failure:  # the run is about to stop, and for a reason that must not be hidden
            _log.warning("the last batch could not be run again: %s: %s", type(failure).__name__, failure)
            return kept.outside
        finally:
            self.is_running = False
        if self._ended_outside and not found.sentence:
            if kept.outside is not None:
                return kept.outside
            found = replace(found, sentence=_OUTSIDE, fix=_OUTSIDE_FIX)
        return found

    def _again(self, kept: _Kept, reason: Reason | None, scale: float) -> None:
        if kept.closure is not None:
            assert kept.random is not None
            random_state.set_(kept.random)
            kept.closure(scale)
            return
        outputs: list[Tensor] = []
        grads: list[Tensor] = []
        for call in kept.calls:
            random_state.set_(call.random)
            for index, (_, tensor) in enumerate(named_tensors(call.module(*_fresh(call.args), **_fresh(call.kwargs)))):
                if index in call.grads:
                    outputs.append(tensor)
                    grads.append(call.grads[index])
        if not outputs or not _are_finite(outputs):
            return
        self._ended_outside = reason == "loss" or not _are_finite(grads)
        if not self._ended_outside:
            torch.autograd.backward(outputs, grads)
