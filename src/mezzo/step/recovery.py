"""What follows a skipped step: the run goes on, what overflowed gets an fp32 rule, or an error says why it stops."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Optimizer, RAdam

from ..binding import AfterForward, Binding
from ..binding.bind import bind
from ..errors import NonFiniteStep, PolicyError, StoppedRun
from ..formats import LOW_DTYPES, dtype_name
from ..kernels import local
from ..loss_scale import LossScale
from ..optim import SGD, AdamW, local_optimizer, parameters, wrapped_optimizer
from ..policy import Policy
from ..stamp import version_of
from .buffers import Buffers
from .gradients import Gradients
from .guard import Guard, GuardState
from .invariants import count_nonfinite, read_together
from .ranks import Ranks, waits_for_ranks
from .replay import Replay
from .result import StepFlags, StepResult
from .state_dict import load_scale_
from .update import Clip

if TYPE_CHECKING:
    from ..trace import Diagnosis

_log = logging.getLogger("mezzo.step")


class Recovery:
    """Reads what past steps found and acts on it; `binding` is as given, or the one that demotion made of it, `clip` how the last step clips."""

    def __init__(
        self,
        model: nn.Module,
        binding: Binding,
        gradients: Gradients,
        buffers: Buffers,
        loss_scale: LossScale,
        names: Mapping[Tensor, str],
        ranks: Ranks,
    ) -> None:
        policy = binding.policy
        self.binding = binding
        untrained = {p: version_of(p) for p in _not_stepped(names, gradients)}
        nonfinite = partial(_nonfinite_weights, names, buffers, gradients, untrained)  # not a method: no cycle
        self.guard = Guard(policy.guard, policy.scaling, nonfinite, _flush_norm(policy, gradients))
        self.replay = Replay(model)
        self._model, self._gradients, self._buffers, self._loss_scale = model, gradients, buffers, loss_scale
        self._ranks = ranks
        self.clip = Clip()

    def keep(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, with_loss: bool
    ) -> AfterForward | None:
        """Keep a forward, whose step may be the last one; return what must be called with its output.

        With `with_loss` what comes after the model is followed too, where the run is about to stop.
        """
        follow = self.replay.keep(module, args, kwargs)
        if follow is None or not (with_loss and self.guard.is_last_chance):
            return follow

        def follow_loss(out: object) -> None:
            follow(out)
            self.replay.follow(self.guard.state.counters.seen)

        return follow_loss

    def stop(self, state: GuardState) -> StoppedRun | None:
        """Return why the run cannot go on, by what the guard knows after the last step, if it cannot; where the policy says so, demote first.

        All ranks say so together, whichever saw it.
        """
        if not state.is_troubled:
            self.replay.forget()
        skip, stop = state.skip, state.stop
        if skip is not None and self._demote(state, skip):
            stop = None
        elif skip is not None and stop is None and skip.reason == "loss" and state.counters.skipped_in_a_row == 2:
            self._explain_early(skip)
        # All ranks have read the same flags, but what else is not finite, or was flushed, each sees in its own part.
        is_watched, consensus = state.is_troubled or state.small_in_a_row > 0, self._ranks.consensus
        if consensus is not None and is_watched and consensus.group.any(stop is not None) and stop is None:
            happened = "was skipped" if state.is_troubled else "had gradients close to zero"
            return NonFiniteStep(
                f"step {state.step} {happened}, and another rank stops the run: its message says why",
                "Load the last good checkpoint.",
                is_batch_to_blame=False,
            )
        return stop

    def explained(self, stop: StoppedRun, skip: StepFlags[float] | None) -> StoppedRun:
        """Return the error with what running the last batch, which was skipped, again has shown. Syncs: at every op."""
        if skip is None or not stop.is_batch_to_blame:
            return stop
        why, found = self._why(skip, stop.advice)
        error = type(stop)(stop.what, why)
        error.report = None if found is None else found.report
        return error

    def _why(self, skip: StepFlags[float], advice: str = "") -> tuple[str, Diagnosis | None]:
        """Return what the last update and the last batch, run again, have shown, and what to do: the advice, where nothing is known."""
        found, rate = self._diagnosis(skip), self.rate_to_blame()
        sentence, fix = ("", "") if found is None else (found.sentence, found.fix)
        return " ".join(filter(None, (rate, sentence, fix or advice))), found

    def rate_to_blame(self) -> str:
        """As the function of this name, of the run's own optimizers. Syncs: yes."""
        return rate_to_blame(self._gradients.optimizers, self.guard.last_norm, self.clip)

    def demote_again(self, edits: Sequence[str]) -> tuple[str, ...]:
        """Add the rules that a run demoted to before it was saved, if this policy demotes; return all edits in force. Writes: as `bind_policy`."""
        policy, known = self.binding.policy, self.guard.state.counters.demoted
        new = [edit for edit in edits if edit not in known] if policy.guard.on_overflow == "demote" else []
        if new:
            self.bind_policy(Policy.parse(", ".join([str(policy), *new])))
        return (*known, *new)

    def bind_policy(self, policy: Policy) -> None:
        """Bind another policy from the next forward on. Writes: the `Bound` of every module."""
        before = self.binding
        self.binding = now = bind(self._model, policy, before.cache)
        now.before_forward, now.before_trace, now.owner = before.before_forward, before.before_trace, before.owner

    def forget(self) -> None:
        """Forget what earlier steps have shown: the run goes on from somewhere else. Syncs: with the last step."""
        self.guard.poll()
        self.replay.drop()
        self.replay.forget()

    def _explain_early(self, skip: StepFlags[float]) -> None:
        """Log why the loss is not finite, where a second batch in a row shows that it is not the batch."""
        why, _ = self._why(skip)
        if why:
            _log.warning("step %d: the loss is inf or NaN again; why: %s", self.guard.state.step, why)

    def _diagnosis(self, skip: StepFlags[float]) -> Diagnosis | None:
        """Run the last batch again under the tracer, where no rank waits for another in it. Syncs: at every op."""
        is_alone = self._ranks.consensus is None
        if not is_alone and waits_for_ranks(self._model):
            return None
        was_pending, stamps = self._gradients.is_pending, self._gradients.stamps
        reason = skip.reason if is_alone else None  # it may be that of another rank
        try:
            with self._buffers.writing():
                return self.replay.run(self.guard.state.step, skip.scale, reason)
        finally:
            if not was_pending and self._gradients.stamps is not stamps:
                self._gradients.close()  # a closure that ran again took the stamps off the gradients

    def _demote(self, state: GuardState, skip: StepFlags[float]) -> bool:
        """Give fp32 rules to what overflowed 16 bit, one after the other, until the last batch no longer overflows; return whether any was given.

        Not where the cause is another one, or the loss scale may still fix it.
        """
        policy, known, stop = self.binding.policy, state.counters.demoted, state.stop
        is_scales = skip.reason == "gradients" and policy.scaling is not None and stop is None
        if policy.guard.on_overflow != "demote" or is_scales or (stop is not None and not stop.is_batch_to_blame):
            return False
        edits: list[str] = []
        found = self._diagnosis(skip)
        while found is not None and found.edit and not {*found.edit.split(", ")} <= {*known, *edits}:
            policy = Policy.parse(f"{policy}, {found.edit}")
            self.bind_policy(policy)
            edits += [edit for edit in found.edit.split(", ") if edit not in (*known, *edits)]
            _log.warning("step %d skipped; '%s' added to the policy: %s", state.step, found.edit, found.sentence)
            found = self._diagnosis(skip)
        if not edits:
            return False
        now = self.guard.state
        self.guard.become(replace(now, counters=replace(now.counters, skipped_in_a_row=0, demoted=(*known, *edits))))
        if skip.reason == "gradients" and policy.scaling is not None:
            # It fell because of an overflow that is fixed now.
            list(load_scale_(self._loss_scale, asdict(LossScale.start(policy.scaling)), policy.scaling, ExitStack()))
        return True


