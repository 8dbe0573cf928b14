"""Watches every op of a program and writes down where non-finite values come from and where they go."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload, autograd_node, tree_leaves
from .context import OpMode, TraceContext
from .evidence import Detached, HostReads, is_arithmetic, is_bad_anyway, is_metric, matters
from .exponents import LineWatch
from .flushed_gradients import FlushWatch
from .frames import Owner, caller, is_backward_root, is_called_from, sample_line
from .lint_rules import LintWatch
from .lost_updates import StateWatch, UpdateWatch
from .measure import (
    amax,
    any_nan,
    divisors,
    first_bad,
    full_rows,
    is_finite,
    numbers,
    offending_values,
    sanitised,
    tensor_facts,
    wide_results,
)
from .ops import FACTORIZATIONS, Call, op_facts, plain
from .records import Event, EventKind, Sink, SinkKind, Site
from .reference_path import Fp64Reference, ReferencePath
from .replaced_states import ReplacedStates
from .replacement import OpInputs, fused_with, replacement_for, saved_operands
from .wide_values import StorageNotes, forget_results

Causes = frozenset[int]
NO_CAUSE: Causes = frozenset()
_STOPS = 8
"""How often a program that catches the end it is given is ended again."""
_SHARED = "torch/multiprocessing/reductions.py"
_COLLATE = "torch/utils/data/_utils/collate.py"
_COUNTS = frozenset({"sum", "count_nonzero", "to"})
"""Ops that make a number of elements, where no gradient goes through them."""
_HANDS_OVER = frozenset({"copy", "fill", "index_put"})
"""Ops that write a tensor's values into another."""
_WRITERS = ("", "scalar_tensor", "where", "full", "tensor", "as_tensor", "masked_fill", "fill", "setitem", "pad")
"""Functions by which a program writes a number down."""


