"""Gradients as they were last left, so that a change by anybody else is seen. Shared by the scaler and the step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .._torch import version
from ..stamp import Stamp
from .unscale import real_values

_FIRST_STEPS = 3
_new, _ref = tuple.__new__, weakref.ref
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GradSums:
    """Sums over the values of gradients: they tell a write that changed nothing from an edit.

    Who writes a gradient without changing it, as clipping to an infinite norm does, does no harm; its version moves all
    the same. Sums are taken in the first steps, and from then on in a run that had such a write.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._steps_left: float = _FIRST_STEPS

    def note(self, grads: Iterable[tuple[int, Tensor]]) -> None:
        """Write down what gradients hold, by the ids of their parameters. Syncs: no."""
        if self._steps_left > 0:
            self._sums.update((key, _sum_of_bits(grad)) for key, grad in grads)

    def clear(self, *, is_step_over: bool = False) -> None:
        """Forget all gradients, before others are noted or because their step is over."""
        self._sums.clear()
        self._steps_left -= is_step_over

    def is_harmless(self, param: Tensor) -> bool:
        """Whether a gradient that was written or replaced since it was noted may be taken as the one noted.

        It may if it has the values it had; and if it is inf or NaN, since its step is skipped either way.

        Syncs: yes.
        """
        noted, grad = self._sums.get(id(param)), param.grad
        if grad is None:
            return True
        is_same = noted is not None and bool(noted == _sum_of_bits(grad))
        if is_same or not bool(real_values(grad).isfinite().all()):
            self._steps_left = math.inf
            return True
        return False


class GradVersions:
    """Identity and version of each gradient, as it was last left; and what it held, as `GradSums` has it."""

    def __init__(self) -> None:
        self._stamps: dict[int, Stamp] = {}
        self._sums = GradSums()

    @property
    def stamps(self) -> Mapping[int, Stamp]:
        """The stamps by the parameters' ids; what is handed out stays as it is when gradients are noted anew."""
        return self._stamps

    def note(self, params: Iterable[Tensor]) -> None:
        """Write down the gradients as they are now, instead of those before. Syncs: no."""
        grads = grads_by_id(params)
        self._stamps = stamps_of(grads)
        self._sums.clear()
        self._sums.note(grads)

    def note_zeros(self, params: Iterable[Tensor]) -> None:
        """Write down that what gradients there are hold zeros, and may be added to. Syncs: no."""
        stamps = stamps_of(grads_by_id(params))
        self._stamps = {key: stamp._replace(version=-1) for key, stamp in stamps.items()}
        self._sums.clear()

    def close(self, params: Sequence[Tensor]) -> None:
        """Write down the gradients as a step leaves them. Syncs: no."""
        self._sums.clear(is_step_over=True)
        if self.changed(params):
            self.note(params)

    def changed(self, params: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters whose gradient is not the one noted. A dropped one is no change. Syncs: no."""
        stamps = self._stamps
        return [
            p
            for p in params
            if (g := p.grad) is not None
            and ((stamp := stamps.get(id(p))) is None or stamp[0]() is not g or stamp[1] != version(g))
        ]

    def edited(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters whose gradient has other values than the one noted, or may have.

        Writes that change no value are forgiven: the gradients count as noted. Syncs: only if any was written.
        """
        changed = self.changed(params)
        edited = [p for p in changed if not self._sums.is_harmless(p)]
        if changed and not edited:
            self.note(params)
        return edited


def same(one: Stamp | None, other: Stamp) -> bool:
    """Whether two stamps are of one tensor that was not written between them; None is of none."""
    return (
        one is not None and one[0] is other[0] and one[1] == other[1]
    )  # Python makes one plain reference to an object


def grads_by_id(params: Iterable[Tensor]) -> list[tuple[int, Tensor]]:
    """Return the gradients that parameters have, by the ids of these. Host only."""
    return [(id(p), g) for p in params if (g := p.grad) is not None]


def stamps_of(tensors: Sequence[tuple[int, Tensor]]) -> dict[int, Stamp]:
    """Return the stamps of many tensors by their keys, without their memory; no Python call for each. Syncs: no."""
    try:
        return {key: _new(Stamp, (_ref(t), version(t), None)) for key, t in tensors}
    except RuntimeError:  # one of them was made in inference mode
        return {key: Stamp.of(t) for key, t in tensors}


def _sum_of_bits(grad: Tensor) -> Tensor:
    """Return the sum over a gradient's elements, read as whole numbers: another after almost any change."""
    values = real_values(grad.detach())
    return values.view(_BITS[values.element_size()]).sum(dtype=torch.int64)
