"""What to change: a policy edit where precision is the cause, else other arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from ..formats import format_of, parse_dtype
from ..policy import ModuleRule, Rule, known_ops, write_module_rule, write_op_rule
from .ops import CASTS, FACTORIZATIONS, SPECTRA, plain_name
from .records import Event, Site
from .replacement import bound
from .verdict import LOW_NAMES, Verdict, call_at, limit_of, narrow_dtype, number


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """A change that removes a fault.

    Attributes:
        edit: a policy edit, as `Policy.parse` reads it after a preset; empty where precision is not the cause.
        advice: one sentence.
        tried: what running it on the values that failed has given; empty where it could not be tried: an idea.
    """

    edit: str = ""
    advice: str
    tried: str = ""


def edit_of(site: Site) -> str:
    """Return the smallest fp32 rule that covers what ran at a place; empty where none does.

    No rule on ops reaches the program's own lines in backward, nor what stands outside of models and regions.
    """
    if site.module:
        return write_module_rule(ModuleRule(pattern=site.module, precision=Rule.FP32))
    if site.is_own or not site.is_ruled:
        return ""
    called = "" if site.called == "div" else site.called  # 1 / x is two ops of torch's, and no div
    known = next((name for name in (called, site.op) if name in known_ops()), None)
    return "" if known is None else f"op:{write_op_rule(known, Rule.FP32)}"


def _edits(sites: Iterable[Site]) -> str:
    return ", ".join(dict.fromkeys(edit for site in sites if (edit := edit_of(site))))


_CONSTANT = "what it normalises together is all the same, so its variance is 0, and eps is 0 too: give the layer an eps, for example 1e-5"
_SINGULAR = {
    "pow": "bound the base away from 0: x.clamp(min={eps:g}).pow(p)",
    "std": "the spread of a single number is 0/0: give std more than one number, or leave out what divides by it",
    "var": "the variance of a single number is 0/0; use unbiased=False or more samples",
    "linalg_vector_norm": "the norm of a zero vector has no derivative: sqrt(x.square().sum() + {square:g})",
    "hypot": "it has no derivative at (0, 0): sqrt(x * x + y * y + {square:g})",
    "atan2": "it has no derivative at (0, 0): mask such elements before it",
    "linalg_cholesky": "the matrix is not positive definite; add a multiple of the identity, as in a + 1e-6 * torch.eye(n), or compute it in fp64",
    "linalg_inv": "the matrix is singular; add a multiple of the identity, or use torch.linalg.pinv",
    "linalg_slogdet": "the matrix is singular, and the logarithm of 0 is -inf; add a multiple of the identity",
    "linalg_solve": "the matrix is singular; add a multiple of the identity, or use torch.linalg.lstsq",
    "linalg_svd": "equal singular values have no derivative of their vectors; use svdvals, or separate them",
    "linalg_eigh": "equal eigenvalues have no derivative of their vectors; use eigvalsh, or separate them",
    "ctc_loss": "a target is longer than its input allows: drop such samples, or ctc_loss(..., zero_infinity=True)",
    "softmax": "a fully masked row has no softmax: keep one entry, or mask with torch.finfo(x.dtype).min",
    "logsumexp": "the sum over nothing is 0: keep one entry, or mask with torch.finfo(x.dtype).min",
    "mean": "the mean of no elements is 0/0; check that the selection is not empty",
    "nll_loss": "every target is ignored or has weight 0, so the mean is 0/0; drop such batches or use reduction='sum'",
    "layer_norm": _CONSTANT,
    "group_norm": _CONSTANT,
    "batch_norm": _CONSTANT,
    "rms_norm": _CONSTANT,
    "log": "bound the argument: log(x.clamp(min={eps:g}))",
    "div": "bound the divisor away from 0, or divide only where it is not 0",
    "sqrt": "its derivative at 0 is infinite: x.clamp(min={square:g}).sqrt()",
    "rsqrt": "bound the argument: x.clamp(min={eps:g}).rsqrt()",
}
_SCALER = "nothing, if the scaler halves the scale and the next steps are clean; else compute the loss in fp32 and lower the first scale."
_LAYERS = "normalise between layers or scale the residual branch; a wider format only delays it."
STEPPED = "the optimizer took the step with these gradients: load the last good checkpoint, and step through scaler.step(optimizer), which leaves such steps out."
"""For a loss scale that was too high and that nobody guarded."""
STUCK = (
    "nobody lowers this scale, and steps with such gradients are lost: use scaling=dynamic in a policy, torch.amp.GradScaler "
    "or mezzo.GradScaler, which find one that fits, or write the one above."
)
"""For a loss scale that stays where it is."""
DIVERGED = (
    "training diverges: lower the learning rate, warm it up, or clip the gradients; no rule of a policy repairs this."
)
"""For an overflow at the end of steps that grew."""
GROWN = "an fp32 run holds these sizes, and so does bf16; or normalise between layers, or scale the residual branch."
"""For growth over depth that fp16 alone does not hold."""
_NEAR = 0.1
"""A negative argument of a logarithm or power that is further from 0 is no cancellation; roots are taken of variances, of any size."""
_ROOTS = frozenset({"sqrt", "rsqrt", "log", "log2", "log10", "pow"})


def fix_for(verdict: Verdict, event: Event, loss: float = 0.0) -> Fix:
    """Return what removes a fault of this kind, which made a loss of this size in an fp32 run non-finite."""
    if event.site.phase == "optimizer" and verdict in ("underflow", "singularity"):
        return _fix_update(event)
    is_narrow = any(t.dtype in LOW_NAMES for t in (*event.inputs, *event.outputs))
    is_far = not event.site.module and (event.site.is_own or not event.site.is_ruled)
    if is_far and is_narrow and verdict in ("overflow", "underflow") and not _narrowed_by_hand(event):
        return _fix_out_of_reach(event)
    if verdict == "overflow":
        return _fix_overflow(event, loss)
    if verdict in ("underflow", "singularity"):
        return _fix_underflow(event) if verdict == "underflow" else _fix_singularity(event)
    if verdict == "exploding" and event.dtype == "fp16" and 0 < loss < math.inf:
        return Fix(
            edit="compute=bf16", advice=_LAYERS.replace("only delays it", "holds it, and only delays it if it grows on")
        )
    return Fix(advice={"loss-scale": _SCALER, "exploding": _LAYERS}.get(verdict) or _inherited_advice(event))


def _narrowed_by_hand(event: Event) -> Site | None:
    """Return where the program itself casts what failed to 16 bit; None where it does not."""
    sites = (*((*event.flush.made_by, event.flush.site) if event.flush else event.followers), event.site)
    return next((s for s in sites if s.op == "to" and s.phase == "forward" and s.called in CASTS), None)


def _fix_out_of_reach(event: Event) -> Fix:
    """Fix a loss of precision where no rule of a policy holds: the program has to widen what it computes there."""
    if event.site.op == "AccumulateGrad":
        return Fix(advice=f"what several backward passes, or uses of a weight, leave is added up in {event.dtype}, the format of the weight: "
                    "divide each loss by the number of passes, lower a loss scale, or keep the weights in fp32.")  # fmt: skip
    flush = event.flush
    first = next((s for s in (*flush.made_by, flush.site) if not s.is_ruled), event.site) if flush else event.site
    if first.is_ruled:  # its own line in a backward
        return Fix(advice=f"no rule reaches the program's own lines in backward: write .float() there before {event.site.op}, or bound "
                    "what it is given.")  # fmt: skip
    name = "the value" if first.op == "to" else f"what {first.op} is given"
    return Fix(advice=f"no rule reaches what stands outside of models and regions: write .float() on {name} at {first.frame}, or "
                f"bound the argument of {event.site.op}{_fused(event)}.")  # fmt: skip


def _fused(event: Event) -> str:
    return event.fused and f", or better {event.fused}"


def _fix_update(event: Event) -> Fix:
    """Fix an optimizer that divides by a moment that is 0: no policy rule reaches its arithmetic."""
    if event.dtype in LOW_NAMES:
        return Fix(advice=f"the optimizer computes in {event.dtype}, the format of its weights, where its eps is 0: keep the "
                    f"weights in fp32, or let mezzo.optim keep masters ({event.dtype}-master as the policy).")  # fmt: skip
    return Fix(advice="give the optimizer an eps above 0, for example eps=1e-8.")


def _fix_overflow(event: Event, loss: float) -> Fix:
    widest = next((w for w in event.wide if w.is_finite), None)
    is_fp32s = widest is not None and widest.dtype == "fp32"
    is_lost_after = event.site.op == "to" or (is_fp32s and edit_of(event.site).startswith("op:"))
    if event.site.phase == "backward" and is_lost_after:
        low = "params=bf16" if any(t.dtype == "bf16" for t in event.inputs) else "compute=bf16"
        return Fix(edit=low * (event.dtype == "fp16"), advice=f"the gradient is narrowed on its way out of {event.site.path}, because what "
                    "feeds it, the module or op before, is 16 bit: an fp32 rule on that repairs it too.")  # fmt: skip
    wider = ", or use bf16, whose range is that of fp32" if event.dtype == "fp16" else ""
    if _narrowed_by_hand(event) is event.site:
        return Fix(advice=f"no rule undoes what {event.site.called}() narrows at {event.site.user or event.site.library}: "
                    f"leave {event.leaf or 'the value'} in fp32 there{wider}.")  # fmt: skip
    if event.dtype in LOW_NAMES and (widest is None or is_fp32s):
        edit = _edits([event.site, *event.followers])
        if widest is not None and edit.startswith("op:") and _is_slope_too_large(event, widest.amax, loss):
            return Fix(edit="compute=bf16", advice=f"{edit} makes the forward finite alone: the gradient of {event.site.op} is as large as its "
                        f"{'factor' if event.site.op == 'mul' else 'result'}, which {event.dtype} does not hold; or bound the argument.")  # fmt: skip
        return Fix(
            edit=edit,
            advice=f"what reads values this large needs fp32 too, up to the next normalisation{wider}, or scale the inputs down.",
            tried=""
            if widest is None
            else f"{event.site.op} in fp32 on these values: finite, up to {number(widest.amax)}",
        )
    if event.site.op == "ctc_loss":
        return Fix(advice=_SINGULAR["ctc_loss"] + ".")
    return Fix(advice="no policy repairs this: the value does not fit fp32. Bound the argument, or rewrite the "
                "expression (logsumexp for log of a sum of exp, log-space products). If sizes grew over the steps before, "
                "lower the learning rate.")  # fmt: skip


_OWN_SLOPE = frozenset({"exp", "exp2", "expm1", "sinh", "cosh"})
"""Functions whose derivative is as large as their value."""


def _is_slope_too_large(event: Event, top: float, loss: float) -> bool:
    """Say whether the gradient of a function overflows where it was 16 bit: that of a sum, or of a mean over as many values as the format goes."""
    limit = limit_of(event)
    if event.site.op == "mul":  # a gradient is multiplied by the other factor
        return event.tracked and max(t.amax for t in event.inputs) > limit
    return event.tracked and event.site.op in _OWN_SLOPE and (top > limit**2 or limit < loss < math.inf)


def _fix_underflow(event: Event) -> Fix:
    flush, cast = event.flush, _narrowed_by_hand(event)
    if cast is not None and event.site.op not in FACTORIZATIONS:
        line = cast.user or cast.library
        if event.leaf:
            return Fix(advice=f"no rule brings back what {cast.called}() rounds at {line}: hold {event.leaf} before that cast and put it back in fp32 behind "
                        f"it (kept = module.x; the cast; module.x = kept), and give {event.site.op} fp32 beside it.")  # fmt: skip
        bounded = f"the argument of {event.site.op}" if flush is None else f"the result of {flush.site.op} away from 0"
        return Fix(advice=f"no rule brings back what {cast.called}() rounds at {line}: leave the "
                    f"value in fp32 there, or bound {bounded}.")  # fmt: skip
    sites = [event.site] if flush is None else [*flush.made_by, flush.site, *flush.carried, event.site]
    edit = _edits(event.followers or sites)
    bounded = f"bound the argument of {event.site.op} away from where it has no value"
    advice = f"or {bounded if event.is_local_enough or not event.replacement else f'write {event.replacement}'}."
    if event.site.op in FACTORIZATIONS | SPECTRA:
        is_factor = event.site.op in FACTORIZATIONS
        tried = "".join(f"{site.op} in fp32 on these values: finite" for site in event.followers if is_factor)
        rest = "add a larger multiple of the identity" if is_factor else "separate what rounding makes equal"
        advice = f"make the matrix in fp32, of numbers that were never 16 bit; or {rest}."
        return Fix(edit=edit if tried else "", advice=advice, tried=tried)
    if flush is not None:
        facts, constant = format_of(parse_dtype(flush.dtype)), flush.constant
        advice = f"or bound the result of {flush.site.op} away from 0{_fused(event)}."
        if constant is not None:
            advice = f"or write a constant of at least {number(facts.tiny)}, the smallest normal {flush.dtype}."
        is_quotient = constant is None and event.site.op == "div"  # the gradient of what is divided is divided too
        small = flush.wide_amax if is_quotient else constant
        # a rule on a module holds for the gradient on its way through it too
        is_alone = edit.startswith("op:") and (event.tracked or event.site.phase == "backward")
        if small and is_alone and (slope := _slope_at(event.site.op, abs(small))) > facts.max:
            advice += f" {edit} makes the forward finite alone: at {number(small)} the gradient reaches {number(slope)}, which {flush.dtype} does not hold."
            return Fix(edit="compute=bf16", advice=advice)
    ran = f"{flush.site.op} and {event.site.op} in fp32" if flush else f"{event.site.op} under {edit}"
    tried = f"{ran} on these values: finite" if event.is_local_enough else ""
    return Fix(edit=edit, advice=advice, tried=tried)


def _slope_at(op: str, x: float) -> float:
    """Return the size of an op's derivative at a small number above 0, whose reciprocal it takes where it is no power or logarithm."""
    slopes = {"sqrt": 1 / (2 * math.sqrt(x)), "rsqrt": 1 / (2 * x * math.sqrt(x)), "reciprocal": 1 / (x * x)}
    return slopes.get(op, 1 / x)


