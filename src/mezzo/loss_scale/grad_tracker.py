"""Which gradients are still multiplied by the loss scale: what each backward pass left, what changed it since, and what is refused of them."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.optim.optimizer import Optimizer

from .._torch import after_backward, graph_task_id
from ..errors import ScalerError
from ..kernels import move
from ..stamp import Stamp
from . import messages
from .accumulation import GradSums, ask_before_steps, grads_by_id, stamps_of
from .fused import parameters
from .unscale import real_values


class Mark(enum.Enum):
    """What a gradient is, as far as the tracker knows."""

    SCALED = "scaled"
    """Left by backward passes of scaled losses."""
    UNSCALED = "unscaled"
    """Divided by the scale."""
    MIXED = "mixed"
    """Divided by the scale, and then a scaled gradient was added."""


@dataclass(slots=True)
class Entry:
    """A gradient as it was written down, by its stamp: another tensor in its place is another gradient. `iteration` counts the `update` calls before."""

    stamp: Stamp
    mark: Mark
    iteration: int


class GradTracker:
    """Keeps the book of one scaler's gradients, on the host only: identities and version counters, no values.

    A hook on each scaled loss notes every known gradient when its backward pass starts and compares when it ends.
    Known are the parameters of optimizers the scaler has met, and the leaves of the graphs it walked: those of the
    first iteration, of any in which an optimizer comes or goes, and of the next. What is not known is not judged.

    Attributes:
        passes: backward passes of scaled losses since the last `update`.
        is_blind: gradients of this iteration may have come about unseen (traced code, a scaled seed in place of a
            scaled loss); nothing is judged in it.
        has_loose_ends: a pass of this iteration left nothing in any gradient (torch.autograd.grad), and what
            became of its result is not seen.
        is_stepping: the scaler itself is calling an optimizer's step.
        is_off: gradients change unseen for good (replayed CUDA graphs); nothing is judged any more.
        captured: the scale that gradients marked scaled are multiplied by; None before the first backward pass.
        iteration: `update` calls so far.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.is_blind = self.has_loose_ends = self.is_stepping = self.is_off = False
        self.captured: Tensor | None = None
        self.iteration = 0
        self._entries: dict[int, Entry] = {}
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._num_optimizers = 0
        self._leaves: dict[int, weakref.ref[Tensor]] = {}
        self._is_exploring = True
        self._known: list[Tensor] | None = None
        self._open: dict[int, tuple[list[Tensor], dict[int, Stamp]]] = {}
        self._sums = GradSums()

    def watch(self, output: Tensor, captured: Tensor) -> None:
        """Note what the backward passes of a scaled output will do to gradients. Syncs: no."""
        if torch.compiler.is_compiling() or output.grad_fn is None:
            self.is_blind = True
        elif not self.is_off:
            if self._is_exploring or len(self._optimizers) != self._num_optimizers:
                known = self._optimized()  # of which nothing is held: torch swaps no weight that somebody refers to
                self._leaves.update((id(p), weakref.ref(p)) for p in leaves(output.grad_fn) if id(p) not in known)
                self._known = None
            output.register_hook(partial(self._begin, captured))  # type: ignore[no-untyped-call]  # torch's

    @property
    def can_judge(self) -> bool:
        """Whether what is written down is all that happened."""
        return not (self.is_blind or self.is_off)

    def entry(self, param: Tensor) -> Entry | None:
        """Return what is written down about a parameter's gradient. Host only."""
        return self._entries.get(id(param))

    def knows(self, optimizer: Optimizer) -> bool:
        """Whether the parameters of an optimizer are noted at every backward pass."""
        return optimizer in self._optimizers

    def write(self, optimizer: Optimizer, mark: Mark) -> None:
        """Note that the gradients of an optimizer, as they are now, are what `mark` says."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._known = None
        grads = grads_by_id(parameters(optimizer))
        self._note(grads, {}, mark)
        for _, before in self._running():
            before.update(stamps_of(grads))

    def _note_running(self, optimizer: Optimizer) -> None:
        """Note what a backward pass that is not over has left an optimizer: one may step inside it, from a hook. Host only."""
        for _, before in self._running():
            self._compare(parameters(optimizer), before)

    def _running(self) -> list[tuple[list[Tensor], dict[int, Stamp]]]:
        return [] if graph_task_id() == -1 else list(self._open.values())

    def accept(self, optimizer: Optimizer, captured: Tensor) -> None:
        """Note that the gradients of an optimizer carry a scale, whatever was known of them. Host only."""
        if captured is not self.captured:
            self._carry_over(captured)
        self.write(optimizer, Mark.SCALED)

    def next_iteration(self) -> None:
        """Close the iteration: `update` was called."""
        self.iteration += 1
        self.passes, self.is_blind, self.has_loose_ends = 0, False, False
        if graph_task_id() == -1:  # not called by a hook, in the middle of a pass
            self._open.clear()
        self._sums.clear(is_step_over=True)
        self._known = None
        self._is_exploring = len(self._optimizers) != self._num_optimizers
        if self._is_exploring:
            self._num_optimizers = len(self._optimizers)
            alive, known = {id(param) for param in self._parameters()}, self._optimized()
            self._leaves = {key: leaf for key, leaf in self._leaves.items() if key in alive and key not in known}
            self._entries = {key: entry for key, entry in self._entries.items() if key in alive}
            self._known = None

    def _parameters(self) -> list[Tensor]:
        """Return what is known: looked up once an iteration, and held no longer than that."""
        if self._known is None:
            known = {key: leaf for key, ref in self._leaves.items() if (leaf := ref()) is not None}
            self._known = list({**known, **self._optimized()}.values())
        return self._known

    def _optimized(self) -> dict[int, Tensor]:
        return {id(param): param for optimizer in self._optimizers for param in parameters(optimizer)}

    def _note(self, grads: list[tuple[int, Tensor]], marks: Mapping[int, Mark], mark: Mark) -> None:
        """Write down gradients, by the ids of their parameters, as what `marks` says of each, or else `mark`."""
        now, iteration = stamps_of(grads), self.iteration
        self._entries.update({key: Entry(stamp, marks.get(key, mark), iteration) for key, stamp in now.items()})
        if mark is Mark.SCALED:
            self._sums.note(grads)

    def _begin(self, captured: Tensor, _: Tensor) -> None:
        if torch.compiler.is_compiling():  # compiled autograd traces hooks and takes no callbacks
            self.is_blind = True
            return
        task = graph_task_id()
        if task in self._open:
            return
        if captured is not self.captured:
            self._carry_over(captured)
        ask_before_steps(self)
        params = self._parameters()
        self._open[task] = params, stamps_of(grads_by_id(params))
        # Queued twice to run last: DDP and FSDP queue their own final callbacks during the pass.
        after_backward(lambda: after_backward(partial(self._end, task)))

    @torch.no_grad()
    def _carry_over(self, captured: Tensor) -> None:
        """Bring scaled gradients of an earlier iteration to the scale of the pass that may add to them."""
        ratio: Tensor | None = None
        for param in self._parameters():
            grad, entry = param.grad, self.entry(param)
            if grad is not None and entry is not None and entry.mark is Mark.SCALED and entry.stamp.is_current(grad):
                assert self.captured is not None
                ratio = captured / self.captured if ratio is None else ratio
                grad.mul_(move(ratio, grad.device))
                entry.stamp = Stamp.of(grad)
        self.captured = captured

    def _end(self, task: int) -> None:
        is_touched = self._compare(*self._open.pop(task, ([], {})))
        self.passes += 1
        self.has_loose_ends = self.has_loose_ends or not is_touched

    def _compare(self, params: list[Tensor], before: Mapping[int, Stamp]) -> bool:
        """Note the gradients that are no longer what they were before a pass, and return whether there are any."""
        grads = grads_by_id(params)
        now = stamps_of(grads)
        touched = [(key, grad) for key, grad in grads if not _is_same(before.get(key), now[key])]
        # What was zeroed or edited before the pass is as good as new.
        entries = {key: entry for key, _ in touched if (entry := self._entries.get(key)) is not None}
        divided = {key: entry for key, entry in entries.items() if entry.mark is not Mark.SCALED}
        mixed = {key: Mark.MIXED for key, entry in divided.items() if _is_same(before.get(key), entry.stamp)}
        self._note(touched, mixed, Mark.SCALED)
        return bool(touched)

    def before_unscale(self, optimizer: Optimizer) -> bool:
        """Refuse gradients that are not exactly what backward passes of scaled losses left; return whether any is known to be scaled.

        Raises:
            ScalerError: a gradient was edited while scaled, is divided already, is left over, or was never scaled.

        Syncs: only where a gradient is suspicious, to see whether it is zero, or has the values it had, and so is harmless.
        """
        if not self.can_judge:
            return False
        self._note_running(optimizer)
        suspects: dict[str, list[int]] = {}
        unknown, is_scaled, params = [], False, parameters(optimizer)
        for index, param in enumerate(params):
            if (grad := param.grad) is None:
                continue
            entry = self.entry(param)
            if entry is not None and entry.mark is Mark.SCALED and entry.stamp.is_current(grad):
                is_scaled = True
            elif entry is not None and (verdict := _verdict(entry, grad, self.iteration)):
                suspects.setdefault(verdict, []).append(index)
            else:
                unknown.append(index)
        edited = suspects.pop(messages.EDITED, [])
        changed = [index for index in edited if not self._sums.is_harmless(params[index])]
        is_scaled = is_scaled or len(changed) < len(edited)
        if changed:
            suspects[messages.EDITED] = changed
        for verdict, indices in suspects.items():
            # Zeroed gradients are harmless beside scaled ones; where none is left, NaN may have been edited to zero.
            _refuse(optimizer, indices, verdict, zeros_too=verdict is messages.EDITED and not is_scaled)
        if unknown and not is_scaled and not self.has_loose_ends and (self.passes == 0 or self.knows(optimizer)):
            _refuse(optimizer, unknown, messages.UNSEEN)
        return is_scaled

    def check_unscaled(self, optimizer: Optimizer) -> None:
        """Refuse to apply gradients that were divided and then had scaled ones added: a ScalerError. Syncs: only on the way to it."""
        if self.can_judge:
            _refuse(optimizer, self._still_scaled(optimizer, Stamp.is_of), messages.ADDED)

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse a step that was not asked of the scaler, on gradients that are still scaled: a ScalerError. Syncs: only on the way to it."""
        if not self.is_stepping and self.can_judge:
            self._note_running(optimizer)
            _refuse(optimizer, self._still_scaled(optimizer, Stamp.is_current), messages.DIRECT)

    def _still_scaled(self, optimizer: Optimizer, is_noted: Callable[[Stamp, Tensor], bool]) -> list[int]:
        """Return the indices of the gradients that were not divided, of those that are the ones noted."""
        found = [(self.entry(param), param.grad) for param in parameters(optimizer)]
        return [
            index
            for index, (entry, grad) in enumerate(found)
            if entry and grad is not None and entry.mark is not Mark.UNSCALED and is_noted(entry.stamp, grad)
        ]


