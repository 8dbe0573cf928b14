"""From records to findings: which event is the root cause, and what kind of fault it is. Pure functions of the record."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from ..errors import listed
from .depth import Trend, grew_into, grew_over_steps, trends
from .fix import DIVERGED, GROWN, STEPPED, STUCK, Fix, fix_for
from .lint_warning import LintWarning, explain_lint
from .records import Event, Flush, FlushedGradient, Frame, Lint, LostUpdate, Phase, Sink, Site, TensorFacts, TraceRecord
from .verdict import Verdict, number, verdict_of

LASTING = 3
"""Steps in a row from which flushed gradients are a fault: one alone does training no harm."""
FLUSHED_SHARE = 0.3
"""Above this share of a step's gradients lost to fp16, or with a whole parameter's, a step is not what fp32 would take."""
_LAYERS = frozenset({"mm", "addmm", "mv", "addmv", "bmm", "linear", "convolution", "layer_norm", "batch_norm"})
_PRODUCTS = _LAYERS | {"mul", "div", "mean", "std", "var", "var_mean"}
_MET = attrgetter("kind", "site.op", "site.phase", "site.step", "site.frame", "where", "offending")
FAULTY_RULES = {
    "clip-before-unscale": "clip_grad", "zero-learning-rate": "step", "cleared-gradients": "zero_grad", "zero-gradients": "",
    "scaled-step": "step", "uncleared-gradients": "step", "exploding-step": "step", "exploding-loop": "", "no-gradients": "step", "ids-in-16-bit": "", "stale-cast": "",
}  # fmt: skip
"""Lint rules that no sound loop breaks, and what is called where one does: nothing where an op is to blame."""
_BEFORE = frozenset({"exploding-loop", "scaled-step"})
"""Of these, what is named first: what overflows is large because of it."""
LOST_SHARE = 0.5
"""Above this share of swallowed updates a weight hardly moves; the limit of the update monitor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fault: what, where, how it is known, and what removes it.

    Attributes:
        phase, op, called, module, path, frame, library, step, rank: where it occurred first, as in `Site`.
        kernel: the torch op that ran.
        why: one sentence with the numbers.
        fix: what to change.
        steps: in which it reached what it reached.
        inputs: what went into the op.
        outputs: what came out non-finite.
        reached: loss, gradients, weights, buffers or outputs it reached.
        flush: the flush to zero that was divided by, for underflow.
        is_stuck: for a loss scale, that nobody lowers it.
    """

    verdict: Verdict
    phase: Phase
    op: str
    kernel: str = ""
    called: str = ""
    module: str
    path: str
    frame: Frame | None = None
    library: Frame | None = None
    step: int
    rank: int
    why: str
    fix: Fix
    steps: tuple[int, ...]
    inputs: tuple[TensorFacts, ...] = ()
    outputs: tuple[TensorFacts, ...] = ()
    reached: tuple[str, ...] = ()
    flush: Flush | None = None
    is_stuck: bool = False

    @property
    def mend(self) -> Fix:
        """Raise: the name of old versions."""
        raise AttributeError("Finding.mend is now called fix: write finding.fix.edit and finding.fix.advice.")

    @property
    def is_fault(self) -> bool:
        """Whether this is more than a loss scaler finding its level: nothing lasting was reached then."""
        lasting = any(r.startswith(("parameter", "buffer")) for r in self.reached)
        return self.verdict != "loss-scale" or lasting or self.is_stuck


def is_mostly_flushed(gradients: Iterable[FlushedGradient]) -> bool:
    """Say whether fp16 took so much of a step's gradients that training cannot do what fp32 would."""
    counts = [(g.flushed, g.numel) for g in gradients]
    numel = sum(n for _, n in counts)
    return sum(f for f, _ in counts) > FLUSHED_SHARE * numel or any(f == n > 1 for f, n in counts)


