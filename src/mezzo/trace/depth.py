"""Sizes over depth: do activations or gradients grow or shrink layer by layer?"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ..formats import format_of, parse_dtype
from .records import Event, Size

LAYERS = 6
"""A trend needs this many layers."""
BINADES = 20
"""Total change, in powers of two, at which no loss scale serves both ends.

fp16 has 30 normal binades, 2^-14 to 2^16, and the elements of one gradient spread over about ten of them.
"""
STEADY = 0.8
"""Share of layers that must move the same way: a jump at one layer is a fault of that layer, not of depth."""
_DIVERGED = 1e3
"""Growth over steps at which training diverges."""
_TOLD = 5
"""Steps whose sizes are told."""
PER_LAYER = 0.5
"""Binades per layer that count as growth when a layer overflows: a factor of sqrt(2)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trend:
    """A steady change of size over the layers of one kind.

    Attributes:
        kind: outputs in forward, or gradients.
        pattern: names, with * for the layer's number.
        cls: class of the modules, empty for gradients.
        sizes: root mean squares, in the order in which the signal passes.
    """

    kind: Literal["output", "gradient"]
    pattern: str
    cls: str
    sizes: tuple[float, ...]
    step: int

    @property
    def binades(self) -> float:
        """Total change in powers of two, from where the signal starts to where it ends."""
        return _log(self.sizes[-1]) - _log(self.sizes[0])

    @property
    def verdict(self) -> Literal["exploding", "vanishing"]:
        """Which way it goes."""
        return "exploding" if self.binades > 0 else "vanishing"

    def __str__(self) -> str:
        what = "outputs" if self.kind == "output" else "gradients"
        way = "grow" if self.binades > 0 else "shrink"
        per = 2 ** (abs(self.binades) / (len(self.sizes) - 1))
        order = "" if self.kind == "output" else ", from the last layer to the first"
        return f"{what} of {self.pattern} {way} {per:.3g}-fold a layer over {len(self.sizes)} layers{order}: {self.sizes[0]:.3g} to {self.sizes[-1]:.3g}."


def _log(x: float) -> float:
    # zero stands for a gradient below the smallest fp32 number
    return math.log2(x) if x > 0 else -150.0


def _patterns(name: str) -> Iterable[tuple[str, int]]:
    """Yield a name with each of its numbers in turn replaced by *, and that number.

    >>> list(_patterns("layer.3.mlp.0"))
    [('layer.*.mlp.0', 3), ('layer.3.mlp.*', 0)]
    """
    for match in re.finditer(r"(?<![^.])\d+(?![^.])", name):
        yield name[: match.start()] + "*" + name[match.end() :], int(match[0])


def chains(sizes: Iterable[Size]) -> dict[tuple[str, str, str, int], list[Size]]:
    """Group sizes of the first call of each module, and step by step, into chains over depth.

    By kind, pattern, class and step they are sizes by layer number, of at least `LAYERS` layers.
    """
    found: dict[tuple[str, str, str, int], dict[int, Size]] = defaultdict(dict)
    for s in sizes:
        if s.call == 0:
            for pattern, number in _patterns(s.name):
                found[s.kind, pattern, s.cls, s.step].setdefault(number, s)
    return {key: [chain[n] for n in sorted(chain)] for key, chain in found.items() if len(chain) >= LAYERS}


def _is_steady(logs: list[float], per_layer: float = 0.0) -> bool:
    total = logs[-1] - logs[0]
    moves = [(b - a) * math.copysign(1, total) for a, b in itertools.pairwise(logs)]
    return sum(m > per_layer for m in moves) >= STEADY * len(moves)


def _in_fp32(size: Size) -> float:
    return size.amax if size.reference is None else size.reference


def trends(sizes: Iterable[Size]) -> list[Trend]:
    """Return the chains whose size changes steadily by more than `BINADES`, the largest change first.

    Gradients that fp16 flushed count as what they are in fp32: their zeros say nothing of depth.
    """
    found = []
    for (kind, pattern, cls, step), chain in chains(sizes).items():
        if any(s.nonfinite for s in chain):
            continue
        by_fp32 = kind == "gradient" and any(s.reference is not None for s in chain)
        values = [_in_fp32(s) if by_fp32 else s.rms for s in (chain if kind == "output" else reversed(chain))]
        while len(values) > LAYERS and values[-1] == 0:
            values.pop()
        logs = [_log(v) for v in values]
        # parts that stand side by side, as experts do, begin at 0 or come to it at once
        seen = logs[: len(values) - (values[-1] == 0)]
        is_deep = values[0] and abs(seen[-1] - seen[0]) >= BINADES / 2 and abs(logs[-1] - logs[0]) >= BINADES
        if is_deep and _is_steady(logs):
            found.append(Trend(kind=chain[0].kind, pattern=pattern, cls=cls, sizes=tuple(values), step=step))
    return sorted(found, key=lambda t: (t.step, -abs(t.binades)))


