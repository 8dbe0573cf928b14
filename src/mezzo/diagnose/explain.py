"""`explain`: what runs in 16 bit, what the casts cost, and whether it pays on this device."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import OpOverload, storage_id
from ..errors import ConfigError, plural, shown
from ..formats import LOW_DTYPES, MIXED_DTYPES, dtype_name, is_number, native_support, number_of
from ..policy import Policy, PolicyLike, as_policy
from ..report import Document, Note, Pairs, Report, Table
from ..trace import OpMode, Site, TraceContext, check_model, floating, flops_of, op_facts
from .memory import size
from .trial import LossFn, backward, bind_copy, check_trial, device_of, loss_of, scale_of

ALIGNMENT = 8
"""Tensor cores of 16-bit formats want sizes that are multiples of this. Source: NVIDIA, Matrix Multiplication Guide."""
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"})
_LOW = ("fp16", "bf16")
_WORTH = 1.1
"""A gain below this is none: launch cost and noise move a step as much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleRow:
    """What one module ran itself, its submodules left out.

    Attributes:
        ops: (dtype, number of ops).
        flops: (dtype, floating-point operations).
        up_casts: casts of activations to fp32.
        down_casts: casts of activations to 16 bit.
        ping_pong: pairs of those of activations.
        unaligned: (sizes, how often) of 16-bit products off the grid of tensor cores.
    """

    module: str
    cls: str
    ops: tuple[tuple[str, int], ...]
    flops: tuple[tuple[str, int], ...]
    weight_casts: int
    up_casts: int
    down_casts: int
    grad_casts: int
    ping_pong: int
    cast_bytes: int
    unaligned: tuple[tuple[tuple[int, ...], int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation(Report):
    """What a policy does to one step of a model.

    Attributes:
        policy: text, with the compute dtype decided.
        device: as torch prints it.
        native: the device has units for the compute dtype.
        native_reason: where that was read.
        rows: by module, in the order they ran.
        fp32_s: seconds of a step in fp32, the fastest of several; 0 where nothing was timed.
    """

    model: str
    policy: str
    device: str
    native: bool
    native_reason: str
    rows: tuple[ModuleRow, ...]
    fp32_s: float
    policy_s: float
    has_backward: bool

    @property
    def low_share(self) -> float:
        """Share of the floating-point operations of products that run in 16 bit."""
        low = sum(n for row in self.rows for name, n in row.flops if name in _LOW)
        return low / max(1, sum(self._flops))

    @property
    def casts(self) -> int:
        """Casts between formats, of weights, activations and gradients."""
        return sum(r.weight_casts + r.up_casts + r.down_casts + r.grad_casts for r in self.rows)

    @property
    def gain(self) -> float:
        """How many times faster the step was measured to be; 1 where nothing was timed."""
        return self.fp32_s / self.policy_s if self.policy_s else 1.0

    @property
    def _flops(self) -> list[int]:
        return [n for row in self.rows for _, n in row.flops]

    @property
    def _low(self) -> str:
        return "fp16" if any(name == "fp16" for row in self.rows for name, _ in row.flops) else "bf16"

    def verdict(self) -> str:
        """Say whether the policy pays here, and why or why not."""
        if self._flops and not sum(self._flops):
            return "Not enough seen: no product had elements."
        if not self.low_share:
            return "Nothing runs in 16 bit: the policy changes no product of this model."
        measured = f"{self.gain:.2f}x, measured" if self.policy_s else "not measured"
        if self.gain >= _WORTH:
            return f"It pays: {measured}; {self.low_share:.0%} of the operations run in 16 bit."
        reasons = []
        if not self.native:
            reasons.append(f"the device has no units for the format ({self.native_reason})")
        if self.low_share < 0.5:
            reasons.append(f"only {self.low_share:.0%} of the operations run in 16 bit")
        if self.native and self.policy_s and sum(self._flops) / self.policy_s < 1e10:
            graph = "" if self.device == "cpu" else ", or replay the step in one launch with amp.capture"
            way = f"use a larger batch or torch.compile{graph}"
            reasons.append(f"the step is bound by launching ops, not by arithmetic: {way}")
        if self.casts > sum(n for r in self.rows for _, n in r.ops) / 4:
            reasons.append(f"casts are a large part of the ops: store weights in 16 bit ({self._low}-master)")
        what = "a slower step" if self.gain < 1 / _WORTH else "no gain"
        return f"Expect {what} ({measured}): {'; '.join(reasons) or 'casts and memory cost what the products gain'}."

    def document(self) -> Document:
        """Return the layout."""
        flops = sum(self._flops)
        timed = f"fp32 {self.fp32_s * 1e3:.3g} ms, policy {self.policy_s * 1e3:.3g} ms"
        pairs = (
            ("device", f"{self.device}: {self.native_reason}"),
            ("step", "forward and backward" if self.has_backward else "forward"),
            ("flops", f"{flops:.3g}, {self.low_share:.1%} of them in 16 bit"),
            ("casts", f"{self.casts:,}, moving {size(sum(r.cast_bytes for r in self.rows))}"),
            ("time", timed if self.policy_s else "not measured"),
        )
        table = Table(
            title="By module, submodules left out",
            columns=("module", "class", "ops", "flops", "weight casts", "up", "down", "backward", "cast bytes"),
            rows=tuple(
                (r.module or "(root)", r.cls, ", ".join(f"{n} {name}" for name, n in r.ops), sum(n for _, n in r.flops),
                 r.weight_casts, r.up_casts, r.down_casts, r.grad_casts, r.cast_bytes)
                for r in self.rows
            ),
        )  # fmt: skip
        return Document(
            title=f"mezzo explain of {self.model} under {self.policy}",
            verdict=self.verdict(),
            # slow is not faulty
            is_good=bool(flops) or not self._flops,
            blocks=(Pairs(pairs=pairs), table, *(Note(text=text) for text in self.advice())),
        )

    def advice(self) -> tuple[str, ...]:
        """Return what would make the step cheaper, with the numbers."""
        texts = []
        for row in self.rows:
            if row.unaligned:
                off = ", ".join(" x ".join(map(str, sizes)) for sizes, _ in row.unaligned[:3])
                where = row.module or self.model
                texts.append(f"{where}: products of {off} have sizes that are no multiples of {ALIGNMENT}.")
        if bouncing := [r for r in self.rows if r.ping_pong]:
            worst = max(bouncing, key=lambda r: r.ping_pong)
            total = sum(r.ping_pong for r in bouncing)
            texts.append(
                f"activations go up to fp32 and down again {total} {plural('time', total)}, most in {worst.module or self.model}."
            )
        if casts := sum(r.weight_casts for r in self.rows):
            master = "split" if self._low == "bf16" else "fp32"
            texts.append(f"weights are cast {casts} times a step: params={self._low}, master={master} stores them so.")
        return tuple(texts)


@dataclass(slots=True, kw_only=True)
class Counts:
    """What one module ran itself, as it is counted; `ModuleRow` says what. Casts are counted by its names for them."""

    ops: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    casts: Counter[str] = field(default_factory=lambda: Counter(weight_casts=0, up_casts=0, down_casts=0, grad_casts=0))
    cast_bytes: int = 0
    unaligned: Counter[tuple[int, ...]] = field(default_factory=Counter)


class OpCounter(OpMode):  # type: ignore[no-untyped-call]  # torch's own
    """Counts ops by module, and says whether one of a backward pass ran, while it is on. Syncs: no."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(TraceContext(model))
        self._weights = {storage_id(p) for p in model.parameters()}
        self.counts: dict[str, Counts] = {}
        self.has_backward = False

    def run_op(self, func: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op and count it."""
        out = func(*args, **kwargs)
        facts = op_facts(func)
        result = out[0] if isinstance(out, (tuple, list)) and out else out
        if not facts.makes_nothing and isinstance(result, Tensor) and result.is_floating_point():
            site = self.context.site(facts.name)
            counts = self.counts.setdefault(site.module, Counts())
            self.has_backward |= site.phase == "backward"
            if facts.name == "to":
                self._cast(counts, site, args[0], result)
            else:
                counts.ops[dtype_name(result.dtype)] += 1
            self._product(counts, facts.name, args, flops_of(func, args, kwargs, out))
        return out

    def _cast(self, counts: Counts, site: Site, source: Tensor, result: Tensor) -> None:
        if source.dtype is result.dtype or source.dtype not in MIXED_DTYPES or result.dtype not in MIXED_DTYPES:
            return
        counts.cast_bytes += sum(t.nbytes for _, t in floating((source, result)))
        if site.phase == "backward":
            kind = "grad_casts"
        elif source.layout is torch.strided and storage_id(source) in self._weights:
            kind = "weight_casts"
        else:
            kind = "down_casts" if result.dtype in LOW_DTYPES else "up_casts"
        counts.casts[kind] += 1

    @staticmethod
    def _product(counts: Counts, op: str, args: tuple[Any, ...], flops: int) -> None:
        if not flops and op not in _PRODUCTS:
            return
        operands = [a for a in args if isinstance(a, Tensor) and a.is_floating_point()]
        dtype = operands[-1].dtype
        counts.flops[dtype_name(dtype)] += flops
        if dtype in LOW_DTYPES and op in _PRODUCTS:
            sizes = _sizes(op, operands)
            if any(n % ALIGNMENT for n in sizes):
                counts.unaligned[sizes] += 1


def _sizes(op: str, operands: list[Tensor]) -> tuple[int, ...]:
    """Return the sizes that decide whether a product can use tensor cores: rows, inner, columns; or channels."""
    if op.startswith("convolution"):
        weight = next(t for t in reversed(operands) if t.dim() >= 3)
        return weight.shape[0], weight.shape[1]
    left, right = operands[-2], operands[-1]
    return int(left.shape[-2]), int(left.shape[-1]), int(right.shape[-1])


def _row(name: str, cls: str, c: Counts) -> ModuleRow:
    return ModuleRow(
        module=name, cls=cls, ops=tuple(sorted(c.ops.items())), flops=tuple(sorted(c.flops.items())),
        unaligned=tuple(sorted(c.unaligned.items())), cast_bytes=c.cast_bytes,
        ping_pong=min(c.casts["up_casts"], c.casts["down_casts"]), **c.casts,
    )  # fmt: skip


def _seconds(run: Callable[[], None], device: torch.device, budget_s: float) -> float:
    """Return the fastest of the runs that fit in a budget, at least one, after one that is not counted."""

    def once() -> float:
        start = time.perf_counter()
        run()
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    once()
    times = [once()]
    while sum(times) < budget_s:
        times.append(once())
    return min(times)


def _step(model: nn.Module, batch: Any, loss_fn: LossFn | None, scale: float) -> Callable[[], None]:
    def run() -> None:
        with torch.set_grad_enabled(model.training):
            backward(loss_of(model, batch, loss_fn), scale)
        for p in model.parameters():
            p.grad = None

    return run


def explain(
    model: nn.Module, batch: Any, policy: PolicyLike = "auto", *, loss_fn: LossFn | None = None, budget_s: float = 0.5
) -> Explanation:
    """Say what a policy runs in which precision, what its casts cost, and whether it pays on this device.

    The step is run once under a counter and, for the verdict, timed in fp32 and under the policy.

    Args:
        model: in training mode the step has a backward; is left as it was.
        batch: as in `mezzo.diagnose.lint`.
        policy: a policy or its text.
        loss_fn: computes the loss from (model, batch).
        budget_s: seconds of timing for each of fp32 and the policy; 0 measures nothing.

    Raises:
        PolicyError: the policy does not fit the model.
        ConfigError: no model, batch or loss.

    Writes: nothing. Syncs: yes.
    """
    check_model("explain", model)
    check_trial("explain", batch, loss_fn)
    if not is_number(number_of(budget_s), 0):
        raise ConfigError(f"explain was given budget_s={shown(budget_s)}; give a number of 0 or more.")
    device = device_of(model)
    chosen = as_policy(policy).resolve(device)
    compute = chosen.compute or torch.float32
    native = native_support(device, compute)
    classes = {name: type(m).__name__ for name, m in model.named_modules()}
    fp32_s = policy_s = 0.0
    with bind_copy(model, chosen) as runnable:
        run = _step(runnable, batch, loss_fn, scale_of(chosen, model))
        counted = OpCounter(runnable)
        with counted.watching():
            run()
        if budget_s:
            policy_s = _seconds(run, device, budget_s)
    if budget_s:
        with bind_copy(model, Policy()) as plain:
            fp32_s = _seconds(_step(plain, batch, loss_fn, 1.0), device, budget_s)
    return Explanation(
        model=type(model).__name__,
        policy=str(chosen),
        device=str(device),
        native=native.native,
        native_reason=f"{dtype_name(compute)}: {native.reason}",
        rows=tuple(_row(name, classes.get(name, ""), c) for name, c in counted.counts.items()),
        fp32_s=fp32_s,
        policy_s=policy_s,
        has_backward=counted.has_backward,
    )