def find(record: TraceRecord) -> tuple[Finding, ...]:
    """Return the faults of a trace, the first one first; behind them what a loss scaler does by itself.

    A non-finite value is a fault only if it reached a loss, a gradient, a parameter, a buffer or an output; of the
    events behind it, those that are not consequences of others are named. A mask's -inf is written on purpose and is
    never a fault by itself.
    """
    found = [_of_event(record, e, sinks) for e, sinks in _root_causes(record)]
    found += _of_flushed(record, bool(found))
    found += [_of_trend(record, t) for t in trends(record.sizes)[:1] if not found]
    found += _of_lost_updates(record.lost)
    found += [_of_lint(x, explain_lint(x)) for x in record.lints if x.rule in FAULTY_RULES or _blew_up(x, record)]
    early = _BEFORE | {f.verdict for f in found if _made_large(f, found[0])}
    found.sort(key=lambda f: (f.verdict != "amplified-rounding", f.verdict not in early))
    merged = _merged(found)
    # what a step that was taken left whole was some other optimizer's, which drops it
    bad = {n for f in merged if not f.is_fault for n in f.steps} - record.taken
    # a scaler found its level: it left out each step that overflowed, and a step was taken after the last of them
    is_level = record.skipped >= len(bad) and record.updates > 0 and record.steps - 1 > max(bad, default=0)
    return tuple(sorted((f for f in merged if f.is_fault or not is_level), key=lambda f: not f.is_fault))


def _blew_up(lint: Lint, record: TraceRecord) -> bool:
    """Say whether a gradient was off by more than half of itself when, or before, it overflowed or a step blew the weights up."""
    is_wrong = lint.case == "weights" and lint.value > 1 / 2
    ends = [x.site for x in record.lints if x.rule == "exploding-step"]
    ends += [e.site for e in record.events if e.kind == "source" and e.site.phase == "backward"]
    return is_wrong and any(lint.site.step <= site.step for site in ends)


def _made_large(step: Finding, first: Finding) -> bool:
    """Say whether a step had blown the weights up before an overflow that no rule would fix for long."""
    is_before = step.verdict == "exploding-step" and step.step < first.step
    return is_before and first.verdict == "overflow" and bool(first.fix.edit)


def _ancestors(record: TraceRecord, causes: frozenset[int]) -> list[Event]:
    seen: set[int] = set()
    todo = list(causes)
    while todo:
        index = todo.pop()
        if index not in seen:
            seen.add(index)
            todo += record.events[index].parents
    return [record.events[i] for i in sorted(seen)]


def _root_causes(record: TraceRecord) -> list[tuple[Event, list[Sink]]]:
    reached: dict[int, list[Sink]] = {}
    for sink in record.sinks:
        for event in _roots(_ancestors(record, sink.causes), sink):
            reached.setdefault(event.index, []).append(sink)
    return [(_first_alike(record.events, record.events[i]), reached[i]) for i in sorted(reached)]


def _first_alike(events: tuple[Event, ...], event: Event) -> Event:
    """Return the first event of a step that met the same values at the same line, in a module whose bad results were dropped."""
    is_source = event.kind == "source" and event.offending
    return next(e for e in events if _MET(e) == _MET(event)) if is_source else event


def _roots(events: list[Event], sink: Sink) -> list[Event]:
    """Return the root causes of a sink, out of all it descends from."""
    sources = [e for e in events if e.kind == "source"]
    is_asked = sink.kind in ("output", "read", "exit")
    if is_asked and not sink.is_loss:
        # a value made outside, such as the best loss so far, may be asked for, and logits may be -inf
        events = [e for e in events if not (e.kind == "leaf" and _is_mask(e))]
    # the sum over nothing is -inf, as a lattice's states that cannot be reached are
    mixed = [e for e in events if e.kind == "mixed" and (not is_asked or any(t.nan for t in e.outputs))]
    has_full_rows = any(e.full_rows for e in mixed)
    # infinities that went through arithmetic before they met are no mask's, which stay -inf
    multiplied = [e for e in mixed if e.site.op in _PRODUCTS or any(t.posinf for t in e.inputs)]
    is_masked = bool(mixed) and all(e.full_rows for e in multiplied)
    leaves = [e for e in events if e.kind == "leaf" and not (is_masked and _is_mask(e, has_full_rows))]
    constants = [e for e in events if e.kind == "constant"]
    if sources or leaves:
        return sorted([*sources, *leaves], key=lambda e: e.index)
    if mixed:
        # an infinity that was written was meant to be a number where a layer reads it, or an optimizer writes it: a mask is added or chosen from
        is_read = mixed[0].site.op in _LAYERS
        written = [e for e in constants if e.index in mixed[0].parents and (is_read or e.site.phase == "optimizer")]
        return written if written and not mixed[0].full_rows else mixed[:1]
    # an output may hold -inf on purpose, as the logits of forbidden actions do; a loss may not
    if not is_asked:
        return constants
    return [e for e in constants if sink.is_loss and any(t.nan for t in e.outputs)]


