"""What a step found: on the device, on its way from there, and read when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar

import torch
from torch import Tensor

from ..distributed import RankConsensus
from ..errors import StepAttributeError, StepError, StepTypeError, did_you_mean
from ..kernels import choose, constant, decision_slots, move, norm_and_finite, num_decided, pack_decision, to_host
from ..loss_scale import AccumulationState, Flag, either, host_decides, is_bad, without
from ..read_only import read_only
from .combine import Findings, combine
from .foreign import OF_RESULT
from .grad_passes import GradStats
from .gradients import OptimizerGrads

Skip = Literal["together", "independent"]
"""What several optimizers do when one has bad gradients: all skip, or that one."""
Reason = Literal["gradients", "loss", "buffers"]
"""What was not finite first in a step that was skipped."""
T = TypeVar("T", Tensor, float)


@read_only
class StepFlags(Generic[T]):
    """The finding of one step: 0-d tensors on the device, or the numbers that the host knows.

    Attributes:
        gradients_bad: inf or NaN in a gradient, or a norm whose square fp32 cannot hold.
        loss_bad: inf or NaN in a loss that backward was given, before scaling.
        buffers_bad: inf or NaN in a buffer that the forward wrote.
        scale: that the losses were multiplied by; 1 without scaling.
        grad_norm: L2 norm of all true gradients before clipping, each counted once; a `LateNorm` for `float` counts as a number.
        flushed: share of the gradients' elements that 16 bit flushed to zero, where it was measured; else 0.
        norms: of the true gradients of each optimizer that has any.
        skipped: of each of those, 1.0 where it must leave everything as it is.
        clip_coefs: of each, what clips its gradients, if that was decided with the flags.
        divisors: of each, likewise, the loss scale over that.
        vector: of all of it, in the slots of `kernels.decision_slots`; None where the host decided.
    """

    gradients_bad: T
    loss_bad: T
    buffers_bad: T
    scale: T
    grad_norm: T
    flushed: T
    norms: tuple[T, ...]
    skipped: tuple[T, ...]
    clip_coefs: tuple[T, ...] = ()
    divisors: tuple[T, ...] = ()
    vector: Tensor | None = None

    @property
    def is_known(self) -> bool:
        """Whether these are numbers, which the host knows."""
        return not isinstance(self.grad_norm, Tensor)

    @staticmethod
    def of(vector: Tensor, num: int, *, clips: bool, together: bool = False) -> StepFlags[Tensor]:
        """Return the flags that a decided vector has, as views of it: one for all who skip together. Host only."""
        each, at = vector.unbind(), decision_slots(num)
        lists = ("norms", *(("clip_coefs", "divisors") if clips else ()))
        scalars = {name: each[at[name].start] for name in _SCALARS}
        skipped = each[at["skipped"]][:1] * num if together else each[at["skipped"]]
        return StepFlags(**scalars, **{name: each[at[name]] for name in lists}, skipped=skipped, vector=vector)

    @staticmethod
    def unpack(vector: Tensor) -> StepFlags[float]:
        """Return what a vector, which is on the host by now, says. Syncs: no."""
        numbers: list[float] = vector.numpy().tolist()
        at = decision_slots(num_decided(vector))
        scalars = {name: numbers[at[name].start] for name in _SCALARS}
        return StepFlags(**scalars, norms=tuple(numbers[at["norms"]]), skipped=tuple(numbers[at["skipped"]]))

    @property
    def void(self) -> Flag:
        """Whether any optimizer skips. Syncs: no."""
        return either(*[skip if isinstance(skip, Tensor) else skip != 0 for skip in dict.fromkeys(self.skipped)])

    @property
    def applied(self: StepFlags[float]) -> bool:
        """Whether every optimizer took its step."""
        return not any(self.skipped)

    @property
    def reason(self: StepFlags[float]) -> Reason | None:
        """What was not finite first; None after a step that was taken."""
        if self.applied:
            return None
        return "loss" if self.loss_bad else "gradients" if self.gradients_bad else "buffers"


_HEALTHY: dict[str, Any] = {"gradients_bad": 0.0, "loss_bad": 0.0, "buffers_bad": 0.0, "scale": 1.0, "flushed": 0.0}
_SCALARS = ("gradients_bad", "loss_bad", "buffers_bad", "scale", "grad_norm", "flushed")


def check_grads(
    grads: Sequence[OptimizerGrads],
    pending: AccumulationState,
    written: Sequence[Tensor],
    skip: Skip,
    consensus: RankConsensus | None,
    num_optimizers: int,
    max_norm: Tensor | float | None = None,
) -> StepFlags[Any]:
    """Say what is wrong with the gradients of a step, if anything, and which optimizers may take it: numbers where the host decides, else tensors.

    `grads` are of each optimizer that has any, of the `num_optimizers` that were prepared; `written` are floating buffers that the forward
    wrote; gradients will be clipped to `max_norm`. Syncs: no on one rank or on accelerators; else with the slowest rank.
    """
    device, scale = pending.device, pending.scale
    by_host = host_decides(device)
    if by_host and consensus is None and len(grads) == 1 and (norm := _all_well(grads[0], pending, written)):
        return StepFlags(**_HEALTHY, grad_norm=norm, norms=(norm,), skipped=(0.0,))
    # A scale of 0 shows in the norms, which were divided by it.
    unusable = False if scale is None else is_bad(scale, device)
    seen = pending.gradients_bad
    if skip == "together":
        seen = dict.fromkeys([one.index for one in grads], either(*seen.values()))
    others = [bad for index, bad in seen.items() if all(index != one.index for one in grads)]
    own = Findings(
        early=either(pending.penalty_bad, unusable),
        # A loss is no witness that is made of a penalty that was not finite, or spoilt gradients that are left alone here.
        loss=without(pending.loss_bad, either(pending.penalty_bad, *others)),
        buffers=is_bad(norm_and_finite(written).norm, device) if written else False,
        optimizers=[either(seen.get(one.index, False), one.is_bad(device)) for one in grads],
    )
    if consensus is None and len(grads) == 1 and grads[0].check.is_plain:
        check, bad = grads[0].check, own
        norms: Sequence[Any] = [check.norm.to(device) if check.known is None or not by_host else check.known]
    else:
        bad, norms = combine(own, grads, device, consensus, num_optimizers)
    if by_host:
        return _decide_on_host(bad, norms, pending, skip)
    return _decide_on_device(bad, norms, pending, skip, max_norm)


def _all_well(one: OptimizerGrads, pending: AccumulationState, written: Sequence[Tensor]) -> Any:
    """Return the norm of gradients without a loss scale where nothing is wrong with anything, which needs no deciding; else None."""
    is_edited = any(pending.gradients_bad.values())
    is_doubted = is_edited or pending.penalty_bad or pending.loss_bad or pending.flushed is not None
    known = None if is_doubted or not one.check.is_plain else one.check.known
    if known is None or not known.is_finite():
        return None
    buffers = norm_and_finite(written).known if written else known
    return known if buffers is not None and buffers.is_finite() else None


def _decide_on_host(bad: Findings, norms: Sequence[Any], pending: AccumulationState, skip: Skip) -> StepFlags[float]:
    gradients = either(*bad.optimizers, bad.elsewhere, bad.early)
    norms = [float(norm) if isinstance(norm, Tensor) else norm for norm in norms]
    if skip == "together":
        skipped = (float(either(gradients, bad.loss, bad.buffers)),) * len(bad.optimizers)
    else:
        # A bad loss belongs to the optimizers whose gradients it spoilt; if it spoilt none, to all.
        unexplained = without(bad.loss, gradients)
        skipped = tuple(float(either(one, bad.early, bad.buffers, unexplained)) for one in bad.optimizers)
    return StepFlags(
        gradients_bad=float(gradients),
        loss_bad=float(bad.loss),
        buffers_bad=float(bad.buffers),
        scale=float(1.0 if pending.scale is None else pending.scale),
        grad_norm=norms[-1],
        flushed=float(0.0 if pending.flushed is None else pending.flushed),
        norms=tuple(norms[: len(bad.optimizers)]),
        skipped=skipped,
    )


def _decide_on_device(
    bad: Findings,
    norms: Sequence[Tensor | float],
    pending: AccumulationState,
    skip: Skip,
    max_norm: Tensor | float | None,
) -> StepFlags[Tensor]:
    num, device = len(bad.optimizers), pending.device
    found = {
        "early": [bad.early], "elsewhere": [bad.elsewhere], "optimizers": bad.optimizers, "loss_bad": [bad.loss],
        "buffers_bad": [bad.buffers], "scale": [1.0 if pending.scale is None else pending.scale], "grad_norm": norms[-1:],
        "flushed": [0.0 if pending.flushed is None else pending.flushed],
        "max_norm": [0.0 if max_norm is None else max_norm], "norms": norms[:num],
    }  # fmt: skip
    zero = constant(0.0, device)
    there = {name: [_on_device(device, value, zero) for value in values] for name, values in found.items()}
    vector = pack_decision(there, zero)
    together, clips = skip == "together", max_norm is not None
    choose("decision", device, torch.float32).module.decide_(vector, num, together=together, clips=clips)
    return StepFlags.of(vector, num, clips=clips, together=together)


def _on_device(device: torch.device, value: Tensor | float, zero: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        return value if value.dim() == 0 and value.device == device else move(value, device).reshape(())
    return constant(float(value), device) if value else zero


class StepResult:
    """What one step did. Every field is read from the device when it is asked for, and not before.

    True as a whole if the step was taken, so that `if amp.step(): ...` means what it says. The copy to the host is
    queued behind the step and waits in pinned memory; reading it waits for that step only, not for what was queued
    later.

    Args:
        flags: of the step, on the device, or known.
        stats: the gradients behind them.
        before: the result of the step before, or how many were skipped in a row before this one.
        is_captured: the step went into a graph, and was not taken.

    Attributes:
        undo: for each optimizer what is called when the flags are read, if it skipped.
    """

    __slots__ = ("_before", "_captured", "_event", "_flags", "_row", "_vector", "stats", "undo")

    def __init__(
        self, flags: StepFlags[Any], stats: GradStats, before: StepResult | int = 0, *, is_captured: bool = False
    ) -> None:
        self._vector: Tensor | None = None
        self._event: torch.Event | None = None
        self._flags: StepFlags[float] | None = None
        self._row, self._before = 0, before
        self.stats = stats
        self.undo: Sequence[Callable[[], None] | None] = ()
        self._captured: StepFlags[Tensor] | None = flags if is_captured else None
        if flags.is_known:
            self._read(flags)
        elif not is_captured:
            assert flags.vector is not None
            self._vector, self._event = to_host(flags.vector)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            known = (word for word in dir(type(self)) if not word.startswith("_"))
            meant = OF_RESULT.get(name) or did_you_mean(name, known).lstrip()
            raise StepAttributeError(f"the result of a step has no '{name}'. {meant}")

        def _no_number(self, *_: object) -> NoReturn:
            raise StepTypeError(f"the result of a step is no number. {OF_RESULT['loss']}")

        __float__ = __add__ = __radd__ = __truediv__ = _no_number

    def _read(self, flags: StepFlags[float]) -> StepFlags[float]:
        self._flags, before, self._before = flags, self._before, 0
        if not flags.applied:
            self._row = 1 + (before if isinstance(before, int) else before.skipped_in_a_row)
        for undo, skipped in zip(self.undo, flags.skipped, strict=False):
            if undo is not None and skipped:
                undo()
        self.undo = ()
        return flags

    def replayed(self, before: StepResult | int) -> StepResult:
        """Return the result of a replay of this captured step that was just queued. Syncs: no."""
        assert self._captured is not None
        return StepResult(self._captured, self.stats.replayed(), before)

    @property
    def is_read(self) -> bool:
        """Whether the host knows the flags already, as it does at once where nothing has to be waited for. Syncs: no."""
        return self._flags is not None

    @property
    def has_arrived(self) -> bool:
        """Whether reading the flags waits for nothing. Syncs: no."""
        return self._event is None or self._event.query()

    def flags(self) -> StepFlags[float]:
        """Return the flags as numbers. Syncs: yes, with the end of the step they are about, once."""
        if self._captured is not None:
            raise StepError(
                "the result of a step was read while the step is captured, and nothing has happened yet. Return it from the function."
            )
        if self._flags is None:
            if self._event is not None:
                self._event.synchronize()
            assert self._vector is not None
            return self._read(StepFlags.unpack(self._vector))
        return self._flags

    @property
    def applied(self) -> bool:
        """Whether every optimizer that had gradients took its step. Syncs: once."""
        return self.flags().applied

    @property
    def optimizers(self) -> tuple[bool, ...]:
        """Whether each optimizer that had gradients took its step, in the order given to `prepare`. Syncs: once."""
        return tuple(not skipped for skipped in self.flags().skipped)

    @property
    def reason(self) -> Reason | None:
        """What was not finite first: "loss", "gradients" or "buffers"; None if the step was taken. Syncs: once."""
        return self.flags().reason

    @property
    def scale(self) -> float:
        """The loss scale that this step's gradients carried; 1.0 without scaling. Syncs: once."""
        return self.flags().scale

    @property
    def grad_norm(self) -> float:
        """L2 norm of the true gradients before clipping; with several optimizers, of all of them. Syncs: once."""
        return float(self.flags().grad_norm)

    @property
    def flushed(self) -> float:
        """Share of the gradients' elements that fp16 flushed to zero and fp32 would not; 0.0 unmeasured. Syncs: once.

        Measured in the steps after one whose gradients were so small that most of them may have been flushed.
        """
        return self.flags().flushed

    @property
    def nonfinite(self) -> Mapping[str, int | None]:
        """Parameters whose gradients were not finite, with the number of elements. Syncs: yes.

        The number is None (at least one) if it is asked for after the gradients were dropped, in the first skipped
        step of a row.
        """
        return MappingProxyType({} if self.applied else self.stats.nonfinite())

    @property
    def skipped_in_a_row(self) -> int:
        """How many steps in a row were skipped, this one included; 0 after a step that was taken. Syncs: once."""
        self.flags()
        return self._row

    def __bool__(self) -> bool:
        return self.applied

    def _repr_html_(self) -> str:
        return f"<code>{escape(repr(self))}</code>"

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what a copy, or another process, gets: what is known, without the gradients behind it. Syncs: yes."""
        flags = self.flags()
        flags = replace(flags, grad_norm=self.grad_norm, norms=tuple(map(float, flags.norms)))
        return StepResult, (flags, GradStats(known=dict(self.nonfinite)), max(self.skipped_in_a_row - 1, 0))

    def __repr__(self) -> str:
        flags = self.flags()
        what = "applied" if flags.applied else f"skipped: {flags.reason} not finite"
        lost = f", {flags.flushed:.0%} of the gradients flushed to zero" if flags.flushed else ""
        return f"StepResult({what}, scale={flags.scale:g}, grad_norm={self.grad_norm:.6g}{lost})"