@torch.no_grad()
def rate_to_blame(optimizers: Sequence[Optimizer], last_norm: SupportsFloat | None, clip: Clip) -> str:
    """Say that the last update was as large as the weights it was made to, which ends in an overflow of any format; empty where it was not, or is not known.

    `last_norm` is that of the gradients of the last step that was taken, before it was clipped. Syncs: yes.
    """
    for optimizer in (wrapped_optimizer(local_optimizer(one)) for one in optimizers):
        params = [p for p in parameters(optimizer) if p.requires_grad and p.is_floating_point()]
        updates = [_last_update(optimizer, group, p) for group in optimizer.param_groups for p in group["params"]]
        update, size = math.hypot(*updates), math.hypot(*map(_finite_norm, params))
        num = sum(local(p).numel() for p in params)
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        if not update and len(optimizers) == 1 and last_norm is not None and isinstance(optimizer, _SGD):
            ends = (clip.max_norm, None if clip.value is None else float(clip.value) * math.sqrt(num))
            update = min(rates) * min(float(last_norm), *(float(end) for end in ends if end is not None), math.inf)
        if update > _REPLACED * size and update > _LEAST_UPDATE * math.sqrt(num):
            share = (
                f"{update / size:.0%} as large as its weights are now" if size else "larger than its weights' format"
            )
            return (
                f"The last update of {type(optimizer).__name__} at lr={max(rates):g} was {share}: the "
                f"learning rate is too high, and no rule of a policy repairs that. Write lr={max(rates) / 10:g} or less, warm it up, or clip "
                "by amp.step(max_norm=1.0)."
            )
    return ""


def _last_update(optimizer: Optimizer, group: Mapping[str, Any], param: Tensor) -> float:
    """Return the norm of what an optimizer last moved a weight by, as its state tells it, or 0. Syncs: yes.

    Where the square of a gradient is inf, Adam had moved by about its rate before; those of its family move each element by that.
    """
    entry, rate = optimizer.state.get(param, {}), float(group.get("lr", 0))
    is_decoupled = group.get("decoupled_weight_decay", getattr(optimizer, "decouples_decay", False))
    decay = float(group["weight_decay"]) if is_decoupled else 0.0
    return rate * (_move_by_rate(optimizer, group, param, entry) + decay * _finite_norm(param))


