"""Where two runs part: pure functions of what was recorded."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from .mismatch_report import Cause, MismatchFinding, OpPlace
from .observed_run import OpRun, Run, Value


class _Known:
    """Everything a run read or made, to be looked up by value."""

    def __init__(self, run: Run) -> None:
        self._values: dict[tuple[int, int], list[Value]] = defaultdict(list)
        for op in run.ops:
            for value in (*op.reads, *op.makes):
                same = self._values[value.numel, value.left_out]
                if value not in same:
                    same.append(value)

    def __contains__(self, value: Value) -> bool:
        return any(value.is_same(other) for other in self._values.get((value.numel, value.left_out), ()))


def _frontier(run: Run, known: _Known, outputs: Iterable[int]) -> list[int]:
    """Return the ops behind outputs that made something new out of nothing new, in order."""
    todo = [maker for i in outputs if (maker := run.makers[i]) is not None]
    seen: set[int] = set()
    found = []
    while todo:
        index = todo.pop()
        if index in seen:
            continue
        seen.add(index)
        op = run.ops[index]
        new = [r for v, r in zip(op.reads, op.readers, strict=True) if r is not None and v not in known]
        todo += new
        if not new:
            found.append(index)
    return sorted(found)


def _behind(run: Run, known: _Known, wrong: Iterable[int]) -> list[int]:
    return _frontier(run, known, [i for i in wrong if run.values[i] not in known])


def _follows(run: Run, index: int, op: OpRun) -> bool:
    """Say whether what reads an op's result does what the other run does in its place."""
    readers = [n for n in run.ops[index + 1 :] if index in n.readers]
    return any(n.site.op == op.site.op and n.arguments == op.arguments for n in readers)


def first_divergence(a: Run, b: Run) -> MismatchFinding | None:
    """Return the first op where two runs part; None where fp64 gives the same in both and no kernel is at fault.

    They returned as many tensors of as many elements.
    """
    wrong = [i for i, (x, y) in enumerate(zip(a.values, b.values, strict=True)) if not x.is_same(y)]
    if not wrong:
        return _kernel_finding(a, b)
    known_a, known_b = _Known(a), _Known(b)
    ours, theirs = _behind(a, known_b, wrong), _behind(b, known_a, wrong)
    # a result may be something that the other run knows by another way, as x * 1 is
    ours = ours or [i for i in _frontier(a, known_b, wrong) if a.ops[i].site.op in {b.ops[j].site.op for j in theirs}]
    theirs = theirs or [j for j in _frontier(b, known_a, wrong) if b.ops[j].site.op in {a.ops[i].site.op for i in ours}]
    x, y = _facing([a.ops[i] for i in ours], [b.ops[j] for j in theirs])
    return _weight_finding(x, y, known_a, known_b) or _op_finding(a, b, x, y)


def _facing(ours: list[OpRun], theirs: list[OpRun]) -> tuple[OpRun | None, OpRun | None]:
    """Return the op of each run to hold against the other's: the first, or two of one name and module if one of them is a first."""
    pairs = ((x, y) for x in ours for y in theirs if (x.site.op, x.site.module) == (y.site.op, y.site.module))
    alike = next(pairs, None)
    if alike is not None and (alike[0] is ours[0] or alike[1] is theirs[0]):
        return alike
    return next(iter(ours), None), next(iter(theirs), None)


def _weight_finding(x: OpRun | None, y: OpRun | None, known_a: _Known, known_b: _Known) -> MismatchFinding | None:
    """Return what was there before one run, and the other does not have; None if there is nothing, or only one of the two ops draws."""
    if x is not None and y is not None and x.draws != y.draws:
        return None
    for side, other, op, known in (("a", "b", x, known_b), ("b", "a", y, known_a)):
        leaves = [] if op is None else [v.leaf for v in op.reads if v.leaf and v not in known]
        if op is not None and leaves:
            return _finding_of("weights", op, x, y, f"{leaves[0]} of {side} has no equal in {other}")
    return None


def _op_finding(a: Run, b: Run, x: OpRun | None, y: OpRun | None) -> MismatchFinding:
    if x is None or y is None:
        op = x or y
        assert op is not None  # something made the output that differs
        return _finding_of("random" if op.draws else "missing op", op, x, y, f"only {'a' if x else 'b'} runs it")
    if x.draws or y.draws:
        op = x if x.draws else y
        what = "both draw, and not the same numbers" if x.draws and y.draws else f"only {'a' if op is x else 'b'} draws"
        return _finding_of("random", op, x, y, what)
    if x.site.op == y.site.op:
        return _same_op_finding(x, y)
    if _follows(a, a.ops.index(x), y):
        return _finding_of("missing op", x, x, None, f"only a runs it; b goes on with {y.name}")
    if _follows(b, b.ops.index(y), x):
        return _finding_of("missing op", y, None, y, f"only b runs it; a goes on with {x.name}")
    return _finding_of("other op", x, x, y, f"a runs {x.name}, b runs {y.name}")


def _same_op_finding(x: OpRun, y: OpRun) -> MismatchFinding:
    changed = _changed(x, y)
    if changed:
        return _finding_of("arguments", x, x, y, changed)
    if all(not v.is_float for v in x.makes):
        return _finding_of("decision", x, x, y, "rounding turned an index or a comparison")
    return _finding_of("other op", x, x, y, "the same op on other operands")


def _changed(x: OpRun, y: OpRun) -> str:
    one, two = dict(x.arguments), dict(y.arguments)
    names = [n for n in (*one, *(n for n in two if n not in one)) if one.get(n) != two.get(n)]
    return "; ".join(f"{n} is {one.get(n, 'left out')} in a and {two.get(n, 'left out')} in b" for n in names)


def _kernel_finding(a: Run, b: Run) -> MismatchFinding | None:
    """Return the first op whose kernel is wrong in one run alone."""
    # reversed, so that the first of each module and op stays
    bad_a, bad_b = ({(o.site.module, o.site.op): o for o in reversed(r.ops) if o.is_wrong} for r in (a, b))
    alone = [(a.ops.index(op), "a", op) for key, op in bad_a.items() if key not in bad_b]
    alone += [(b.ops.index(op), "b", op) for key, op in bad_b.items() if key not in bad_a]
    if not alone:
        return None
    _, side, op = min(alone, key=lambda found: found[0])
    x, y = (op, None) if side == "a" else (None, op)
    if op.local == math.inf:
        return _finding_of("overflow", op, x, y, f"{side} holds inf or NaN in {op.dtype} where fp64 is finite")
    what = f"{side} is {op.local:.2g} off on the values it was given, rounding explains {op.bound:.2g}"
    return _finding_of("kernel", op, x, y, what)


def _finding_of(cause: Cause, op: OpRun, a: OpRun | None, b: OpRun | None, what: str) -> MismatchFinding:
    frame = next((o.frame for o in (a, b) if o is not None and o.frame is not None), None)
    places = {"a": place_of(a), "b": place_of(b)}
    return MismatchFinding(cause=cause, op=op.label, module=op.site.module, frame=frame, what=what, **places)


def place_of(op: OpRun | None) -> OpPlace | None:
    """Return an op of a run as a report has it."""
    if op is None:
        return None
    return OpPlace(op=op.label, kernel=op.kernel, module=op.site.module, frame=op.frame, dtype=op.dtype)
