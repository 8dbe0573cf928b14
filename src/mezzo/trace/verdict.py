"""What kind of fault an event is, judged from its numbers alone."""

from __future__ import annotations

import math
from typing import Literal

import torch

from ..errors import plural
from ..formats import LOW_DTYPES, dtype_name, format_of, parse_dtype
from .ops import FACTORIZATIONS, plain_name
from .records import Event, Wide

Verdict = Literal[
    "overflow", "underflow", "singularity", "loss-scale", "inherited", "exploding", "vanishing", "lost-update",
    "clip-before-unscale", "scaled-step", "zero-learning-rate", "cleared-gradients", "zero-gradients", "exploding-step",
    "exploding-loop", "uncleared-gradients", "no-gradients", "ids-in-16-bit", "stale-cast", "amplified-rounding",
]  # fmt: skip
"""Kinds of fault.

overflow: the value exists, the format is too small. underflow: a 16-bit zero that is none in fp32 was divided by, or
its logarithm taken. singularity: the value does not exist in any format. loss-scale: a gradient that a smaller loss
scale keeps finite. inherited: a parameter, buffer, input or constant was bad before any op. exploding, vanishing:
sizes grow or shrink layer by layer. lost-update: a 16-bit weight that its updates do not move. The others are lint rules
that are broken only where training does not do what was written.
"""
_ENTIRE = frozenset({
    "exp", "exp2", "expm1", "sinh", "cosh", "square", "add", "sub", "mul", "mm", "bmm", "addmm", "baddbmm", "addbmm",
    "addmv", "mv", "dot", "linear", "convolution", "sum", "mean", "cumsum", "prod", "cumprod", "addcmul", "polyval",
    "linalg_vector_norm", "softplus", "mse_loss", "dist", "to",
})  # fmt: skip
_LOGARITHMS = frozenset(
    {"log", "log2", "log10", "xlogy", "logit", "logsumexp", "logdet", "slogdet", "binary_cross_entropy"}
)
_DIVIDES = frozenset({
    "div", "reciprocal", "rsqrt", "floor_divide", "remainder", "fmod", "addcdiv", "pow", "layer_norm", "batch_norm", "group_norm",
    "rms_norm", "fused_rms_norm", "linalg_solve", "linalg_inv", "softmax", "mean", "cdist",
})  # fmt: skip
LOW_NAMES = tuple(dtype_name(d) for d in LOW_DTYPES)


def number(x: float) -> str:
    """Write a number for a sentence.

    >>> number(65504.0), number(7.82e8), number(0.0)
    ('65504', '7.82e+08', '0')
    """
    return f"{x:.5g}" if abs(x) < 1e5 else f"{x:.3g}"


def narrow_dtype(event: Event) -> torch.dtype:
    """Return the dtype of the result that went wrong; some of torch's have no short name."""
    return getattr(torch, event.dtype, None) or parse_dtype(event.dtype)


def limit_of(event: Event) -> float:
    """Return the largest number that the dtype of the result that went wrong holds."""
    return torch.finfo(narrow_dtype(event)).max


def verdict_of(event: Event) -> tuple[Verdict, str]:
    """Return the kind of fault an event is, and one sentence with the numbers that show it."""
    if event.kind in ("leaf", "constant"):
        return "inherited", _inherited(event)
    if event.kind == "mixed":
        return "singularity", _mixed(event)
    finite = next((w for w in event.wide if w.is_finite), None)
    if finite is None:
        return _never_finite(event)
    if event.site.op in FACTORIZATIONS and event.dtype not in LOW_NAMES:
        return "singularity", (
            f"the matrix has no factors in {event.dtype}, to whose rounding it is singular; in {finite.dtype} it has."
        )
    halvings = _halvings(event, finite)
    if halvings is not None:
        scale = event.loss_scale / 2**halvings
        return "loss-scale", (
            f"the gradient reaches {number(finite.amax)} at loss scale {number(event.loss_scale)}, more than the "
            f"{number(limit_of(event))} that {event.dtype} holds; it is finite at scale {number(scale)} = "
            f"{number(event.loss_scale)} / 2^{halvings}."
        )
    return "overflow", _overflow(event, finite)


def _inherited(event: Event) -> str:
    bad = event.outputs[0]
    counts = {"NaN": bad.nan, "inf": bad.posinf, "-inf": bad.neginf}
    held = " and ".join(f"{n} {name}" for name, n in counts.items() if n)
    if event.kind == "constant" and event.site.phase == "optimizer":
        return f"the optimizer is given the number {event.leaf or held}, which reaches the weights."
    if event.kind == "constant":
        return f"the code writes the number {event.leaf or held} here, and it reached the end unmasked."
    return f"{event.leaf} already holds {held} when {event.site.op} first reads it."