def _move_by_rate(optimizer: Optimizer, group: Mapping[str, Any], param: Tensor, entry: Mapping[str, Any]) -> float:
    step = float(entry.get("step", 0))
    if isinstance(optimizer, _ADAM) and step:
        below, above = (1 - float(beta) ** step for beta in group["betas"])
        mean, square = (local(entry[name]).float() for name in ("exp_avg", "exp_avg_sq"))
        share = _rectification(float(group["betas"][1]), step) if isinstance(optimizer, RAdam) else 1.0
        if share is None:
            return _norm(mean / below)
        return share * _norm(torch.where(square.isinf(), 1, mean / below / ((square / above).sqrt() + group["eps"])))
    if isinstance(optimizer, _NORMED) and step:
        below = step if isinstance(optimizer, Adagrad) else 1 - float(group.get("alpha", 0)) ** step
        return math.sqrt(local(param).numel() / below)
    total = entry.get("momentum_buffer") if isinstance(optimizer, _SGD) else None
    return 0.0 if total is None else _norm(total)


def _rectification(beta: float, step: float) -> float | None:
    """Return what RAdam multiplies the update of Adam by; None for its first steps, which are not divided. Source: Liu et al. 2020, algorithm 2."""
    longest = 2 / (1 - beta) - 1
    length = longest - 2 * step * beta**step / (1 - beta**step)
    if length <= 5:
        return None
    return math.sqrt((length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length))


def _finite_norm(tensor: Tensor) -> float:
    return _norm(local(tensor.detach()).nan_to_num(0, 0, 0))


def _norm(tensor: Tensor) -> float:
    """Return the norm of a tensor, or of this rank's shard of it: nobody waits for the others. Syncs: yes."""
    return float(local(tensor.detach()).float().norm())


_ADAM, _SGD = (torch.optim.Adam, AdamW, RAdam), (torch.optim.SGD, SGD, torch.optim.ASGD)
_NORMED = (torch.optim.NAdam, torch.optim.Adamax, torch.optim.RMSprop, Adagrad)
_REPLACED, _LEAST_UPDATE = 0.5, 0.1
"""Share of the weights, and root mean square, of an update that no healthy run makes: weights that begin at 0 are made by their first update, of a small one."""


def _nonfinite_weights(
    names: Mapping[Tensor, str],
    buffers: Buffers,
    gradients: Gradients,
    untrained: Mapping[Tensor, int],
    result: StepResult,
    was_healthy: bool,
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Count inf and NaN in what a bad step may have read. Syncs: once for each device.

    Of weights that are stepped those with a gradient, where it is not 0. Of others all, if the loss was not finite, but
    those that are since `prepare` what they were in a healthy step. Of sharded ones the part here: nobody waits for
    other ranks, of which one may ask alone.
    """
    stats = result.stats
    counts = {names[p]: count_nonfinite(p, grad=stats.gradient(p)) for p in stats.params}
    for p in _not_stepped(names, gradients) if result.flags().loss_bad else ():
        if not (was_healthy and untrained.get(p) == version_of(p)):
            counts[names[p]] = count_nonfinite(p, p.requires_grad)
    found = read_together(counts, buffers.nonfinite_counts())
    weights, others = ({name: int(count) for name, count in group.items() if count} for group in found)
    return weights, others


def _not_stepped(names: Mapping[Tensor, str], gradients: Gradients) -> list[Tensor]:
    """Return the parameters that no optimizer steps, or that are frozen. Host only."""
    stepped = {id(p) for p in gradients.parameters() if p.requires_grad}
    return [p for p in names if id(p) not in stepped]


def _flush_norm(policy: Policy, gradients: Gradients) -> float:
    """Return the norm of scaled gradients below which fp16 may have flushed many of them; 0 where nothing is fp16."""
    dtypes = {policy.compute, policy.params, policy.grads, *(rule.precision for rule in policy.modules)}
    if torch.float16 not in dtypes:
        return 0.0
    return _SMALL_FP16 * math.sqrt(sum(p.numel() for p in gradients.parameters()))


_SMALL_FP16 = 2.0**-18
"""A root mean square below this is suspicious: it is 64 times fp16's smallest number, and layers differ as much."""


def check_demotion(policy: Policy) -> None:
    """Refuse, by a PolicyError, demotion where it could not be kept: without a guard, or with weights stored in 16 bit."""
    if policy.guard.on_overflow != "demote":
        return
    if not policy.guard.enabled:
        raise PolicyError(
            "guard.on_overflow=demote was asked for with guard.enabled=false, and without the guard nobody sees an "
            "overflow. Leave guard.enabled=false out."
        )
    if policy.params in LOW_DTYPES:
        raise PolicyError(
            f"guard.on_overflow=demote was asked for with params={dtype_name(policy.params)}, and a module that gets an "
            "fp32 rule needs fp32 weights, which were given away when the model was prepared. Write params=fp32, or "
            "guard.on_overflow=skip and the rule that the error names."
        )
