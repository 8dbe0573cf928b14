"""Watches every op of a program and writes down where non-finite values come from and where they go."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from .call import Call
from .flush import FlushWatch
from .frames import is_called_from
from .ledger import Ledger
from .lines import LineWatch
from .lintwatch import LintWatch
from .measure import (
    amax,
    full_rows,
    is_finite,
    numbers,
    offending_values,
    rerun,
    sanitised,
    tensor_facts,
    wide_results,
)
from .opfacts import op_facts
from .records import Event, EventKind, Sink, SinkKind, Site
from .scene import Scene
from .shadow import Shadow
from .updates import UpdateWatch

Causes = frozenset[int]
NO_CAUSE: Causes = frozenset()
_CLIPS = "torch/nn/utils/clip_grad.py"


def _has_nan(tensors: Iterable[Tensor]) -> bool:
    return any(bool(t.isnan().any()) for t in tensors)


class Collector(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Sees every op that reaches torch's dispatcher: forward, backward, optimizer, the parts of composites.

    Every storage that received non-finite values carries the indices of the events they come from, so a bad
    loss or gradient can name its origin however many ops lie between.

    Args:
        scene: where the program stands.
        on_sink: called after harm was noted.

    Attributes:
        scene: as given.
        events: how non-finite values came about, in order.
        sinks: where they did harm, in order.
        ops: number of ops seen.
        lints: habits that lose numbers.
        updates: 16-bit weights whose updates were lost.
        lines: magnitudes by source line.

    Syncs: at every op. Reads values; writes none, and draws none of the program's random numbers.
    """

    def __init__(self, scene: Scene, on_sink: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.scene = scene
        self._on_sink = on_sink
        self.events: list[Event] = []
        self.sinks: list[Sink] = []
        self.ops = 0
        self.updates = UpdateWatch()
        self.lints = LintWatch()
        self.lines = LineWatch()
        self._flushes = FlushWatch()
        self._shadow = Shadow()
        self._causes: Ledger[Causes] = Ledger()
        self._harmed_step = -1
        self._is_aside = False
        self._has_scaled_grads = False

    def __torch_dispatch__(
        self,
        func: OpOverload[Any, Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one op and judge its results."""
        kwargs = kwargs or {}
        if self._is_aside:
            return func(*args, **kwargs)
        facts = op_facts(func)
        site = self.scene.site(facts.name)
        self.ops += 1
        if facts.makes_nothing:
            out = func(*args, **kwargs)
            self._shadow.view(func, args, kwargs, out)
            return out
        if facts.name == "ones_like" and self.scene.is_backward_root():
            self._on_loss(args[0], site)
        call = Call(func, facts, args, kwargs)
        out = call.run(args, kwargs)
        if facts.name.startswith("amp_"):
            self._on_scaler(facts.name)
        else:
            self._judge(call, site)
        return out

    def _on_scaler(self, op: str) -> None:
        self._has_scaled_grads = False
        if op == "amp_update_scale":
            self.scene.end_step()

    def _judge(self, call: Call, site: Site) -> None:
        tops = [amax(t) for t in call.out]
        bad = [t for t, top in zip(call.out, tops, strict=True) if not math.isfinite(top)]
        if len(self._causes) or bad:
            self._follow(call, site, bad)
        self.lines.see(site, call.out, tops)
        self.lints.see(call, site)
        self._flushes.see(call, site)
        if site.phase == "optimizer":
            self.updates.see(call)
        elif self._has_scaled_grads and not site.root and site.phase == "forward" and is_called_from(_CLIPS):
            self.lints.add("clip-before-unscale", site, call.out[0].dtype if call.out else torch.float32,
                           "gradients", self.scene.loss_scale)  # fmt: skip

    def _follow(self, call: Call, site: Site, bad: list[Tensor]) -> None:
        """Take in an op while non-finite values are about."""
        sources = [s for s in call.inputs if (bad or self._is_marked(call, s[1])) and not is_finite(s[1])]
        absorbed = self._shadow.carry(call) if sources else ""
        if absorbed:
            causes = NO_CAUSE.union(*(self._causes.get(call.original(t)) or NO_CAUSE for _, t in sources))
            self._sink(Sink(kind="activation", name=f"{call.facts.name}: {absorbed}", causes=causes,
                            step=self.scene.step, after=len(self.events)))  # fmt: skip
        if bad:
            self._on_nonfinite(call, site, sources, bad)
        elif not call.facts.writes:
            for tensor in call.out:
                self._causes.forget(tensor)

    def _is_marked(self, call: Call, tensor: Tensor) -> bool:
        return self._causes.get(call.original(tensor)) is not None

    def _on_nonfinite(self, call: Call, site: Site, sources: list[tuple[str, Tensor]], bad: list[Tensor]) -> None:
        causes = self._blame(call, site, sources, bad)
        if not sources and self._is_arithmetic(call, bad):
            causes = self._event(call, site, bad, "born")
            self._shadow.born(call)
        elif not sources:
            causes = self._event(call, site, bad, "constant")
        elif self._harmed_step != self.scene.step and self._is_born_anyway(call):
            causes |= self._event(call, site, bad, "born", causes)
        elif _has_nan(bad) and not _has_nan(t for _, t in sources):
            causes = self._event(call, site, bad, "mixed", causes)
        for tensor in bad:
            older = self._causes.get(tensor) if call.facts.writes else None
            self._causes.note(tensor, causes | (older or NO_CAUSE))

    @staticmethod
    def _is_arithmetic(call: Call, bad: list[Tensor]) -> bool:
        """Tell computed non-finite values from ones the program wrote on purpose, such as a mask's -inf."""
        given = [x for x in numbers(call.args, call.kwargs) if not math.isfinite(x)]
        if not given:
            return bool(call.inputs)
        return _has_nan(bad) and not any(math.isnan(x) for x in given)

    @staticmethod
    def _is_born_anyway(call: Call) -> bool:
        """Say whether the op goes wrong on the finite part of its inputs too."""
        if call.facts.draws or any(not math.isfinite(x) for x in numbers(call.args, call.kwargs)):
            return False
        return not all(is_finite(t) for t in rerun(call.func, call.facts, sanitised(call.args), sanitised(call.kwargs)))

    def _blame(self, call: Call, site: Site, sources: list[tuple[str, Tensor]], bad: list[Tensor]) -> Causes:
        """Return the causes of those inputs that made the results bad."""
        if len(sources) > 1 and not call.facts.draws:
            sources = [s for s in sources if self._matters(call, s[1], bad)] or sources
        causes = NO_CAUSE
        for name, tensor in sources:
            known = self._causes.get(call.original(tensor))
            causes |= self._leaf(call, site, name, tensor) if known is None else known
        return causes

    @staticmethod
    def _matters(call: Call, source: Tensor, bad: list[Tensor]) -> bool:
        """Say whether mending one input alone makes an element of the results finite."""
        args, kwargs = tree_map(lambda v: sanitised(v) if v is source else v, (call.args, call.kwargs))
        out = rerun(call.func, call.facts, args, kwargs)
        was_bad = [~t.isfinite() for t in call.out]
        return any(bool((o.isfinite() & b).any()) for o, b in zip(out, was_bad, strict=True))

    def _leaf(self, call: Call, site: Site, name: str, tensor: Tensor) -> Causes:
        original = call.original(tensor)
        called = self.scene.name_of(original) or f"argument {name!r} of {call.facts.name}, made outside the trace"
        causes = self._event(call, site, [tensor], "leaf", leaf=called)
        self._causes.note(original, causes)
        return causes

    def _event(
        self, call: Call, site: Site, bad: list[Tensor], kind: EventKind, parents: Causes = NO_CAUSE, leaf: str = ""
    ) -> Causes:
        index, born = len(self.events), kind in ("born", "mixed")
        # beside inherited non-finite values, the op is judged by its finite ones
        args, kwargs = sanitised((call.args, call.kwargs)) if parents else (call.args, call.kwargs)
        names = [self.scene.name_of(call.original(t)) if site.phase == "optimizer" else "" for t in bad]
        if site.phase == "optimizer" and not site.module:
            site = replace(site, module=names[0].rpartition(" ")[2].rpartition(".")[0])
        given = ", ".join(str(x) for x in numbers(call.args, call.kwargs) if not math.isfinite(x))
        event = Event(
            index=index,
            kind=kind,
            kernel=call.facts.kernel,
            site=site,
            inputs=tuple(tensor_facts(n, t) for n, t in call.inputs),
            outputs=tuple(tensor_facts(n or f"result {i}", t) for i, (n, t) in enumerate(zip(names, bad, strict=True))),
            parents=parents,
            wide=wide_results(call.func, call.facts, args, kwargs, bad[0].dtype) if kind == "born" else (),
            offending=offending_values(call.inputs, bad[0]) if born else (),
            full_rows=full_rows(call.facts, call.args, call.inputs) if born else 0,
            loss_scale=self.scene.loss_scale if site.phase == "backward" else 1.0,
            flush=self._flushes.behind(t for _, t in call.inputs) if born else None,
            leaf=leaf or (given if kind == "constant" else ""),
        )
        self.events.append(event)
        if event.full_rows:
            self.lints.softmax(site, bad[0].dtype, event.full_rows, call.facts.kernel)
        return frozenset((index,))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let ops of the tool itself pass unseen."""
        was, self._is_aside = self._is_aside, True
        try:
            with torch.no_grad():
                yield
        finally:
            self._is_aside = was

    def sink(self, kind: SinkKind, name: str, tensor: Tensor) -> None:
        """Note that a tensor, known to be non-finite, is where harm is done."""
        causes = self._causes.get(tensor) or NO_CAUSE
        self._sink(Sink(kind=kind, name=name, causes=causes, step=self.scene.step, after=len(self.events)))

    def _sink(self, sink: Sink) -> None:
        self._harmed_step = sink.step
        self.sinks.append(sink)
        self._on_sink()

    def was_spoiled(self, name: str, buffer: Tensor) -> bool:
        """Say whether a buffer received non-finite values; a mask that held them all along did not."""
        events = [self.events[i] for i in self._causes.get(buffer) or ()]
        return any(e.kind != "constant" and e.leaf != f"buffer {name}" for e in events)

    def _on_loss(self, loss: Tensor, site: Site) -> None:
        self.scene.enter_backward(loss)
        self._has_scaled_grads = self.scene.loss_scale > 1
        self.lints.loss(loss, site, self.scene.loss_scale, self.scene.names.backward_dtype)
        if loss.is_floating_point() and not is_finite(loss):
            self.sink("loss", "loss", loss)
