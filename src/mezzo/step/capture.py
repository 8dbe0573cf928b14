"""A whole step as a graph of the device: captured once, replayed, and what each replay found read one call later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from .._torch import begin_capture, new_graph, tree_flatten, tree_map_only
from ..casting import weight_casts
from ..errors import StepError, first_line
from ..formats import describe
from ..kernels import GraphTables, for_capture, num_asked
from . import capture_rules
from .buffers import Copy
from .engine import Engine
from .result import StepResult

P = ParamSpec("P")
R = TypeVar("R")
WARM_UP = 3
"""Calls that run before one is captured: kernels are loaded, libraries find their plans, and state is made in them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Graph:
    """A captured step, and all that its kernels know by address.

    Attributes:
        graph: torch's, whose kernels read the `tables`.
        given: arguments of the function, its tensors those that the graph reads; flat.
        spec: how they were nested.
        out: what the function returned; `result` is that of its step.
        grads: of each parameter, which each replay writes.
        copies: of buffers, likewise.
        watched: see `watched_values`.
        tensors: held, so that nothing else comes to lie where they lie.
    """

    graph: Any
    tables: GraphTables
    given: Sequence[Any]
    spec: Any
    out: Any
    result: StepResult
    grads: Mapping[Tensor, Tensor | None]
    copies: Mapping[str, Copy]
    watched: Mapping[str, Sequence[object]]
    tensors: Sequence[Tensor]

    def load_inputs(self, args: Any, kwargs: Any) -> None:
        """Copy the arguments of a call to where the graph reads them; a StepError if they are not like those that were captured.

        Writes: the arguments of the graph. Syncs: no, from pinned memory or the device.
        """
        leaves, spec = tree_flatten((args, kwargs))
        if spec != self.spec:
            raise StepError(
                "a captured step was called with its arguments nested otherwise than when it was captured. Call it alike, or "
                "the function itself."
            )
        for own, leaf in zip(self.given, leaves, strict=True):
            if not _is_like(own, leaf):
                raise StepError(
                    f"a captured step was called with {describe(leaf)}, and was captured with {describe(own)}. Call the function itself for such "
                    "a batch; a DataLoader leaves the last, smaller one out with drop_last=True."
                )
        for own, leaf in zip(self.given, leaves, strict=True):
            if isinstance(own, Tensor):
                own.copy_(leaf, non_blocking=True)

    def hand_over(self, engine: Engine, result: StepResult) -> None:
        """Tell the host of a replay that was just queued: what it writes has another value from now on. Syncs: no."""
        engine.num_steps, engine.result = engine.num_steps + 1, result
        engine.guard.add(result)
        torch.autograd.graph.increment_version(list(engine.names))
        if engine.buffers.slots:
            engine.buffers.note_replay(self.copies)
        if any([p.grad is not grad for p, grad in self.grads.items()]):
            for p, grad in self.grads.items():
                p.grad = grad
            engine.gradients.close()


