"""A batch run again under the tracer: what the step's errors say about it, and what demotion acts on."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..step.replay import Diagnosis
from .collect import Collector
from .findings import Finding
from .frames import source_line
from .records import OUTSIDE
from .tracer import Trace
from .trial import undisturbed


def diagnose(model: nn.Module, run: Callable[[], object], *, step: int, scale: float) -> Diagnosis:
    """Run a batch again, op by op, and leave model, gradients and random state as they were.

    Args:
        model: names are relative to it.
        run: runs the batch.
        step: number of the step, from 0.
        scale: loss scale that gradients handed to backward carry.

    Returns:
        The report, the first fault in words, and the policy edit where an op of the model overflowed 16 bit. Nothing
        inside a trace, which has seen the batch the first time.

    Writes: what it gives back. Syncs: at every op.
    """
    if any(isinstance(mode, Collector) for mode in _get_current_dispatch_mode_stack()):
        return Diagnosis(report=None, sentence="", mend="", edit="")
    with undisturbed(model), Trace(model, step=step) as t:
        t.assume_scale(scale)
        run()
    report = t.report
    fault = next(iter(report.faults), None)
    if fault is None:
        return Diagnosis(report=report, sentence="", mend="", edit="")
    is_models = fault.verdict == "overflow" and fault.path != OUTSIDE
    return Diagnosis(
        report=report, sentence=_found(fault), mend=_mend(fault), edit=fault.mend.edit if is_models else ""
    )


def _found(fault: Finding) -> str:
    line = "" if fault.frame is None else f" at {fault.frame} ({source_line(fault.frame)})"
    return (
        f"Run again op by op, the last batch shows {fault.verdict} in {fault.op}, {fault.phase}, module "
        f"{fault.path}{line}: {fault.why}"
    )


def _mend(fault: Finding) -> str:
    return (
        f"Add '{fault.mend.edit}' to the policy; {fault.mend.advice}"
        if fault.mend.edit
        else f"Mend: {fault.mend.advice}"
    )