def grew_into(event: Event, sizes: Iterable[Size]) -> Trend | None:
    """Return the steady growth that an overflow is the end of.

    The layers before the one that overflowed must grow by at least `PER_LAYER` binades each, and carry on into the
    format's limit within two more layers.
    """
    limit = math.log2(format_of(parse_dtype(event.outputs[0].dtype)).max)
    beyond = _beyond_fp32(event, sizes)
    if beyond is not None:
        return beyond
    for (kind, pattern, cls, step), chain in chains(sizes).items():
        if kind != "output" or step != event.site.step or event.site.phase != "forward":
            continue
        finite = []
        for s in chain:
            if s.nonfinite or f"{event.site.module}.".startswith(f"{s.name}."):
                break  # its own layer may take the overflow in, as relu does with -inf
            finite.append(s)
        if len(finite) < LAYERS - 1 or not _ends(event, pattern, chain[len(finite) :]):
            continue
        logs = [_log(s.amax) for s in finite]
        slope = (logs[-1] - logs[0]) / (len(logs) - 1)
        if slope >= PER_LAYER and _is_steady(logs, PER_LAYER / 2) and logs[-1] + 2 * slope >= limit - slope:
            return Trend(kind="output", pattern=pattern, cls=cls, sizes=tuple(s.rms for s in finite), step=step)
    return None


def _beyond_fp32(event: Event, sizes: Iterable[Size]) -> Trend | None:
    """Return steady growth that fp32 does not survive either: the sizes of an fp32 run, carried on past the overflow."""
    for (kind, pattern, cls, step), chain in chains(sizes).items():
        bad = next((s for s in chain if s.nonfinite), None)
        if kind != "output" or step != event.site.step or bad is None or not _is_on_the_way(event, pattern, bad):
            continue
        values = [_in_fp32(s) if s.nonfinite else s.amax for s in chain]
        finite = list(itertools.takewhile(math.isfinite, values))
        if not LAYERS <= len(finite) < len(chain):
            continue
        if math.isnan(values[len(finite)]) and chain[len(finite)].reference is None:
            continue
        logs = [_log(v) for v in finite]
        if (logs[-1] - logs[0]) / (len(logs) - 1) >= PER_LAYER and _is_steady(logs, PER_LAYER / 2):
            return Trend(kind="output", pattern=pattern, cls=cls, sizes=tuple(finite), step=step)
    return None


def grew_over_steps(sizes: Iterable[Size], step: int) -> str:
    """Say how the outputs of a module, or else a gradient, grew a thousandfold over the steps up to one; empty if none did."""
    largest: dict[tuple[str, str, int], dict[int, float]] = defaultdict(dict)
    for s in sizes:
        if s.step <= step and not s.nonfinite and s.amax > 0:
            by_step = largest[s.kind, s.name or s.root, s.owner]
            by_step[s.step] = max(by_step.get(s.step, 0.0), s.amax)
    for (kind, name, _), by_step in sorted(largest.items(), key=lambda item: item[0][0], reverse=True):
        values = [value for value, _ in itertools.groupby(by_step[n] for n in sorted(by_step))]
        values = values[values.index(min(values)) :]  # steps that a loss scaler leaves out repeat a value
        grows = len(values) > 2 and values[-1] > _DIVERGED * values[0] and _is_steady([_log(v) for v in values])
        if grows:
            return f"{kind}s of {name} grow from step to step: {', '.join(f'{v:.3g}' for v in values[-_TOLD:])}."
    return ""


def _ends(event: Event, pattern: str, rest: list[Size]) -> bool:
    """Say whether an event ends a chain: in the layer behind its finite ones, which a program that was ended has not left."""
    if rest:
        return _is_on_the_way(event, pattern, rest[0])
    parts = event.site.module.split(".")
    numbered = ((".".join(parts[: n + 1]), int(part)) for n, part in enumerate(parts) if part.isdecimal())
    return any((pattern, number) in _patterns(name) for name, number in numbered)


def _is_on_the_way(event: Event, pattern: str, bad: Size) -> bool:
    """Say whether an event lies in the first bad layer of a chain, or in the module that runs the chain."""
    module, above = event.site.module, pattern.partition("*")[0].rstrip(".")
    is_inside = module == bad.name or module.startswith(f"{bad.name}.")
    return is_inside or not module or module == above or above.startswith(f"{module}.")
