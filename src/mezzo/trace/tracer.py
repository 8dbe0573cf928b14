"""`trace`: a context in which the first bad op of a training step is found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizer_hooks

from .._torch import autograd_node, dispatch_modes, function_modes
from ..binding import named_tensors
from ..casting import backward_message, traceback_message
from ..errors import ConfigError, RegionError, plural, shown
from ..formats import SMALLEST, dtype_name, is_count, is_number, number_of
from ..optim import parameters
from .collector import Collector
from .context import TraceContext
from .evidence import PendingOutputs, leaves_behind
from .findings import LASTING, find, is_mostly_flushed
from .frames import leave_step, still_stepping
from .idle_steps import IdleSteps
from .measure import amax, is_finite, rms, tensor_facts
from .modules import Place, check_model
from .ops import plain
from .records import FlushedGradient, Size, TraceRecord
from .trace_report import TraceReport

_OF_SCALER = {
    "Attempting to unscale FP16 gradients.": "keep weights in fp32 under a scaler, no model.half(): the region casts them; or mezzo.prepare(model, optimizer, 'fp16-master')",
    "No inf checks were recorded for this optimizer.": "no parameter of the optimizer had a gradient: step it where a loss reaches them, and clear gradients behind the step",
}
"""What to write where torch's GradScaler refuses."""


def _told(error: BaseException) -> str:
    """Return an error that ended a program, and what to write where it is one of dtypes, or of torch's scaler. Syncs: no."""
    try:
        if found := backward_message(error) or traceback_message(error, error.__traceback__, casts=False):
            return " ".join(f"{type(error).__name__} at {found}".split()).rstrip(".")
        return f"{error!r}" + (f". Instead: {way}" if (way := _OF_SCALER.get(str(error))) else "")
    except Exception:  # of a __str__ or __repr__ of its own
        return type(error).__name__


