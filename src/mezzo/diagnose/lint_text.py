"""What a lint costs, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..formats import format_of, parse_dtype
from .records import Lint
from .verdict import number


@dataclass(frozen=True, kw_only=True, slots=True)
class LintWarning:
    """A lint in words.

    Attributes:
        lint: what was seen.
        why: what it costs, with the numbers.
        advice: what to write instead.
    """

    lint: Lint
    why: str
    advice: str


def explain_lint(lint: Lint) -> LintWarning:
    """Say what a lint costs and what to write instead."""
    why, advice = _TEXTS[lint.rule](lint)
    return LintWarning(lint=lint, why=why, advice=advice)


def _exact(lint: Lint) -> str:
    return number(2.0 / format_of(parse_dtype(lint.dtype)).eps)


def _constant(lint: Lint) -> tuple[str, str]:
    facts = format_of(parse_dtype(lint.dtype))
    if lint.what == "0":
        return (
            f"the constant {number(lint.value)} is 0 in {lint.dtype}, whose smallest number is {number(facts.smallest)}.",
            f"write at least {number(facts.tiny)}, or run this in fp32.",
        )
    return (
        f"the constant {number(lint.value)} is inf in {lint.dtype}, which holds at most {number(facts.max)}.",
        "write torch.finfo(x.dtype).min (or max), which fits whatever type x has.",
    )


_TEXTS: dict[str, Callable[[Lint], tuple[str, str]]] = {
    "integers-in-16-bit": lambda x: (
        f"whole numbers up to {number(x.value)} are cast to {x.dtype}, which is exact up to {_exact(x)}: neighbours become equal.",
        "compute positions and phases in fp32: with torch.autocast(..., enabled=False) and x.float().",
    ),
    "constant-lost": _constant,
    "squares-near-overflow": lambda x: (
        f"squares reach {number(x.value)} of the {number(format_of(parse_dtype(x.dtype)).max)} that {x.dtype} holds.",
        "square in fp32 (x.float().square()), or scale x down first.",
    ),
    "masked-row": lambda x: (
        f"{x.what} of a softmax hold -inf alone, which gives NaN.",
        "keep one entry in every row, or mask with torch.finfo(x.dtype).min.",
    ),
    "buffer-in-16-bit": lambda x: (
        f"{x.what} is stored in {x.dtype}; frequencies and running statistics need fp32.",
        "exclude it when casting the model: module.buffer = module.buffer.float().",
    ),
    "half-accumulator": lambda x: (
        f"{x.what} is kept in {x.dtype}: additions smaller than half its spacing are lost (1000 ones sum to 256 in bf16).",
        "start the sum in fp32: total = torch.zeros((), dtype=torch.float32).",
    ),
    "backward-in-region": lambda x: (
        "backward runs inside the autocast region, so ops of its own (penalties, custom Functions) are cast again.",
        "leave the region before loss.backward().",
    ),
    "half-weights-in-region": lambda x: (
        f"{x.what} are stored in {x.dtype} under autocast: updates are rounded to {x.dtype} and gradients cannot be unscaled.",
        "keep the weights in fp32, or mezzo.prepare with params and master.",
    ),
    "loss-in-16-bit": lambda x: (
        f"the loss is {x.dtype} when backward starts; a scale of 65536 does not fit fp16, and small changes are lost.",
        "compute the loss from float outputs: loss_fn(output.float(), target).",
    ),
    "clip-before-unscale": lambda x: (
        f"gradients are clipped while they are still multiplied by {number(x.value)}.",
        "call scaler.unscale_(optimizer) before clipping.",
    ),
    "no-loss-scale": lambda x: (
        "ops run in fp16 and the loss is not scaled: gradients below 6e-8 become 0.",
        "scale the loss: mezzo.GradScaler, or a policy with scaling; or use bf16.",
    ),
}
