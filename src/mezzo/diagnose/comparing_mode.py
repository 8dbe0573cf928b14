"""Runs each op of a step three times: as the policy has it, in fp32 on the same inputs, and in fp32 all the way."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._torch import OpOverload, autograd_node
from ..formats import LOW_DTYPES
from ..trace import (
    Call,
    Frame,
    OpMode,
    Phase,
    Place,
    Site,
    StorageNotes,
    TraceContext,
    WideValues,
    draws,
    flat,
    floating,
    flops_of,
    length,
    op_facts,
    run_wide,
)
from .compare_report import Agreement

_MASK = 2.0**127
"""fp32 magnitudes from here on stand for infinity, as `torch.finfo(dtype).min` does in a mask."""
Values = dict[int, Tensor]
"""What to put in the place of an argument, by its id."""


@dataclass(frozen=True, slots=True)
class Maker:
    """Whose local ops wrote a tensor: class of the outermost module, empty outside, and name below it; no phase for values that were there before the run."""

    phase: Phase | None = None
    root: str = ""
    module: str = ""


@dataclass(slots=True)
class _Made:
    """Who wrote a storage last, and whether somebody read it as the maker's result, so that its error was noted."""

    maker: Maker
    is_counted: bool = False


def power(reference: Tensor, actual: Tensor) -> tuple[float, float]:
    """Return the energies, in fp64, of a signal and of the error of another tensor of its shape that should equal it. Syncs: yes.

    Elements that the reference, fp32 or wider, itself has as inf or NaN, or as a mask, are left out. An element that is not finite
    where the reference is makes the error infinite.
    """
    signal, noise = length(reference) ** 2, length(actual.detach().to(reference.dtype) - reference) ** 2
    if signal < _MASK and math.isfinite(noise):
        return signal, noise
    keep = reference.isfinite() & (reference.abs() < _MASK)
    reference, actual = reference[keep], actual.detach()[keep].to(reference.dtype)
    noise = length(actual - reference) ** 2
    return length(reference) ** 2, noise if math.isfinite(noise) else math.inf


def decibels(signal: float, noise: float) -> float:
    """Return the signal-to-error ratio in dB: inf without error, -inf without signal or with infinite error.

    >>> decibels(100.0, 1.0), decibels(1.0, 0.0)
    (20.0, inf)
    """
    if noise == 0:
        return math.inf
    return -math.inf if signal == 0 or math.isinf(noise) else 10 * math.log10(signal / noise)


@dataclass(slots=True)
class Tally:
    """Energies of signal and error, summed over `count` tensors: local, inherited, total."""

    signal: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    noise: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    count: int = 0

    def add(self, actual: Tensor, local: Tensor, full: Tensor) -> None:
        """Take in a tensor, with what it would be from the same inputs, and altogether. Syncs: yes."""
        pairs = ((local, actual), (full, local), (full, actual))
        for i, (signal, noise) in enumerate(power(*pair) for pair in pairs):
            self.signal[i] += signal
            self.noise[i] += noise
        self.count += 1

    def merge(self, other: Tally) -> None:
        """Take in what another tally took in. Writes: this one."""
        for i in range(3):
            self.signal[i] += other.signal[i]
            self.noise[i] += other.noise[i]
        self.count += other.count

    @property
    def agreement(self) -> Agreement:
        """The three ratios in dB."""
        local, inherited, total = map(decibels, self.signal, self.noise)
        return Agreement(local=local, inherited=inherited, total=total)

    @property
    def local_share(self) -> float:
        """Local error over signal, in energy."""
        return self.noise[0] / self.signal[0] if self.signal[0] else math.inf if self.noise[0] else 0.0


class Fp32Reference:
    """fp32 values for each storage that holds something else than fp32 would: locally and in full.

    Local is what it would hold had its maker computed in fp32 on the inputs it was given, full had everything been. Memory
    that is not known holds exactly what fp32 would hold. Syncs: no.
    """

    def __init__(self) -> None:
        self._made: StorageNotes[_Made] = StorageNotes()
        self._local, self._full = WideValues(), WideValues()

    def __contains__(self, tensor: Tensor) -> bool:
        return self._made.get(tensor) is not None

    def local(self, tensor: Tensor, here: Maker) -> Tensor | None:
        """Return what a tensor would be had the module `here` computed in fp32; None if that is what it is. Syncs: no."""
        maker = self.maker(tensor)
        return self._local.get(tensor) if (maker.root, maker.module) == (here.root, here.module) else None

    def full(self, tensor: Tensor) -> Tensor | None:
        """Return what a tensor would be had everything been computed in fp32; None if that is what it is. Syncs: no."""
        return self._full.get(tensor)

    def put(self, tensor: Tensor, here: Maker, local: Tensor, full: Tensor) -> None:
        """Note what a tensor that `here` just wrote, all of its storage or a part, would hold locally and in full. Syncs: no."""
        if tensor.numel() == 0:
            return
        if self.maker(tensor) != here:
            self._local.forget(tensor)
        self._made.note(tensor, _Made(here))
        self._local.put(tensor, local.float())
        self._full.put(tensor, full.float())

    def tally(self, tensor: Tensor) -> Tally:
        """Return the error of one tensor. Syncs: yes."""
        tally, actual = Tally(), tensor.detach()
        local, full = self._local.get(tensor), self._full.get(tensor)
        tally.add(actual, actual.float() if local is None else local, actual.float() if full is None else full)
        return tally

    def take(self, tensor: Tensor) -> tuple[Maker, Tally] | None:
        """Return the error of a full storage and who made it, once; None if it is known or nobody made it. Syncs: yes."""
        made = self._made.get(tensor)
        if made is None or made.is_counted or made.maker.phase is None:
            return None
        made.is_counted = True
        return made.maker, self.tally(flat(tensor))

    def maker(self, tensor: Tensor) -> Maker:
        """Return who wrote a tensor last. Syncs: no."""
        made = self._made.get(tensor)
        return Maker() if made is None else made.maker