class Trace:
    """Follows a program op by op while its `with` block runs.

    Args:
        model: names are given relative to it; None names modules relative to whichever is called from outside.
        step: number of the first step.
        on_reached: called, with the trace, after a non-finite value reached a loss, gradient, parameter, buffer or output.
        on_root: called, with the number of the step, before each outermost module runs.
        of_risks: whether the lint rules count too what may lose numbers and did not.

    Writes: while it runs, torch's global module and optimizer hooks, one hook per parameter; all are gone after. Syncs: at every op.
    """

    def __init__(
        self,
        model: nn.Module | None,
        *,
        step: int = 0,
        on_reached: Callable[[Trace], None] | None = None,
        on_root: Callable[[int], None] | None = None,
        of_risks: bool = False,
    ) -> None:
        self._context = TraceContext(model, self._on_output, self._on_root, step)
        self._collector = Collector(self._context, self._on_sink, self._on_loss)
        self._collector.lints.of_risks = of_risks
        self._context.names.on_read = self._collector.on_read_in_python
        self._context.names.on_numbers = self._on_numbers
        self._on_reached, self._tell_step, self._model = on_reached, on_root, model
        self._sizes: list[Size] = []
        self._calls: dict[tuple[int, int], int] = {}
        self._hooked: dict[int, Tensor] = {}
        self._pending = PendingOutputs()
        self._flushed: dict[tuple[int, str], FlushedGradient] = {}
        self._contexts = ExitStack()
        self._was_loss_seen, self._first, self._begun = False, step, step - 1
        self._forwards = self._inferences = self._backwards = self._updates = 0
        self._ended = ""
        self._idle = IdleSteps()
        self._context.names.on_cleared = lambda x: self._idle.on_cleared(self._context.site("zero_grad"), x)
        self._stepping: list[torch.optim.Optimizer] = []
        self._taken: set[int] = set()
        self._judged_steps: set[int] = set()
        self._roots_since_backward: set[int] = set()
        self.is_running = True
        self._is_spent = False

    def __enter__(self) -> Trace:
        if self._is_spent:
            raise RegionError(
                "a trace was entered twice; it records one run. Write `with diagnose.trace(model)` again."
            )
        self._is_spent = True
        try:  # Ctrl-C inside of it leaves nothing on
            self._contexts.callback(optimizer_hooks.register_optimizer_step_pre_hook(self._before_update).remove)
            self._contexts.callback(optimizer_hooks.register_optimizer_step_post_hook(self._after_update).remove)
            if self._model is not None:
                self._hook_gradients(*self._model.parameters())
            self._contexts.enter_context(self._collector.watching())
            return self
        except BaseException:
            self._contexts.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._contexts.close()
        is_stop = error is self._collector.stop_with and not isinstance(error, SystemExit)
        is_end = isinstance(error, SystemExit) and error.code in (None, 0)
        has_failed = not (is_stop or is_end or isinstance(error, KeyboardInterrupt | GeneratorExit | None))
        self._ended = _told(error) if has_failed and error is not None else ""
        self.is_running = False
        self._settle_step()
        for sink in self._pending.dropped(is_over=True):
            self._collector.reach(sink)
        self._collector.settle_reads(has_failed=has_failed)
        self._idle.tell(self._collector.lints, self._context.modules.parameters())

    def __repr__(self) -> str:
        ops, steps = self._collector.ops, self._context.step + (self._begun == self._context.step) - self._first
        return (
            f"<trace of {ops:,} {plural('op', ops)} in {steps} {plural('step', steps)}: its .report says what it found>"
        )

    @property
    def is_on_top(self) -> bool:
        """Whether no mode was put on after this one that is still on."""
        return dispatch_modes()[-1:] == [self._collector] and function_modes()[-1:] == [self._context.names]

    @property
    def record(self) -> TraceRecord:
        """What was seen so far."""
        modules = self._context.modules
        roots, unreached = modules.roots, self._idle.unreached(modules.parameters(only_trained=True))
        has_flushed = not self._flushed or any(g.flushed for g in self._flushed.values())
        return TraceRecord(
            model=type(getattr(roots[0], "_orig_mod", roots[0])).__name__ if roots else "",
            events=tuple(self._collector.events),
            sinks=tuple(self._collector.sinks),
            sizes=tuple(self._sizes),
            lost=tuple(self._collector.updates.lost.values()),
            lints=self._collector.lints.records(has_flushed=has_flushed),
            lines=self._collector.lines.records(),
            ops=self._collector.ops,
            flushed=tuple(self._flushed.values()),
            forwards=self._forwards,
            inferences=self._inferences,
            backwards=self._backwards or int(self._collector.has_gone_backward),
            updates=self._updates,
            taken=frozenset(self._taken),
            skipped=self._collector.skipped,
            ended=self._ended,
            elsewhere=tuple(sorted(modules.elsewhere)),
            unreached=tuple((name, self._collector.detached.line_of(key)) for key, name in unreached),
            first=self._first,
            steps=self._context.step + (self._begun == self._context.step),
            rank=self._context.rank,
            torch=torch.__version__,
        )

    @property
    def report(self) -> TraceReport:
        """What was found so far."""
        record = self.record
        return TraceReport(record=record, findings=find(record))

    def stop(self, reason: BaseException) -> None:
        """End the program: raise, and raise again at the next ops if the program caught it. Then trace no more."""
        self._collector.stop(reason)

    def assume_scale(self, scale: float) -> None:
        """Say what factor gradients carry that backward is given, where no loss is there to show it; a ConfigError for what no loss scale can be."""
        if not is_number(number := number_of(scale), SMALLEST):
            raise ConfigError(f"assume_scale was given {shown(scale)}; give the loss scale, a finite number above 0.")
        self._context.loss_scale = float(number)

    def _on_sink(self) -> None:
        if self._on_reached is not None:
            self._on_reached(self)

    def _on_loss(self, loss: Tensor) -> None:
        self._was_loss_seen, self._begun = True, self._context.step
        self._backwards += 1
        self._pending.differentiated(loss)
        if (value := plain(loss)) is not None:
            wide = None if amax(value) else self._collector.reference.get(value)
            self._idle.on_loss(amax(value if wide is None else wide) / self._context.loss_scale)
        self._hook_gradients(*leaves_behind(loss))

    def _on_numbers(self, tensor: Tensor, data: Any) -> None:
        with self._collector.aside():
            wide = torch.tensor(data, dtype=torch.float32, device=tensor.device)
            self._collector.reference.begin(tensor, wide, self._context.site("to"))

    def _settle_step(self) -> None:
        """Judge the gradients of a step, once they have all arrived."""
        now = [g for (step, _), g in self._flushed.items() if step == self._context.step]
        if self._context.step not in self._judged_steps and is_mostly_flushed(now):
            self._judged_steps.add(self._context.step)
            if all(self._context.step - n in self._judged_steps for n in range(LASTING)):
                self._on_sink()

    def _on_root(self, module: nn.Module) -> None:
        if autograd_node() is None:
            self._leave_raised_steps()
            self._settle_step()
            self._was_loss_seen = False
            for sink in self._pending.dropped():
                self._collector.reach(sink)
            if id(module) in self._roots_since_backward:
                self._collector.settle_reads()
            self._roots_since_backward.add(id(module))
            if self._tell_step is not None:
                self._tell_step(self._context.step)
            if torch.is_grad_enabled():  # an evaluation begins no step
                self._begun = self._context.step
            self._forwards += torch.is_grad_enabled()
            self._inferences += not torch.is_grad_enabled()
        first, is_trained = next(module.parameters(), None), torch.is_grad_enabled()
        with self._collector.aside():
            is_cast = first is not None and torch.is_autocast_enabled(first.device.type)
            self._collector.lints.model(module, self._context.site("call"), is_trained and is_cast)
            if autograd_node() is None:
                self._collector.states.enter(module)
        self._hook_gradients(*module.parameters(), *(t for _, t in self._context.modules.inputs))

    def _hook_gradients(self, *leaves: Tensor) -> None:
        with self._collector.alone():
            for leaf in leaves:
                if id(leaf) not in self._hooked and leaf.requires_grad and leaf.is_leaf:
                    self._hooked[id(leaf)] = leaf
                    # the first for what torch.autograd.grad hands out, too
                    self._contexts.callback(leaf.register_hook(partial(self._on_flushed, leaf)).remove)  # type: ignore[no-untyped-call]  # torch's own
                    self._contexts.callback(leaf.register_post_accumulate_grad_hook(self._on_gradient).remove)  # type: ignore[no-untyped-call]  # torch's own

    def _on_flushed(self, parameter: Tensor, gradient: Tensor) -> None:
        """Take note of how much of a gradient 16 bit flushed, as backward hands it over or leaves it in `.grad`."""
        name = self._context.parameter_name(parameter) or "of an input"
        if (values := plain(gradient)) is not None:
            with self._collector.aside():
                self._collector.lints.arrived(values)
                self._flushed[self._context.step, name] = self._collector.flushes.lost(
                    name, values, self._context.loss_scale, self._context.step
                )

    def _on_gradient(self, parameter: Tensor) -> None:
        self._roots_since_backward.clear()
        if not self._was_loss_seen:
            # backward was given gradients, so the tensor it began with was not seen
            self._pending = PendingOutputs()
            self._was_loss_seen = True
            self._backwards += 1
        self._context.last_gradient_of = parameter
        gradient = None if parameter.grad is None else plain(parameter.grad)
        if gradient is None:
            return
        name = self._context.parameter_name(parameter) or "of an input"
        with self._collector.aside():
            self._size("gradient", name, "", id(parameter), gradient)
            flushes, top = self._collector.flushes, self._sizes[-1].amax
            self._idle.on_gradient(
                parameter, name, top, flushes.zeroed_at(gradient), flushes.constants.behind(gradient)
            )
            is_bad = not is_finite(gradient)
        self._on_flushed(parameter, gradient)
        if is_bad:
            self._collector.reach(self._collector.sink_of("gradient", name, gradient))

    def _on_output(self, module: nn.Module, place: Place, output: Any) -> None:
        if autograd_node() is not None:
            return
        with self._collector.aside():
            tensors = [
                (n, v, t.requires_grad) for n, t in named_tensors(output, "output") if (v := plain(t)) is not None
            ]
            if tensors:
                self._size("output", place.module, type(module).__name__, id(module), tensors[0][1], place.root)
            if not self._context.modules.is_outside:
                return
            self._collector.reference.inside.clear()
            self._collector.states.leave(module)
            spoiled = [(n, b) for n, b in module.named_buffers() if self._collector.was_spoiled(n, b)]
            buffers = [(n, b) for n, b in spoiled if not is_finite(b)]
            outputs = [(f"{n} of {place.root}", t, grad) for n, t, grad in tensors if not is_finite(t)]
        for name, buffer in buffers:
            self._collector.reach(self._collector.sink_of("buffer", name, buffer))
        for name, tensor, grad in outputs:
            sink = self._collector.sink_of("output", name, tensor)
            # what still leads to a loss is judged there
            self._pending.add(tensor, sink) if grad else self._collector.reach(sink)

    def _size(self, kind: Any, name: str, cls: str, key: int, tensor: Tensor, root: str = "") -> None:
        call = self._calls.get((key, self._context.step), 0)
        self._calls[key, self._context.step] = call + 1
        facts = tensor_facts(name, tensor)
        known = self._collector.reference if facts.nonfinite else self._collector.flushes.wide
        wide = known.get(tensor) if facts.nonfinite or kind == "gradient" else None
        self._sizes.append(
            Size(
                kind=kind, root=root, name=name, cls=cls, dtype=dtype_name(tensor.dtype), step=self._context.step, call=call, owner=key,
                rms=rms(tensor, is_finite=not facts.nonfinite), amax=facts.amax, nonfinite=facts.nonfinite,
                reference=None if wide is None else amax(wide),
            )
        )  # fmt: skip

    def _leave_raised_steps(self, starting: torch.optim.Optimizer | None = None) -> None:
        """Forget the steps that an error has ended, which no hook of torch's tells."""
        self._stepping = still_stepping(self._stepping, starting)
        self._context.is_optimizer_running = bool(self._stepping)

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._leave_raised_steps(optimizer)
        self._stepping.append(optimizer)
        if len(self._stepping) > 1:
            # an optimizer inside another, as in MasterWeights, is part of its step
            return
        if optimizer not in self._context.optimizers:
            self._context.optimizers.append(optimizer)
        late = [p for p in parameters(optimizer) if id(p) not in self._hooked]
        self._hook_gradients(*late)
        for p in late:
            self._on_gradient(p)
        self._settle_step()
        self._context.is_optimizer_running = True
        # torch hands a pre-hook the optimizer as the first argument too
        self._context.has_closure = any(callable(a) and a is not optimizer for a in (*args, *kwargs.values()))
        with self._collector.aside():
            scale = self._collector.lints.scale
            self._idle.before(optimizer, self._collector.ops, self._context.has_closure, scale)
            self._collector.updates.begin(optimizer)

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """End the step of an optimizer: what it updated and left not finite goes into the trace, and nowhere else."""
        if not leave_step(self._stepping, optimizer):
            return
        site = self._context.site("step")
        self._context.is_optimizer_running = False
        params = parameters(optimizer)
        names = {id(p): self._context.parameter_name(p) for p in params}
        with self._collector.aside():
            self._idle.after(optimizer, site, self._collector.ops)
            self._collector.updates.end(optimizer, names, site)
            bad = [(p, v) for p in params if (v := plain(p)) is not None and not is_finite(v)]
        for p, values in bad:
            self._collector.reach(self._collector.sink_of("parameter", names[id(p)], values))
        self._updates += 1
        self._taken.add(self._context.step)
        self._collector.end_step()


def trace(model: nn.Module | None = None, *, step: int = 0) -> Trace:
    """Return a context that finds the first bad op of the program inside it.

    Every op of forward, backward and optimizer is seen, one by one, so the program runs slower; its numbers, its
    random state and its gradients are those of an untraced run.

    Args:
        model: names in the report are relative to it; None names modules relative to whichever is called first.
        step: number of the first step, for the report.

    Returns:
        The context. Its `report` can be read inside and after the block.

    Raises:
        ConfigError: the model is none, or the step no whole number.
        RegionError: the context is entered a second time.

    Writes: nothing that outlives the block.
    Syncs: at every op.

    >>> model, x = nn.Linear(2, 1), torch.full((1, 2), float("nan"))
    >>> with trace(model) as t:
    ...     model(x).sum().backward()
    >>> t.report.findings[0].verdict, t.report.findings[0].why
    ('inherited', 'input [0] of Linear already holds 2 NaN when addmm first reads it.')
    """
    if model is not None:
        check_model("trace", model)
    if not is_count(step):
        raise ConfigError(f"trace was given step={shown(step)}; give a whole number of 0 or more.")
    return Trace(model, step=step)