def call_at(event: Event, says: str = "") -> str:
    """Return which op went wrong at which values: `div(self, other) at self=1, other=0`, with what is said of it between; without known ones the op.

    In backward that is the derivative of a forward op, or a kernel of torch's where no more is known than what it was given.
    """
    names = [name for name, _ in event.offending]
    op, is_slope = event.site.op, event.site.is_derivative
    if is_slope and any(name.startswith("grad") for name in names):
        op, is_slope = plain_name(event.kernel), False
    what = f"the derivative of {op}" if is_slope else op
    if not names:
        return f"{what}{says}"
    values = ", ".join(f"{name}={number(value)}" for name, value in event.offending)
    return f"{what}({', '.join(names)}){says} at {values}"


def _mixed(event: Event) -> str:
    if event.full_rows:
        follows = "nothing to share out: 0/0" if event.outputs[0].nan else "no sum to take the logarithm of"
        return f"every entry of {event.full_rows} {plural('row', event.full_rows)} is -inf, so there is {follows}."
    return f"infinities written on purpose meet and give NaN in {call_at(event)}."


def _halvings(event: Event, finite: Wide) -> int | None:
    """Return how often the loss scale must be halved for this gradient to fit; None if that is not the cause."""
    if event.site.phase != "backward" or event.loss_scale <= 1 or finite.has_nan:
        return None
    limit = limit_of(event)
    halvings = max(1, math.ceil(math.log2(finite.amax / limit))) if finite.amax > 0 else 1
    return halvings if 2**halvings <= event.loss_scale else None


def _overflow(event: Event, finite: Wide) -> str:
    top = max((t.amax for t in event.inputs), default=0.0)
    name, limit = event.dtype, limit_of(event)
    if event.leaf and event.site.op == "to":
        return f"{event.leaf} reaches {number(top)}, and {name}, to which it is cast, holds at most {number(limit)}."
    where = "" if finite.amax > limit else " on the way to its result"
    return (
        f"{name} overflows{where}: it holds at most {number(limit)}, and the same op in {finite.dtype} gives "
        f"{number(finite.amax)} from inputs of at most {number(top)}."
    )


def _never_finite(event: Event) -> tuple[Verdict, str]:
    if event.reference is not None and event.reference.is_finite:
        return "underflow", _underflow(event)
    has_nan = any(t.nan for t in event.outputs)
    if not event.wide and event.dtype in LOW_NAMES:
        top = number(max(t.amax for t in event.inputs))
        return "overflow", f"finite inputs of at most {top} gave a non-finite result."
    if not has_nan and event.kernel.split(".")[-1].strip("_").removeprefix("foreach_") in _ENTIRE:
        return "overflow", f"the result is larger than any format holds: {call_at(event)}."
    tried = " and ".join(w.dtype for w in event.wide) or "its own format"
    return "singularity", f"not finite in {tried} either: {call_at(event)}{_column(event)}."


_ADDED = frozenset({"bias", "running_mean"})
"""Arguments of a norm that nothing is divided by."""


def _column(event: Event) -> str:
    """Name the column in which a divisor that is shared by all rows is 0."""
    zero = {name for name, value in event.offending if value == 0 and name not in _ADDED}
    width = event.outputs[0].shape[-1:]
    rows = [t for t in event.inputs if t.shape[-1:] == width and math.prod(t.shape) == math.prod(width)]
    shared = [t for t in rows if t.name in zero]
    if event.site.phase != "forward" or not shared or len(event.outputs[0].shape) < 2 or not event.where:
        return ""
    return f"; column {event.where[-1]} is the same in all rows, or empty: its {shared[0].name} is 0"


def _underflow(event: Event) -> str:
    flush, reference = event.flush, event.reference
    assert reference is not None
    if flush is None:
        low = next((t.dtype for t in (*event.outputs, *event.inputs) if t.dtype in LOW_NAMES), "16 bit")
        return (
            f"rounding to {low} on the way here moved its argument to where no value exists; on the values of "
            f"an fp32 run {event.site.op} gives {number(reference.amax)}."
        )
    if flush.is_cancellation:
        return (
            f"{flush.site.op} gives exactly 0 because {flush.dtype} rounded what it is computed from (fp32: up to "
            f"{number(flush.wide_amax)}), and {_meets_zero(event)} that 0."
        )
    if flush.constant is not None:
        return (
            f"the constant {number(flush.constant)} rounds to 0 in {flush.dtype}, whose smallest number is "
            f"{number(format_of(parse_dtype(flush.dtype)).smallest)}; so {_meets_zero(event)} exactly 0."
        )
    return f"{flush.site.op} flushed {flush.share:.1%} of its results to 0 in {flush.dtype} (fp32: up to {number(flush.wide_amax)}), and {_meets_zero(event)} that 0."


def _meets_zero(event: Event) -> str:
    """Say what an op does with a 0 that has no value in any format."""
    op = event.site.op
    if event.site.is_derivative:
        return f"the derivative of {op} divides by"
    if op in _LOGARITHMS:
        return f"{op} takes the logarithm of"
    return f"{op} divides by" if op in _DIVIDES else f"{op} has no value at"
