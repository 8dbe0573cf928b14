"""Steps that cannot train: at a rate of 0, without gradients or with spent ones, past the scaler, or that blow weights up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

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


class IdleSteps:
    """Counts steps at a rate of 0, on gradients cleared after backward or never, and gradients of 0, which one other of its kind unsays; sees what steps blew up."""

    def __init__(self) -> None:
        self._idle: dict[tuple[LintRule, object], _Idle] = {}
        self._alive: set[object] = set()
        self._left: dict[int, tuple[torch.optim.Optimizer, tuple[int, int, int]]] = {}
        self._is_sum: dict[torch.optim.Optimizer, bool] = {}
        self._arrived: dict[int, int] = {}
        self._tops: dict[int, float] = {}
        self._zeroed_at: dict[int, Site | None] = {}
        self._since: dict[int, tuple[Site, str, int]] = {}
        self._zero: Site | None = None
        self._cleared: tuple[int, Site | None] = (0, None)
        self._clearings: Counter[int] = Counter()
        self._events = 0
        self._is_cleared: bool | None = None
        self._ops, self._has_gradients = 0, False
        self._is_unreached = False
        self._sizes: dict[torch.optim.Optimizer, tuple[float, float, float]] = {}  # at first, before a step, at most
        self._first_losses: dict[torch.optim.Optimizer, float] = {}
        self._losses: list[float] = []
        self._blown_up: dict[object, int] = {}
        self._scale = 1.0
        self._steps: dict[torch.optim.Optimizer, tuple[Site, int]] = {}
        self._brought: Counter[int] = Counter()
        self._had: set[int] = set()
        self._by_hand: Counter[torch.optim.Optimizer] = Counter()
        self._seen: dict[int, set[tuple[int, float]]] = {}
        self._rates: dict[torch.optim.Optimizer, float] = {}
        self._still: dict[torch.optim.Optimizer, tuple[Site, int, float]] = {}

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
        self._zeroed_at[id(parameter)] = zeroed_at
        self._brought[id(parameter)] += 1
        if (value := plain(parameter)) is not None:  # what is written through .data counts no version
            self._seen.setdefault(id(parameter), set()).add((version(parameter), rms(value, is_finite=False)))
        self._tops[id(parameter)] = top
        if top:
            self._events += 1
            self._arrived[id(parameter)] = self._events
        optimizer, left = self._left.pop(id(parameter), (None, (0, 0, 0)))
        if optimizer is not None:
            # autograd adds in place, which is one more version; so does what clears, but through .data
            now = self._stamp(parameter)
            self._is_sum[optimizer] = now == (left[0], left[1] + 1, left[2])
            if self._is_sum[optimizer]:  # another network's loss may have added it, before it is cleared
                self._left[id(parameter)] = optimizer, now
        flat = None if top or parameter.dim() < 2 else zeroed_at
        first, _, times = self._since.pop(id(parameter), (flat, name, 0))
        if flat and flat.op in _PIECEWISE_CONSTANT:
            self._since[id(parameter)] = first or flat, name, times + 1
        if constant is not None:
            self._count("zero-gradients", id(parameter), constant, name, is_idle=True, case="one-number")
        # a weight of 0 between others of 0 stays one
        elif flat and (flat.op in _FLAT or not amax(parameter)):
            self._count("zero-gradients", id(parameter), flat, name, is_idle=True)
        else:
            self._alive.add(id(parameter))

    def _stamp(self, parameter: Tensor) -> tuple[int, int, int]:
        """Return which dense gradient a parameter has, how often it was written, and how often cleared. Host only."""
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
        arrived = max((self._arrived.pop(id(p), 0) for p in parameters(optimizer)), default=0)
        grads = {id(p): plain(p.grad) for p in parameters(optimizer) if p.grad is not None}
        found = list(grads.values())
        self._had |= grads.keys()
        self._by_hand[optimizer] += bool(grads) and not arrived
        is_empty = not has_closure and not any(g is None or amax(g) for g in found)
        self._is_cleared = False
        if is_empty:  # None where it cannot be told: nothing arrived
            self._is_cleared = arrived < self._cleared[0] if arrived else None
        self._ops, self._has_gradients = ops, bool(found)
        self._is_unreached = is_empty and not found and not arrived
        if self._is_sum.get(optimizer):
            left = [(self._stamp(p), self._left[id(p)][1]) for p in parameters(optimizer) if id(p) in self._left]
            self._is_sum[optimizer] = any(now[::2] == then[::2] for now, then in left)
        size = _size_of(optimizer)
        self._first_losses.setdefault(optimizer, max(self._losses, default=math.inf))
        start, _, largest = self._sizes.get(optimizer, (size, size, 0.0))
        self._sizes[optimizer] = start, size, largest
        # divided by hand, they are no longer what came
        as_came = all(g is not None and amax(g) == self._tops.get(key) for key, g in grads.items())
        self._scale = scale if as_came and not has_closure and not is_empty else 1.0
        sites = [site for key in grads if (site := self._zeroed_at.get(key)) is not None]
        self._zero = sites[0] if sites and as_came and is_empty else None

    def after(self, optimizer: torch.optim.Optimizer, site: Site, ops: int) -> None:
        """Count the step that has just ended. Syncs: yes."""
        rate = max((float(group.get("lr", 1.0)) for group in optimizer.param_groups), default=1.0)
        self._rates[optimizer] = max(rate, self._rates.get(optimizer, 0.0))
        name = type(optimizer).__name__
        began, still, top = self._still.pop(optimizer, (site, 0, 0.0))
        if rate <= _NO_RATE * self._rates[optimizer]:
            self._still[optimizer] = began, still + 1, max(top, rate)
        zero, every = self._zero, f"every parameter of {name}"
        self._count("zero-gradients", optimizer, zero or site, every, zero is not None)
        if optimizer in self._is_sum:
            self._count("uncleared-gradients", optimizer, site, name, self._is_sum.pop(optimizer))
        kept = next((p for p in parameters(optimizer) if self._stamp(p)[0]), None)
        if kept is not None:
            self._left[id(kept)] = optimizer, self._stamp(kept)
        size, (start, before, largest) = _size_of(optimizer), self._sizes[optimizer]
        self._sizes[optimizer] = start, size, max(size, largest)
        is_blown_up = 0 < before and max(_LARGE, _LEAST["exploding-step"] * before) < size < math.inf
        if is_blown_up and optimizer not in self._blown_up:
            self._blown_up[optimizer] = len(self._losses)
            self._idle["exploding-step", optimizer] = _Idle(site, f"one step of {name}", round(size / before))
        if self._scale > 1:
            self._idle.setdefault(("scaled-step", optimizer), _Idle(site, name, round(self._scale)))
        first, steps = self._steps.get(optimizer, (site, 0))
        self._steps[optimizer] = first, steps + 1
        what, is_silent = f"the parameters of {name}", self._ops == ops
        self._count("no-gradients", optimizer, site, what, self._is_unreached and is_silent)
        if self._is_cleared is not None and (cleared := self._cleared[1] or site):
            # an optimizer that computes without gradients has them from elsewhere
            is_idle = self._is_cleared and (self._has_gradients or is_silent)
            self._count("cleared-gradients", optimizer, cleared, f"{name}.step ({short_line(site.frame)})", is_idle)

    def _count(self, rule: LintRule, owner: object, site: Site, what: str, is_idle: bool, case: LintCase = "") -> None:
        last = self._idle.get((rule, owner), _Idle(site, what, 0, case))
        self._idle[rule, owner] = last._replace(times=last.times + 1 if is_idle and last.times >= 0 else -1)

    def tell(self, lints: LintWatch, named: Mapping[int, str]) -> None:
        """Say which optimizers never moved a weight, or hold what stood in the place of one, given the parameters in modules by their ids."""
        for (rule, owner), (site, what, times, case) in self._idle.items():
            is_learnt = rule == "exploding-step" and self._has_fallen_since(self._blown_up[owner])
            least = _LEAST[rule]
            if case == "one-number":
                least = 1 if lints.of_risks else _LEAST_OF_NORMS if site.op.endswith("norm") else least
            if times >= least and owner not in self._alive and not is_learnt:
                lints.add(rule, site, torch.float32, what, times, case=case)
        for key, (site, name, times) in self._since.items():  # quantised after it was trained
            if key in self._alive and times >= _LEAST["zero-gradients"] and 3 * times > self._brought[key]:
                what = f"{name}, after the first {self._brought[key] - times},"
                lints.add("zero-gradients", site, torch.float32, what, times)
        self._tell_still(lints)
        self._tell_replaced(lints, named)
        self._tell_diverged(lints)

    def _has_fallen_since(self, step: int) -> bool:
        """Say whether losses were smaller in the end than before a step, as where weights have to become large."""
        before, after = self._losses[:step][-1:], self._losses[step:][-_FEW:]
        return bool(before and after) and max(after) < before[0]

    def _tell_diverged(self, lints: LintWatch) -> None:
        if len(self._losses) < 2 * _FEW:
            return
        last = sorted(self._losses[-_FEW:])[_FEW // 2]
        for optimizer, (site, steps) in self._steps.items():
            (start, _, size), first = self._sizes[optimizer], self._first_losses[optimizer]
            has_grown = max(_LARGE, _GROWN * start) < size < math.inf and _DIVERGED * first < last < math.inf
            if start and has_grown and ("exploding-step", optimizer) not in self._idle:
                what = f"{steps} steps of {type(optimizer).__name__}, in which the loss grew from {number(first)} to {number(last)},"
                lints.add("exploding-step", site, torch.float32, what, round(size / start))

    def unreached(self, named: Mapping[int, str]) -> list[tuple[int, str]]:
        """Return those of some parameters, by their ids, that had no gradient where others of them had. Host only."""
        left = [(key, name) for key, name in named.items() if not self._brought[key]]
        return left if len(left) < len(named) else []

    def _tell_still(self, lints: LintWatch) -> None:
        for optimizer, (site, still, top) in self._still.items():
            steps, name = self._steps[optimizer][1], type(optimizer).__name__
            if still == steps >= _STILL or (still >= _STILL_AT_THE_END and 3 * still > steps):
                after = f" after the first {steps - still}" if still < steps else ""
                largest = f", or at most a millionth of {number(self._rates[optimizer])}," if top else ""
                what = f"0{largest} in each of the {still} steps of {name}{after}"
                lints.add("zero-learning-rate", site, torch.float32, what, still, case="tiny" if top else "")

    def _tell_replaced(self, lints: LintWatch, named: Mapping[int, str]) -> None:
        params = {o: set(map(id, parameters(o))) for o in self._steps}
        held, least = set().union(*params.values()), _LEAST["no-gradients"]
        left = [name for key, name in named.items() if key not in held and self._brought[key] >= least]
        is_moved = any(len(self._seen.get(key, ())) > 1 for key in named)
        for optimizer, (site, steps) in self._steps.items() if left else ():
            # of the first step they count as arrived, since nobody looked at them before
            is_by_hand = self._by_hand[optimizer] >= least - 1 and params[optimizer] <= self._had
            if is_by_hand and not is_moved:
                what = f"the parameters of {type(optimizer).__name__} had a gradient of backward, while {listed(left)}, which had, never changed,"
                lints.add("no-gradients", site, torch.float32, what, steps, case="masters")
            gone = params[optimizer] - named.keys() - self._had
            if gone and steps >= least and params[optimizer] & named.keys() & self._had:
                what = f"the {len(gone)} parameters of {type(optimizer).__name__} that are in no module, while no optimizer holds {listed(left)},"
                lints.add("no-gradients", site, torch.float32, what, steps)
