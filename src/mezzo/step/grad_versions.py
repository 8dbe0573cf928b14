"""Marks on gradients: what the last backward pass left, so that a change by anybody else is seen. Host only."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from .._torch import version
from ..errors import StepError, listed

Mark = tuple[weakref.ref[Tensor], int]
"""A gradient, not kept alive, and its version."""


class GradVersions:
    """Identity and version of each gradient, as the stepper last left it.

    Args:
        names: of parameters, for messages.
    """

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self._names = names
        self._marks: dict[int, Mark] = {}

    @property
    def now(self) -> Mapping[int, Mark]:
        """The marks by the parameters' ids; what is handed out stays as it is when gradients are marked anew."""
        return self._marks

    def note(self, params: Iterable[Tensor]) -> None:
        """Write down the gradients as they are now. Syncs: no."""
        self._marks = {id(p): (weakref.ref(g), version(g)) for p in params if (g := p.grad) is not None}

    def renew(self, params: Sequence[Tensor]) -> None:
        """Write down the gradients as they are now, if any is not as it was. Syncs: no."""
        if self._changed(params):
            self.note(params)

    def note_zeros(self, params: Iterable[Tensor]) -> None:
        """Write down that what gradients there are hold zeros, and may be added to. Syncs: no."""
        self._marks = {id(p): (weakref.ref(g), -1) for p in params if (g := p.grad) is not None}

    def edited(self, params: Iterable[Tensor]) -> list[str]:
        """Return the names of parameters whose gradient is not the one written down. A dropped one is no edit."""
        return [self._name(p) for p in self._changed(params)]

    def check_fresh(self, params: Iterable[Tensor]) -> None:
        """Refuse gradients that the first backward pass of a step would be added to.

        A gradient of the last step that was written since is taken for one that was set to zero.

        Raises:
            StepError: gradients of the last step, or gradients that came about elsewhere.
        """
        stale, foreign = [], []
        for p in params:
            if p.grad is None:
                continue
            mark = self._marks.get(id(p))
            if mark is None or mark[0]() is not p.grad:
                foreign.append(self._name(p))
            elif mark[1] == version(p.grad):
                stale.append(self._name(p))
        if stale:
            raise StepError(
                f"backward(loss) would add to the gradients of the last step, which {listed(stale)} still have. "
                "Call amp.zero_grad() between step() and the next backward(loss)."
            )
        if foreign:
            raise StepError(
                f"{listed(foreign)} have gradients that amp.backward did not make, so they carry no loss scale. "
                "Write amp.backward(loss) for every loss.backward(), and amp.zero_grad() to drop what is there."
            )

    def _changed(self, params: Iterable[Tensor]) -> list[Tensor]:
        marks = self._marks
        return [
            p
            for p in params
            if (g := p.grad) is not None
            and ((mark := marks.get(id(p))) is None or mark[0]() is not g or mark[1] != version(g))
        ]

    def _name(self, param: Tensor) -> str:
        return self._names.get(param, "a parameter")
