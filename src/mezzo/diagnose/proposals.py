"""Which fp32 rules are worth trying, judged by the errors that were measured. Pure functions of the measurement."""

from __future__ import annotations

import glob
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain, zip_longest

from ..policy import ModuleRule, Rule, known_ops, write_module_rule, write_op_rule
from .compare_report import GOOD_DB, WORTH_DB, ModuleError, Proposal, StepFidelity

DEAR = 0.5
"""A rule that takes more of the work than this to fp32 is no rule but another policy."""
DB_FOR_ALL_WORK = 20.0
"""What taking all of a step to fp32 must gain to be worth it: 2 dB, the least that counts, for each tenth of the work."""
_STANDS_OUT = 10.0
"""Times the mean error of the others, in energy."""
_RANGE_EDITS = ("scaling=dynamic", "compute=bf16")
"""Edits that keep gradients too small for fp16."""
_CASTS = frozenset({"to", "type", "float", "half", "bfloat16", "double"})
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """An edit that might pay.

    Attributes:
        covers: indices in `StepFidelity.ops` of the ops it takes to fp32.
        local_share: the local error it is meant against.
        flops: 16-bit floating-point operations that it takes to fp32.
    """

    edit: str
    covers: frozenset[int]
    local_share: float
    flops: int


def _rules(names: Iterable[str]) -> str:
    """Return module rules that match names which are equal but for their numbers.

    >>> _rules(["layer.0.out", "layer.3.out", "layer.11.out"])
    'layer.[0-9].out=fp32, layer.[0-9][0-9].out=fp32'
    >>> _rules(["layer.3.out"])
    'layer.3.out=fp32'
    """
    names = [glob.escape(name) for name in names]
    if len(names) > 1:
        names = [_NUMBER.sub(lambda m: "[0-9]" * len(m[0]), name) for name in names]
    rules = [ModuleRule(pattern=name, precision=Rule.FP32) for name in dict.fromkeys(names)]
    return ", ".join(map(write_module_rule, rules))


def _groups(modules: list[ModuleError]) -> list[list[ModuleError]]:
    """Group modules of one class whose names differ in a number only: the same place of each layer.

    Where one of them stands out, or they are of several classes, each stands alone.
    """
    places: dict[str, list[ModuleError]] = defaultdict(list)
    for m in modules:
        places[_NUMBER.sub("#", m.module)].append(m)
    found = []
    for group in places.values():
        *rest, most = sorted(m.local_share for m in group)
        stands_out = bool(rest) and most > _STANDS_OUT * sum(rest) / len(rest)
        is_one = len({m.cls for m in group}) == 1 and not stands_out
        found += [group] if is_one else [[m] for m in group]
    return found


def _candidate(found: StepFidelity, edit: str, covers: Iterable[int], local_share: float) -> Candidate:
    covers = frozenset(covers)
    flops = sum(found.ops[i].flops for i in covers)
    return Candidate(edit=edit, covers=covers, local_share=local_share, flops=flops)


def _module_candidates(found: StepFidelity) -> list[Candidate]:
    """Return a rule for each group of modules. It covers what is inside them too."""
    candidates = []
    for group in _groups([m for m in found.modules if m.module and "<" not in m.module]):
        names = [m.module for m in group]
        inside = tuple(f"{name}." for name in names)
        covers = (i for i, op in enumerate(found.ops) if op.module in names or op.module.startswith(inside))
        candidates.append(_candidate(found, _rules(names), covers, sum(m.local_share for m in group)))
    return candidates


def _op_candidates(found: StepFidelity) -> list[Candidate]:
    groups: dict[str, list[int]] = defaultdict(list)
    for i, op in enumerate(found.ops):
        public_name = next((n for n in (op.called, op.op) if n in known_ops()), None)
        if public_name is not None and public_name not in _CASTS:
            groups[public_name].append(i)
    return [
        _candidate(found, f"op:{write_op_rule(name, Rule.FP32)}", places, sum(found.ops[i].local_share for i in places))
        for name, places in groups.items()
    ]