def _fix_singularity(event: Event) -> Fix:
    if event.replacement:
        is_root = event.site.op == "sqrt" and event.site.is_derivative
        reason = "its derivative at 0 is infinite: " if is_root else ""
        return Fix(
            advice=f"{reason}write {event.replacement}{_fused(event)}{_cancelled(event)}.",
            tried=f"{event.replacement} on these values: finite, and so are its gradients",
        )
    return Fix(advice=_singular_advice(event))


def _cancelled(event: Event) -> str:
    """Say what a negative argument of a root or logarithm comes from."""
    value = dict(event.offending).get("self", 0.0)
    is_near = -_NEAR < value < 0 or (value < 0 and event.site.op in ("sqrt", "rsqrt"))
    if event.site.op not in _ROOTS or event.site.phase == "backward" or not is_near:
        return ""
    return "; an argument below 0 is what a difference of nearly equal numbers leaves, such as E[x^2] - E[x]^2"


def _singular_advice(event: Event) -> str:
    eps = bound(narrow_dtype(event))
    is_forward = event.site.phase == "forward" or event.site.is_own
    names = [event.site.op.removeprefix("log_"), event.site.called] + [plain_name(event.kernel)] * is_forward
    if event.site.op == "div" and is_forward and ("other", 0.0) in event.offending and len(event.inputs) == 1:
        return f"the divisor is the number 0: divide by max(divisor, {eps:g})."
    if (variance := dict(event.offending).get("running_var", 0.0)) < 0:
        return f"running_var holds {number(variance)}, and no variance is below 0: reset the layer's running statistics, or load them again."
    name = next((n for n in names if n in _SINGULAR), "softmax" if event.full_rows else "")
    if not name:
        return f"{call_at(event, ' has no value')}: mask such elements before it, or bound them."
    return _SINGULAR[name].format(eps=eps, square=eps**2) + "."


def _inherited_advice(event: Event) -> str:
    if event.kind == "constant" and event.site.phase == "optimizer":
        return "look at the learning rate that the schedule gives this step, then at decay and eps."
    if event.kind == "constant":
        return "write a finite number, for example torch.finfo(x.dtype).min, or mask it out before it is summed."
    kind = event.leaf.split(" ")[0]
    return {
        "parameter": "load or initialise the parameter again; its gradient is not the cause.",
        "buffer": "reset the buffer; running statistics go bad when an overflowing forward updates them.",
        "input": "check the data: this batch holds the value.",
        "batch": "check the data: clean or drop such samples in the Dataset, before they are batched.",
        "optimizer": "clear the optimizer's state, or load an older checkpoint.",
    }.get(kind, "check where this tensor was made.")
