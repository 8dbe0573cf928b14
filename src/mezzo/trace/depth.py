"""Sizes over depth: do activations or gradients grow or shrink layer by layer?"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .records import Event, Size
from .verdict import limit_of

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


def _trend(pattern: str, chain: list[Size], sizes: list[float]) -> Trend:
    first = chain[0]
    return Trend(kind=first.kind, pattern=pattern, cls=first.cls, sizes=tuple(sizes), step=first.step)


def trends(sizes: Iterable[Size]) -> list[Trend]:
    """Return the chains whose size changes steadily by more than `BINADES`, the largest change first.

    Gradients that fp16 flushed count as what they are in fp32: their zeros say nothing of depth.
    """
    found = []
    for (kind, pattern, _, _), chain in chains(sizes).items():
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
            found.append(_trend(pattern, chain, values))
    return sorted(found, key=lambda t: (t.step, -abs(t.binades)))


def grew_into(event: Event, sizes: Iterable[Size]) -> Trend | None:
    """Return the steady growth that an overflow is the end of.

    The layers before the one that overflowed must grow by at least `PER_LAYER` binades each, and carry on into the
    format's limit within two more layers.
    """
    of_step = chains(s for s in sizes if s.kind == "output" and s.step == event.site.step)
    outputs = [(pattern, chain) for (_, pattern, _, _), chain in of_step.items()]
    for pattern, chain in outputs:
        if beyond := _beyond_fp32(event, pattern, chain):
            return _trend(pattern, chain, beyond)
    limit = math.log2(limit_of(event))
    for pattern, chain in outputs if event.site.phase == "forward" else ():
        # its own layer may take the overflow in, as relu does with -inf
        finite = list(itertools.takewhile(lambda s: not (s.nonfinite or _is_within(event, s)), chain))
        slope = _slope([s.amax for s in finite]) if len(finite) >= LAYERS - 1 else 0.0
        reaches = slope and _log(finite[-1].amax) + 3 * slope >= limit
        if reaches and _ends(event, pattern, chain[len(finite) :]):
            return _trend(pattern, chain, [s.rms for s in finite])
    return None


def _beyond_fp32(event: Event, pattern: str, chain: list[Size]) -> list[float]:
    """Return the sizes of an fp32 run, carried on past an overflow, where they grow steadily until fp32 does not hold them either; else none."""
    bad = next((s for s in chain if s.nonfinite), None)
    values = (_in_fp32(s) if s.nonfinite else s.amax for s in chain)
    finite = list(itertools.takewhile(math.isfinite, values))
    is_end = bad is not None and _is_on_the_way(event, pattern, bad) and LAYERS <= len(finite) < len(chain)
    return finite if is_end and _slope(finite) else []


def _slope(sizes: list[float]) -> float:
    """Return the binades per layer by which sizes grow; 0 where they do not grow steadily, by at least `PER_LAYER`."""
    logs = [_log(size) for size in sizes]
    slope = (logs[-1] - logs[0]) / (len(logs) - 1)
    return slope if slope >= PER_LAYER and _is_steady(logs, PER_LAYER / 2) else 0.0


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
    """Say whether an event ends a chain: it lies in the layer after the finite ones, which a program that ended there never left."""
    if rest:
        return _is_on_the_way(event, pattern, rest[0])
    parts = event.site.module.split(".")
    numbered = ((".".join(parts[: n + 1]), int(part)) for n, part in enumerate(parts) if part.isdecimal())
    return any((pattern, number) in _patterns(name) for name, number in numbered)


def _is_within(event: Event, layer: Size) -> bool:
    return f"{event.site.module}.".startswith(f"{layer.name}.")


def _is_on_the_way(event: Event, pattern: str, bad: Size) -> bool:
    """Say whether an event lies in the first bad layer of a chain, or in the module that runs the chain."""
    module, above = event.site.module, pattern.partition("*")[0].rstrip(".")
    return _is_within(event, bad) or not module or module == above or above.startswith(f"{module}.")