def _is_dear(candidate: Candidate, found: StepFidelity) -> bool:
    return candidate.flops > DEAR * found.flops


def candidates(found: StepFidelity, tries: int) -> list[Candidate]:
    """Return so many edits to try on the step as it is: modules and ops in turn, those with most local error first."""
    # what overflows in one module must be repaired there, whatever it costs
    modules = (c for c in _module_candidates(found) if not _is_dear(c, found) or math.isinf(c.local_share))
    ops = (c for c in _op_candidates(found) if not _is_dear(c, found))
    lists = (sorted((c for c in group if c.local_share > 0), key=lambda c: -c.local_share) for group in (modules, ops))
    mixed = [c for c in chain.from_iterable(zip_longest(*lists)) if c is not None]
    distinct: dict[frozenset[int], Candidate] = {}
    for candidate in mixed:
        distinct.setdefault(candidate.covers, candidate)
    return list(distinct.values())[:tries]


def together(tried: Iterable[tuple[Candidate, Proposal]], found: StepFidelity) -> Candidate | None:
    """Return the union of edits that are worth it, cheapest first, as long as it is not too dear; None for one or none."""
    chosen: list[Candidate] = []
    covered: frozenset[int] = frozenset()
    for candidate, _ in sorted(tried, key=lambda pair: (pair[1].cost, -pair[1].gain)):
        union = covered | candidate.covers
        if union != covered and sum(found.ops[i].flops for i in union) <= DEAR * found.flops:
            chosen, covered = [*chosen, candidate], union
    if len(chosen) < 2:
        return None
    return _candidate(found, ", ".join(c.edit for c in chosen), covered, sum(c.local_share for c in chosen))


def proposal(edit: str, before: StepFidelity, after: StepFidelity) -> Proposal:
    """Say what an edit changed."""
    return Proposal(
        edit=edit,
        gain=after.figure - before.figure if after.figure != before.figure else 0.0,
        gradients=None if after.gradients is None else after.gradients.total,
        outputs=after.outputs.total,
        cost=max(0, before.low_flops - after.low_flops) / max(1, before.flops),
    )


def ranked(found: Iterable[Proposal]) -> list[Proposal]:
    """Return proposals by what they gain for what they cost, the best first."""
    return sorted(found, key=lambda p: (DB_FOR_ALL_WORK * p.cost - p.gain, p.cost))


def try_edits(
    found: StepFidelity, again: Callable[[str], StepFidelity], tries: int
) -> tuple[list[Proposal], list[str]]:
    """Measure the step again under edits of the policy, as many as `tries` by themselves.

    Returns:
        Those that pay, and what they give together, by gain for cost, the best first; and the edits tried by themselves.
    """
    is_small = -math.inf < found.figure < GOOD_DB and any(op.dtype == "fp16" for op in found.ops)
    range_edits = [_candidate(found, edit, (), 0.0) for edit in _RANGE_EDITS if is_small]
    chosen = [*range_edits, *candidates(found, tries)][:tries]
    results = [proposal(candidate.edit, found, again(candidate.edit)) for candidate in chosen]
    worthy = [pair for pair in zip(chosen, results, strict=True) if pair[1].gain >= WORTH_DB]
    paying = [result for _, result in worthy]
    union = together(worthy, found)
    if union is not None and (result := proposal(union.edit, found, again(union.edit))).gain >= WORTH_DB:
        paying.append(result)
    if tries and found.figure == -math.inf and not paying:
        paying += _overflow_proposals(found, again, tries)
    return ranked(paying), [candidate.edit for candidate in chosen]


def _overflow_proposals(found: StepFidelity, again: Callable[[str], StepFidelity], tries: int) -> list[Proposal]:
    """Add a rule for whatever overflows next, as a value too large for one op is for the op that reads it."""
    edits: list[str] = []
    now = found
    while now.figure == -math.inf and len(edits) < tries:
        worst = next(iter(candidates(now, 1)), None)
        if worst is None:
            return []
        edits.append(worst.edit)
        now = again(", ".join(edits))
    return [] if now.figure == -math.inf else [proposal(", ".join(edits), found, now)]
