"""Steps that cannot train: at a rate of 0, without gradients or with spent ones, past the scaler, or that blow weights up."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import storage_id, tree_leaves, version
from ..errors import listed
from ..optim import parameters
from .frames import short_line
from .lint_rules import LintWatch
from .lost_updates import FACTORS
from .measure import amax, rms
from .ops import plain
from .records import LintCase, LintRule, Site
from .verdict import number

_FLAT = frozenset({
    "sign", "sgn", "round", "floor", "ceil", "trunc", "fix", "clamp", "clamp_min", "clamp_max", "hardtanh", "relu", "relu6",
    "threshold", "hardsigmoid", "hardswish", "hardshrink", "softshrink", "sigmoid", "tanh", "softmax", "log_softmax", "softplus",
    "log_sigmoid", "exp", "gelu", "silu", "elu", "grid_sampler_2d", "grid_sampler_3d",
})  # fmt: skip
"""Ops whose slope is 0 everywhere or far out; a mask or a factor of 0 is written on purpose."""
_PIECEWISE_CONSTANT = frozenset({"sign", "sgn", "round", "floor", "ceil", "trunc", "fix"})
"""Those whose slope is 0 everywhere: no training ends there, as a margin that is kept by all rows ends in a clamp."""
_LEAST = {
    "scaled-step": 1,
    "cleared-gradients": 1,
    "uncleared-gradients": 8,
    "zero-gradients": 32,
    "no-gradients": 32,
    "exploding-step": 100,
}
"""Steps that show it; of the last, how many times as large weights become."""
_LEAST_OF_NORMS = 3
"""Backward passes through a norm over one number; a softmax has one where a batch is short."""
_STILL, _STILL_AT_THE_END = 3, 32
"""Steps at no rate: of all there are, since a warm-up's first may be one; and of the last, more than a third of all, since a schedule may end so."""
_NO_RATE = 1e-6
"""Of its largest: fp32 weights do not move at it."""
_LARGE = 10.0
"""Root mean square of weights that steps have blown up: what starts near 0 grows as fast, and stays small."""
_DIVERGED, _FEW, _GROWN = 100, 4, 10
"""Where training diverges: how many times as large as those before the first step half of the last few losses are, and weights once were as at the start."""


def _size_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the root mean square of an optimizer's weights. Syncs: yes."""
    found = [v for p in parameters(optimizer) if (v := plain(p)) is not None]
    squares = sum(rms(v, is_finite=True) ** 2 * v.numel() for v in found)
    return math.sqrt(squares / max(1, sum(v.numel() for v in found)))


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and plain(tensor) is not None


class _Idle(NamedTuple):
    """Steps, or backward passes, that a rule counted: where first, of what, how many (-1 once one was sound), and the rule's case."""

    site: Site
    what: str
    times: int
    case: LintCase = ""


_Stamp = tuple[int, int, int]
"""Which dense gradient a parameter has, how often it was written, and how often cleared."""


@dataclass(slots=True)
class _Gradients:
    """What backward brought to one parameter."""

    count: int = 0
    arrived: int = 0  # the event with which the last that is not 0 came, until a step has looked
    top: float | None = None  # the largest magnitude of the last
    zeroed_at: Site | None = None  # the op that made the last 0 throughout
    left: tuple[torch.optim.Optimizer, _Stamp] | None = None  # whose step left one behind, and its stamp then
    rounded: _Idle | None = None  # those in a row, up to the last, that are 0 behind an op whose slope is 0 everywhere
    is_alive: bool = False  # one came that trains
    was_stepped: bool = False
    values: set[tuple[int, float]] = field(default_factory=set)  # version and size: .data raises no version


@dataclass(slots=True)
class _OptimizerSteps:
    """The steps of one optimizer, whose weights had a size at the `start`, before or behind the last step, and at most."""

    start: float
    first_loss: float  # the largest before the first step
    size: float = 0.0
    largest: float = 0.0
    first: Site | None = None  # where the first one ended
    count: int = 0
    by_hand: int = 0  # on gradients that no backward pass brought
    rate: float = 0.0  # the largest
    still: tuple[Site, int, float] | None = None  # at no rate, up to the last: the first, how many, the largest rate
    is_sum: bool | None = None  # whether the gradient of the last was added to; None where nothing came to it
    blown_up_at: int = 0  # losses before the one that blew up weights
    # of the one that is taken just now
    ops: int = 0  # that had run before it
    has_gradients: bool = False
    is_cleared: bool | None = None  # whether gradients that came were cleared; None where nothing tells
    is_unreached: bool = False  # none came
    zero: Site | None = None  # the op that made all of them 0
    scale: float = 1.0  # that they are still multiplied by


