"""Lints in words: what each costs, with the numbers, and what to write instead."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..formats import Format, format_of, parse_dtype
from .buffers_at_rest import exact_integers
from .ops import plain_name
from .records import Lint, LintCase, LintRule
from .verdict import number


@dataclass(frozen=True, kw_only=True, slots=True)
class LintWarning:
    """A lint in words: why it costs what, with the numbers, and what to write instead."""

    lint: Lint
    why: str
    advice: str


def explain_lint(lint: Lint) -> LintWarning:
    """Say what a lint costs and what to write instead."""
    why, advice = TEXTS[lint.rule, lint.case](lint)
    return LintWarning(lint=lint, why=why, advice=advice)


def _format(lint: Lint) -> Format:
    return format_of(parse_dtype(lint.dtype))


def _exact(lint: Lint) -> str:
    return f"{lint.dtype}, which is exact up to {number(exact_integers(parse_dtype(lint.dtype)))}"


def _enlarged(lint: Lint) -> str:
    """Say by how much rounding became large, and which op read the elements that are off, where it is another than made them."""
    shown = plain_name(lint.kernel)
    read = f" where {shown} reads it" if shown != lint.site.op else ""
    return f"{lint.site.op} makes rounding large: its result is {lint.value:.0%} off what fp32 has{read}"


def _added_up(lint: Lint) -> str:
    return f"{lint.what} is kept in {lint.dtype}: additions smaller than half its spacing are lost (1000 ones sum to 256 in bf16)."


def _clipped(lint: Lint) -> str:
    return f"gradients are clipped while they are still multiplied by {number(lint.value)}."


_PRINT_FACTORS = "print the schedule's factors: whole-number division (//) in a warm-up gives 0, and a schedule made for epochs, or fewer steps, is over soon."
_POSITIONS_IN_FP32 = "compute positions and phases in fp32: with torch.autocast(..., enabled=False) and x.float()."
TEXTS: dict[tuple[LintRule, LintCase], Callable[[Lint], tuple[str, str]]] = {
    ("integers-in-16-bit", ""): lambda x: (
        f"whole numbers up to {number(x.value)} are cast to {_exact(x)}: neighbours become equal.",
        _POSITIONS_IN_FP32,
    ),
    ("integers-in-16-bit", "arange"): lambda x: (
        f"numbers of arange up to {number(x.value)} lie closer together than those of {x.dtype}: neighbours become equal.",
        _POSITIONS_IN_FP32,
    ),
    ("integers-in-16-bit", "sum"): lambda x: (
        f"whole numbers up to {number(x.value)} are added up in {_exact(x)}: neighbours become equal.",
        _POSITIONS_IN_FP32,
    ),
    ("ids-in-16-bit", ""): lambda x: (
        f"whole numbers are cast to {_exact(x)}, and read as whole numbers again: {x.what}.",
        "keep ids whole (int64) up to the op that reads them, as embedding does, and cast only what is computed with.",
    ),
    ("constant-lost", "underflow"): lambda x: (
        f"the constant {x.what} is 0 in {x.dtype}, whose smallest number is {number(_format(x).smallest)}.",
        f"write at least {number(_format(x).tiny)}, or run this in fp32.",
    ),
    ("constant-lost", "overflow"): lambda x: (
        f"the constant {x.what} is inf in {x.dtype}, which holds at most {number(_format(x).max)}.",
        "write torch.finfo(x.dtype).min (or max), which fits whatever type x has.",
    ),
    ("squares-near-overflow", ""): lambda x: (
        f"squares reach {number(x.value) + ' of' if x.value < math.inf else 'more than'} the {number(_format(x).max)} that {x.dtype} holds.",
        "square in fp32 (x.float().square()), or scale x down first.",
    ),
    ("log-of-one-plus", ""): lambda x: (
        f"1 + x was rounded to 16 bit before its logarithm, which is off by {x.what} of what fp32 has: a small x is lost beside 1.",
        "write torch.log1p(x); of 1 + exp(x), torch.nn.functional.softplus(x).",
    ),
    ("finite-difference", ""): lambda x: (
        f"a difference is divided by its step, {number(x.value)}, and off by {x.what} of what fp32 has: {x.dtype} gives both of its terms nearly the same numbers.",
        "compute both terms in fp32, with torch.autocast(..., enabled=False) and a model of fp32 weights; or differentiate: torch.func.jvp, torch.autograd.grad.",
    ),
    ("amplified-rounding", ""): lambda x: (
        f"{_enlarged(x)}, of numbers that {x.dtype} rounded since the last layer or input.",
        "compute it, and all behind the last layer or input that it is made of, in fp32: x = x.float() there, with torch.autocast(..., enabled=False); or leave out the large part that cancels.",
    ),
    ("amplified-rounding", "close-results"): lambda x: (
        f"{_enlarged(x)}, since results of {x.what} lie closer together than numbers of {x.dtype}.",
        "run that layer in fp32 (module:NAME=fp32 in the policy, or torch.autocast(..., enabled=False)); or take out what its results have in common, as by targets less their mean.",
    ),
    ("amplified-rounding", "weights"): lambda x: (
        f"{x.site.op} is rounded to {x.dtype} near {x.what}, and shares its gradient out by e^(x - result): what comes back through its calls is off by {100 * x.value:.3g}%.",
        "compute it in fp32, of x.float(), with torch.autocast(..., enabled=False).",
    ),
    ("amplified-rounding", "probabilities"): lambda x: (
        f"{x.value:.1%} of the probabilities that {x.site.op} is given are 0 or 1 against their targets since {x.dtype} rounded them: they have no gradient.",
        "write binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the values before the sigmoid, or take the sigmoid of x.float().",
    ),
    ("rounded-index", ""): lambda x: (
        f"{x.site.op} picks by numbers that {x.dtype} rounded since the last layer or input: fp32 picks others in {x.what} of its places.",
        "compute what it picks by, from there on, in fp32: x = x.float(), with torch.autocast(..., enabled=False); keep the type of the result.",
    ),
    ("rounded-index", "answer"): lambda x: (
        f"{x.site.op} compares numbers that {x.dtype} rounded: fp32 gives the other answer in {x.what} of its places.",
        "compare in fp32, of numbers that were made in it (x.float(), with torch.autocast(..., enabled=False)); ask of equality within a distance: (a - b).abs() < tolerance.",
    ),
    ("rounded-index", "factors"): lambda x: (
        f"{x.site.op} finds no factors of {x.what} of the matrices that it is given, which {x.dtype} rounded: in fp32 they have some.",
        "make the matrix in fp32, of numbers that were never 16 bit; what stands in for factors is for matrices that have none.",
    ),
    ("masked-row", ""): lambda x: (
        f"{x.what} of a softmax hold -inf alone, which gives NaN.",
        "keep one entry in every row, or mask with torch.finfo(x.dtype).min.",
    ),
    ("buffer-in-16-bit", ""): lambda x: (
        f"{x.what} is stored in {x.dtype}, or went through it; frequencies, positions, weights of classes and running statistics need fp32.",
        "hold it before the model is cast, and put it back behind: kept = module.buffer; model.half(); module.buffer = kept.",
    ),
    ("half-accumulator", ""): lambda x: (
        _added_up(x),
        "keep it in fp32: total = torch.zeros((), dtype=torch.float32), or module.buffer = module.buffer.float().",
    ),
    ("half-accumulator", "by-index"): lambda x: (
        _added_up(x),
        "add it up in fp32, of x.float(), or keep the weights that it belongs to in fp32.",
    ),
    ("half-accumulator", "gradients"): lambda x: (
        _added_up(x),
        "add gradients up in fp32: grads=fp32 in the policy that mezzo.prepare is given; or keep the weights in fp32.",
    ),
    ("backward-in-region", ""): lambda x: (
        "backward runs inside the autocast region, so ops of its own (penalties, custom Functions) are cast again.",
        "leave the region before loss.backward().",
    ),
    ("half-weights-in-region", ""): lambda x: (
        f"{x.what} are stored in {x.dtype} under autocast: updates are rounded to {x.dtype} and gradients cannot be unscaled.",
        "keep the weights in fp32, or mezzo.prepare with params and master.",
    ),
    ("loss-in-16-bit", ""): lambda x: (
        f"the loss is {x.dtype} when backward starts; a scale of 65536 does not fit fp16, and small changes are lost.",
        "compute the loss from float outputs: loss_fn(output.float(), target).",
    ),
    ("clip-before-unscale", ""): lambda x: (
        _clipped(x),
        "call scaler.unscale_(optimizer) before clipping.",
    ),
    ("clip-before-unscale", "hook"): lambda x: (
        _clipped(x),
        "multiply the bound of the hook, or of the backward, by the loss scale (amp.scale, scaler.get_scale()), clip in the step, or use bf16.",
    ),
    ("scaled-step", ""): lambda x: (
        f"{x.what} stepped gradients that are still multiplied by {number(x.value)}: nothing unscaled them, and no step would be left out.",
        "step through scaler.step(optimizer) and scaler.update(), or divide by scaler.get_scale() first, from the last good checkpoint.",
    ),
    ("stale-cast", ""): lambda x: (
        f"{x.what} was changed since its {x.dtype} cast was made, and the old cast is read here: the autocast region that keeps it was not left in between.",
        "write `with torch.autocast(...):` around forward and loss of each step, and leave it before weights are changed; or cache_enabled=False.",
    ),
    ("zero-learning-rate", ""): lambda x: (f"the learning rate was {x.what}: no weight moved.", _PRINT_FACTORS),
    ("zero-learning-rate", "tiny"): lambda x: (
        f"the learning rate was {x.what}: weights hardly moved.",
        _PRINT_FACTORS,
    ),
    ("cleared-gradients", ""): lambda x: (
        f"gradients that backward had brought are cleared here, before {x.what}: none was left in any of its {number(x.value)} steps.",
        "clear gradients after the step, or before backward.",
    ),
    ("uncleared-gradients", ""): lambda x: (
        f"gradients were never cleared between the steps of {x.what}: each of {number(x.value)} took the sum of all backward passes so far.",
        "call optimizer.zero_grad() before backward.",
    ),
    ("zero-gradients", ""): lambda x: (
        f"{x.site.op} passes no gradient back here: that of {x.what} was exactly 0 in each of {number(x.value)} backward passes.",
        "let gradients pass, as a straight-through estimator does: x + (f(x) - x).detach(); or keep its argument where it has a slope, and factors and first weights from 0.",
    ),
    ("zero-gradients", "one-number"): lambda x: (
        f"{x.site.op} over one number gives the same whatever it is given: the gradient of {x.what} was 0, or rounding, in each of {number(x.value)} backward passes.",
        f"give {x.site.op} more than one number to share out, or leave it out; of a single logit, use binary_cross_entropy_with_logits.",
    ),
    ("no-gradients", ""): lambda x: (
        f"none of {x.what} had a gradient in any of its {number(x.value)} steps: it steps others than the loss is computed from.",
        "make the optimizer when the model is complete, or add what was replaced since: optimizer.add_param_group.",
    ),
    ("no-gradients", "masters"): lambda x: (
        f"none of {x.what} in any of its {number(x.value)} steps: it steps others than the loss is computed from.",
        "copy what was stepped back into the weights after each step: p.copy_(master); or let mezzo.prepare keep the masters.",
    ),
    ("exploding-step", ""): lambda x: (
        f"{x.what} made its weights {number(x.value)} times as large: root mean square.",
        "lower the learning rate, warm it up, or clip the gradients; state that was reset or loaded may not fit the weights.",
    ),
    ("exploding-loop", ""): lambda x: (
        f"results of {x.site.op} grow from call to call here, {number(x.value)} times in one step: {x.what}.",
        "keep what is multiplied again and again near norm 1 (normalise, gate, or bound its largest eigenvalue), or take fewer steps.",
    ),
    ("no-loss-scale", ""): lambda x: (
        "ops run in fp16 and the loss is not scaled: gradients below 6e-8 become 0.",
        "scale the loss: mezzo.GradScaler, or a policy with scaling; or use bf16.",
    ),
    ("no-loss-scale", "scaler"): lambda x: (
        "ops run in fp16 and the scaler multiplies the loss by 1: gradients below 6e-8 become 0.",
        "begin with a larger scale (init_scale=65536.0); or use bf16.",
    ),
}