class Collector(OpMode):  # type: ignore[no-untyped-call]  # torch's own
    """Sees every op that reaches torch's dispatcher: forward, backward, optimizer, the parts of composites.

    Every storage that received non-finite values carries the indices of the events they come from, so a bad
    loss or gradient can name its origin however many ops lie between.

    `on_sink` is called after a sink was noted, `on_loss` with each tensor that a backward starts from.

    Syncs: at every op. Reads values; writes none, and draws none of the program's random numbers.
    """

    def __init__(self, context: TraceContext, on_sink: Callable[[], None], on_loss: Callable[[Tensor], None]) -> None:
        super().__init__(context)
        self._on_sink, self._told_loss = on_sink, on_loss
        self.events: list[Event] = []
        self.sinks: list[Sink] = []
        self.reference = ReferencePath()
        self.updates, self.lints = UpdateWatch(), LintWatch(self.reference)
        self.states = StateWatch(self.updates, self.lints)
        self.replaced = ReplacedStates(self.updates)
        self.lines = LineWatch(self.lints)
        self._carried: list[Tensor] | None = None
        self.flushes, self.detached = FlushWatch(), Detached()
        self._fp64 = Fp64Reference()
        self._causes: StorageNotes[Causes] = StorageNotes()
        self._reads = HostReads(self._causes)
        self._pending_reads: list[Sink] = []
        self._read_causes = NO_CAUSE
        self._shared: StorageNotes[Site] = StorageNotes()
        self._counts: StorageNotes[bool] = StorageNotes()
        self._scalars: StorageNotes[Causes] = StorageNotes()
        self.ops = self.skipped = 0
        self._was_updated = self.has_gone_backward = False
        self._factored: tuple[Call, Site] | None = None
        self.stop_with: BaseException | None = None
        self._stops_left, self._reached_step = 0, -1

    def run_op(self, func: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op and check its results."""
        if self.stop_with is not None:
            self._stops_left -= 1
            if self._stops_left >= 0:
                raise self.stop_with
            return func(*args, **kwargs)
        facts = op_facts(func)
        site = self.context.site(facts.name)
        self.ops += 1
        self.has_gone_backward = self.has_gone_backward or site.phase == "backward"
        if facts.makes_nothing:
            out = func(*args, **kwargs)
            if facts.name == "detach":
                self.detached.see(args[0], site)
            if facts.name == "set" and isinstance(out, Tensor) and is_called_from(_SHARED):
                self._shared.note(out, site)
            return out
        # under torch.func a loss has no graph that could be seen here
        if facts.name == "ones_like" and is_backward_root():
            self._on_loss(args[0], site)
        if facts.name == "local_scalar_dense":
            self.on_read(args[0], site)
            with self.alone():
                self.lints.indices.read(args[0], site)
        call = Call(func, facts, args, kwargs)
        try:
            out = call.run(args, kwargs)
        except Exception:
            self._on_refusal(call, site)
            raise
        if facts.name.startswith("amp_"):
            self._on_scaler(facts.name)
            return out
        with self.alone():
            self._check_results(call, site)
            self._reads.see(call, out)
        self._factored = (call, site) if facts.name in FACTORIZATIONS else self._factored
        return out

    def before_parts(self, func: OpOverload[Any, Any], args: tuple[Any, ...]) -> None:
        """Take note of a loss that is a tensor of others, which has the graph that its parts have not."""
        if op_facts(func).name == "ones_like" and is_backward_root():
            self._on_loss(args[0], self.context.site("ones_like"))

    def stop(self, reason: BaseException) -> None:
        """Raise from this op, and from the next ones if the program goes on."""
        self.stop_with, self._stops_left = reason, _STOPS
        raise reason

    def _on_scaler(self, op: str) -> None:
        self.lints.unscale()
        if op == "amp_update_scale":
            self.skipped += not self._was_updated
            self.end_step()
            self._was_updated = False

    def end_step(self) -> None:
        """Say that an optimizer step was taken or left out."""
        self._was_updated, self._factored = True, None
        self.context.end_step()
        self.reference.end_step()
        self.lints.end_step()
        self.flushes.clear()

    def on_read(self, tensor: Tensor, site: Site) -> None:
        """Take note of a value that the host reads. Syncs: yes, where non-finite values are about."""
        if (read := self._reads.of(tensor)) is None or caller()[0] is Owner.MEZZO:
            return
        if tensor.is_floating_point():
            self._read_causes |= read.causes
        # torch's anomaly mode asks every gradient for NaN, and raises where it finds one
        asks_all = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
        is_raised = site.phase == "backward" and asks_all and tensor.dtype is torch.bool
        is_of_training = read.tracked or not all(is_metric(self.events[i]) for i in read.causes)
        if not (bool(tensor) if is_raised else is_of_training):
            return
        where = f"at {site.frame}" if site.frame else "by the host"
        sink = self._sink("read", where, read.causes, is_loss=read.is_scalar and read.tracked)
        if read.is_scalar or is_raised:
            self.reach(sink)
        else:
            # a program may ask, repair what it found, and go on
            self._pending_reads.append(sink)

    def on_read_in_python(self, tensor: Tensor) -> None:
        """Take note of a tensor that becomes an array or a list, which no op shows. Syncs: yes, where non-finite values are about."""
        with self.aside():
            self.on_read(tensor, self.context.site("item"))

    def _on_refusal(self, call: Call, site: Site) -> None:
        """Take note that an op raised, if it was given non-finite values or asks whether a matrix has the factors it should."""
        with self.aside():
            self.lints.indices.refused(call, site)
            factored = self._factored if call.facts.name == "linalg_check_errors" else None
            call, site = factored or (call, site)
            bad = [self._causes.get(t) or self._leaf(call, site, n, t) for n, t in call.inputs if not is_finite(t)]
            causes = self._reads.behind(call).union(*bad)
            if factored and not causes:
                found = self._event(call, site, [call.out[0].fill_(math.nan)], "source")  # nobody gets it
                # who adds to the diagonal and asks again has repaired it
                self._pending_reads.append(self._sink("read", f"{site.op}, which raised", found))
            elif not causes and self.reference.accepts(call):
                call.out, self._carried = [torch.tensor(math.nan, dtype=self.reference.low)], [torch.zeros(())]
                causes = self._event(call, site, call.out, "source")
        if causes:
            self.reach(self._sink("read", f"{call.facts.name}, which raised", causes))

    def settle_reads(self, *, has_failed: bool = False) -> None:
        """Count what was asked about and led to no finite loss; at the end of a program what it left behind too."""
        pending, self._pending_reads = self._pending_reads, []
        if has_failed and not pending and self._reached_step != self.context.step:
            if causes := NO_CAUSE.union(*self._scalars.live()):
                pending = [self._sink("exit", "when the program ended", causes)]
        for sink in pending:
            self.reach(sink)

    def _check_results(self, call: Call, site: Site) -> None:
        self.reference.enter_node(autograd_node(), call)
        self._carried = self.reference.see(call, site)
        self.lints.amplified.see(call, site, self._carried)
        tops = [amax(t) for t in call.out]
        self.flushes.see(call, site, tops)
        bad = [t for t, top in zip(call.out, tops, strict=True) if not math.isfinite(top)]
        if len(self._causes) or bad:
            self._propagate(call, site, bad)
        if call.facts.name in _COUNTS and call.out and not any(t.requires_grad for _, t in call.inputs):
            self._counts.note(call.out[0], call.facts.name != "to" or not call.inputs)
        self.lines.see(site, call.out, tops)
        self.lints.see(call, site, self.context.name_of)
        for watch in (self.updates, self.replaced):
            watch.see(call, site, self.context.name_of)
        self.states.see(call, site)

    def _propagate(self, call: Call, site: Site, bad: list[Tensor]) -> None:
        asked = [s for s in call.inputs if bad or self._causes.get(call.original(s[1])) is not None]
        sources = [s for s in asked if not is_finite(s[1])]
        causes = NO_CAUSE.union(*(self._causes.get(call.original(t)) or NO_CAUSE for _, t in sources))
        if sources and site.phase == "forward" and self._fp64.is_too_large(call):
            self.events = [replace(e, followers=(*e.followers, site)) if e.index in causes else e for e in self.events]
        followed = NO_CAUSE.union(*(self._causes.get(t) or NO_CAUSE for t in call.originals if self._fp64.follows(t)))
        if absorbed := self._fp64.carry(call):
            self.reach(self._sink("activation", f"{call.facts.name}: {absorbed}", followed))
        self.reference.absorb(call, site, causes)
        if bad:
            self._on_nonfinite(call, site, sources, bad)
        elif not call.facts.writes:
            forget_results(call, self._causes)
        for tensor in call.out if followed and not bad else ():
            if self._fp64.follows(tensor):
                self._causes.note(tensor, followed)

    def _on_nonfinite(self, call: Call, site: Site, sources: list[tuple[str, Tensor]], bad: list[Tensor]) -> None:
        assigned = self.context.names.assigned
        if assigned is None and self._is_handed_over(call, site, sources):
            return
        if assigned is not None and not math.isfinite(assigned):
            sources = [s for s in sources if s[1].dim()]  # the others are that number
        causes = self._causes_of(call, site, sources)
        is_over = any(s.kind == "parameter" and s.causes & causes for s in self.sinks)  # weights went bad before
        if assigned is not None and not sources:
            causes = self._event(call, site, bad, "constant", leaf=str(assigned))
        elif not sources and site.op == "scalar_tensor" and site.called not in _WRITERS:
            # a function of torch's own says that its result does not exist, as logdet does
            causes = self._event(call, replace(site, op=site.called), bad, "source")
        elif not sources and is_arithmetic(call, bad):
            causes = self.reference.absorbed(call) or self._event(call, site, bad, "source")
            self._fp64.start(call)
        elif not sources:
            parents = self._read_causes if site.phase == "optimizer" else NO_CAUSE
            causes = self._event(call, site, bad, "constant", parents)
        elif not is_over and self._reached_step != self.context.step and is_bad_anyway(call):
            causes |= self._event(call, site, bad, "source", causes)
        elif (any_nan(bad) and not any_nan(t for _, t in sources)) or (
            call.facts.name == "logsumexp" and full_rows(call)
        ):
            causes = self._event(call, site, bad, "mixed", causes)
        for tensor in bad:
            older = self._causes.get(tensor) if call.facts.writes else None
            self._causes.note(tensor, causes | (older or NO_CAUSE))
            if tensor.numel() == 1 and not site.root and site.phase == "forward":
                self._scalars.note(tensor, causes)
        if call.facts.writes and site.phase == "forward":
            self._on_written(bad, causes)

    def _is_handed_over(self, call: Call, site: Site, sources: list[tuple[str, Tensor]]) -> bool:
        """Say whether a program writes what it loaded, or a number, into a tensor: that tensor is named where it is read."""
        is_outside = not site.root and site.phase == "forward" and call.facts.name in _HANDS_OVER
        return is_outside and bool(sources) and all(self._causes.get(call.original(t)) is None for _, t in sources)

    def _on_written(self, bad: list[Tensor], causes: Causes) -> None:
        """Take note of parameters into which a loop by hand wrote what was not meant to be there."""
        if any(self.events[i].kind != "constant" for i in causes):
            for tensor in bad:
                kind, _, name = self.context.modules.name_of(tensor).partition(" ")
                if kind == "parameter":
                    self.reach(self.sink_of("parameter", name, tensor))

    def _causes_of(self, call: Call, site: Site, sources: list[tuple[str, Tensor]]) -> Causes:
        if len(sources) > 1 and not call.facts.draws:
            sources = [s for s in sources if matters(call, s[1])] or sources
        causes = NO_CAUSE
        for name, tensor in sources:
            known = self._causes.get(call.original(tensor))
            causes |= self._leaf(call, site, name, tensor) if known is None else known
        return causes

    def _leaf(self, call: Call, site: Site, name: str, tensor: Tensor) -> Causes:
        original = call.original(tensor)
        called = self.context.name_of(original) or f"argument {name!r} of {call.facts.name}, made outside the trace"
        if (received := self._shared.get(original)) is not None:
            site = replace(site, user=received.user or site.user)
            called = called.replace(", made outside the trace", "") + ", from a DataLoader worker,"
        elif is_called_from(_COLLATE):
            called, site = f"batch of a DataLoader: its sample {name}", replace(site, user=sample_line() or site.user)
        causes = self._event(call, site, [tensor], "leaf", leaf=called)
        self._causes.note(original, causes)
        return causes

    def _event(
        self, call: Call, site: Site, bad: list[Tensor], kind: EventKind, parents: Causes = NO_CAUSE, leaf: str = ""
    ) -> Causes:
        index, computed = len(self.events), kind in ("source", "mixed")
        # beside inherited non-finite values, the op is judged by its finite ones
        judged_on = sanitised(call.given) if parents else call.given
        names = [self.context.name_of(call.original(t)) if site.phase == "optimizer" else "" for t in bad]
        if site.phase == "optimizer" and not site.module:
            site = replace(site, module=names[0].rpartition(" ")[2].rpartition(".")[0])
        judged = self.reference.judge(call, self._carried) if computed else (None, None)
        operands = self._operands(call, site) if computed else OpInputs([], [])
        wide = wide_results(call, bad[0].dtype, judged_on) if kind == "source" else ()
        followers, is_tried = self.reference.needs_fp32(call, (t for _, t in operands.saved), judged, wide)
        given = ", ".join(str(x) for x in numbers(call.args, call.kwargs) if not math.isfinite(x))
        event = Event(
            index=index,
            kind=kind,
            kernel=call.facts.kernel,
            site=site,
            inputs=tuple(tensor_facts(n, t) for n, t in call.inputs),
            outputs=tuple(tensor_facts(n or f"result {i}", t) for i, (n, t) in enumerate(zip(names, bad, strict=True))),
            parents=parents,
            wide=wide,
            offending=offending_values(operands.saved, bad[0])
            or (*offending_values([*call.inputs, *call.whole], bad[0]), *divisors(call)),
            where=first_bad(bad[0]) if computed else (),
            full_rows=full_rows(call) if computed else 0,
            loss_scale=self.context.loss_scale if site.phase == "backward" else 1.0,
            flush=judged[1],
            reference=judged[0],
            leaf=leaf or (given if kind == "constant" else self._cast_of(call, site)),
            replacement=replacement_for(site.op, operands) if kind == "source" else "",
            fused=fused_with(site.op, call.originals[0]) if kind == "source" and call.inputs else "",
            is_local_enough=is_tried or (computed and self.reference.is_local_enough(call)),
            followers=followers,
            tracked=call.is_tracked,
        )
        self.events.append(event)
        return frozenset((index,))

    def _cast_of(self, call: Call, site: Site) -> str:
        """Return what a tensor is called that is only cast, or that 16 bit flushed where it rests; empty for one that was computed."""
        given = call.originals
        if site.op == "to" and site.phase == "forward":
            return self.context.name_of(given[0]) if given else ""
        names = (self.context.name_of(t) for t in given if self.reference.behind([t]))
        return next((name for name in names if name.startswith(("buffer", "parameter"))), "")

    def _operands(self, call: Call, site: Site) -> OpInputs:
        """Return what an op that failed was given; in a backward of torch's, what its forward was."""
        if site.is_derivative:
            return saved_operands(autograd_node())
        given = [t for t in tree_leaves(call.args) if isinstance(t, Tensor) and not t.is_nested]
        tensors = [t if (o := call.original(t)) is t else t.detach().requires_grad_(o.requires_grad) for t in given]
        return OpInputs(tensors, numbers(call.args, {}), bool(given) and self._counts.get(given[-1]) is True)

    def sink_of(self, kind: SinkKind, name: str, tensor: Tensor) -> Sink:
        """Return what is to be noted of a non-finite tensor, once it is known to matter. Syncs: no."""
        return self._sink(kind, name, self._causes.get(tensor) or NO_CAUSE)

    def _sink(self, kind: SinkKind, name: str, causes: Causes, *, is_loss: bool = False) -> Sink:
        return Sink(kind=kind, name=name, causes=causes, step=self.context.step, is_loss=is_loss)

    def reach(self, sink: Sink) -> None:
        """Note that non-finite values reached something that matters."""
        self._reached_step = sink.step
        self.sinks.append(sink)
        for index in sink.causes:
            self.lints.softmax(self.events[index])
        self._on_sink()

    def was_spoiled(self, name: str, buffer: Tensor) -> bool:
        """Say whether a buffer received non-finite values; a mask that held them all along did not. Syncs: no."""
        events = [self.events[i] for i in self._causes.get(buffer) or ()]
        return any(e.kind != "constant" and e.leaf != f"buffer {name}" for e in events)

    def _on_loss(self, loss: Tensor, site: Site) -> None:
        self.context.enter_backward(loss)
        self.lints.loss(loss, site, self.context.loss_scale, self.context.names.backward_dtype)
        with self.aside():
            self._told_loss(loss)
        if (value := plain(loss)) is not None and not is_finite(value):
            wide = self.reference.get(value)
            size = 0.0 if wide is None else amax(wide) / self.context.loss_scale
            self.reach(replace(self.sink_of("loss", "loss", value), reference=size))
        else:
            self._pending_reads.clear()