def _is_mask(leaf: Event, has_full_rows: bool = False) -> bool:
    """Say whether a tensor from outside holds nothing but -inf on purpose: softmax reads it; it is added, not multiplied."""
    return (has_full_rows or leaf.site.op not in _PRODUCTS) and all(t.neginf == t.nonfinite for t in leaf.outputs)


def _at(site: Site, **said: Any) -> Finding:
    """Return a finding about the op that ran at a place, where nothing else is said."""
    copied = ("phase", "op", "called", "module", "path", "frame", "library", "step", "rank")
    return Finding(**{name: getattr(site, name) for name in copied} | said)


def _of_event(record: TraceRecord, event: Event, sinks: list[Sink]) -> Finding:
    verdict, why = verdict_of(event)
    site = event.site
    growth = grew_over_steps(record.sizes, site.step) if verdict == "overflow" else ""
    trend = grew_into(event, record.sizes) if verdict == "overflow" and not growth else None
    if trend is not None:
        verdict, why = "exploding", f"{trend} {why}"
    fix = fix_for(verdict, event, max((s.reference for s in sinks), default=0.0))
    is_stuck = verdict == "loss-scale" and _is_stuck(record, event.loss_scale)
    if verdict == "loss-scale" and any(s.kind in ("parameter", "buffer") for s in sinks):
        fix = Fix(advice=STEPPED)
    elif is_stuck:
        fix = Fix(advice=STUCK)
    elif growth:
        fix, why = Fix(advice=DIVERGED), f"{growth} {why}"
    elif trend is not None and event.dtype == "fp16" and _is_held(record, site.step):
        fix = Fix(edit="compute=bf16", advice=GROWN)
    return _at(
        site,
        verdict=verdict,
        kernel=event.kernel,
        inputs=event.inputs,
        outputs=event.outputs,
        why=why,
        fix=fix,
        reached=tuple(dict.fromkeys(f"{s.kind} {s.name}".replace("loss loss", "loss") for s in sinks)),
        flush=event.flush if verdict == "underflow" else None,
        is_stuck=is_stuck,
        steps=tuple(sorted({s.step for s in sinks})),
    )


def _is_held(record: TraceRecord, step: int) -> bool:
    """Say whether every output that was not finite in a step is finite in an fp32 run."""
    lost = [s.reference for s in record.sizes if s.nonfinite and s.kind == "output" and s.step == step]
    return bool(lost) and all(reference is not None and math.isfinite(reference) for reference in lost)


def _is_stuck(record: TraceRecord, scale: float) -> bool:
    """Say whether gradients were bad at this very loss scale in steps that follow each other: a scaler halves it in between, but for a bad loss."""
    lost = {s.step for s in record.sinks if s.kind == "loss"}
    steps = {e.site.step for e in record.events if e.kind == "source" and e.loss_scale == scale} - lost
    return any({n + 1, n + 2} <= steps for n in steps)


def _of_trend(record: TraceRecord, trend: Trend) -> Finding:
    return Finding(
        verdict=trend.verdict,
        phase="forward" if trend.kind == "output" else "backward",
        op=trend.cls or "gradient",
        module=trend.pattern,
        path=trend.pattern,
        step=trend.step,
        rank=record.rank,
        why=str(trend),
        fix=Fix(
            advice="normalise between layers, add residual paths, or scale the initial weights; "
            "no precision and no loss scale repairs this."
        ),
        steps=(trend.step,),
    )