@dataclass(slots=True)
class ModuleTally:
    """Errors of what one module's own ops made: results, gradients of its inputs, and gradients of its parameters."""

    cls: str
    forward: Tally = field(default_factory=Tally)
    backward: Tally = field(default_factory=Tally)
    weights: Tally = field(default_factory=Tally)


class OpKey(NamedTuple):
    """What calls of one op are added up: the same op on the same line of the same module."""

    phase: Phase
    root: str
    module: str
    op: str
    called: str
    kernel: str
    dtype: torch.dtype
    frame: Frame | None


class ComparingMode(OpMode):  # type: ignore[no-untyped-call]  # torch's own
    """Sees every op of a step and measures how far it is from fp32.

    The run itself is not changed: control flow, masks, indices and random draws are those of the policy's run, for
    the fp32 values too. Names are relative to the model.

    Attributes:
        fp32: what memory would hold in fp32.
        modules, ops: errors by (root, module), and by op and place.
        flops, low_flops: floating-point operations in any format; those in 16 bit, by op and place.
        unseen: calls of ops that could not be run in fp32, by kernel.
        outputs: errors of the outermost modules' outputs.

    Syncs: at every op.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(TraceContext(model, self._on_output))
        self.fp32 = Fp32Reference()
        self.modules: dict[tuple[str, str], ModuleTally] = {}
        self.ops: dict[OpKey, Tally] = {}
        self.flops = 0
        self.low_flops: Counter[OpKey] = Counter()
        self.unseen: Counter[str] = Counter()
        self.outputs = Tally()

    def run_op(self, func: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op and compare it."""
        facts = op_facts(func)
        site = self.context.site(facts.name)
        if facts.makes_nothing:
            return func(*args, **kwargs)
        call, here = Call(func, facts, args, kwargs), Maker(site.phase, site.root, site.module)
        # before the op may write what it reads
        self._on_read(call, site, here)
        originals = {id(t): call.original(t) for _, t in call.inputs}
        local_in = {key: value for key, t in originals.items() if (value := self.fp32.local(t, here)) is not None}
        full_in = {key: value for key, t in originals.items() if (value := self.fp32.full(t)) is not None}
        call.run(args, kwargs)
        self._compare(call, site, here, local_in, full_in)
        return call.returned

    def _compare(self, call: Call, site: Site, here: Maker, local_in: Values, full_in: Values) -> None:
        """Compare what an op gave with what it would have given had it, its module, or the whole run been in fp32."""
        flops = flops_of(call.func, call.args, call.kwargs, call.returned)
        self.flops += flops
        is_narrow = any(t.dtype in LOW_DTYPES for t in (*call.out, *(t for _, t in call.inputs)))
        if not call.out or not (is_narrow or local_in or full_in or any(t in self.fp32 for t in call.out)):
            return
        kernel, dtype, frame = call.facts.kernel, call.out[0].dtype, site.library or site.user
        key = OpKey(site.phase, site.root, site.module, site.op, site.called, kernel, dtype, frame)
        if is_narrow:
            self.low_flops[key] += flops
        op = self._in_fp32(call, {}) if is_narrow else [t.detach().float() for t in call.out]
        module = self._in_fp32(call, local_in) if local_in else op
        run = self._in_fp32(call, full_in) if full_in else op
        if op is None or module is None or run is None:
            self.unseen[call.facts.kernel] += 1
            return
        self.modules.setdefault((site.root, site.module), ModuleTally(site.classes[-1] if site.classes else ""))
        tally = self.ops.setdefault(key, Tally())
        for tensor, of_op, of_module, of_run in zip(call.out, op, module, run, strict=True):
            tally.add(tensor, of_op, of_run)
            self.fp32.put(tensor, here, of_module, of_run)

    @staticmethod
    def _in_fp32(call: Call, values: Values) -> list[Tensor] | None:
        """Return the op's results in fp32, some inputs exchanged; None if it has no fp32 kernel, or drew what it cannot draw again."""
        wide = run_wide(call, values, torch.float32)
        return [t.detach().float() for t in call.out] if wide is None and draws(call) and not values else wide

    def _on_read(self, call: Call, site: Site, here: Maker) -> None:
        """Note the errors of other modules' results, the first time they are read in the phase they were made in."""
        for _, tensor in call.inputs:
            original = call.original(tensor)
            maker = self.fp32.maker(original)
            if maker.phase == here.phase and maker != here:
                self.count_result(original, is_weight=site.op == "AccumulateGrad")

    def count_result(self, tensor: Tensor, is_weight: bool = False) -> None:
        """Note the error of a tensor that leaves the module that made it, unless that was done. Syncs: yes."""
        found = self.fp32.take(tensor)
        if found is None:
            return
        maker, tally = found
        into = self.modules[maker.root, maker.module]
        part = into.forward if maker.phase == "forward" else into.weights if is_weight else into.backward
        part.merge(tally)

    def _on_output(self, module: nn.Module, place: Place, output: Any) -> None:
        if not self.context.modules.is_outside or autograd_node() is not None:
            return
        with self.aside():
            for _, tensor in floating(output):
                self.outputs.merge(self.fp32.tally(tensor))
                self.count_result(tensor)
