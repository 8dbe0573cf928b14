"""What a watch keeps of a step on the device: samples of tensors, and what a step meant to move."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import move
from ...trace import BINS, Histogram, exponent_fields, spaced


class SampledRows:
    """Samples of many tensors in one block of device memory, counted by one reduction a step.

    Args:
        count: number of tensors.
        width: values kept of each.
        device: where.
    """

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

    @property
    def is_holding(self) -> bool:
        """Whether values wait to be counted."""
        return any(self._held)

    def histograms(self) -> list[Histogram]:
        """Return the histograms so far. Syncs: one read."""
        width = self.values.shape[1]
        found = []
        for filled, counts in zip(self.filled, self._counts.tolist(), strict=True):
            # places that no value was put into hold zeros
            counts[0] -= width * self._steps - filled
            found.append(Histogram(counts=tuple(counts)))
        return found


@dataclass(frozen=True, slots=True)
class SampledStep:
    """What a sampled step meant to do and did, on the device.

    Attributes:
        counts: by parameter, samples with a gradient, and those of them that did not move.
        flags: some gradient was not 0; there was one, and nothing moved.
        taken: the step was; None where its result tells.
    """

    counts: Tensor
    flags: Tensor
    taken: Tensor | None


def is_taken(optimizer: torch.optim.Optimizer) -> Tensor:
    """Say whether a step that just ran was meant to move anything: at a rate, and not skipped on the device.

    Syncs: no.
    """
    found = getattr(optimizer, "found_inf", None)
    rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
    there = [rate for rate in rates if isinstance(rate, Tensor) and rate.device.type != "cpu"]
    home = found.device if isinstance(found, Tensor) else there[0].device if there else torch.device("cpu")
    has_rate = any(float(rate) != 0 for rate in rates if not any(rate is one for one in there))
    taken = torch.full((), has_rate, dtype=torch.bool, device=home)
    for rate in there:
        taken = taken | move(rate.detach().reshape(()) != 0, home)
    return taken & (found == 0).all() if isinstance(found, Tensor) else taken
