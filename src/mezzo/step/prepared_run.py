"""A prepared model and its optimizers: what they are now, how they are saved and loaded, and given back to torch."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from html import escape
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch import constant_when_compiled
from ..binding import BeforeForward, innermost
from ..distributed import RankConsensus
from ..errors import StepError, StepTypeError, as_flag, plural
from ..formats import LOW_DTYPES
from ..policy import Policy
from . import state_dict as checkpoint
from .engine import Engine
from .forward_hook import ForwardHook, weakly
from .guard import Counters
from .release import Released, refuse_sharded, release_
from .report import StateReport, refuse_differing
from .strangers import AverageByHand, is_call, warn_of_average
from .update import forbid_direct_steps

_log = logging.getLogger("mezzo.step")


class PreparedRun:
    """What a stepper has besides its steps: state, reports, checkpoints, and the way back."""

    model: nn.Module

    def __init__(self, *given: Engine) -> None:
        if len(given) != 1 or not isinstance(engine := given[0], Engine):
            raise StepTypeError(
                "a Stepper is what mezzo.prepare returns: write amp = mezzo.prepare(model, optimizer, policy)."
            )
        self.__dict__["model"], self._engine = engine.model, engine
        self._forward_hook, binding = ForwardHook(engine), engine.recovery.binding
        binding.before_forward = weakly(self._forward_hook, ForwardHook.__call__)
        # A compiler calls it outside of its graph.
        binding.before_trace = constant_when_compiled(weakly(self._forward_hook, ForwardHook.apply_changes_traced))
        binding.owner = weakref.ref(self)
        for optimizer in engine.optimizers:
            forbid_direct_steps(optimizer, engine, self)

    def __repr__(self) -> str:
        if isinstance(self._engine, Released):
            return "Stepper(released)"
        names = ", ".join(type(part).__name__ for part in (self.model, *self.optimizers))
        counters = self.counters()
        done = f"{counters.applied} {plural('step', counters.applied)} taken, {counters.skipped} skipped, loss scale {self.scale:g}"
        return f"Stepper({names}, policy={str(self.policy)!r}: {done})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: what was done, and what is kept."""
        report = "" if isinstance(self._engine, Released) else self.report()._repr_html_()
        return f"<p><code>{escape(repr(self))}</code></p>{report}"

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """What is stepped: the optimizers that were given to `prepare`, or the masters around them."""
        if is_call(sys._getframe(1)):
            raise StepTypeError(
                "amp.optimizers is a tuple of what is stepped, and was called as a method of Lightning's. Write amp.optimizers[0]."
            )
        return self._engine.optimizers

    @property
    def consensus(self) -> RankConsensus | None:
        """What makes decisions equal on all ranks, found by itself for DistributedDataParallel and `fully_shard`.

        None on one rank. Before a wrapper has called the model it decides nothing yet, and its `group.timeout` may be set.
        Assign a `mezzo.distributed.RankConsensus` for ranks that nothing wraps, or to choose group and timeout.
        """
        return self._engine.ranks.expected()

    @consensus.setter
    def consensus(self, consensus: RankConsensus | None) -> None:
        if not isinstance(consensus, RankConsensus | None):
            raise StepTypeError(
                f"amp.consensus is a mezzo.distributed.RankConsensus() or None, and was given {type(consensus).__name__}."
            )
        self._engine.ranks.use(consensus)

    @property
    def policy(self) -> Policy:
        """The policy in force: with its compute dtype decided, and the rules that on_overflow=demote added."""
        return self._engine.policy

    def counters(self) -> Counters:
        """Return how many steps were seen, applied and skipped, and what was demoted. Syncs: with the last step."""
        self._engine.guard.read()
        return self._engine.guard.state.counters

    @property
    def scale(self) -> float:
        """The loss scale that the next step will use; 1.0 without scaling. Syncs: yes."""
        if is_call(sys._getframe(1)):
            raise StepTypeError(
                "amp.scale is the loss scale, a number, and was called as a GradScaler's method. Write amp.backward(loss), which "
                "scales where the policy says so, in place of scaler.scale(loss).backward(), then amp.step()."
            )
        return float(self._engine.loss_scale.scale)

    def state_dict(self, weights: bool = True) -> dict[str, Any]:
        """Return everything a run needs to go on: the one object to save.

        Weights, those that are trained and not the model's too, optimizer states with masters and rounding counts, loss scale, counters, policy
        and the dtypes weights were stored in. torch.load(weights_only=True) reads it back. Gradients are not part of it: save
        between `step` and `backward`.

        Args:
            weights: False leaves out what `model.state_dict()` and `optimizer.state_dict()` hold, for those who save
                these by themselves.

        Syncs: yes.
        """
        has_weights = as_flag("amp.state_dict", "weights", weights, StepError)
        self._warn_of_half("amp.state_dict()")
        run = checkpoint.save_run(self.policy, self._engine.loss_scale, self.counters())
        if beside := checkpoint.outside(self.model, self.optimizers):
            run["outside"] = beside
        return {**run, **checkpoint.save_weights(self.model, self.optimizers)} if has_weights else run

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Go on from a checkpoint, bit for bit where policy and optimizers are those it was made with.

        Under another policy or master mode what was saved is converted, and a checkpoint of a run without mezzo, with
        the keys "model" and "optimizer", is taken too.

        Args:
            state: from `state_dict`; without weights, those of model and optimizers stay.

        Returns:
            A sentence for everything that was converted or is missing; they are logged as well.

        Raises:
            CheckpointError: not a checkpoint, or not one of such a model and optimizers; nothing was changed then. Where the model's
                own hooks raise, weights and optimizers are put back: weights are copied to the host for that.

        Writes: weights, buffers, optimizer states, loss scale, counters; drops gradients. Syncs: yes.
        """
        engine = self._engine
        complete = checkpoint.check(state, len(engine.optimizers))
        policy, undo = engine.policy, ExitStack()
        try:
            with engine.load_hooks.paused():
                loaded = checkpoint.load_(engine.model, engine.optimizers, complete, policy, undo)
            engine.load_hooks.has_loaded = True
            engine.recovery.forget()
            undo.callback(engine.guard.become, engine.guard.state)
            undo.callback(engine.recovery.bind_policy, policy)
            counters = Counters(**(complete["counters"] or {}))
            counters = replace(counters, demoted=engine.recovery.demote_again(counters.demoted))
            sentences = (
                *checkpoint.compare_policies(complete["policy"], engine.policy),
                *loaded,
                *checkpoint.load_scale_(engine.loss_scale, complete["scaling"], engine.policy.scaling, undo),
            )
            engine.guard.become(replace(engine.guard.state, counters=counters))
            for sentence in sentences:
                _log.warning("loading a checkpoint: %s", sentence)
            engine.drop(set_to_none=True)
            engine.buffers.forgive()
            return sentences
        except BaseException:
            undo.close()
            raise

    def report(self, strict: bool = False) -> StateReport:
        """Return what is declared beside what is: dtypes of weights, gradients, moments, masters and buffers, and bytes.

        Args:
            strict: refuse a run in which anything is not what was declared.

        Raises:
            InvariantError: with `strict`, something is not.

        Syncs: no.
        """
        report = self._engine.report()
        if as_flag("amp.report", "strict", strict, StepError):
            refuse_differing(report)
        return report

    def export_weights(self, dtype: torch.dtype | str = torch.float32) -> dict[str, Tensor]:
        """Return a plain state dict of the model, its weights rounded once from their masters.

        Masters of a ZeroRedundancyOptimizer lie in parts on the ranks, which give them to each other: call it on all ranks.

        Args:
            dtype: of floating parameters, or its name, "bf16"; buffers stay as they are.

        Raises:
            FormatError: an unknown name.
            StepError: no floating dtype, or one that has no number as large as a weight.

        Syncs: for fp16 and fp8, and a ZeroRedundancyOptimizer's masters.
        """
        self._warn_of_half("amp.export_weights()")
        return checkpoint.export(self.model, self.optimizers, dtype)

    def _warn_of_half(self, call: str) -> None:
        """Say in the log that a call came in the middle of a step, or after one that was interrupted there. Host only."""
        if half := self._engine.gradients.half_step:
            _log.warning(
                "%s was called after %s: what it returns may be half of that step. Load the last checkpoint where there is one", call, half,
            )  # fmt: skip

    def release(self) -> nn.Module:
        """Take the policy off again and return the model: a plain one, with plain optimizers, which go on in torch.

        Weights with masters become fp32 and take the masters' values, those trained in fp32 stay so; others go back to the dtype they had. Gradients
        are dropped, moments stay. Every later call of this stepper raises. With a ZeroRedundancyOptimizer, call it on all ranks.

        Raises:
            StepError: `fully_shard` holds weights in 16 bit.

        Writes: classes, forward and storage of the model; state and hooks of the optimizers. Syncs: with the last step.
        """
        original = self._engine.original
        refuse_sharded(self.model, self.optimizers, original)
        self._engine.drop(set_to_none=True)
        release_(self.model, self.optimizers, original)
        self._engine.load_hooks.remove()  # last: masters follow what is loaded where memory ran out before
        self._engine = cast(Engine, Released(original.optimizers))
        del self._forward_hook
        return self.model

    def _note_copy(self) -> BeforeForward | None:
        """Called by the binding when the model is copied; returns what the copy calls before its forwards."""
        if self.policy.params not in LOW_DTYPES or warn_of_average(self.policy.params):
            return None
        return AverageByHand(innermost(self.model))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StepError(
            "a stepper cannot be pickled or copied, since it belongs to one model in one process. Save amp.state_dict(), "
            "and load it into the stepper that mezzo.prepare makes there."
        )
