"""A batch run again under the tracer: what the step's errors say about it, and what demotion acts on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..step.replay import Diagnosis
from .collect import Collector
from .findings import Finding
from .frames import source_line
from .records import OUTSIDE
from .trace_report import TraceReport
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
    return _of_batch(t.report)


class Following:
    """A trace from the end of a forward to the end of a backward, taken off only where nobody's mode lies above it."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace.__enter__()

    def stop(self) -> Diagnosis | None:
        """Return what was found; None if it cannot be taken off yet. Writes: the modes of this thread."""
        if not self._trace.is_on_top:
            return None
        self._trace.__exit__(None, None, None)
        return _of_loss(self._trace.report)


def follow(model: nn.Module, *, step: int) -> Following | None:
    """Follow the program until `stop`; None in a side thread, or where a mode is on, which may be taken off before.

    Args:
        model: names are relative to it.
        step: number of the step, from 0.

    Writes: the modes of this thread.
    """
    functions = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch's own
    is_aside = threading.current_thread() is not threading.main_thread()
    if is_aside or functions or _get_current_dispatch_mode_stack():
        return None
    return Following(Trace(model, step=step))


_NARROW_LOSS = "Add 'output=fp32' to the policy, or write output.float() before the loss."


def _of_batch(report: TraceReport) -> Diagnosis:
    fault = next(iter(report.faults), None)
    if fault is None:
        return Diagnosis(report=report, sentence="", mend="", edit="")
    is_models = fault.verdict == "overflow" and fault.path != OUTSIDE
    return Diagnosis(
        report=report,
        sentence=f"Run again op by op, the last batch shows {_found(fault)}",
        mend=f"Add '{fault.mend.edit}' to the policy; {fault.mend.advice}" if fault.mend.edit else _mend(fault),
        edit=fault.mend.edit if is_models else "",
    )


def _of_loss(report: TraceReport) -> Diagnosis:
    """Return what was found outside the model, where no rule of its policy reaches."""
    fault = next(iter(report.faults), None)
    if fault is None:
        return Diagnosis(report=report, sentence="", mend="", edit="")
    is_narrow = fault.verdict in ("overflow", "underflow") and bool(fault.mend.edit)
    return Diagnosis(
        report=report,
        sentence=f"The model's outputs are finite; what was computed from them shows {_found(fault)}",
        mend=_NARROW_LOSS if is_narrow else _mend(fault),
        edit="",
    )


def _found(fault: Finding) -> str:
    line = "" if fault.frame is None else f" at {fault.frame} ({source_line(fault.frame)})"
    return f"{fault.verdict} in {fault.op}, {fault.phase}, module {fault.path}{line}: {fault.why}"


def _mend(fault: Finding) -> str:
    return f"Mend: {fault.mend.advice}"
