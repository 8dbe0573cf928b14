"""What a step does once the calls are in order: judge, update or leave alone, settle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn
from torch.optim import Optimizer

from ..dist.agree import Agreement
from ..errors import MezzoError, NonFiniteStep
from ..kernels.gradients import norm_and_finite
from ..kernels.shards import is_spread, local
from ..policy import Policy
from ..scaling.state import LossScale, NoScaling
from .bind import innermost
from .buffers import Buffers
from .decision import Decision, decide, move_scale_
from .gradients import Gradients
from .guard import Guard
from .invariants import ALWAYS, Invariants, look
from .ranks import agreement_around, agreement_of
from .report import Report, make_report
from .result import StepResult
from .update import Clip, Order, Share, Skip, clamp_, decides_on_device, multiply_, step_
from .verdict import Verdict

Callback = tuple[Callable[[], object], Optimizer | None]


class Engine:
    """The parts of a stepper and how a step goes through them.

    Args:
        model: prepared.
        optimizers: of its parameters.
        policy: with its compute dtype decided.
        names: of parameters.
        skip: what several optimizers do when one has bad gradients.

    Attributes:
        gradients: between backward and update.
        buffers: of the model, as a transaction.
        guard: counts and stops.
        loss_scale: as it is now.
        callbacks: functions to call after steps of an optimizer, or of all, that were taken.
        agree: makes findings the same on all ranks; None on one rank.
        is_stepping: whether an optimizer's step is called from here just now.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        policy: Policy,
        names: Mapping[Tensor, str],
        skip: Skip,
    ) -> None:
        self.model = model
        self.optimizers = tuple(optimizers)
        self.policy = policy
        self.names = names
        self.skip: Skip = skip
        self.gradients = Gradients(model, self.optimizers, names, policy.loss)
        self.buffers = Buffers(model)
        self.guard = Guard(policy, self._nonfinite_weights)
        self.loss_scale = (
            NoScaling() if policy.scaling is None else LossScale.start(policy.scaling, self.gradients.home)
        )
        self.callbacks: list[Callback] = []
        self.agree: Agreement | None = agreement_of(model, policy)
        self.is_stepping = False
        self._num_taken = 0
        self._invariants = Invariants(names, self.report, self.buffers.nonfinite)
        named = innermost(model).named_buffers()
        self._buffer_dtypes = {name: buffer.dtype for name, buffer in named if buffer.is_floating_point()}

    @property
    def scale(self) -> Tensor | None:
        """The loss scale: shape (), fp32, on the device; None without scaling."""
        scale = self.loss_scale.scale
        return scale if isinstance(scale, Tensor) else None

    def before_forward(self) -> None:
        """Do what must be done before the model runs forward: open the buffers' transaction, notice other ranks."""
        if self.agree is None:
            self.agree = agreement_around(self.model, self.policy)
        self.buffers.begin()

    def report(self) -> Report:
        """Return what is declared beside what is; see `Stepper.report`."""
        return make_report(innermost(self.model), self.optimizers, self.policy, self.names, self._buffer_dtypes)

    def check_before_step(self) -> None:
        """Stop the run as `check` does; the step in the making, which is not taken, then leaves no trace.

        Writes: if it raises, gradients, and buffers that the forward of this step wrote.
        """
        try:
            self.check()
        except MezzoError:
            if self.policy.guard.restore_buffers:
                self.buffers.settle(True)
            self.gradients.zero(set_to_none=True)
            raise

    def drop(self, set_to_none: bool) -> None:
        """Drop gradients, and buffers that came out not finite in the step they belong to; see `Stepper.zero_grad`."""
        was_pending = self.gradients.is_pending
        self.gradients.zero(set_to_none)
        if was_pending:
            written = self.buffers.written() if self.policy.guard.restore_buffers else []
            self.buffers.settle(norm_and_finite(written).found_nonfinite != 0 if written else False)

    def take(self, optimizer: Optimizer | None, clip: Clip) -> StepResult:
        """Take the step with the gradients that are there; see `Stepper.step`."""
        shares = self.gradients.shares(optimizer)
        decision, verdict = self.judge(shares)
        by_host = bool(self.callbacks) or not all(decides_on_device(share.optimizer) for share in shares)
        skipped = verdict.facts().skipped if by_host else None
        before = look(shares) if self._is_due() else None
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

    def judge(self, shares: Sequence[Share]) -> tuple[Decision, Verdict]:
        """Say what is wrong with the gradients, if anything. Syncs: no."""
        pending = self.gradients.require("step()")
        written = self.buffers.written() if self.policy.guard.restore_buffers else []
        decision = decide(shares, pending, written, self.skip, self.agree, len(self.optimizers))
        return decision, decision.verdict(shares, self.names, count=self.guard.is_troubled)

    def settle(
        self, shares: Sequence[Share], decision: Decision, verdict: Verdict, skipped: Sequence[bool] | None
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
        self._audit()
        if skipped is not None:
            self._call_back({id(share.optimizer): not skip for share, skip in zip(shares, skipped, strict=True)})
            if self.agree is None:  # ranks check together, when the next step begins
                self.guard.check()
        return StepResult(verdict, self.guard.settle)

    def check(self) -> None:
        """Stop the run if an earlier step showed that it cannot go on: on every rank, whichever saw it.

        Raises:
            NonFiniteStep: as `Guard.check`, or another rank does.
            LossScaleExhausted: as `Guard.check`.

        Syncs: with the last step.
        """
        error = self.guard.take_error()
        # All ranks have read the same verdicts, but what else is not finite each sees in its own part.
        if self.agree is not None and self.guard.is_troubled and self.agree.any(error is not None) and error is None:
            error = NonFiniteStep(
                f"step {self.guard.counters.seen} was skipped, and another rank stops the run: its message says why. "
                "Load the last good checkpoint."
            )
        if error is not None:
            raise error

    def watching(self) -> AbstractContextManager[None]:
        """Return a block in which the loss of another rank is named as what it is."""
        return nullcontext() if self.agree is None else self.agree.watching()

    def _audit(self) -> None:
        """Compare loss scale, counters and whole weights over the ranks, in steps that the agreement chooses."""
        if self.agree is not None:
            numbers = {
                "the loss scale": self.loss_scale.scale,
                "the number of clean steps since the loss scale moved": self.loss_scale.growth_tracker,
                "the number of skipped steps in a row": self.loss_scale.skipped_in_a_row,
            }
            self.agree.audit(numbers, lambda: {name: p for p, name in self.names.items() if not is_spread(p)})

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Let optimizers step inside the block."""
        self.is_stepping = True
        try:
            yield
        finally:
            self.is_stepping = False

    def _update(self, shares: Sequence[Share], decision: Decision, skipped: Sequence[bool] | None, clip: Clip) -> None:
        scale = decision.scale
        if clip.value is not None:
            clamp_([grad for share in shares for grad in share.grads], clip.value, scale)
        if scale is not None and _is_shared(shares):
            # An optimizer that divides in place would do so for the next one too.
            multiply_([grad for share in shares for grad in share.grads], scale.reciprocal())
            scale = None
        with self.stepping():
            for place, share in enumerate(shares):
                if skipped is None or not skipped[place]:
                    norm = decision.norms[place] if self.skip == "independent" else decision.norm
                    skip = decision.skips[place] if skipped is None else None
                    order = Order(scale=scale, coefficient=clip.coefficient(norm), skip=skip)
                    step_(share.optimizer, share.grads, order)

    def _call_back(self, applied: Mapping[int, bool]) -> None:
        for function, optimizer in self.callbacks:
            if all(applied.values()) if optimizer is None else applied.get(id(optimizer), False):
                function()

    def _nonfinite_weights(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        # Of a sharded weight the part here: one rank may ask alone, so nobody waits for the others.
        counts = {name: int((~local(p.detach()).isfinite()).sum()) for p, name in self.names.items()}
        return {name: count for name, count in counts.items() if count}, self.buffers.nonfinite()


def _is_shared(shares: Sequence[Share]) -> bool:
    params = [p for share in shares for p in share.params]
    return len(set(params)) < len(params)
