"""Runs each op of a step three times: as the policy has it, in fp32 on the same inputs, and in fp32 all the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ..formats import LOW_DTYPES
from .call import Call
from .compare_twins import Maker, Tally, Twins
from .explain_flops import flops_of
from .measure import rerun_wide
from .modules import Place, tensors_in
from .opfacts import op_facts, plain
from .records import Frame, Phase, Site
from .scene import Scene


@dataclass(slots=True)
class ModuleTally:
    """Errors of what one module's own ops made.

    Attributes:
        cls: class name.
        forward: results.
        backward: gradients of its inputs.
        weights: gradients of its parameters.
        flops: of its own ops, both phases.
    """

    cls: str
    forward: Tally = field(default_factory=Tally)
    backward: Tally = field(default_factory=Tally)
    weights: Tally = field(default_factory=Tally)
    flops: int = 0


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


def _draws(call: Call) -> bool:
    """Say whether an op's result depends on random numbers; attention without dropout only might."""
    given = dict(zip(call.facts.arguments, call.args, strict=False)) | call.kwargs
    return call.facts.draws and given.get("dropout_p") != 0.0


def _dropped(call: Call, x: Tensor) -> list[Tensor] | None:
    """Return what fused dropout makes of other inputs with the elements it dropped."""
    if call.facts.name != "dropout" or "native_dropout" not in call.facts.kernel:
        return None
    share = float(call.args[1])
    return [x.float() * call.mask / (1 - share) if share < 1 else torch.zeros_like(x, dtype=torch.float32)]


class ComparingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Sees every op of a step and measures how far it is from fp32.

    The run itself is not changed: control flow, masks, indices and random draws are those of the policy's run, for
    the fp32 values too.

    Args:
        model: names are relative to it.

    Attributes:
        twins: what memory would hold in fp32.
        modules: errors by (root, module).
        ops: errors by op and place.
        op_flops: floating-point operations by public name.
        unseen: calls of ops that could not be run in fp32, by kernel.
        outputs: errors of the outermost modules' outputs.

    Syncs: at every op.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.scene = Scene(model, 0, lambda _: None, self._on_output)
        self.twins = Twins()
        self.modules: dict[tuple[str, str], ModuleTally] = {}
        self.ops: dict[OpKey, Tally] = {}
        self.op_flops: Counter[str] = Counter()
        self.unseen: Counter[str] = Counter()
        self.outputs = Tally()
        self._is_aside = False

    def __torch_dispatch__(
        self,
        func: OpOverload[Any, Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one op and compare it."""
        kwargs = kwargs or {}
        facts = op_facts(func)
        if self._is_aside:
            return func(*args, **kwargs)
        site = self.scene.site(facts.name)
        if facts.makes_nothing:
            return func(*args, **kwargs)
        call = Call(func, facts, args, kwargs)
        out = call.run(args, kwargs)
        self._count_flops(site, flops_of(func, args, kwargs, out))
        self._compare(call, site, out)
        return out

    def _tally(self, maker: Maker, cls: str) -> ModuleTally:
        return self.modules.setdefault((maker.root, maker.module), ModuleTally(cls))

    def _count_flops(self, site: Site, flops: int) -> None:
        if flops:
            here = Maker(site.phase, site.root, site.module)
            self._tally(here, site.classes[-1] if site.classes else "").flops += flops
            self.op_flops[site.called or site.op] += flops

    def _compare(self, call: Call, site: Site, out: Any) -> None:
        here = Maker(site.phase, site.root, site.module)
        originals = {id(t): call.original(t) for _, t in call.inputs}
        for tensor in originals.values():
            self._on_read(tensor, here, site)
        own_in = {k: v for k, t in originals.items() if (v := self.twins.own(t, here)) is not None}
        whole_in = {k: v for k, t in originals.items() if (v := self.twins.whole(t)) is not None}
        is_narrow = any(t.dtype in LOW_DTYPES for t in (*call.out, *(t for _, t in call.inputs)))
        is_known = any(self.twins.get(t) is not None for t in call.out)
        if not call.out or not (is_narrow or own_in or whole_in or is_known):
            return
        local = self._in_fp32(call, {}, out) if is_narrow else [t.detach().float() for t in call.out]
        if local is None or len(local) != len(call.out):
            self.unseen[call.facts.kernel] += 1
            return
        own = self._in_fp32(call, own_in, out) if own_in else local
        whole = self._in_fp32(call, whole_in, out) if whole_in else local
        assert own is not None and whole is not None  # the same op ran in fp32 a moment ago
        tally = self.ops.setdefault(_key(call, site), Tally())
        for tensor, near, mine, far in zip(call.out, local, own, whole, strict=True):
            tally.add(tensor, near, far)
            self.twins.put(tensor, here, mine, far)
        self._tally(here, site.classes[-1] if site.classes else "")

    @staticmethod
    def _in_fp32(call: Call, values: dict[int, Tensor], out: Any) -> list[Tensor] | None:
        """Return the op's results in fp32, with some inputs exchanged; random draws are those that were made."""
        if _draws(call):
            if "native_dropout" in call.facts.kernel:
                source = values.get(id(call.args[0]), call.args[0])
                return [source.float() * out[1] / max(1 - float(call.args[1]), torch.finfo(torch.float32).tiny)]
            return None if call.inputs else [t.detach().float() for t in call.out]
        args, kwargs = tree_map(lambda v: values.get(id(v), v), (call.args, call.kwargs))
        return rerun_wide(call.func, call.facts, args, kwargs, torch.float32)

    def _on_read(self, tensor: Tensor, here: Maker, site: Site) -> None:
        """Note the error of another module's result, the first time it is read in the phase it was made in."""
        twin = self.twins.get(tensor)
        if twin is not None and twin.maker.phase == here.phase and twin.maker != here:
            self._count(tensor, is_weight=site.op == "AccumulateGrad")

    def _count(self, tensor: Tensor, is_weight: bool = False) -> None:
        twin = self.twins.get(tensor)
        if twin is None or twin.is_counted or twin.maker.phase is None:
            return
        twin.is_counted = True
        into = self._tally(twin.maker, "")
        tally = into.forward if twin.maker.phase == "forward" else into.weights if is_weight else into.backward
        tally.add(twin.actual(tensor), twin.own, twin.whole)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Let ops of the tool itself pass unseen."""
        was, self._is_aside = self._is_aside, True
        try:
            with torch.no_grad():
                yield
        finally:
            self._is_aside = was

    def _on_output(self, module: nn.Module, place: Place, output: Any) -> None:
        if not self.scene.modules.is_outside or torch._C._current_autograd_node() is not None:
            return
        with self.aside():
            for _, tensor in tensors_in(output, "output"):
                if (values := plain(tensor)) is not None:
                    self.outputs.merge
