"""One run, op by op, beside what fp64 gives: what each op read and made, in figures that no rounding moves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import OpOverload, tree_leaves
from ..formats import dtype_name, widened, widest
from ..trace import (
    Call,
    Frame,
    OpMode,
    Place,
    Site,
    StorageNotes,
    TraceContext,
    WideValues,
    draws,
    flat,
    floating,
    length,
    op_facts,
    run_wide,
)

SAME = 5e-7
"""Two fp64 runs of the same mathematics differ by less: constants and tables may have been rounded to fp32."""
_MASK = 2.0**100
"""Magnitudes from here on stand for infinity, as `torch.finfo(dtype).min` does in a mask."""
ROUNDINGS = 64
"""So many roundings of inputs and results may add up in an op before its kernel is called wrong."""


@dataclass(frozen=True, slots=True)
class Value:
    """What a tensor holds, whatever its layout: figures of its elements as a set.

    Attributes:
        left_out: how many elements are not finite, or stand for infinity in a mask.
        sums: sum of the other elements, of their magnitudes, squares and cubes; the smallest; the largest.
        is_float: not an index or a mask.
        leaf: name of what was there before the run; empty for results.
    """

    numel: int
    left_out: int
    sums: tuple[float, ...]
    is_float: bool
    leaf: str = ""

    def is_same(self, other: Value) -> bool:
        """Say whether both hold the same numbers but for the rounding of constants."""
        if (self.numel, self.left_out) != (other.numel, other.left_out):
            return False
        _, size, power, _, low, high = (max(abs(x), abs(y)) for x, y in zip(self.sums, other.sums, strict=True))
        top = max(low, high)
        scales = (size, size, power, power * top, top, top)
        pairs = zip(self.sums, other.sums, scales, strict=True)
        return all(abs(x - y) <= SAME * scale for x, y, scale in pairs)


def value_of(tensor: Tensor, leaf: str = "") -> Value:
    """Describe a tensor. Syncs: yes."""
    x = tensor.detach().to(widest(tensor.device)).reshape(-1)
    kept = x[x.abs() < _MASK]
    if not kept.numel():
        return Value(x.numel(), x.numel(), (0.0,) * 6, tensor.is_floating_point(), leaf)
    square = kept.square()
    figures = (kept.sum(), kept.abs().sum(), square.sum(), (square * kept).sum(), kept.min(), kept.max())
    sums = tuple(torch.stack(figures).tolist())
    return Value(x.numel(), x.numel() - kept.numel(), sums, tensor.is_floating_point(), leaf)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRun:
    """One op of a run.

    Attributes:
        arguments: numbers, flags and words it was given, by name.
        reads: what it read, in fp64.
        readers: for each of `reads` the op that made it; None for what was there before the run.
        makes: what it made, in fp64.
        dtype: of the first result, short name.
        local: its error over its result, against fp64 on what it read; as lengths.
        bound: what rounding explains of it.
        total: its error over its result, against a run in fp64 from the start.
    """

    site: Site
    kernel: str
    arguments: tuple[tuple[str, str], ...]
    reads: tuple[Value, ...]
    readers: tuple[int | None, ...]
    makes: tuple[Value, ...]
    draws: bool
    dtype: str
    local: float
    bound: float
    total: float

    @property
    def label(self) -> str:
        """What a report calls it."""
        if self.site.is_own:
            return f"{self.name} in backward of {self.site.own_node}"
        return self.name if self.site.phase == "forward" else f"backward of {self.site.op}"

    @property
    def frame(self) -> Frame | None:
        """The nearest line of a library, else of the user's code."""
        return self.site.library or self.site.user

    @property
    def name(self) -> str:
        """The public function that was called, else the op."""
        return self.site.called or self.site.op

    @property
    def is_wrong(self) -> bool:
        """Whether its kernel is further from fp64 than rounding explains."""
        return self.local > self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run, op by op.

    Attributes:
        outputs, values: floating tensors it returned, as they are and in fp64.
        makers: for each of `outputs` the op that made it.
        modules: outputs of modules, by name and call.
        leaves: what was there before the run, by name.
    """

    ops: tuple[OpRun, ...]
    outputs: tuple[Tensor, ...]
    values: tuple[Value, ...]
    makers: tuple[int | None, ...]
    modules: dict[tuple[str, int], Tensor]
    leaves: dict[str, Tensor]


def relative_error(actual: Tensor, true: Tensor) -> float:
    """Return the length of an error over that of the truth; inf where something finite came out not finite. Syncs: yes."""
    true = true.to(widest(true.device))
    known = true.isfinite() & (true.abs() < _MASK)
    true, got = true[known], actual.detach()[known].to(true.dtype)
    error, size = length(got - true), length(true)
    return 0.0 if error == 0 else math.inf if not math.isfinite(error) or size == 0 else error / size


def jittered(tensor: Tensor, eps: float, random: torch.Generator) -> Tensor:
    """Return a tensor in fp64 whose elements are a rounding up or down of what they were. Syncs: no."""
    noise = torch.randint(0, 2, tensor.shape, generator=random).to(tensor.device) * 2 - 1
    return widened(tensor) * (1 + eps * noise)


class ObservingMode(OpMode):  # type: ignore[no-untyped-call]  # torch's own
    """Records each op, and carries fp64 values from the inputs along beside it.

    Names are relative to the model, or to whatever is called first. What equals one of `other`, the leaves of a run that this one
    is held against, but for rounding has its values. Syncs: at every op.
    """

    def __init__(self, model: nn.Module | None, other: dict[str, Tensor]) -> None:
        super().__init__(TraceContext(model, self._on_output))
        self._other = other
        self.ops: list[OpRun] = []
        self.modules: dict[tuple[str, int], Tensor] = {}
        self.leaves: dict[str, Tensor] = {}
        self._wide = WideValues()
        self._makers: StorageNotes[int] = StorageNotes()
        self._names: StorageNotes[str] = StorageNotes()
        self._calls: dict[str, int] = {}
        self._random = torch.Generator().manual_seed(0)

    def run_op(self, func: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op and record it."""
        facts = op_facts(func)
        if facts.makes_nothing:
            return func(*args, **kwargs)
        site, call = self.context.site(facts.name), Call(func, facts, args, kwargs)
        with self.aside():
            found = {id(t): self._wide_of(call.original(t)) for _, t in call.inputs}
            known = {key: wide for key, wide in found.items() if wide is not None}
            read = [(known.get(id(t), t), call.original(t)) for _, t in call.inputs]
            read += [(t, t) for t in tree_leaves((call.args, call.kwargs)) if _is_index(t)]
            reads = tuple(value_of(true, self._leaf(t)) for true, t in read)
            readers = tuple(self._makers.get(t) for _, t in read)
        out = call.run(args, kwargs)
        with self.aside():
            self._record(call, site, reads, readers, known)
        return out

    def _wide_of(self, tensor: Tensor) -> Tensor | None:
        """Return the fp64 values of a tensor that the run made, or that rounding alone tells from the other run's."""
        if self._makers.get(tensor) is None and self._names.get(tensor) is None:
            name = self._name(tensor)
            twin = self._twin(name, tensor)
            if twin is not None:
                self._wide.put(flat(tensor), twin)
        return self._wide.get(tensor)

    def _name(self, tensor: Tensor) -> str:
        name = self.context.name_of(tensor) or f"tensor {len(self.leaves)}"
        self._names.note(tensor, name)
        self.leaves.setdefault(name, flat(tensor))
        return name

    def _leaf(self, tensor: Tensor) -> str:
        return "" if self._makers.get(tensor) is not None else self._names.get(tensor) or self._name(tensor)

    def _twin(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return the other run's values of a leaf, in fp64, where the two differ by the rounding of the narrower format."""
        mine = flat(tensor)
        named = self._other.get(name)
        for other in [named] if named is not None else self._other.values():
            if other.numel() == mine.numel() and other.dtype != mine.dtype and other.is_floating_point():
                true, got = widened(other.to(mine.device)), widened(mine)
                eps = max(torch.finfo(other.dtype).eps, torch.finfo(mine.dtype).eps)
                if bool(((got - true).abs() <= eps * true.abs() + eps**4).all()):
                    return true
        return None

    def _record(
        self,
        call: Call,
        site: Site,
        reads: tuple[Value, ...],
        readers: tuple[int | None, ...],
        known: dict[int, Tensor],
    ) -> None:
        wide = call.wide_dtype
        full = run_wide(call, known, wide) or [t.detach() for t in call.out]
        near = (run_wide(call, {}, wide) if known else full) or [t.detach() for t in call.out]
        local = max((relative_error(t, n) for t, n in zip(call.out, near, strict=True)), default=0.0)
        others = [t for t in tree_leaves(call.returned) if _is_index(t)]
        made = [*zip(call.out, full, strict=True), *((t, t) for t in others)]
        self.ops.append(
            OpRun(
                site=site,
                kernel=call.facts.kernel,
                arguments=_arguments(call),
                reads=reads,
                readers=readers,
                makes=tuple(value_of(true) for _, true in made),
                draws=draws(call),
                dtype=dtype_name(call.out[0].dtype) if call.out else "",
                local=local,
                bound=self._bound(call, near, local),
                total=max((relative_error(t, f) for t, f in zip(call.out, full, strict=True)), default=0.0),
            )
        )
        for tensor, true in zip(call.out, full, strict=True):
            self._wide.put(tensor, widened(true))
        for tensor, _ in made:
            self._makers.note(tensor, len(self.ops) - 1)

    def _bound(self, call: Call, near: list[Tensor], local: float) -> float:
        """Return the error that rounding explains: of the result, and of what the op makes of rounded inputs."""
        dtypes = [t.dtype for t in (*call.out, *(t for _, t in call.inputs))]
        eps = max((torch.finfo(d).eps for d in dtypes), default=0.0)
        if local <= 4 * eps:
            return 4 * eps
        moved = {id(t): jittered(t.detach(), eps, self._random) for _, t in call.inputs}
        again = run_wide(call, moved, call.wide_dtype)
        if again is None:
            return math.inf
        return ROUNDINGS * (eps + max(relative_error(a, n) for a, n in zip(again, near, strict=True)))

    def _on_output(self, module: nn.Module, place: Place, output: Any) -> None:
        with self.aside():
            found = next((v for _, v in floating(output)), None)
        if found is not None and place.module:
            call = self._calls.get(place.module, 0)
            self._calls[place.module] = call + 1
            self.modules[place.module, call] = found.detach()

    def run_of(self, output: object) -> Run:
        """Return the run, given what it returned. Syncs: yes."""
        tensors = [v for _, v in floating(output)]
        with self.aside():
            wide = [(t, self._wide.get(t)) for t in tensors]
            return Run(
                ops=tuple(self.ops),
                outputs=tuple(t.detach() for t in tensors),
                values=tuple(value_of(t if w is None else w) for t, w in wide),
                makers=tuple(self._makers.get(t) for t in tensors),
                modules=self.modules,
                leaves=self.leaves,
            )


def _is_index(value: object) -> bool:
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
        return False
    return value.layout is torch.strided and not value.is_meta


def _arguments(call: Call) -> tuple[tuple[str, str], ...]:
    named = {**dict(zip(call.facts.arguments, call.args, strict=False)), **call.kwargs}
    return tuple((n, repr(v)) for n, v in named.items() if isinstance(v, str) or _is_numbers(v))


def _is_numbers(value: object) -> bool:
    """Say whether a value is a number or a flag, or a list or tuple of some."""
    return all(isinstance(v, (int, float)) for v in (value if isinstance(value, (list, tuple)) else [value]))
