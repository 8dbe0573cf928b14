"""Runs each op of a step three times: as the policy has it, in fp32 on the same inputs, and in fp32 all the way."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..._torch import OpOverload, autograd_node
from ...formats import LOW_DTYPES
from ...trace import (
    Call,
    Frame,
    OpMode,
    Phase,
    Place,
    Site,
    TraceContext,
    draws,
    flops_of,
    op_facts,
    plain,
    run_wide,
    tensors_in,
)
from .fp32_reference import Fp32Reference, Maker, Tally

Values = dict[int, Tensor]
"""What to put in the place of an argument, by its id."""


@dataclass(slots=True)
class ModuleTally:
    """Errors of what one module's own ops made: results, gradients of its inputs, and gradients of its parameters."""

    cls: str
    forward: Tally = field(default_factory=Tally)
    backward: Tally = field(default_factory=Tally)
    weights: Tally = field(default_factory=Tally)


@dataclass(frozen=True, slots=True)
class OpKey:
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
        super().__init__(TraceContext(model, 0, lambda _: None, self._on_output))
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
        local_in, full_in = self._fp32_inputs(call, here)
        out = call.run(args, kwargs)
        self._compare(call, site, here, local_in, full_in, out)
        return out

    def _tally(self, site: Site) -> ModuleTally:
        cls = site.classes[-1] if site.classes else ""
        return self.modules.setdefault((site.root, site.module), ModuleTally(cls))

    def _fp32_inputs(self, call: Call, here: Maker) -> tuple[Values, Values]:
        originals = {id(t): call.original(t) for _, t in call.inputs}
        return (
            {key: value for key, t in originals.items() if (value := self.fp32.local(t, here)) is not None},
            {key: value for key, t in originals.items() if (value := self.fp32.full(t)) is not None},
        )

    def _compare(self, call: Call, site: Site, here: Maker, local_in: Values, full_in: Values, out: Any) -> None:
        flops = flops_of(call.func, call.args, call.kwargs, out)
        self.flops += flops
        is_narrow = any(t.dtype in LOW_DTYPES for t in (*call.out, *(t for _, t in call.inputs)))
        if not call.out or not (is_narrow or local_in or full_in or any(t in self.fp32 for t in call.out)):
            return
        key = _key(call, site)
        if is_narrow:
            self.low_flops[key] += flops
        local = self._in_fp32(call, {}) if is_narrow else [t.detach().float() for t in call.out]
        own = self._in_fp32(call, local_in) if local_in else local
        whole = self._in_fp32(call, full_in) if full_in else local
        if local is None or own is None or whole is None:
            self.unseen[call.facts.kernel] += 1
            return
        self._tally(site)
        tally = self.ops.setdefault(key, Tally())
        for tensor, near, mine, far in zip(call.out, local, own, whole, strict=True):
            tally.add(tensor, near, far)
            self.fp32.put(tensor, here, mine, far)

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
            for tensor in [v for _, t in tensors_in(output, "") if (v := plain(t)) is not None]:
                self.outputs.merge(self.fp32.tally(tensor))
                self.count_result(tensor)


def _key(call: Call, site: Site) -> OpKey:
    return OpKey(
        phase=site.phase,
        root=site.root,
        module=site.module,
        op=site.op,
        called=site.called,
        kernel=call.facts.kernel,
        dtype=call.out[0].dtype,
        frame=site.library or site.user,
    )
