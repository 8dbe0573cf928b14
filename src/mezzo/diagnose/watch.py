"""`watch`: samples a run: exponents of activations, gradients and weights, lost updates, scale, skips."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_hooks

from .._torch import autograd_node, functorch_level
from ..errors import ConfigError, plural, shown
from ..formats import LOW_DTYPES, dtype_name, is_count
from ..kernels import move
from ..optim import keeps_masters, parameters, stepped_optimizer
from ..stamp import Stamp
from ..step import Inert, Stepper, StepResult
from ..trace import SampledRows, floating, leave_step, spaced, still_stepping
from .trial import cover
from .watch_report import Kind, StepRecord, TensorRecord, WatchReport

_KEPT_RESULTS = 256
_SMALL_RATE = 1e-8
"""At it and below, fp32 weights do not move by gradients of their own size."""
_TABLES, _DENSE = (nn.Embedding, nn.EmbeddingBag), torch.strided


@dataclass(frozen=True, slots=True)
class _Before:
    """Samples from before a step: weights, what lies beside those with masters and takes small updates, and by parameter whether its gradient was cleared."""

    weights: Tensor
    aux: list[Tensor | None]
    is_cleared: Tensor


@dataclass(frozen=True, slots=True)
class _SampledStep:
    """What a step did, on the device until a report reads it.

    Attributes:
        counts: by parameter, samples with a gradient, and those of them that did not move.
        flags: whether some gradient was not 0, whether it was 0 before the step, whether there was one and nothing moved.
        has_rate: whether a learning rate was not 0.
        taken: whether the step was; None where its result tells.
    """

    counts: Tensor
    flags: Tensor
    has_rate: Tensor
    taken: Tensor | None


class Watch(AbstractContextManager["Watch"]):
    """Watches a run until it is closed; made by `mezzo.diagnose.watch`, which says what it takes and writes.

    Without a stepper, `amp`, the steps are those of any optimizer of the model's parameters.
    """

    def __init__(self, model: nn.Module, amp: Stepper | None, every: int, width: int) -> None:
        self._model, self._amp, self._every = model, amp, every
        modules = model.named_modules()
        self._leaves = [(n, m) for n, m in modules if not [*m.children()] or [*m.parameters(recurse=False)]]
        self._parameters = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.is_floating_point()]
        self._device = self._parameters[0][1].device if self._parameters else torch.device("cpu")
        count = len(self._parameters)
        # one block for all: activations, then gradients, then weights
        self._first_gradient, self._first_weight = len(self._leaves), len(self._leaves) + count
        self._rows = SampledRows(self._first_weight + count, width, self._device)
        self._dtypes = {p.dtype for _, p in self._parameters}
        self._masters: dict[int, Any] = {}  # the optimizer that keeps a parameter's
        self._states = {n: Stamp.of(b) for n, b in model.named_buffers() if b.dtype in LOW_DTYPES}
        self._sampled: dict[int, _SampledStep] = {}
        self._moved = torch.zeros(2, count, dtype=torch.int64, device=self._device)
        self._counts = Counter[str]()  # of sampled steps, by the names that the report has for them
        self._seen = 0
        self._losses: list[Tensor] = []
        self._unread: list[tuple[int, StepResult, list[Tensor]]] = []
        self._steps: list[StepRecord] = []
        self._spent_s, self._started = 0.0, time.perf_counter()
        self._sampling: list[Any] = []
        self._stepping: list[Optimizer] = []
        self._before: _Before | None = None
        with ExitStack() as on:  # Ctrl-C inside of it leaves nothing on
            on.callback(self._disarm)
            self._arm()
            if amp is None:
                on.callback(optimizer_hooks.register_optimizer_step_pre_hook(self._before_update).remove)
                on.callback(optimizer_hooks.register_optimizer_step_post_hook(self._after_update).remove)
            else:
                self._note_masters(amp.optimizers)
                on.callback(cover(amp, step=self._step, backward=self._backward))
            self._on = on.pop_all()

    def __repr__(self) -> str:
        return f"<watch of {self._seen} {plural('step', self._seen)}: its .report says what it found>"

    @property
    def _is_sampling(self) -> bool:
        return self._seen % self._every == self._seen // self._every % self._every

    def _arm(self) -> None:
        """Put hooks on the tensors of a step that is sampled, and take them off those of any other."""
        if not self._is_sampling:
            self._disarm()
        elif not self._sampling:
            for row, (_, module) in enumerate(self._leaves):
                self._sampling.append(module.register_forward_hook(Inert(self._on_output, row)))
            for row, (_, parameter) in enumerate(self._parameters, self._first_gradient):
                hook = partial(self._on_gradient, row)
                self._sampling.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]  # torch's own

    def _disarm(self) -> None:
        while self._sampling:
            self._sampling.pop().remove()

    def _timed(self, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        with torch.no_grad():
            out = call()
        self._spent_s += time.perf_counter() - start
        return out

    def _on_output(self, row: int, module: nn.Module, args: Any, output: Any) -> None:
        if autograd_node() is None and functorch_level() is None:
            self._timed(lambda: self._put(row, output))

    def _on_gradient(self, row: int, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._timed(lambda: self._put(row, parameter.grad))

    def _put(self, row: int, value: object) -> None:
        found = next((v for _, v in floating(value)), None)
        if found is not None and found.numel():
            self._dtypes.add(found.dtype)
            self._rows.put(row, found)

    def _backward(self, backward: Callable[..., None], loss: Tensor, **options: Any) -> None:
        backward(loss, **options)
        self._losses.append(loss.detach())

    def _step(self, step: Callable[..., StepResult], closure: Any = None, **kwargs: Any) -> StepResult:
        known, one = self._amp.optimizers if self._amp is not None else (), kwargs.get("optimizer")
        stepped = known if one is None else [stepped_optimizer(one, known)]
        before = self._timed(lambda: self._sample_before(stepped)) if self._is_sampling else None
        result = step(closure, **kwargs)
        if before is not None:
            self._timed(lambda: self._compare(before, stepped, None))
        losses, self._losses = self._losses[-1:] if closure is not None else self._losses, []
        self._unread.append((self._seen, result, losses))
        self._end_step()
        return result

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._indices_of([optimizer]):
            return
        # an optimizer inside another, as in MasterWeights, is part of its step; of one that an error ended no hook of torch's tells
        self._stepping = [*still_stepping(self._stepping, optimizer), optimizer]
        if len(self._stepping) == 1:
            self._note_masters([optimizer])
            self._before = self._timed(lambda: self._sample_before([optimizer])) if self._is_sampling else None

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not leave_step(self._stepping, optimizer):
            return
        if (before := self._before) is not None:
            self._timed(lambda: self._compare(before, [optimizer], _is_taken(optimizer)))
        self._end_step()

    def _end_step(self) -> None:
        self._seen += 1
        self._timed(self._arm)
        if max(len(self._unread), len(self._sampled)) >= _KEPT_RESULTS:
            self._read_results()

    def _note_masters(self, optimizers: Iterable[Optimizer]) -> None:
        for o in filter(keeps_masters, optimizers):
            self._masters.update({id(p): o for p in parameters(o) if p.dtype in LOW_DTYPES})

    def _indices_of(self, optimizers: Sequence[Optimizer], above: float = -1.0) -> set[int]:
        """Return the indices of the optimizers' parameters whose rate is larger than a number; one on a device is not read. Host only."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        rated = [g for g in groups if isinstance(g.get("lr"), Tensor) or g.get("lr", 1) > above]
        owned = {id(p) for group in rated for p in group["params"]}
        return {index for index, (_, p) in enumerate(self._parameters) if id(p) in owned}

    def _sample_before(self, optimizers: Sequence[Optimizer]) -> _Before:
        """Sample weights, what gradients the optimizers are to step that no backward pass has shown, and which of the others are 0 by now."""
        is_cleared = torch.zeros(len(self._parameters), dtype=torch.bool, device=self._device)
        for index in self._indices_of(optimizers):
            grad, row = self._parameters[index][1].grad, self._first_gradient + index
            if not self._rows.is_holding(row, row + 1):
                self._put(row, grad)
            elif grad is None or grad.layout is torch.strided:
                is_cleared[index] = True if grad is None else (spaced(grad, self._rows.values.shape[1]) == 0).all()
        return _Before(self._sample_weights(), [self._sample_aux(p) for _, p in self._parameters], is_cleared)

    def _sample_weights(self) -> Tensor:
        for row, (_, parameter) in enumerate(self._parameters, self._first_weight):
            self._rows.put(row, parameter)
        return self._rows.values[self._first_weight :].clone()

    def _sample_aux(self, parameter: Tensor) -> Tensor | None:
        """Sample what is stored beside a weight that has a master, where its small updates go; None where nothing is. Syncs: no."""
        optimizer = self._masters.get(id(parameter))
        aux = None if optimizer is None else optimizer.aux_state(parameter)[1]
        return None if aux is None else spaced(aux, self._rows.values.shape[1]).clone()

    def _compare(self, before: _Before, optimizers: Sequence[Optimizer], taken: Tensor | None) -> None:
        """Count samples with a gradient whose weight or master did not move, then exponents; `taken` is None where the step's result will tell."""
        moved = torch.zeros_like(before.weights, dtype=torch.bool)
        for row, ((_, parameter), aux) in enumerate(zip(self._parameters, before.aux, strict=True)):
            sample, now = spaced(parameter.detach(), moved.shape[1]), self._sample_aux(parameter)
            moved[row, : sample.numel()] = sample != before.weights[row, : sample.numel()]
            # without aux state a master is new, or rounded at random, which loses none on average
            if id(parameter) in self._masters:
                moved[row, : sample.numel()] |= True if aux is None or now is None else now != aux
        gradients = slice(self._first_gradient, self._first_weight)
        meant = self._rows.values[gradients] != 0
        has_gradient = meant.any() | (not self._rows.is_holding(gradients.start, gradients.stop))
        # values of a sparse gradient stand at other indices than those of the weight
        dense = {i for i, (_, p) in enumerate(self._parameters) if getattr(p.grad, "layout", _DENSE) is _DENSE}
        was_meant = meant.logical_and_(self._column(dense & self._indices_of(optimizers, above=0))).any()
        meant &= ~before.is_cleared[:, None]
        is_left = meant.any()
        # what a model that has converged still gets fp32 rounds away, as it does all at a rate near 0
        wide = {i for i, (_, p) in enumerate(self._parameters) if not self._is_bare(p)}
        meant &= ~self._column(wide & self._indices_of(optimizers, above=_SMALL_RATE))
        counts = torch.stack([meant.sum(1), (meant & ~moved).sum(1)])
        flags = torch.stack([has_gradient, was_meant & ~is_left, meant.any() & ~moved.any()])
        self._sampled[self._seen] = _SampledStep(counts, flags, _has_rate(optimizers), taken)
        self._rows.count()

    def _column(self, indices: set[int]) -> Tensor:
        found = [index in indices for index in range(len(self._parameters))]
        return torch.tensor(found, dtype=torch.bool, device=self._device)[:, None]

    def _is_bare(self, parameter: Tensor) -> bool:
        """Say whether a weight is in 16 bit, and nothing keeps what it cannot hold. Host only."""
        return parameter.dtype in LOW_DTYPES and id(parameter) not in self._masters

    def _read_results(self) -> None:
        for index, result, losses in self._unread:
            self._steps.append(
                StepRecord(
                    step=index,
                    applied=result.applied,
                    scale=result.scale,
                    grad_norm=result.grad_norm,
                    loss=sum(float(loss) for loss in losses) if losses else None,
                    reason=result.reason or "",
                    names=() if result.applied else tuple(result.nonfinite)[:5],
                )
            )
        self._unread.clear()
        self._count_sampled()

    def _count_sampled(self) -> None:
        """Add up the sampled steps that were taken; a skipped step moves nothing and is not counted. Syncs: yes."""
        applied = {s.step: s.applied for s in self._steps}
        for number, step in self._sampled.items():
            if not (applied.get(number, True) if step.taken is None else bool(step.taken)):
                continue
            if not bool(step.has_rate):  # moves nothing, and is meant: a warm-up may begin so
                self._counts["still"] += 1
                continue
            has_gradient, is_cleared, is_idle = step.flags.tolist()
            self._moved += step.counts
            self._counts.update(sampled=1, zero=not has_gradient, cleared=is_cleared, idle=is_idle)
        self._sampled.clear()

    def _compute(self) -> torch.dtype:
        low = next((dtype for dtype in LOW_DTYPES if dtype in self._dtypes), torch.float32)
        return low if self._amp is None else self._amp.policy.compute or torch.float32

    @property
    def report(self) -> WatchReport:
        """What was seen so far. Syncs: yes, here and nowhere between reports."""
        self._read_results()
        if self._seen == 0 and self._amp is None and self._rows.is_holding():
            self._timed(self._sample_weights)
            self._rows.count()  # a model that is only run, never trained
        tensors = self._tensors()
        reached = {t.name for t in tensors if t.kind == "gradient"}
        elapsed, buffers = time.perf_counter() - self._started, dict(self._model.named_buffers())
        return WatchReport(
            model=type(self._model).__name__,
            policy="" if self._amp is None else str(self._amp.policy),
            compute=dtype_name(self._compute()),
            every=self._every,
            num_steps=self._seen,
            steps=tuple(self._steps),
            tensors=tensors,
            loss_scale=self._steps[-1].scale if self._steps else 1.0,
            host_share=self._spent_s / elapsed if elapsed else 0.0,
            **self._counts,
            dead=self._dead(tensors),
            states=tuple(n for n, b in buffers.items() if n in self._states and not self._states[n].is_current(b)),
            masters=next((f"{dtype_name(p.dtype)}-master" for _, p in self._parameters if self._is_bare(p)), ""),
            unreached=tuple(name for name, _ in self._parameters if name not in reached),
        )

    def _tensors(self) -> tuple[TensorRecord, ...]:
        """Return what was sampled of each tensor; of a weight, how many of its updates were lost. Syncs: yes."""
        rows: list[tuple[Kind, str, float]] = [("activation", name, 0.0) for name, _ in self._leaves]
        rows += [("gradient", name, 0.0) for name, _ in self._parameters]
        counts = zip(self._parameters, *self._moved.tolist(), strict=True)
        rows += [("weight", name, lost / meant if meant else 0.0) for (name, _), meant, lost in counts]
        sampled = zip(rows, self._rows.histograms(), self._rows.filled, strict=True)
        return tuple(
            TensorRecord(kind=kind, name=name, histogram=histogram, lost=share)
            for (kind, name, share), histogram, filled in sampled
            if filled
        )

    def _dead(self, tensors: Sequence[TensorRecord]) -> tuple[str, ...]:
        """Return the weights whose every sampled gradient was 0; a table's may be, of rows that nothing looked up. Host only."""
        tables = {id(p) for m in self._model.modules() if isinstance(m, _TABLES) for p in m.parameters()}
        may_die = {n for n, p in self._parameters if p.dim() > 1 and id(p) not in tables}
        gradients = [(t.name, t.histogram) for t in tensors if t.kind == "gradient" and t.name in may_die]
        return tuple(name for name, h in gradients if h.zeros and not h.numbers and not h.nonfinite)

    def close(self) -> None:
        """Stop watching. What was seen stays. Writes: hooks, and `step` of the stepper, as they were."""
        self._on.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def _has_rate(optimizers: Sequence[Optimizer]) -> Tensor:
    """Say whether a learning rate of any group is not 0: shape (), bool. Syncs: no."""
    rates = [group.get("lr", 1.0) for optimizer in optimizers for group in optimizer.param_groups]
    there = [rate for rate in rates if isinstance(rate, Tensor) and rate.device.type != "cpu"]
    home = there[0].device if there else torch.device("cpu")
    here = any(float(rate) != 0 for rate in rates if not any(rate is one for one in there))
    found = torch.full((), here, dtype=torch.bool, device=home)
    for rate in there:
        found = found | move(rate.detach().reshape(()) != 0, home)
    return found