def _of_flushed(record: TraceRecord, is_faulty: bool) -> list[Finding]:
    """Report gradients that are 0 in fp16 and not in fp32. Layers that shrink in fp32 too are another fault."""
    steps: dict[int, list[FlushedGradient]] = {}
    for g in record.flushed:
        steps.setdefault(g.step, []).append(g)
    bad = _lasting([step for step, found in steps.items() if is_mostly_flushed(found)], list(steps))
    if is_faulty or not bad or any(t.verdict == "vanishing" for t in trends(record.sizes)):
        return []
    found = steps[bad[0]]
    share = sum(g.flushed for g in found) / sum(g.numel for g in found)
    worst = max((g for g in found if g.flush is not None), key=lambda g: g.flushed)
    flush = worst.flush
    assert flush is not None
    site, wanted = flush.site, min(g.wanted_scale for g in found if g.flush is not None)
    gone = [g.name for g in found if g.flushed]
    return [
        _at(
            replace(site, phase="backward"),
            verdict="underflow",
            kernel=flush.kernel,
            why=f"{share:.1%} of the gradients are 0 in {flush.dtype} and not in fp32: {site.op} flushed {flush.share:.1%} of "
            f"its results (fp32: up to {number(flush.wide_amax)}) at loss scale {number(worst.loss_scale)}.",
            fix=Fix(
                advice=f"raise the loss scale: a loss scale of {number(wanted)} keeps them; begin with it (init_scale), or use "
                "bf16, which has the range of fp32."
                if worst.loss_scale > 1 or any(x.case == "scaler" for x in record.lints)
                else f"scale the loss: a loss scale of {number(wanted)} keeps them, and torch.amp.GradScaler or "
                "mezzo.GradScaler find it; or use bf16, which has the range of fp32."
            ),
            reached=tuple(f"gradient {name}" for name in gone),
            flush=flush,
            steps=tuple(bad),
        )
    ]


def _lasting(bad: list[int], steps: list[int]) -> list[int]:
    """Return the steps that follow each other among some: as many as last, or all there were; none if one alone was bad."""
    count = min(LASTING, len(steps))
    runs = [steps[i : i + count] for i in range(len(steps) - count + 1)]
    return sorted({step for run in runs if set(run) <= set(bad) for step in run})


def _of_lost_updates(lost: tuple[LostUpdate, ...]) -> list[Finding]:
    worst = [u for u in lost if u.lost > LOST_SHARE * u.intended]
    if not worst:
        return []
    first = worst[0]
    same = [u for u in worst if (u.site.step, u.optimizer) == (first.site.step, first.optimizer)]
    share = sum(u.lost for u in same) / sum(u.intended for u in same)
    site, names = first.site, listed(tuple(dict.fromkeys(u.name for u in same)))
    steps = tuple(sorted({u.site.step for u in worst}))
    if not first.optimizer:
        why = f"{share:.0%} of what is added here to {names} is smaller than half the spacing of {first.dtype} there, time after time: it does not move."
        fix = Fix(advice="keep it in fp32 while steps are added to it: write .float() on it before the first.")
        return [_at(site, verdict="lost-update", why=why, fix=fix, steps=steps)]
    by_hand, is_state = site.phase == "forward", first.optimizer == "the forward"
    ran = {} if by_hand else {"op": "step", "kernel": first.optimizer, "called": ""}
    named = {} if first.name.startswith("a ") else {"module": first.name.rpartition(".")[0], "path": first.name}
    return [
        _at(
            site,
            verdict="lost-update",
            phase="forward" if is_state else "optimizer",
            **ran,
            **named,
            why=f"{share:.0%} of the updates {first.optimizer} computed for {names} are smaller than half the spacing "
            f"of {first.dtype} there, and were rounded away.",
            fix=Fix(advice="keep in fp32 what is updated, and hand out a copy of it in 16 bit.")
            if by_hand
            else Fix(
                edit="params=bf16, master=split" if first.dtype == "bf16" else "params=fp16, master=fp32",
                advice="keep the weights in fp32, or use mezzo.optim, which keeps what 16 bits cannot hold.",
            ),
            reached=tuple(f"{'state' if is_state else 'parameter'} {u.name}" if named else u.name for u in same),
            steps=steps,
        )
    ]


def _of_lint(lint: Lint, said: LintWarning) -> Finding:
    """Report a loop that is wrong whatever the numbers."""
    called = FAULTY_RULES.get(lint.rule) if lint.case != "hook" else ""
    site = replace(lint.site, phase="optimizer", op=called) if called else lint.site
    return _at(site, verdict=lint.rule, why=said.why, fix=Fix(advice=said.advice), steps=(site.step,))


def _merged(found: list[Finding]) -> tuple[Finding, ...]:
    """Fold findings that name the same op on the same line into the first of them."""
    kept: dict[tuple[object, ...], Finding] = {}
    for f in found:
        key = (f.verdict, f.phase, f.op, f.module, str(f.frame))
        if key in kept:
            old = kept[key]
            reached = tuple(dict.fromkeys((*old.reached, *f.reached)))
            kept[key] = replace(old, steps=tuple(sorted({*old.steps, *f.steps})), reached=reached)
        else:
            kept[key] = f
    return tuple(kept.values())