def _is_same(one: Stamp | None, other: Stamp) -> bool:
    """Whether two stamps are of one tensor that was not written between them; None is of none."""
    # Python makes one plain reference to an object.
    return one is not None and one[0] is other[0] and one[1] == other[1]


def _verdict(entry: Entry, grad: Tensor, iteration: int) -> str | None:
    if entry.mark is Mark.SCALED:
        return messages.EDITED
    if entry.mark is Mark.MIXED:
        return messages.MIXED if entry.stamp.is_of(grad) else None
    if entry.iteration == iteration:
        return messages.TWICE if entry.stamp.is_of(grad) else None
    return messages.STALE if entry.stamp.is_current(grad) else None


def _refuse(optimizer: Optimizer, indices: list[int], verdict: str, zeros_too: bool = False) -> None:
    params = parameters(optimizer)
    if not zeros_too:
        indices = [i for i in indices if (grad := params[i].grad) is not None and bool(real_values(grad).any())]
    if indices:
        raise ScalerError(messages.about(optimizer, indices, verdict))


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients an optimizer holds, in the order of its parameters. Host only."""
    return [param.grad for param in parameters(optimizer) if param.grad is not None]


def leaves(root: Node) -> Iterator[Tensor]:
    """Yield the leaf tensors whose gradients a graph accumulates, each once per path that is new. Host only."""
    seen, stack = {root}, [root]
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            if type(node).__name__ == "AccumulateGrad":
                yield cast(Tensor, getattr(node, "variable"))  # noqa: B009  # torch declares it nowhere
            else:
                stack.append(node)
