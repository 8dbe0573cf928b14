"""Lints in words: what each costs, with the numbers, and what to write instead."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..formats import format_of, parse_dtype
from .buffers_at_rest import exact_integers
from .lint_rules import OF_ONE
from .ops import plain_name
from .records import Lint
from .verdict import number


@dataclass(frozen=True, kw_only=True, slots=True)
class LintWarning:
    """A lint in words: why it costs what, with the numbers, and what to write instead."""

    lint: Lint
    why: str
    advice: str


def explain_lint(lint: Lint) -> LintWarning:
    """Say what a lint costs and what to write instead."""
    why, advice = _TEXTS[lint.rule](lint)
    return LintWarning(lint=lint, why=why, advice=advice)


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


def _shown_by(lint: Lint) -> str:
    """Say which op read the elements that are off, where it is another than made them."""
    shown = plain_name(lint.kernel)
    return f" where {shown} reads it" if shown != lint.site.op else ""


_TEXTS: dict[str, Callable[[Lint], tuple[str, str]]] = {
    "integers-in-16-bit": lambda x: (
        f"whole numbers up to {number(x.value)} are {'added up in' if x.what == 'cumsum' else 'cast to'} {x.dtype}, which is exact up to {number(exact_integers(parse_dtype(x.dtype)))}: neighbours become equal.",
        "compute positions and phases in fp32: with torch.autocast(..., enabled=False) and x.float().",
    ),
    "ids-in-16-bit": lambda x: (
        f"whole numbers are cast to {x.dtype}, which is exact up to {number(exact_integers(parse_dtype(x.dtype)))}, and read as whole numbers again: {x.what}.",
        "keep ids whole (int64) up to the op that reads them, as embedding does, and cast only what is computed with.",
    ),
    "constant-lost": _constant,
    "squares-near-overflow": lambda x: (
        f"squares reach {number(x.value) + ' of' if x.value < math.inf else 'more than'} the {number(format_of(parse_dtype(x.dtype)).max)} that {x.dtype} holds.",
        "square in fp32 (x.float().square()), or scale x down first.",
    ),
    "log-of-one-plus": lambda x: (
        f"1 + x was rounded to 16 bit before its logarithm, which is off by {x.what} of what fp32 has: a small x is lost beside 1.",
        "write torch.log1p(x); of 1 + exp(x), torch.nn.functional.softplus(x).",
    ),
    "finite-difference": lambda x: (
        f"a difference is divided by its step, {number(x.value)}, and off by {x.what} of what fp32 has: {x.dtype} gives both of its terms nearly the same numbers.",
        "compute both terms in fp32, with torch.autocast(..., enabled=False) and a model of fp32 weights; or differentiate: torch.func.jvp, torch.autograd.grad.",
    ),
    "amplified-rounding": lambda x: (
        (
            f"{x.site.op} makes rounding large: its result is {x.value:.0%} off what fp32 has{_shown_by(x)}, since results of {x.what} lie closer together than numbers of {x.dtype}.",
            "run that layer in fp32 (module:NAME=fp32 in the policy, or torch.autocast(..., enabled=False)); or take out what its results have in common, as by targets less their mean.",
        )
        if x.what
        else (
            f"{x.site.op} makes rounding large: its result is {x.value:.0%} off what fp32 has{_shown_by(x)}, of numbers that {x.dtype} rounded since the last layer or input.",
            "compute it, and all behind the last layer or input that it is made of, in fp32: x = x.float() there, with torch.autocast(..., enabled=False); or leave out the large part that cancels.",
        )
    ),
    "rounded-index": lambda x: (
        f"{x.site.op} picks by numbers that {x.dtype} rounded since the last layer or input: fp32 picks others in {x.what} of its places.",
        "compute what it picks by, from there on, in fp32: x = x.float(), with torch.autocast(..., enabled=False); keep the type of the result.",
    ),
    "masked-row": lambda x: (
        f"{x.what} of a softmax hold -inf alone, which gives NaN.",
        "keep one entry in every row, or mask with torch.finfo(x.dtype).min.",
    ),
    "buffer-in-16-bit": lambda x: (
        f"{x.what} is stored in {x.dtype}, or went through it; frequencies, positions, weights of classes and running statistics need fp32.",
        "hold it before the model is cast, and put it back behind: kept = module.buffer; model.half(); module.buffer = kept.",
    ),
    "half-accumulator": lambda x: (
        f"{x.what} is kept in {x.dtype}: additions smaller than half its spacing are lost (1000 ones sum to 256 in bf16).",
        "add gradients up in fp32: grads=fp32 in the policy that mezzo.prepare is given; or keep the weights in fp32."
        if "backward passes" in x.what
        else "add it up in fp32, of x.float(), or keep the weights that it belongs to in fp32."
        if x.what.startswith("what ")
        else "keep it in fp32: total = torch.zeros((), dtype=torch.float32), or module.buffer = module.buffer.float().",
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
        "multiply the bound of the hook, or of the backward, by the loss scale (amp.scale, scaler.get_scale()), clip in the step, or use bf16."
        if x.what == "a hook's"
        else "call scaler.unscale_(optimizer) before clipping.",
    ),
    "scaled-step": lambda x: (
        f"{x.what} stepped gradients that are still multiplied by {number(x.value)}: nothing unscaled them, and no step would be left out.",
        "step through scaler.step(optimizer) and scaler.update(), from the last good checkpoint.",
    ),
    "zero-learning-rate": lambda x: (
        f"the learning rate was {x.what}: {'weights hardly' if 'or at most' in x.what else 'no weight'} moved.",
        "print the schedule's factors: whole-number division (//) in a warm-up gives 0, and a schedule made for epochs, or fewer steps, is over soon.",
    ),
    "cleared-gradients": lambda x: (
        f"gradients that backward had brought are cleared here, before {x.what}: none was left in any of its {number(x.value)} steps.",
        "clear gradients after the step, or before backward.",
    ),
    "uncleared-gradients": lambda x: (
        f"gradients were never cleared between the steps of {x.what}: each of {number(x.value)} took the sum of all backward passes so far.",
        "call optimizer.zero_grad() before backward.",
    ),
    "zero-gradients": lambda x: (
        (
            f"{x.site.op} over one number gives the same whatever it is given: the gradient of {x.what.removesuffix(OF_ONE)} was 0, or rounding, in each of {number(x.value)} backward passes.",
            f"give {x.site.op} more than one number to share out, or leave it out; of a single logit, use binary_cross_entropy_with_logits.",
        )
        if x.what.endswith(OF_ONE)
        else (
            f"{x.site.op} passes no gradient back here: that of {x.what} was exactly 0 in each of {number(x.value)} backward passes.",
            "let gradients pass, as a straight-through estimator does: x + (f(x) - x).detach(); or keep its argument where it has a slope, and factors and first weights from 0.",
        )
    ),
    "no-gradients": lambda x: (
        f"none of {x.what} {'' if 'never changed' in x.what else 'had a gradient '}in any of its {number(x.value)} steps: it steps others than the loss is computed from.",
        "copy what was stepped back into the weights after each step: p.copy_(master); or let mezzo.prepare keep the masters."
        if "never changed" in x.what
        else "make the optimizer when the model is complete, or add what was replaced since: optimizer.add_param_group.",
    ),
    "exploding-step": lambda x: (
        f"{x.what} made its weights {number(x.value)} times as large: root mean square.",
        "lower the learning rate, warm it up, or clip the gradients; state that was reset or loaded may not fit the weights.",
    ),
    "exploding-loop": lambda x: (
        f"results of {x.site.op} grow from call to call here, {number(x.value)} times in one step: {x.what}.",
        "keep what is multiplied again and again near norm 1 (normalise, gate, or bound its largest eigenvalue), or take fewer steps.",
    ),
    "no-loss-scale": lambda x: (
        f"ops run in fp16 and {'the scaler multiplies the loss by 1' if x.what == 'scaler' else 'the loss is not scaled'}: gradients below 6e-8 become 0.",
        "begin with a larger scale (init_scale=65536.0); or use bf16."
        if x.what == "scaler"
        else "scale the loss: mezzo.GradScaler, or a policy with scaling; or use bf16.",
    ),
}