def _is_taken(optimizer: Optimizer) -> Tensor | None:
    """Say whether a step that just ran was not skipped on the device; None where nobody could skip it there. Syncs: no."""
    found = getattr(optimizer, "found_inf", None)
    return (found == 0).all() if isinstance(found, Tensor) else None


def watch(run: Stepper | nn.Module, *, every: int = 10, width: int = 1024) -> Watch:
    """Watch a run: where its values lie in the formats' ranges, what is lost, what the scale does.

    On one step in `every` some values of each activation, gradient and weight are put into one block of memory
    and counted by exponent in one reduction. The host reads nothing until `report` is asked for.

    Args:
        run: what `mezzo.prepare` returned; or a model that is not prepared, whose report has no loss scale and no
            skipped steps, and whose gradients are those that its own loop made, scaled or not.
        every: one step in so many is sampled, the first first, and each time one step later than so many after the last, up
            to twice as many: what a loop does in turn is seen whole.
        width: values sampled of each tensor, evenly spaced.

    Returns:
        The watch, to be closed or used as a context. Its `report` says how much host time it took.

    Raises:
        ConfigError: `every` or `width` below 1, or something else to watch.
        StepError: the stepper was released.

    Writes: hooks on leaf modules and parameters, and `step` and `backward` of a stepper or torch's global optimizer hooks, until it is
        closed.
    Syncs: no; `report` does.

    >>> import mezzo
    >>> model = nn.Linear(4, 1)
    >>> amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    >>> with watch(amp) as w:
    ...     amp.backward(model(torch.ones(2, 4)).sum())
    ...     _ = amp.step()
    >>> len(w.report.steps), w.report.skipped
    (1, 0)
    """
    if not (is_count(every, 1) and is_count(width, 1)):
        raise ConfigError(
            f"watch was asked for every={shown(every)}, width={shown(width)}; give whole numbers of at least 1."
        )
    if isinstance(run, Stepper):
        run.report()  # of the shards that optimizers know; a stepper that was released refuses it
        return Watch(run.model, run, every, width)
    if isinstance(run, nn.Module):
        return Watch(run, None, every, width)
    raise ConfigError(
        f"watch was given {type(run).__name__}; it takes what mezzo.prepare returned, or a model that is not prepared."
    )
