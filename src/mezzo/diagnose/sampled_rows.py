"""Values of many tensors in one block of memory, counted by exponent all at once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..trace import BINS, Histogram, exponent_fields, spaced


class SampledRows:
    """Samples of many tensors, `width` values of each, in one block of device memory, counted by one reduction a step."""

    def __init__(self, count: int, width: int, device: torch.device) -> None:
        self.values = torch.zeros(count, width, dtype=torch.float32, device=device)
        self._ones = torch.ones(1, 1, dtype=torch.int64, device=device).expand(count, width)
        self._counts = torch.zeros(count, BINS, dtype=torch.int64, device=device)
        self.filled = [0] * count
        self._held = [0] * count
        self._steps = 0

    def put(self, row: int, tensor: Tensor) -> None:
        """Keep evenly spaced values of a tensor in place of those that are kept. Writes: one row. Syncs: no."""
        sample = spaced(tensor.detach(), self.values.shape[1])
        count = sample.numel()
        self.values[row, :count].copy_(sample)
        if self._held[row] > count:
            self.values[row, count:].zero_()
        self._held[row] = count

    def count(self) -> None:
        """Add this step's samples to the histograms, all in one reduction. Syncs: no."""
        self._counts.scatter_add_(1, exponent_fields(self.values).long(), self._ones)
        self.values.zero_()
        self.filled = [a + b for a, b in zip(self.filled, self._held, strict=True)]
        self._held = [0] * len(self._held)
        self._steps += 1

    def is_holding(self, begin: int = 0, end: int | None = None) -> bool:
        """Whether values of some rows wait to be counted."""
        return any(self._held[begin:end])

    def histograms(self) -> list[Histogram]:
        """Return the histograms so far. Syncs: one read."""
        width = self.values.shape[1]
        found = []
        for filled, counts in zip(self.filled, self._counts.tolist(), strict=True):
            # places that no value was put into hold zeros
            counts[0] -= width * self._steps - filled
            found.append(Histogram(counts=tuple(counts)))
        return found
