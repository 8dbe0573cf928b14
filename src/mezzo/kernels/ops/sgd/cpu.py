"""The SGD step on the CPU: one compiled pass; the folder defines it and `cpu.cpp` computes it."""

from __future__ import annotations

from ...backends.cpp.batch import compiled_step
from .. import sgd as reference
from . import SGDRule


def _numbers(rule: SGDRule) -> tuple[float, ...]:
    """Return what struct SGD of cpu.cpp holds."""
    return rule.weight_decay, rule.momentum, rule.nesterov


step_ = compiled_step("sgd", reference, _numbers)