class IdleSteps:
    """Counts steps at a rate of 0, on gradients cleared after backward or never, and gradients of 0, which one other of its kind unsays; sees what steps blew up."""

    def __init__(self) -> None:
        self._idle: dict[tuple[LintRule, Any], _Idle] = {}
        self._gradients: defaultdict[int, _Gradients] = defaultdict(_Gradients)
        self._steps: dict[torch.optim.Optimizer, _OptimizerSteps] = {}
        self._cleared: tuple[int, Site | None] = (0, None)
        self._clearings: Counter[int] = Counter()
        self._events = 0
        self._losses: list[float] = []

    def on_loss(self, size: float) -> None:
        """Take note of the magnitude of a loss, in fp32 where 16 bit made it 0. Host only."""
        self._losses.append(size)

    def on_gradient(
        self, parameter: Tensor, name: str, top: float, zeroed_at: Site | None, constant: Site | None
    ) -> None:
        """Take note of a gradient, its largest magnitude, and the op that made it 0 throughout, or is constant. Syncs: no."""
        # where no weight of 0 makes it 0, a loss is at its minimum
        is_met = self._losses[-1:] == [0.0] and zeroed_at is not None and zeroed_at.op not in FACTORS
        zeroed_at = None if is_met else zeroed_at
        own = self._gradients[id(parameter)]
        own.count, own.zeroed_at, own.top = own.count + 1, zeroed_at, top
        if (value := plain(parameter)) is not None:
            own.values.add((version(parameter), rms(value, is_finite=False)))
        if top:
            self._events += 1
            own.arrived = self._events
        if own.left is not None:
            # autograd adds in place, which is one more version; so does what clears, but through .data
            (optimizer, left), now = own.left, self._stamp(parameter)
            is_sum = self._steps[optimizer].is_sum = now == (left[0], left[1] + 1, left[2])
            # another network's loss may have added it, before it is cleared
            own.left = (optimizer, now) if is_sum else None
        flat = None if top or parameter.dim() < 2 else zeroed_at
        first, own.rounded = own.rounded, None
        if flat and flat.op in _PIECEWISE_CONSTANT:
            first = first or _Idle(flat, name, 0)
            own.rounded = first._replace(what=name, times=first.times + 1)
        if constant is not None:
            self._count("zero-gradients", id(parameter), constant, name, is_idle=True, case="one-number")
        # a weight of 0 between others of 0 stays one
        elif flat and (flat.op in _FLAT or not amax(parameter)):
            self._count("zero-gradients", id(parameter), flat, name, is_idle=True)
        else:
            own.is_alive = True

    def _stamp(self, parameter: Tensor) -> _Stamp:
        grad = parameter.grad
        if grad is None or not _is_dense(grad):
            return 0, 0, 0
        return storage_id(grad), version(grad), self._clearings[storage_id(grad)]

    def on_cleared(self, site: Site, cleared: object) -> None:
        """Take note of a line that sets something to 0, or the gradient of something to None. Syncs: no."""
        found = [v for v in tree_leaves(cleared) if isinstance(v, Tensor)]
        grads = (v.grad for v in found if v.is_leaf and v.grad is not None)
        self._clearings.update(storage_id(v) for v in (*found, *grads) if _is_dense(v))
        self._events += 1
        self._cleared = self._events, site

    def before(self, optimizer: torch.optim.Optimizer, ops: int, has_closure: bool, scale: float) -> None:
        """Look at the gradients of a step, given how many ops ran before it and what they were multiplied by; a closure brings its own. Syncs: yes."""
        size = _size_of(optimizer)
        steps = self._steps.setdefault(optimizer, _OptimizerSteps(size, max(self._losses, default=math.inf)))
        steps.size = size
        own = [(p, self._gradients[id(p)]) for p in parameters(optimizer)]
        arrived = max((brought.arrived for _, brought in own), default=0)
        held = [(brought, plain(p.grad)) for p, brought in own if p.grad is not None]
        for _, brought in own:
            brought.arrived = 0
        for brought, _ in held:
            brought.was_stepped = True
        steps.by_hand += bool(held) and not arrived
        is_empty = not has_closure and not any(g is None or amax(g) for _, g in held)
        if steps.is_sum:
            left = [(self._stamp(p), brought.left[1]) for p, brought in own if brought.left is not None]
            steps.is_sum = any(now[::2] == then[::2] for now, then in left)
        # divided by hand, they are no longer what came
        as_came = all(g is not None and amax(g) == brought.top for brought, g in held)
        sites = [brought.zeroed_at for brought, _ in held if brought.zeroed_at is not None]
        steps.ops, steps.has_gradients = ops, bool(held)
        steps.is_cleared = (arrived < self._cleared[0] if arrived else None) if is_empty else False
        steps.is_unreached = is_empty and not held and not arrived
        steps.zero = sites[0] if sites and as_came and is_empty else None
        steps.scale = scale if as_came and not has_closure and not is_empty else 1.0

    def after(self, optimizer: torch.optim.Optimizer, site: Site, ops: int) -> None:
        """Count the step that has just ended. Syncs: yes."""
        steps, name = self._steps[optimizer], type(optimizer).__name__
        rate = max((float(group.get("lr", 1.0)) for group in optimizer.param_groups), default=1.0)
        steps.rate = max(rate, steps.rate)
        began, still, top = steps.still or (site, 0, 0.0)
        steps.still = (began, still + 1, max(top, rate)) if rate <= _NO_RATE * steps.rate else None
        every = f"every parameter of {name}"
        self._count("zero-gradients", optimizer, steps.zero or site, every, steps.zero is not None)
        if steps.is_sum is not None:
            self._count("uncleared-gradients", optimizer, site, name, steps.is_sum)
            steps.is_sum = None
        kept = next((p for p in parameters(optimizer) if self._stamp(p)[0]), None)
        if kept is not None:
            self._gradients[id(kept)].left = optimizer, self._stamp(kept)
        size, was = _size_of(optimizer), steps.size
        steps.size, steps.largest = size, max(size, steps.largest)
        is_blown_up = 0 < was and max(_LARGE, _LEAST["exploding-step"] * was) < size < math.inf
        if is_blown_up and ("exploding-step", optimizer) not in self._idle:
            steps.blown_up_at = len(self._losses)
            self._idle["exploding-step", optimizer] = _Idle(site, f"one step of {name}", round(size / was))
        if steps.scale > 1:
            self._idle.setdefault(("scaled-step", optimizer), _Idle(site, name, round(steps.scale)))
        steps.first, steps.count = steps.first or site, steps.count + 1
        what, is_silent = f"the parameters of {name}", steps.ops == ops
        self._count("no-gradients", optimizer, site, what, steps.is_unreached and is_silent)
        if steps.is_cleared is not None and (cleared := self._cleared[1] or site):
            # an optimizer that computes without gradients has them from elsewhere
            is_idle = steps.is_cleared and (steps.has_gradients or is_silent)
            self._count("cleared-gradients", optimizer, cleared, f"{name}.step ({short_line(site.frame)})", is_idle)

    def _count(self, rule: LintRule, owner: object, site: Site, what: str, is_idle: bool, case: LintCase = "") -> None:
        last = self._idle.get((rule, owner), _Idle(site, what, 0, case))
        self._idle[rule, owner] = last._replace(times=last.times + 1 if is_idle and last.times >= 0 else -1)

    def tell(self, lints: LintWatch, named: Mapping[int, str]) -> None:
        """Say which optimizers never moved a weight, or hold what stood in the place of one, given the parameters in modules by their ids."""
        alive = {key: brought for key, brought in self._gradients.items() if brought.is_alive}
        for (rule, owner), (site, what, times, case) in self._idle.items():
            is_learnt = rule == "exploding-step" and self._has_fallen_since(self._steps[owner].blown_up_at)
            least = _LEAST[rule]
            if case == "one-number":
                least = 1 if lints.of_risks else _LEAST_OF_NORMS if site.op.endswith("norm") else least
            if times >= least and owner not in alive and not is_learnt:
                lints.add(rule, site, torch.float32, what, times, case=case)
        for brought in alive.values():  # quantised after it was trained
            rounded, count = brought.rounded, brought.count
            if rounded and rounded.times >= _LEAST["zero-gradients"] and 3 * rounded.times > count:
                what = f"{rounded.what}, after the first {count - rounded.times},"
                lints.add("zero-gradients", rounded.site, torch.float32, what, rounded.times)
        self._tell_still(lints)
        self._tell_replaced(lints, named)
        self._tell_diverged(lints)

    def _ended(self) -> Iterator[tuple[torch.optim.Optimizer, _OptimizerSteps, Site]]:
        """Yield each optimizer whose steps have ended, with where the first one was."""
        yield from ((one, steps, steps.first) for one, steps in self._steps.items() if steps.first is not None)

    def _has_fallen_since(self, step: int) -> bool:
        """Say whether losses were smaller in the end than before a step, as where weights have to become large."""
        before, after = self._losses[:step][-1:], self._losses[step:][-_FEW:]
        return bool(before and after) and max(after) < before[0]

    def _tell_diverged(self, lints: LintWatch) -> None:
        if len(self._losses) < 2 * _FEW:
            return
        last = sorted(self._losses[-_FEW:])[_FEW // 2]
        for optimizer, steps, site in self._ended():
            start, size, first = steps.start, steps.largest, steps.first_loss
            has_grown = max(_LARGE, _GROWN * start) < size < math.inf and _DIVERGED * first < last < math.inf
            if start and has_grown and ("exploding-step", optimizer) not in self._idle:
                what = f"{steps.count} steps of {type(optimizer).__name__}, in which the loss grew from {number(first)} to {number(last)},"
                lints.add("exploding-step", site, torch.float32, what, round(size / start))

    def unreached(self, named: Mapping[int, str]) -> list[tuple[int, str]]:
        """Return those of some parameters, by their ids, that had no gradient where others of them had. Host only."""
        left = [(key, name) for key, name in named.items() if not self._gradients[key].count]
        return left if len(left) < len(named) else []

    def _tell_still(self, lints: LintWatch) -> None:
        for optimizer, steps, _ in self._ended():
            if steps.still is None:
                continue
            (site, still, top), count = steps.still, steps.count
            if still == count >= _STILL or (still >= _STILL_AT_THE_END and 3 * still > count):
                after = f" after the first {count - still}" if still < count else ""
                largest = f", or at most a millionth of {number(steps.rate)}," if top else ""
                what = f"0{largest} in each of the {still} steps of {type(optimizer).__name__}{after}"
                lints.add("zero-learning-rate", site, torch.float32, what, still, case="tiny" if top else "")

    def _tell_replaced(self, lints: LintWatch, named: Mapping[int, str]) -> None:
        had = {key for key, brought in self._gradients.items() if brought.was_stepped}
        params = {one: set(map(id, parameters(one))) for one, *_ in self._ended()}
        held, least = set().union(*params.values()), _LEAST["no-gradients"]
        left = [name for key, name in named.items() if key not in held and self._gradients[key].count >= least]
        is_moved = any(len(self._gradients[key].values) > 1 for key in named)
        for optimizer, steps, site in self._ended() if left else ():
            # of the first step they count as arrived, since nobody looked at them before
            is_by_hand = steps.by_hand >= least - 1 and params[optimizer] <= had
            if is_by_hand and not is_moved:
                what = f"the parameters of {type(optimizer).__name__} had a gradient of backward, while {listed(left)}, which had, never changed,"
                lints.add("no-gradients", site, torch.float32, what, steps.count, case="masters")
            gone = params[optimizer] - named.keys() - had
            if gone and steps.count >= least and params[optimizer] & named.keys() & had:
                what = f"the {len(gone)} parameters of {type(optimizer).__name__} that are in no module, while no optimizer holds {listed(left)},"
                lints.add("no-gradients", site, torch.float32, what, steps.count)