class CapturedStep(Generic[P, R]):
    """A function that takes one step, run at first and then replayed; made by `Stepper.capture`.

    Attributes:
        result: of the last call; None before the first.
        num_replayed: calls that were replays; the others ran the function.
    """

    def __init__(self, function: Callable[P, R], engine: Engine, is_observed: Callable[[], bool]) -> None:
        capture_rules.refuse_uncapturable(engine)
        self._function, self._engine, self._is_observed = function, engine, is_observed
        self._device = engine.gradients.device
        self._stream = torch.Stream(self._device)
        self._graph: _Graph | None = None
        self._num_run, self._room = 0, 0
        self.result: StepResult | None = None
        self.num_replayed = 0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Take a step, by the graph where that is there and the host is not needed.

        Returns:
            What the function returns: tensors as copies, and the step's result as that of this call.

        Raises:
            StepError: it cannot be captured, or is not what was captured any more; says why.
            StoppedRun: see `Stepper.step`.

        Writes: as the function. Syncs: with the step before the last.
        """
        engine = self._engine
        if engine.gradients.is_pending and not engine.gradients.is_abandoned:
            raise StepError(
                "a captured step was called after backward(loss) of another one. Write amp.step() or amp.zero_grad() first."
            )
        engine.check(unread=1)
        if self._num_run < WARM_UP or engine.needs_host:
            return self._run(args, kwargs)
        if self._graph is None:
            engine.check()
            if engine.needs_host:
                return self._run(args, kwargs)
            self._graph = self._captured(args, kwargs)
        return self._replay(self._graph, args, kwargs)

    def _run(self, args: Any, kwargs: Any) -> R:
        """Run the function, on the stream that it is captured on. What its graph holds remembers the stream it was made on."""
        before, current = self._engine.num_steps, torch.accelerator.current_stream(self._device)
        asked = num_asked()
        self._stream.wait_stream(current)
        try:
            with self._stream, for_capture():  # as it is captured, to the bit
                out = self._function(*args, **kwargs)
        finally:
            current.wait_stream(self._stream)
        self._check_one_step(self._engine.num_steps - before)
        self.result = self._engine.result
        self._num_run, self._room = self._num_run + 1, max(self._room, num_asked() - asked)
        return out

    def _captured(self, args: Any, kwargs: Any) -> _Graph:
        """Capture a call of the function, which then has not been taken. Writes: no value. Syncs: yes."""
        engine = self._engine
        capture_rules.refuse_uncapturable_steps(engine)
        leaves, spec = tree_flatten((args, kwargs))
        given = [_own(leaf, self._device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        own_args, own_kwargs = spec.unflatten(given)
        graph, tables = new_graph(self._device), GraphTables(self._device, 2 * self._room)
        watched, host = capture_rules.watched_values(engine), capture_rules.host_values(engine)
        before = engine.num_steps
        _drop_casts(engine)
        try:
            with self._stream, _recording(graph, self._device), tables.capturing(), _unnoted(engine), for_capture():
                out = self._function(*own_args, **own_kwargs)
                self._check_one_step(engine.num_steps - before)
                result, grads = engine.result, {p: p.grad for p in engine.gradients.parameters()}
        except BaseException as failure:  # nothing had run, so only what the host noted is dropped
            engine.gradients.zero(set_to_none=True)
            engine.buffers.renew()
            _drop_casts(engine)
            if isinstance(failure, StepError) or not isinstance(failure, Exception):
                raise
            raise StepError(
                f"the step could not be captured, and nothing was done: {type(failure).__name__}: {first_line(failure)}. A graph "
                "holds no read of a value (loss.item(), print(loss), `if loss > 1`) and no copy to or from the host: do that "
                "outside of the function, with what it returns and is given."
            ) from failure
        assert result is not None
        found = _Graph(
            graph=graph, tables=tables, given=given, spec=spec, out=out, result=result, grads=grads,
            copies=engine.buffers.copies(), watched=watched, tensors=capture_rules.held_tensors(engine),
        )  # fmt: skip
        _drop_casts(engine)
        capture_rules.refuse_host_state(engine, host, watched)
        tables.fill()
        return found

    def _replay(self, graph: _Graph, args: Any, kwargs: Any) -> R:
        engine = self._engine
        self._refuse_changed(graph)
        graph.load_inputs(args, kwargs)
        graph.graph.replay()
        self.result = result = graph.result.replayed(engine.guard.last)
        graph.hand_over(engine, result)
        self.num_replayed += 1
        copied = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), graph.out)
        own: R = tree_map_only(StepResult, lambda _: result, copied)
        return own

    def _refuse_changed(self, graph: _Graph) -> None:
        if self._is_observed() or self._engine.callbacks:
            raise StepError(
                "a captured step was called with an observer or an on_applied function registered since: the host would have "
                "to know of each step. Call the function itself, or register before amp.capture to learn what it says."
            )
        if changed := capture_rules.changed_value(self._engine, graph.watched):
            raise StepError(
                f"a captured step was called after {changed} changed, of which a replay would know nothing. Write "
                "step = amp.capture(function) anew; a learning rate that moves belongs into a tensor on the device, "
                "lr=torch.tensor(1e-3, device=...), which schedulers fill."
            )

    def _check_one_step(self, count: int) -> None:
        if count != 1:
            raise StepError(
                f"the function that amp.capture was given took {count} steps. It must call amp.step() once in each call."
            )


def _own(given: Tensor, device: torch.device) -> Tensor:
    """Return memory of the graph's for an argument. Syncs: no."""
    if given.device != device or given.requires_grad:
        raise StepError(
            f"a captured step was given {describe(given)}{' with a gradient' if given.requires_grad else ''}, and a graph reads plain "
            f"tensors on {device}. Write x.to(device, non_blocking=True) before the call."
        )
    return torch.empty_like(given).copy_(given)


def _is_like(own: object, leaf: object) -> bool:
    if isinstance(own, Tensor):
        return isinstance(leaf, Tensor) and (own.shape, own.dtype) == (leaf.shape, leaf.dtype)
    return type(own) is type(leaf) and bool(own == leaf)


@contextmanager
def _recording(graph: Any, device: torch.device) -> Iterator[None]:
    """Have what is launched inside the block go into a graph. Syncs: before it."""
    torch.accelerator.synchronize(device)
    begin_capture(graph)
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # a capture that went wrong cannot be ended well
            graph.capture_end()
        raise
    graph.capture_end()


@contextmanager
def _unnoted(engine: Engine) -> Iterator[None]:
    """Let a step inside the block go into a graph: the host takes no note of it. Syncs: no."""
    num_steps, result = engine.num_steps, engine.result
    engine.is_captured = True
    try:
        engine.gradients.zero(set_to_none=True)
        engine.buffers.renew()
        yield
    finally:
        engine.is_captured, engine.num_steps, engine.result = False, num_steps, result
        engine.gradients.close()


def _drop_casts(engine: Engine) -> None:
    """Forget kept casts of the weights: those of before are no graph's, and a graph's are nobody else's. Host only."""
    for param in engine.names:
        weight_casts.drop(param)
