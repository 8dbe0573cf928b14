"""The order of calls in a step: check the gradients, update or leave alone, finish."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from .._torch import is_capturing
from ..binding import Binding, bound_of, convert_, innermost, rebind, set_grad_dtype_, warn_of_replaced
from ..distributed import is_running, refuse_joining, reshard_
from ..errors import StepError
from ..formats import LOW_DTYPES
from ..kernels import any_dtensor, norm_and_finite
from ..loss_scale import LossScale, ask_before_steps, is_bad
from ..policy import Policy
from .buffers import Buffers
from .grad_passes import GradStats
from .gradients import NOTHING, Gradients, OptimizerGrads
from .invariants import ALWAYS, Invariants
from .leftovers import refuse_repeated
from .load_hooks import LoadHooks
from .ranks import Ranks
from .recovery import Recovery
from .release import Original
from .report import ParameterNames, StateReport, make_report, refuse_differing
from .result import Skip, StepFlags, StepResult, check_grads
from .strangers import refuse_stranger, warn_of_probabilities
from .update import UNFINISHED, Clip, SteppedOptions, decides_on_device, move_scale_, update_

Callback = tuple[Callable[[], object], Optimizer | None]


class _OneThread:
    """A block for one thread at a time, which may enter it again; a StepError in any other, where gradients would be freed while they are read."""

    def __init__(self) -> None:
        self._lock = RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise StepError(
                "another thread is inside of a backward, a step or a zero_grad of this stepper, whose gradients are the same. Have one "
                "thread take its steps, or hold a threading.Lock around zero_grad, backward and step."
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Engine:
    """The parts of a stepper, and the order in which a step calls them.

    Attributes:
        root: the model without wrappers.
        ranks: who takes the same steps.
        callbacks: functions to call after steps of an optimizer, or of all, that were taken.
        is_stepping: whether an optimizer's step is called from here just now.
        is_captured: whether what is called now goes into a graph, and nothing is done.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[Optimizer], binding: Binding, original: Original, load_hooks: LoadHooks,
        skip: Skip,
    ) -> None:  # fmt: skip
        self.model, self.original, self.load_hooks, policy = model, original, load_hooks, binding.policy
        self.optimizers = tuple(optimizers)
        self.names = names = ParameterNames(model, self.optimizers)
        self._dtypes = {p: p.dtype if p.dtype in LOW_DTYPES else dtype for p, (dtype, _) in original.dtypes.items()}
        self._skip: Skip = skip
        self.root = innermost(model)
        self.gradients = Gradients(model, self.optimizers, names, policy.loss, by_turns=skip == "independent")
        self.may_capture = self.gradients.device.type != "cpu"  # once: torch makes the text anew each time
        self.buffers = Buffers(self.root, restores=policy.guard.restore_buffers)
        scaling, device = policy.scaling, self.gradients.device
        self.loss_scale = LossScale(scale=1.0) if scaling is None else LossScale.start(scaling, device)
        self.ranks = Ranks(model, self.optimizers, policy, names, load_hooks)
        self.recovery = Recovery(self.root, binding, self.gradients, self.buffers, self.loss_scale, names, self.ranks)
        self.guard = self.recovery.guard
        self.replay = self.recovery.replay
        self._joinable = [one for one in self.optimizers if isinstance(one, Joinable)]
        self._stepped = [SteppedOptions(optimizer, index) for index, optimizer in enumerate(self.optimizers)]
        self.callbacks: list[Callback] = []
        self.one_thread = _OneThread()
        self._is_warned = self.is_stepping = self.is_captured = False
        self.refusal: Exception | None = None  # of a change that was met where a compiler traced the model
        self.num_steps = 0
        self.result: StepResult | None = None
        self._invariants = Invariants(names, self.buffers.nonfinite_counts, self.recovery.rate_to_blame)
        if policy.scaling is not None or policy.params in LOW_DTYPES:
            ask_before_steps(self)

    @property
    def policy(self) -> Policy:
        """The policy in force: as given, or the one that demotion made of it."""
        return self.recovery.binding.policy

    @property
    def scale(self) -> Tensor | None:
        """The loss scale: shape (), fp32, on the device; None without scaling. Host only."""
        scale = self.loss_scale.scale
        return scale if isinstance(scale, Tensor) else None

    def follow_changes(self) -> None:
        """Take modules, parameters and groups that came since into the policy. Writes: as `prepare`. Syncs: no."""
        refuse_repeated(self.model, self.optimizers)
        rebind(self.root, self.recovery.binding)
        convert_(self.root, self.optimizers, self.policy)
        set_grad_dtype_(self.optimizers, self.policy)
        self.names.refresh()
        self.gradients.refresh()
        self.buffers.rescan()
        self.load_hooks.follow_parts()

    def report(self) -> StateReport:
        """Return what is declared beside what is; see `Stepper.report`."""
        reshard_(self.root)
        self.names.refresh()
        buffers = self.buffers.dtypes()
        return make_report(self.root, self.optimizers, self.policy, self.names, buffers, self._dtypes)

    def refuse_capture(self, call: str) -> None:
        """Refuse a call while somebody else captures a graph, which no host could follow when it is replayed: a StepError. Syncs: no."""
        if self.may_capture and not self.is_captured and is_capturing(device := self.gradients.device):
            raise StepError(
                f"{call} was called while a graph is captured on {device}: the host reads what each step found, and would not "
                "know of a replay. Write step = amp.capture(function), which captures the function's step and replays it, or "
                "leave training outside of the graph: under torch.no_grad() a forward may go into one."
            )

    @property
    def needs_host(self) -> bool:
        """Whether the host must run the next step: it is looked at, or kept in case it is bad again. Syncs: no."""
        return self._is_due or self.guard.may_stop or self.guard.state.wants_probe

    def check(self, unread: int = 0, *, before_step: bool = False) -> None:
        """Stop the run if an earlier step showed that it cannot go on: on every rank, whichever saw it; but for the `unread` last ones.

        Raises: StoppedRun: see `Stepper.step`. Writes: if it raises `before_step`, the step in the making, which then leaves no
        trace: gradients, and buffers that its forward wrote. Syncs: with the last step, or the last that must be known.
        """
        state = self.guard.poll(unread)
        if state is None:
            if not self.replay.is_idle:
                self.replay.forget()
            return
        stop = self.recovery.stop(state)
        if stop is None:
            return
        if before_step:
            self.buffers.settle(True)
            self.gradients.zero(set_to_none=True)
        raise self.recovery.explained(stop, state.skip)

    def check_before_step(self) -> None:
        """Do as `check`, where nobody captures a graph, with sharded weights as optimizers hold them."""
        self.refuse_capture("amp.step()")
        if self.gradients.has_dtensors:
            reshard_(self.root)
            self.names.refresh()
        self.check(before_step=True)

    def drop(self, set_to_none: bool) -> None:
        """Drop gradients, and buffers that came out not finite in the step they belong to; see `Stepper.zero_grad`."""
        was_pending = self.gradients.is_pending
        with self.one_thread:
            self.gradients.zero(set_to_none)
        if self.ranks.consensus is not None:
            self.ranks.consensus.wrapper.drop()
        if not self.replay.is_idle:
            self.replay.drop(by_closure=self.is_stepping)
        if not self.buffers.slots:
            return
        if was_pending:
            self.give_buffers_up()
        elif not self.is_stepping:
            self.buffers.abandon()

    def give_buffers_up(self) -> None:
        """End the step that its gradients were dropped of: only buffers that came out not finite are taken back."""
        written = self.buffers.written()
        self.buffers.settle(is_bad(norm_and_finite(written).norm, self.gradients.device) if written else False)

    def backward(
        self, loss: Tensor, retain_graph: bool | None, create_graph: bool, inputs: Sequence[Tensor] | None
    ) -> None:
        """Add a loss's gradients to those of this step; see `Stepper.backward`. Syncs: no."""
        self.refuse_capture("amp.backward(loss)")
        if self.refusal is not None:
            refusal, self.refusal = self.refusal, None
            raise refusal
        if is_running():
            self.ranks.find()
        consensus = self.ranks.consensus
        if consensus is not None:
            consensus.wrapper.check_backward()
        for optimizer in self._joinable:
            refuse_joining(optimizer, "Join([optimizer])")
        may_probe = self.guard.flush_norm > 0 and inputs is None and self.replay.is_idle
        is_first = may_probe and not self.gradients.is_pending
        wants_probe = is_first and self.guard.wants_probe(is_alone=consensus is None)
        try:
            with (
                self.one_thread,
                NOTHING if consensus is None else consensus.watching(),
                self.buffers.writing() if self.buffers.slots else NOTHING,
            ):
                probing = self.replay.paused() if wants_probe else None
                self.gradients.backward(loss, self.scale, retain_graph, create_graph, inputs, probing)
        finally:
            if not self.replay.is_idle:
                self.replay.stop_following()
        self._is_warned = self._is_warned or (self._is_due and self.policy.is_low and warn_of_probabilities(loss))

    @contextmanager
    def external_backward(self) -> Iterator[None]:
        """Take what backward passes of somebody else's leave inside the block; see `Stepper.external_backward`. Syncs: no."""
        consensus = self.ranks.consensus
        watched = NOTHING if consensus is None else consensus.watching()
        with watched, self.gradients.external(self.scale, is_alone=consensus is None or not consensus.has_parts):
            yield

    def run_step(self, optimizer: Optimizer | None, clip: Clip) -> StepResult:
        """Take the step with the gradients that are there, whose backward pass has found the ranks; see `Stepper.step`."""
        if self.policy.guard.on_overflow == "retry":
            raise StepError(
                "step() was called without a closure, and the policy declares guard.on_overflow=retry, which computes "
                "the loss again. Write amp.step(closure), or guard.on_overflow=skip."
            )
        for one in self.stepped_options(optimizer):
            one.refuse_options(has_closure=False)
        consensus = self.ranks.consensus
        if consensus is not None:
            self.ranks.find()
            consensus.wrapper.check_step()
        grads = self.gradients.collect(optimizer)
        self.announce(optimizer, clip)
        flags, result = self.check_grads(grads, clip.max_norm)
        must_know = self._must_host_know(grads, flags)
        skipped = result.flags().skipped if flags.is_known or must_know else None
        self.settle_buffers(flags, skipped)
        is_due = self._is_due and not self.is_captured
        has_parts = consensus is not None and consensus.has_parts
        before = self._invariants.look(grads, self.num_steps, has_parts=has_parts) if is_due else None
        pending = self.gradients.pending
        pending.broken = UNFINISHED  # which stays where Ctrl-C comes, until the step is closed
        try:
            self.is_stepping = True
            result.undo = update_(grads, flags, pending, skipped, clip, self._skip)
        except Exception:
            if pending.broken == UNFINISHED:  # refused before an optimizer stepped
                pending.broken = ""
            raise
        finally:
            self.is_stepping = False
        self.finish_step(grads, flags, result, skipped if must_know else None)
        if before is not None:
            self.check()
            warn_of_replaced(self.root)
            self._invariants.check(before, grads, result.flags())
            refuse_differing(self.report())
        return result

    def _must_host_know(self, grads: Sequence[OptimizerGrads], flags: StepFlags[Any]) -> bool:
        """Whether the host must know before the update who skips: somebody waits for steps that were taken, or an optimizer cannot leave one out on the device. Syncs: no."""
        is_healthy = flags.is_known and flags.applied and not flags.flushed  # of which nothing is to be said
        return bool(self.callbacks) or not (is_healthy or all([decides_on_device(one.optimizer) for one in grads]))

    def announce(self, optimizer: Optimizer | None, clip: Clip) -> None:
        """Take note of how the step clips, and have the other ranks told what it is. Syncs: no."""
        self.recovery.clip = clip
        if self.ranks.consensus is not None:
            stepped = self.stepped_options(optimizer)
            which = [f"optimizer={one.index}" for one in stepped if optimizer is not None]
            call = f"amp.step({', '.join((*which, *clip.spelled()))})"
            lines = [call, *(line for one in stepped for line in one.lines())]
            self.ranks.announce(lines, lacks_scale=self.gradients.pending.lacks_scale)

    def stepped_options(self, optimizer: Optimizer | None) -> list[SteppedOptions]:
        """Return the options of the optimizer that a step is of, or of all. Host only."""
        return [one for one in self._stepped if optimizer is None or one.optimizer is optimizer]

    @property
    def _is_due(self) -> bool:
        number, every = self.num_steps + 1, self.policy.guard.check_every
        return every > 0 and (number <= ALWAYS or number % every == 0)

    def grad_norm(self, optimizer: Optimizer | None) -> Tensor:
        """Return the norm of the gradients that are there; see `Stepper.grad_norm`. Syncs: as `check_grads`."""
        grads, pending = self.gradients.collect(optimizer, "grad_norm()"), self.gradients.pending
        is_sharded = any_dtensor(p for one in grads for p in one.params)
        consensus = self.ranks.consensus if is_sharded else None
        norm = check_grads(grads, pending, [], self._skip, consensus, len(self.optimizers)).grad_norm
        known = norm if isinstance(norm, Tensor) else float(norm)
        return torch.as_tensor(known, dtype=torch.float32, device=self.gradients.device)

    def check_grads(
        self, grads: Sequence[OptimizerGrads], max_norm: Tensor | float | None = None
    ) -> tuple[StepFlags[Any], StepResult]:
        """Say what is wrong with the gradients, if anything: known, or on the way to the host. Syncs: no."""
        pending = self.gradients.pending
        written = self.buffers.written() if self.buffers.slots else []
        flags = check_grads(grads, pending, written, self._skip, self.ranks.consensus, len(self.optimizers), max_norm)
        guard = self.guard
        stats = GradStats(
            params=[p for one in grads for p in one.params],
            names=self.names,
            norms=[one.check.norms for one in grads],
            counts=[one.check.count_nonfinite() for one in grads] if guard.is_troubled else None,
            stamps=self.gradients.stamps,
        )
        return flags, StepResult(flags, stats, guard.last, is_captured=self.is_captured)

    def settle_buffers(self, flags: StepFlags[Any], skipped: Sequence[float] | None) -> None:
        """Close the step of the buffers: before the update, since copies of them may find no memory. Writes: those of a skipped step. Syncs: no."""
        if self.buffers.slots:
            self.buffers.settle(flags.void if skipped is None else any(skipped))

    def finish_step(
        self, grads: Sequence[OptimizerGrads], flags: StepFlags[Any], result: StepResult,
        skipped: Sequence[float] | None,
    ) -> None:  # fmt: skip
        """Close the step: loss scale, counters, and who waits for steps that were taken.

        Where the host had to know who `skipped`, callbacks are called, and a StoppedRun is raised now; else when the next step begins.
        Writes: the loss scale. Syncs: no.
        """
        self.num_steps, self.result = self.num_steps + 1, result
        if not self.is_captured:
            self.guard.add(result)
        self.gradients.close([one.optimizer for one in grads])  # before the scale moves: those that wait carry this one
        if self.policy.scaling is not None:
            move_scale_(self.loss_scale, flags, self.policy.scaling)
        if not self.replay.is_idle:
            self.replay.close()
        if self.ranks.consensus is not None:
            stepped = [p for one in grads for p in one.params]
            self.ranks.compare(self.loss_scale, stepped, has_shards=self.gradients.has_dtensors)
        if skipped is not None:
            applied = {id(one.optimizer): not skip for one, skip in zip(grads, skipped, strict=True)}
            for function, optimizer in self.callbacks:
                if all(applied.values()) if optimizer is None else applied.get(id(optimizer), False):
                    function()
            if self.ranks.consensus is None:  # ranks check together, when the next step begins
                self.check()

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse or name the step of an optimizer that was not prepared: see `refuse_stranger`. Host only."""
        if not self.is_stepping:
            bound = bound_of(self.root)
            is_released = bound is None or bound.binding is not self.recovery.binding
            stamps = {} if self.policy.scaling is None else self.gradients.stamps
            refuse_stranger(optimizer, self.optimizers, stamps, {} if is_released else self.names)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let optimizers step inside the block."""
        try:
            self.is_stepping = True
            yield
        finally:
            self.is_stepping = False
