"""What a step does once the calls are in order: judge, update or leave alone, settle."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..binding.bind import AfterForward, Binding, bind, innermost
from ..distributed.consensus import RankConsensus
from ..distributed.group import is_running
from ..distributed.wrapper import Wrapper
from ..errors import NonFiniteStep
from ..kernels.dtensor import any_dtensor, is_dtensor, local
from ..kernels.ops.gradients import norm_and_finite
from ..loss_scale.state import LossScale, NoScaling
from ..policy import Policy
from .buffers import Buffers
from .decision import Decision, decide, move_scale_
from .demote import check_demotion, demote
from .flags import StepFlags
from .gradients import Gradients
from .guard import Guard, SkipInfo, Stop
from .invariants import ALWAYS, Invariants, look
from .ranks import setup_of, waits_for_ranks, warn_alone, wrapper_around, wrapper_of
from .replay import Replay
from .report import Report, make_report
from .result import StepResult
from .state_dict import load_scale_
from .update import Clip, OptimizerGrads, Skip, StepScaling, clamp_, decides_on_device, multiply_, step_

if TYPE_CHECKING:
    from ..trace import Diagnosis

_log = logging.getLogger("mezzo.step")

Callback = tuple[Callable[[], object], Optimizer | None]


class Engine:
    """The parts of a stepper and how a step goes through them.

    Args:
        model: prepared.
        optimizers: of its parameters.
        policy: with its compute dtype decided.
        names: of parameters.
        skip: what several optimizers do when one has bad gradients.
        binding: of the policy to the model.

    Attributes:
        policy: as given, or the one that demotion made of it.
        gradients: between backward and update.
        buffers: of the model, as a transaction.
        guard: counts and stops.
        loss_scale: as it is now.
        callbacks: functions to call after steps of an optimizer, or of all, that were taken.
        consensus: makes findings the same on all ranks; None on one rank.
        replay: keeps the last batch where it may be needed.
        is_stepping: whether an optimizer's step is called from here just now.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        policy: Policy,
        names: Mapping[Tensor, str],
        skip: Skip,
        binding: Binding,
    ) -> None:
        self.model = model
        self.optimizers = tuple(optimizers)
        self.policy = policy
        self.names = names
        self.skip: Skip = skip
        self.binding = binding
        self.gradients = Gradients(model, self.optimizers, names, policy.loss)
        self.buffers = Buffers(model)
        self.guard = Guard(policy, self._nonfinite_weights)
        self.loss_scale = (
            NoScaling() if policy.scaling is None else LossScale.start(policy.scaling, self.gradients.home)
        )
        self.callbacks: list[Callback] = []
        self.consensus: RankConsensus | None = None
        self.not_yet: RankConsensus | None = None
        self._is_alone = False
        self._join(wrapper_of(model, policy))
        check_demotion(policy, self.consensus)
        self.is_stepping = False
        self._root = innermost(model)
        self.replay = Replay(self._root)
        self._trouble: SkipInfo | None = None
        self._num_taken = 0
        self._invariants = Invariants(names, self.report, self.buffers.nonfinite)
        named = innermost(model).named_buffers()
        self._buffer_dtypes = {name: buffer.dtype for name, buffer in named if buffer.is_floating_point()}

    @property
    def scale(self) -> Tensor | None:
        """The loss scale: shape (), fp32, on the device; None without scaling."""
        scale = self.loss_scale.scale
        return scale if isinstance(scale, Tensor) else None

    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> AfterForward | None:
        """Do what must be done before the model, or a module of it by itself, runs forward.

        Before the model: open the buffers' transaction, notice other ranks.

        Returns:
            What must be called with its output, where the step may be the last one and its batch is kept.
        """
        if self.replay.is_running:
            return None
        if module is self._root:
            if self.consensus is None:
                self._join(wrapper_around(self.model, self.policy, is_calling=True))
            if self.consensus is not None:
                self.consensus.note_forward()
            self.buffers.begin()
        if not self.guard.may_stop or not torch.is_grad_enabled():
            return None
        follow = self.replay.keep(module, args, kwargs)
        return follow if follow is None or not self._watches_loss else lambda out: self._follow_loss(follow, out)

    def _join(self, wrapper: Wrapper | None) -> None:
        """Take steps together with the ranks of a wrapper, if there is one."""
        if wrapper is not None:
            consensus = (self.not_yet or RankConsensus(wrapper.process_group)).attach(wrapper)
            check_demotion(self.policy, consensus)
            self.consensus, self.not_yet = consensus, None

    def find_ranks(self) -> None:
        """Look for ranks that nothing has led to yet, and compare with them, once, what this one was prepared with.

        Raises:
            DistributedError: ranks were prepared differently.

        Writes: masters, once, where the first rank's weights were copied. Syncs: once.
        """
        if self.consensus is None and not self._is_alone and is_running() and dist.get_world_size() > 1:
            self._join(wrapper_around(self.model, self.policy, is_calling=False))
            self._is_alone = self.consensus is None
            if self._is_alone:
                warn_alone(self._root)
        if self.consensus is not None:
            self.consensus.handshake(lambda: setup_of(self._root, self.optimizers, self.policy))

    @property
    def _watches_loss(self) -> bool:
        """Whether what comes after the model is followed too: the step may be the last, and nothing runs it again."""
        return self.guard.is_last_chance and self.consensus is None and not self.is_stepping

    def _follow_loss(self, follow: AfterForward, out: object) -> None:
        follow(out)
        self.replay.follow(self.guard.counters.seen)

    def report(self) -> Report:
        """Return what is declared beside what is; see `Stepper.report`."""
        return make_report(innermost(self.model), self.optimizers, self.policy, self.names, self._buffer_dtypes)

    def check_before_step(self) -> None:
        """Stop the run as `check` does; the step in the making, which is not taken, then leaves no trace.

        Writes: if it raises, gradients, and buffers that the forward of this step wrote.
        """
        stop = self._stop()
        if stop is not None:
            if self.policy.guard.restore_buffers:
                self.buffers.settle(True)
            self.gradients.zero(set_to_none=True)
            raise self._explained(stop)

    def drop(self, set_to_none: bool) -> None:
        """Drop gradients, and buffers that came out not finite in the step they belong to; see `Stepper.zero_grad`."""
        was_pending = self.gradients.is_pending
        self.gradients.zero(set_to_none)
        if self.consensus is not None:
            self.consensus.drop()
        self.replay.drop(by_closure=self.is_stepping)
        if was_pending:
            written = self.buffers.written() if self.policy.guard.restore_buffers else []
            self.buffers.settle(norm_and_finite(written).found_nonfinite != 0 if written else False)

    def take(self, optimizer: Optimizer | None, clip: Clip) -> StepResult:
        """Take the step with the gradients that are there; see `Stepper.step`."""
        self.find_ranks()
        if self.consensus is not None:
            self.consensus.check_step()
        shares = self.gradients.shares(optimizer)
        decision, verdict = self.judge(shares)
        by_host = bool(self.callbacks) or not all(decides_on_device(share.optimizer) for share in shares)
        skipped = verdict.facts().skipped if by_host else None
        before = look(shares) if self._is_due() else None
        if before is not None and self.consensus is not None and self.consensus.has_parts:
            before.raw_norm = None  # the norm of the step is that of all ranks
        self._update(shares, decision, skipped, clip)
        result = self.settle(shares, decision, verdict, skipped)
        if before is not None:
            self.check()
            self._invariants.check(before, shares, verdict.facts())
        return result

    def _is_due(self) -> bool:
        """Whether the invariants of this step are looked at. Syncs: no."""
        self._num_taken += 1
        every = self.policy.guard.check_every
        return every > 0 and (self._num_taken <= ALWAYS or self._num_taken % every == 0)

    def grad_norm(self, optimizer: Optimizer | None) -> Tensor:
        """Return the norm of the gradients that are there; see `Stepper.grad_norm`."""
        shares, pending = self.gradients.shares(optimizer), self.gradients.require("grad_norm()")
        is_sharded = any_dtensor(p for share in shares for p in share.params)
        consensus = self.consensus if is_sharded else None
        return decide(shares, pending, [], self.skip, consensus, len(self.optimizers)).norm

    def judge(self, shares: Sequence[OptimizerGrads]) -> tuple[Decision, StepFlags]:
        """Say what is wrong with the gradients, if anything. Syncs: no."""
        pending = self.gradients.require("step()")
        written = self.buffers.written() if self.policy.guard.restore_buffers else []
        decision = decide(shares, pending, written, self.skip, self.consensus, len(self.optimizers))
        return decision, decision.verdict(shares, self.names, self.gradients.marks, count=self.guard.is_troubled)

    def settle(
        self, shares: Sequence[OptimizerGrads], decision: Decision, verdict: StepFlags, skipped: Sequence[bool] | None
    ) -> StepResult:
        """Close the step: buffers, loss scale, counters, and who waits for steps that were taken.

        Args:
            shares: the parts of the optimizers.
            decision: what was found.
            verdict: the same on its way to the host.
            skipped: who skipped, where the host knows.

        Raises:
            NonFiniteStep: the host knows, and no loss scale mends it.
            LossScaleExhausted: the host knows, and the loss scale cannot help any more.

        Writes: buffers of a skipped step, the loss scale. Syncs: no.
        """
        self.guard.push(verdict)
        void = decision.is_void if skipped is None else any(skipped)
        self.buffers.settle(void if self.policy.guard.restore_buffers else False)
        move_scale_(self.loss_scale, decision, self.policy.scaling)
        self.gradients.close()
        self.replay.close()
        self._audit()
        if skipped is not None:
            self._call_back({id(share.optimizer): not skip for share, skip in zip(shares, skipped, strict=True)})
            if self.consensus is None:  # ranks check together, when the next step begins
                self.check()
        return StepResult(verdict, self.guard.settle)

    def check(self) -> None:
        """Stop the run if an earlier step showed that it cannot go on: on every rank, whichever saw it.

        Raises:
            NonFiniteStep: parameters or buffers are not finite, or too many steps in a row were skipped; or another
                rank stops.
            LossScaleExhausted: the loss scale cannot shrink any more, or too many steps in a row were skipped.

        Syncs: with the last step.
        """
        stop = self._stop()
        if stop is not None:
            raise self._explained(stop)

    def _stop(self) -> Stop | None:
        """Return why the run cannot go on, if the last step showed that; where the policy says so, demote first."""
        trouble = self._trouble = self.guard.take()
        if not self.guard.is_troubled:
            self.replay.forget()
        if trouble is None or self._demote(trouble):
            stop = None
        else:
            stop = trouble.stop
            if stop is None and trouble.reason == "loss" and self.guard.counters.skipped_in_a_row == 2:
                self._explain_early(trouble)
        # All ranks have read the same verdicts, but what else is not finite each sees in its own part.
        if (
            self.consensus is not None
            and self.guard.is_troubled
            and self.consensus.any(stop is not None)
            and stop is None
        ):
            return Stop(
                kind=NonFiniteStep,
                what=f"step {self.guard.counters.seen} was skipped, and another rank stops the run: its message says why",
                advice="Load the last good checkpoint.",
                is_batch_to_blame=False,
            )
        return stop

    def _explain_early(self, trouble: SkipInfo) -> None:
        """Log why the loss is not finite, where a second batch in a row shows that it is not the batch."""
        found = self._diagnosis(trouble)
        if found is not None and found.sentence:
            _log.warning(
                "step %d: the loss is inf or NaN again; why: %s %s", trouble.step + 1, found.sentence, found.fix
            )

    def _explained(self, stop: Stop) -> Exception:
        return stop.error(self._diagnosis(self._trouble) if stop.is_batch_to_blame and self._trouble else None)

    def _diagnosis(self, trouble: SkipInfo) -> Diagnosis | None:
        """Run the last batch again under the tracer, where no rank waits for another in it. Syncs: at every op."""
        if self.consensus is not None and waits_for_ranks(innermost(self.model)):
            return None
        was_pending = self.gradients.is_pending
        reason = trouble.reason if self.consensus is None else None  # it may be that of another rank
        try:
            return self.replay.run(trouble.step, trouble.scale, reason)
        finally:
            if not was_pending:
                self.gradients.close()  # a closure that ran again took the marks off the gradients

    def _demote(self, trouble: SkipInfo) -> bool:
        counters = self.guard.counters
        edits = demote(self.policy, counters.demoted, trouble, lambda: self._diagnosis(trouble), self.adopt)
        if not edits:
            return False
        self.guard.counters = replace(counters, demoted=(*counters.demoted, *edits))
        if trouble.reason == "gradients" and isinstance(self.loss_scale, LossScale) and self.policy.scaling:
            # It fell because of an overflow that is mended now.
            list(load_scale_(self.loss_scale, asdict(LossScale.start(self.policy.scaling))))
        return True

    def demote_again(self, edits: Sequence[str]) -> tuple[str, ...]:
        """Add the rules that a run demoted to before it was saved, if this policy demotes.

        Returns:
            All edits that are in force. Writes: as `adopt`.
        """
        known = self.guard.counters.demoted
        new = [edit for edit in edits if edit not in known] if self.policy.guard.on_overflow == "demote" else []
        if new:
            self.adopt(Policy.parse(", ".join([str(self.policy), *new])))
        return (*known, *new)

    def forget(self) -> None:
        """Forget what earlier steps have shown: the run goes on from somewhere else. Syncs: with the last step."""
        self.guard.take()
        self.replay.drop()
        self.replay.forget()

    def adopt(self, policy: Policy) -> None:
        """Bind another policy from the next forward on. Writes: the record of every module."""
        hook = self.binding.before_forward
        self.binding = bind(innermost(self.model), policy, self.binding.cache)
        self.binding.before_forward = hook
        self.policy = self.guard.policy = policy

    def watching(self) -> AbstractContextManager[None]:
        """Return a block in which the loss of another rank is named as what it is."""
        return nullcontext() if self.consensus is None else self.consensus.watching()

    def _audit(self) -> None:
        """Compare loss scale, counters and whole weights over the ranks, in steps that the agreement chooses."""
        if self.consensus is not None:
            numbers = {
                "the loss scale": self.loss_scale.scale,
                "the number of clean steps since the loss scale moved": self.loss_scale.growth_tracker,
                "the number of skipped steps in a row": self.loss_scale.skipped_in_a_row,
            }
            self.consensus.audit(numbers, lambda: {name: p for p, name in self.names.items() if not is_dtensor(p)})

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let optimizers step inside the block."""
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False

    def _update(
        self, shares: Sequence[OptimizerGrads], decision: Decision, skipped: Sequence[bool] | None, clip: Clip
    ) -> None:
        scale = decision.scale
        if clip.value is not None:
            clamp_([grad for share in shares for grad in share.grads], clip.value, scale)
        if scale is not None and _is_shared(shares):
            # An optimizer that divides in place would do so for the next one too.
            multiply_([grad for share in shares for grad in share.grads], scale.reciprocal())
            scale = None
        with self.stepping():
            for index, share in enumerate(shares):
                if skipped is None or not skipped[index]:
                    norm = decision.norms[index] if self.skip == "independent" else decision.norm
                    skip = decision.skips[index] if skipped is None else None
                    order = StepScaling(scale=scale, coefficient=clip.coefficient(norm), skip=skip)
                    step_(share.optimizer, share.grads, order)

    def _call_back(self, applied: Mapping[int, bool]) -> None:
        for function, optimizer in self.callbacks:
            if all(applied.values()) if optimizer is None else applied.get(id(optimizer), False):
                function()

    def _nonfinite_weights(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        # Of a sharded weight the part here: one rank may ask alone, so nobody waits for the others.
        counts = {name: int((~local(p.detach()).isfinite()).sum()) for p, name in self.names.items()}
        return {name: count for name, count in counts.items() if count}, self.buffers.nonfinite()


def _is_shared(shares: Sequence[OptimizerGrads]) -> bool:
    indices = [id(p) for share in shares for p in share.params]
    return len(shares) > 1 and len(set(indices)) < len(indices)
