"""The AdamW step on the CPU: one compiled pass; the folder defines it and `cpu.cpp` computes it."""

from __future__ import annotations

from ...backends.cpp.batch import compiled_step
from .. import adamw as reference
from . import AdamWRule


def _numbers(rule: AdamWRule) -> tuple[float, ...]:
    """Return what struct AdamW of cpu.cpp holds."""
    return 1 - rule.beta1, rule.beta2, 1 - rule.beta2, rule.eps, rule.l2, rule.amsgrad


step_ = compiled_step("adamw", reference, _numbers)
