"""A batch run again under the tracer: what the step's errors say about it, and what demotion acts on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .. import random_state
from .._torch import dispatch_modes, function_modes, own_buffers
from ..binding import bound_of, innermost
from ..formats import LOW_DTYPES
from .collector import Collector
from .findings import Finding
from .frames import source_line
from .records import OUTSIDE
from .trace_report import TraceReport
from .tracer import Trace

_NARROW_LOSS = "Add 'output=fp32' to the policy, or write output.float() before the loss."


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What running a batch again has shown.

    Attributes:
        report: the `mezzo.diagnose.TraceReport`; None where a trace around the run has one already.
        sentence: op, module, line and verdict; empty where nothing was found.
        fix: what to change, in a sentence; empty where the loss scale is, of which the step knows how it moves.
        edit: the policy edit that fixes it, where a module or an op of the model overflowed 16 bit; else empty.
    """

    report: TraceReport | None
    sentence: str = ""
    fix: str = ""
    edit: str = ""


def rerun_traced(model: nn.Module, run: Callable[[], object], *, step: int, scale: float) -> Diagnosis:
    """Run a batch again, op by op, and leave model, gradients and random state as they were.

    Gradients that `run` hands to backward carry the loss scale; step numbers begin at 0.

    Returns:
        The report, the first fault in words, and the policy edit where an op of the model overflowed 16 bit. Nothing
        inside a trace, which has seen the batch the first time.

    Syncs: at every op.
    """
    if any(isinstance(mode, Collector) for mode in dispatch_modes()):
        return Diagnosis(report=None)
    with preserve_state(model), Trace(model, step=step) as t:
        t.assume_scale(scale)
        run()
    return _of_batch(t.report)


class LossTrace:
    """A trace from the end of a forward to the end of a backward, taken off only where nobody's mode lies above it."""

    def __init__(self, trace: Trace, *, is_narrow: bool) -> None:
        self._trace, self._is_narrow = trace.__enter__(), is_narrow

    def stop(self) -> Diagnosis | None:
        """Return what was found; None if it cannot be taken off yet. Writes: the modes of this thread."""
        if not self._trace.is_on_top:
            return None
        self._trace.__exit__(None, None, None)
        return _of_loss(self._trace.report, self._is_narrow)


def trace_loss(model: nn.Module, *, step: int) -> LossTrace | None:
    """Trace the program until `stop`; None in a side thread, or where a mode is on, which may be taken off before.

    Names are relative to the model; steps are counted from 0. Writes: the modes of this thread.
    """
    if threading.current_thread() is not threading.main_thread() or function_modes() or dispatch_modes():
        return None
    policy = None if (bound := bound_of(innermost(model))) is None else bound.binding.policy
    is_narrow = policy is not None and (policy.output or policy.compute) in LOW_DTYPES
    return LossTrace(Trace(model, step=step), is_narrow=is_narrow)


def _of_batch(report: TraceReport) -> Diagnosis:
    fault = next(iter(report.findings), None)
    if fault is None:
        return Diagnosis(report=report)
    edit, is_models = fault.fix.edit, fault.verdict == "overflow" and fault.path != OUTSIDE
    fix = f"Add '{edit}' to the policy; {fault.fix.advice}" if edit else f"Fix: {fault.fix.advice}"
    sentence = f"Run again op by op, the last batch shows {_found(fault)}"
    is_scale = fault.verdict == "loss-scale"
    return Diagnosis(report=report, sentence=sentence, fix="" if is_scale else fix, edit=edit if is_models else "")


def _of_loss(report: TraceReport, is_narrow: bool) -> Diagnosis:
    """Return what was found outside the model, where no rule of its policy reaches but that on its outputs."""
    fault = next(iter(report.faults), None)
    if fault is None:
        return Diagnosis(report=report)
    is_narrow = is_narrow and fault.verdict in ("overflow", "underflow")
    sentence = f"The model's outputs are finite; what was computed from them shows {_found(fault)}"
    return Diagnosis(report=report, sentence=sentence, fix=_NARROW_LOSS if is_narrow else f"Fix: {fault.fix.advice}")


def _found(fault: Finding) -> str:
    text = "" if fault.frame is None else source_line(fault.frame)
    line = "" if fault.frame is None else f" at {fault.frame}{f' ({text})' if text else ''}"
    return f"{fault.verdict} in {fault.op}, {fault.phase}, module {fault.path}{line}: {fault.why}"


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[None]:
    """Give gradients, buffers, mode and random state back after the block. Writes: what it gives back. Syncs: no."""
    grads = {p: p.grad for p in model.parameters()}
    buffers = {b: b.detach().clone() for b in model.buffers()}
    places = [(own_buffers(m), dict(own_buffers(m))) for m in model.modules()]
    training = {m: m.training for m in model.modules()}
    for p in grads:
        p.grad = None
    try:
        with random_state.kept(), torch.enable_grad():
            yield
    finally:
        for p, grad in grads.items():
            p.grad = grad
        for registry, held in places:
            registry.update(held)
        for buffer, before in buffers.items():
            buffer.data.copy_(before)  # what it was, so by no new version: graphs of other losses may hold it
        for module, mode in training.items():
            module.training = mode
