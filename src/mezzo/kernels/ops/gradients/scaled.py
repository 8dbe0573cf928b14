"""Gradients as a step meets them: 16 bit, scaled, perhaps not finite, and what to do about each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....read_only import read_only


@read_only
class ScaledGradients:
    """Gradients of one device, and how a step must read them.

    Attributes:
        values: any shapes and floating dtypes, each in its own.
        inv_scale: shape (), fp32: multiplies every gradient first; None: not scaled.
        clip_coef: shape (), fp32: multiplies after that; None: not clipped.
        found_inf: shape () or (1,), fp32: anything but 0 leaves everything as it is; None: the step is taken.
        maximize: step up the gradient instead of down.
    """

    values: Sequence[Tensor]
    inv_scale: Tensor | None = None
    clip_coef: Tensor | None = None
    found_inf: Tensor | None = None
    maximize: bool = False

    @property
    def skip(self) -> Tensor | None:
        """Whether the step must change nothing: shape (), bool, on the device; None: it may. Syncs: no."""
        return None if self.found_inf is None else self.found_inf.reshape(()) != 0

    def read(self, index: int, dtype: torch.dtype) -> Tensor:
        """Return one gradient unscaled, clipped and pointing the way to step down.

        Args:
            index: which.
            dtype: to compute in, no narrower than the gradients.

        Returns:
            Its shape, `dtype`; the gradient itself if nothing had to be done.

        Syncs: no.
        """
        grad = self.values[index].to(dtype)
        for factor in (self.inv_scale, self.clip_coef):
            if factor is not None:
                grad = grad * factor.reshape(())
        return -grad if self.maximize else grad
