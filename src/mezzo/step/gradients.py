"""The gradients of a step, from its first backward pass to its update: nobody else touches them unseen."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch import graph_task_id, is_pipeline_dry_run
from ..casting import backward_message
from ..distributed import is_summed_apart
from ..errors import CastError, StepError, listed
from ..kernels import GradientCheck, any_dtensor, move, norm_and_finite
from ..loss_scale import AccumulationState, Flag, GradVersions, check_loss, either, host_decides, is_bad, without
from ..optim import parameters
from ..read_only import read_only
from ..stamp import Stamp
from .grad_passes import HALF_SHOWN, ShownGrads, add_up_parts_, measure_flush, true_gradients
from .leftovers import (
    NO_OPTIMIZER,
    Leftovers,
    Registered,
    WeightLayouts,
    drop_all,
    forget_zeros_,
    is_stale,
    is_zero,
    nonzero,
    refuse_replaced,
    why_no_gradients,
)
from .strangers import refuse_scaled


@read_only
class OptimizerGrads:
    """The gradients of one optimizer in a step, by its index among the prepared ones, the parameters that have some, at least one, and their check."""

    optimizer: Optimizer
    index: int
    params: list[Tensor]
    check: GradientCheck

    def is_bad(self, device: torch.device) -> Flag:
        """Return whether their norm is inf or NaN; see `is_bad`."""
        known = self.check.known
        return is_bad(self.check.norm, device) if known is None or not host_decides(device) else not known.is_finite()

    @property
    def grads(self) -> list[Tensor]:
        """The gradients. A list made anew, since a step may replace them. Host only."""
        return [p.grad for p in self.params if p.grad is not None]


def grads_of(optimizers: Mapping[int, Optimizer], inv_scale: Tensor | None) -> list[OptimizerGrads]:
    """Return the gradients of each optimizer that has any, checked. Syncs: no."""
    found = []
    for index, optimizer in optimizers.items():
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if params:
            check = norm_and_finite([p.grad for p in params], inv_scale)
            found.append(OptimizerGrads(optimizer=optimizer, index=index, params=params, check=check))
    return found


NOTHING: AbstractContextManager[Any] = nullcontext()
_HALF_A_SUM = "a backward(loss) that failed halfway, so the gradients are part of a sum"
_OF_NO_LOSS = "of no loss, amp.backward(sum((p.float() * g).sum() for p, g in pairs))"
AFTER_BACKWARD = "Write amp.step() after amp.backward(loss), which has not returned yet."


class Gradients:
    """Keeps the scale that gradients carry, what was seen of inf and NaN, and the order of calls.

    With `by_turns` each optimizer may take its step of one loss by a call of its own; a loss may be no narrower than `loss_dtype`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        names: Mapping[Tensor, str],
        loss_dtype: torch.dtype,
        *,
        by_turns: bool,
    ) -> None:
        self.device = next((p.device for p in names), torch.device("cpu"))
        self._model, self.optimizers, self._names, self._loss_dtype = model, optimizers, names, loss_dtype
        self._by_turns = by_turns
        self._had: dict[Tensor, str] = {}
        self.refresh()
        self._versions, self._is_shown = GradVersions(), False
        self._pending: AccumulationState | None = None
        self._closed: AccumulationState | None = None
        self.penalty_bad: Flag = False
        self._leftovers, self.layouts = Leftovers(optimizers, names), WeightLayouts(optimizers, names)

    def refresh(self) -> None:
        """Take note of parameters that came since. Host only."""
        self._nums_found = set[int]()
        self._had = {p: self._had.get(p, self._names[p]) for p in self.parameters()}
        self._others = [p for p in self._names if p not in self._had]
        self._registered = Registered(self._model)
        self.has_dtensors = any_dtensor(self._had)

    def backward(
        self,
        loss: Tensor,
        scale: Tensor | None,
        retain_graph: bool | None,
        create_graph: bool,
        inputs: Sequence[Tensor] | None,
        probing: AbstractContextManager[None] | None,
    ) -> None:
        """Add the gradients of a loss times the scale that the first loss captured; see `Stepper.backward`. Syncs: no.

        With `probing`, the first backward pass of a step measures how many of them 16 bit flushes to zero.
        """
        self._refuse_while_shown("backward(loss)")
        check_loss(loss, self._loss_dtype)
        if (node := loss.grad_fn) is not None and node.name() == "MulBackward0":
            refuse_scaled(loss)
        params = self.parameters()
        pending = self._begin(params, scale, "backward(loss)")
        scaled = pending.scaled(loss)
        pending.broken = _HALF_A_SUM
        with NOTHING if probing is None else measure_flush(pending, scaled, params, probing):
            try:
                pending.run_backward(scaled, retain_graph, create_graph, inputs)
            except RuntimeError as error:
                if (message := backward_message(error)) is None:
                    raise
                raise CastError(message) from error
        pending.broken = ""
        self._versions.note(params)

    def _begin(self, params: Sequence[Tensor], scale: Tensor | None, call: str) -> AccumulationState:
        """Return the step that a backward pass adds to, opened if there is none."""
        if scale is not None and not self.optimizers:
            raise StepError(f"{call} {NO_OPTIMIZER}")
        pending = None if self.is_abandoned or self._are_zeroed(params) else self._pending
        if pending is None:
            pending = AccumulationState(scale, self.device, penalty_bad=self.penalty_bad)
            if scale is not None:
                self._leftovers.note_begun()
            if held := [p for p in params if p.grad is not None]:
                self._leftovers.open(pending, held, self._versions.stamps)
            self._pending, self.penalty_bad = pending, False
        else:
            self._refuse_broken(pending, call)
            self._accept_edits(pending, params)
        return pending

    @contextmanager
    def external(self, scale: Tensor | None, *, is_alone: bool) -> Iterator[None]:
        """Take what somebody else's backward passes leave for the gradients of this step; see `Stepper`. Syncs: no.

        The losses of one that `is_alone`, or has a copy, are all asked for here; those of parts of a model, on one of their ranks.
        """
        self._refuse_while_shown("external_backward()")
        pending = self._begin(self.parameters(), scale, "external_backward()")
        pending.broken, pending.is_scaled = _HALF_A_SUM, False
        yield
        is_missed = pending.scale is not None and not pending.is_scaled
        pending.lacks_scale |= is_missed
        if is_alone and is_missed and self._versions.changed(self.parameters()):
            raise StepError(
                "external_backward() left gradients without the loss scale that the step divides them by. Write amp.scaled(loss) in the "
                f"block for its loss, or, for gradients g {_OF_NO_LOSS} in place of the block."
            )
        pending.broken = ""
        self._versions.note(self.parameters())

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss times the scale of the step that somebody else's backward adds to; see `Stepper.scaled`. Syncs: no."""
        if self._pending is None or not self._pending.broken:
            raise StepError(
                "scaled(loss) was called outside of `with amp.external_backward():`, whose backward passes it is for. "
                "Write amp.backward(loss) for a loss of your own, which needs no scaling."
            )
        check_loss(loss, self._loss_dtype, "scaled(loss)")
        return loss if is_pipeline_dry_run() else self._pending.scaled(loss)

    def grad(
        self, outputs: Tensor, inputs: Sequence[Tensor], scale: Tensor | None, create_graph: bool, retain_graph: bool | None,
        allow_unused: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Return true gradients, computed scaled; see `Stepper.grad`. Syncs: no."""
        check_loss(outputs, self._loss_dtype, "amp.grad(outputs, inputs)")
        scale = scale if self._pending is None else self._pending.scale
        scaled = outputs if scale is None else outputs * move(scale, outputs.device)
        found = torch.autograd.grad(
            scaled, inputs, None, retain_graph, create_graph, allow_unused=True, materialize_grads=allow_unused
        )
        if any([g is None for g in found]):
            raise StepError(
                "amp.grad(outputs, inputs) was given inputs that outputs were not made of. What a prepared model returns is a copy in fp32: "
                "take the tensor that it copies, add output=none to the policy, or write allow_unused=True, which gives zeros."
            )
        self._note_penalty(outputs, found)
        wide = tuple(g.to(torch.promote_types(g.dtype, torch.float32)) for g in found)
        return wide if scale is None else tuple(g * move(scale, g.device).reciprocal() for g in wide)

    @contextmanager
    def unscaled(self) -> Iterator[dict[str, Tensor]]:
        """Show true gradients; see `Stepper.unscaled_grads`. Syncs: no."""
        pending = self.require("unscaled_grads()")
        self._accept_edits(pending, self.parameters())
        self._add_up_parts()
        params = [p for p in self.parameters() if not is_stale(pending, p)]
        self._note_bad(pending)
        self._leftovers.is_stepped = True
        try:
            self._is_shown = True
            with true_gradients(params, pending):
                yield ShownGrads({self._names[p]: p.grad for p in params if p.grad is not None})
            self._is_shown = False
            self._versions.note(self.parameters())
        except BaseException:  # Ctrl-C may have ended that, too
            self._is_shown = False
            if not sys.is_finalizing():
                self._versions.note(self.parameters())
            raise

    def zero(self, set_to_none: bool) -> None:
        """Drop the gradients and the step in the making. Syncs: no."""
        self._refuse_while_shown("zero_grad()")
        drop_all(self.optimizers, set_to_none)
        if any([p.grad is not None for p in self._others]):
            self._model.zero_grad(set_to_none)
        last, self._pending = self._pending or self._closed, None  # what `grad` found stays for a penalty
        self._leftovers.drop(last)
        self._versions.note_zeros(self.parameters())

    @property
    def is_pending(self) -> bool:
        """Whether there was a backward pass since the last step."""
        return self._pending is not None

    @property
    def half_step(self) -> str:
        """What step the weights may have been taken by in part; empty for none."""
        broken = "" if self._pending is None else self._pending.broken
        return "" if broken in (_HALF_A_SUM, HALF_SHOWN) else broken

    @property
    def is_abandoned(self) -> bool:
        """Whether somebody dropped the gradients since the backward pass, and with them the step."""
        pending = self._pending
        is_at_rest = pending is not None and graph_task_id() == -1  # a pass that runs may have left none yet
        return is_at_rest and all(p.grad is None or is_stale(self.pending, p) for p in self.parameters())

    def _are_zeroed(self, params: Sequence[Tensor]) -> bool:
        """Whether somebody set all gradients to zero in place since the backward pass, and so dropped the step. Syncs: only if all were written."""
        held = [p for p in params if p.grad is not None] if self._pending is not None and graph_task_id() == -1 else []
        is_written = bool(held) and all(self._versions.changed((p,)) for p in held)  # mostly the first is not
        return is_written and all(map(is_zero, held))

    @property
    def pending(self) -> AccumulationState:
        """The step in the making, which `collect` has required."""
        assert self._pending is not None
        return self._pending

    def require(self, call: str) -> AccumulationState:
        """Return the step in the making; a StepError if there is none, or its gradients are not whole."""
        self._refuse_while_shown(call)
        if not self.optimizers:
            raise StepError(f"{call} {NO_OPTIMIZER}")
        if self._pending is None and self._by_turns:
            self._pending = self._leftovers.pending
        if self._pending is None and self._leftovers.spent_by:
            raise StepError(
                f"{call} was called after step(optimizer={self._leftovers.spent_by}), which ended the step of this loss for the "
                "other optimizers too. Write amp.step() once, which steps all of them, amp.backward(loss) for each, or "
                "mezzo.prepare(..., skip='independent'), after which each may take its step alone."
            )
        if self._pending is None:
            raise StepError(
                f"{call} was called before backward(loss). Write amp.backward(loss), then amp.step().{self._elsewhere()}"
            )
        self._refuse_broken(self._pending, call)
        return self._pending

    def _elsewhere(self) -> str:
        if not self._versions.changed(self.parameters()):
            return ""
        return (
            " Gradients are there, made elsewhere: write amp.backward(loss) for loss.backward(), for models that share a loss one "
            "mezzo.prepare(nn.ModuleList([a, b]), [optimizer_a, optimizer_b], policy), "
            f"for gradients g {_OF_NO_LOSS}, or, if a schedule runs backward itself, `with amp.external_backward(): schedule.step(...)`."
        )

    def collect(self, optimizer: Optimizer | None, call: str = "step()") -> list[OptimizerGrads]:
        """Return the gradients of the optimizers, or of one of them, that have any. Syncs: no.

        Raises:
            StepError: no gradients, gradients that somebody else changed, or of a parameter that took another's place.
        """
        pending = self.require(call)
        self._accept_edits(pending, self.parameters())
        self._add_up_parts()
        if [p.nbytes for p in self.layouts.noted] != self.layouts.num_bytes:
            self.layouts.refuse_changed(has_grads=True)
        chosen = {k: o for k, o in enumerate(self.optimizers) if optimizer is None or o is optimizer}
        found = grads_of(chosen, None if pending.scale is None else pending.scale.reciprocal())
        ids = [id(one) for own in self._registered.registries for one in own.values()]
        if (count := sum([len(one.params) for one in found])) not in self._nums_found or ids != self._registered.ids:
            refuse_replaced(self._model, self._had)
            self._nums_found.add(count)
            self._registered = Registered(self._model)
        if not found:
            was_reached = not self._versions.stamps.keys().isdisjoint(map(id, self.parameters()))
            raise StepError(why_no_gradients(self._model, list(chosen.values()), self._names, was_reached=was_reached))
        if pending.stale:
            self._leftovers.refuse_stale(pending, [p for one in found for p in one.params])
        is_first_turn = len(chosen) < len(self.optimizers) and pending is not self._leftovers.pending
        if self._by_turns and is_first_turn and pending.loss_bad is not False:
            self._note_bad(pending)  # of all: what the loss of one has spoilt is gone when another is stepped
        return found

    def _add_up_parts(self) -> None:
        if self.has_dtensors and add_up_parts_(self.parameters()):
            self._versions.note(self.parameters())

    def close(self, stepped: Sequence[Optimizer] = ()) -> None:
        """End the step, that of the optimizers which `stepped`: what gradients are left are spent. Syncs: no."""
        if self._pending is not None:
            self._closed, self._pending = self._pending, None
            self._leftovers.is_stepped = True
        if stepped and self._closed and (len(stepped) < len(self.optimizers) or self._leftovers.is_part):
            self._leftovers.close(stepped, self._closed)
        self._versions.close(self.parameters())

    @property
    def stamps(self) -> Mapping[int, Stamp]:
        """The gradients as they were left, by the parameters' ids, and as a backward pass that runs has left them so far."""
        if self._pending is not None and self._pending.broken and graph_task_id() != -1:
            self._versions.note(self.parameters())
        return self._versions.stamps

    def parameters(self) -> list[Tensor]:
        """Return the parameters of all optimizers, each once. Host only."""
        params = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        return params if len(self.optimizers) == 1 else list({id(p): p for p in params}.values())

    def _note_penalty(self, outputs: Tensor, found: Iterable[Tensor]) -> None:
        """Remember that true gradients of a finite number came out not finite: then the scale is to blame."""
        bad = without(self._are_bad(found), is_bad(outputs.detach(), self.device))
        step = self._pending or self
        step.penalty_bad = either(bad, step.penalty_bad)

    def _note_bad(self, pending: AccumulationState) -> None:
        """Remember of which optimizers gradients of this step are not finite. Syncs: no."""
        for index, one in enumerate(self.optimizers):
            if grads := [p.grad for p in parameters(one) if p.grad is not None and not is_stale(pending, p)]:
                pending.gradients_bad[index] = either(self._are_bad(grads), pending.gradients_bad.get(index, False))

    def _are_bad(self, grads: Iterable[Tensor]) -> Flag:
        return is_bad(norm_and_finite(list(grads)).norm, self.device)

    def _refuse_broken(self, pending: AccumulationState, call: str) -> None:
        if pending.broken:
            if graph_task_id() != -1:
                raise StepError(
                    f"{call} was called while a backward pass runs, which has more to add. {AFTER_BACKWARD}"
                )
            raise StepError(
                f"{call} was called after {pending.broken}. Call amp.zero_grad() and compute the loss again."
            )

    def _accept_edits(self, pending: AccumulationState, params: Sequence[Tensor]) -> None:
        """Take true gradients as user code left them, and refuse edits of scaled ones.

        Gradients of a policy without loss scale are true between calls, but where earlier micro-batches are summed beside them.
        """
        changed = self._versions.changed(params)
        if not changed:
            return
        if pending.stale:
            forget_zeros_(pending, changed)
        is_true = pending.scale is None and not any(map(is_summed_apart, params))
        if not is_true and (edited := nonzero(self.optimizers, self._versions.edited(params))):
            raise StepError(
                f"the gradients of {listed([self._names[p] for p in edited])} were changed since backward(loss), while they carry the loss scale. "
                "Edit them inside `with amp.unscaled_grads():`, clip with amp.step(max_norm=...), and write "
                "amp.backward(loss) for every loss.backward()."
            )
        self._versions.note(params)

    def _refuse_while_shown(self, call: str) -> None:
        if self._is_shown:
            raise StepError(f"{call} was called inside `with amp.unscaled_grads():`. Leave the block first.")
