"""What to change: a policy edit where precision is the cause, else a change to the model's arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from ..formats import LOW_DTYPES, dtype_name, format_of
from ..policy import ModuleRule, Rule, write_module_rule, write_op_rule
from ..policy.table import known_ops
from .records import Event
from .verdict import Verdict, narrow_dtype, number

_LOW_NAMES = tuple(dtype_name(d) for d in LOW_DTYPES)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """A change that removes a fault.

    Attributes:
        edit: a policy edit, as `Policy.parse` reads it after a preset; empty where precision is not the cause.
        advice: one sentence.
    """

    edit: str
    advice: str


def policy_edit(event: Event) -> str:
    """Return the smallest fp32 rule that covers an event: its module, else its op; empty if no rule can name it."""
    site = event.site
    if site.module and "<" not in site.module:
        return write_module_rule(ModuleRule(pattern=site.module, precision=Rule.FP32))
    known = next((name for name in (site.called, site.op) if name in known_ops()), None)
    return "" if known is None else f"op:{write_op_rule(known, Rule.FP32)}"


_SINGULAR = {
    "log": "bound the argument: log(x.clamp(min={tiny}))",
    "log2": "bound the argument: log2(x.clamp(min={tiny}))",
    "log10": "bound the argument: log10(x.clamp(min={tiny}))",
    "div": "bound the divisor away from 0: x / y.clamp(min={tiny}), or divide only where it is not 0",
    "reciprocal": "bound the argument: 1 / x.clamp(min={tiny})",
    "rsqrt": "bound the argument: (x + eps).rsqrt() with eps of at least {tiny}",
    "sqrt": "its derivative at 0 is infinite: sqrt(x.clamp(min={tiny})) or sqrt(x + eps)",
    "pow": "bound the base away from 0: x.clamp(min={tiny}).pow(p)",
    "acos": "keep the argument inside (-1, 1): acos(x.clamp(-1 + {eps}, 1 - {eps}))",
    "asin": "keep the argument inside (-1, 1): asin(x.clamp(-1 + {eps}, 1 - {eps}))",
    "atanh": "keep the argument inside (-1, 1): atanh(x.clamp(-1 + {eps}, 1 - {eps}))",
    "logit": "give logit an eps: logit(x, eps={eps})",
    "std": "a spread of 0 or of a single number has no finite result or derivative; add eps before the root",
    "var": "the variance of a single number is 0/0; use unbiased=False or more samples",
    "linalg_vector_norm": "the norm of a zero vector has no derivative: sqrt(x.square().sum() + eps)",
    "softmax": "a fully masked row has no softmax: keep one entry, or mask with torch.finfo(x.dtype).min",
    "log_softmax": "a fully masked row has no softmax: keep one entry, or mask with torch.finfo(x.dtype).min",
    "logsumexp": "the sum over nothing is 0: keep one entry, or mask with torch.finfo(x.dtype).min",
}
_AFTER = {
    "mean": "the mean of no elements is 0/0; check that the selection is not empty",
    "nll_loss": "every target is ignored, so the mean is 0/0; drop such batches or use reduction='sum'",
    "nll_loss_forward": "every target is ignored, so the mean is 0/0; drop such batches or use reduction='sum'",
}


def fix_for(verdict: Verdict, event: Event) -> Fix:
    """Return what removes a fault of this kind."""
    if verdict == "overflow":
        return _fix_overflow(event)
    if verdict == "underflow":
        return _fix_underflow(event)
    if verdict == "singularity":
        return Fix(edit="", advice=_singular_advice(event))
    if verdict == "loss-scale":
        return Fix(edit="", advice="nothing, if the scaler halves the scale and the next steps are clean; "
                    "else compute the loss in fp32 and lower the first scale.")  # fmt: skip
    if verdict == "inherited":
        return Fix(edit="", advice=_inherited_advice(event))
    return Fix(edit="", advice="normalise between layers or scale the residual branch; a wider format only delays it.")


def _fix_overflow(event: Event) -> Fix:
    if event.site.op == "to" and event.site.phase == "backward":
        return Fix(edit="", advice=f"the gradient is narrowed on its way out of {event.site.path}, because what feeds it "
                    "is 16 bit: give that, the module or op before it, an fp32 rule too.")  # fmt: skip
    widest = next((w.dtype for w in event.wide if w.is_finite), "")
    if event.outputs[0].dtype in _LOW_NAMES and widest in ("fp32", ""):
        return Fix(
            edit=policy_edit(event),
            advice="what reads values this large needs fp32 too, up to the next normalisation; or use bf16, whose range "
            "is that of fp32, or scale the inputs down.",
        )
    return Fix(edit="", advice="no policy repairs this: the value does not fit fp32. Bound the argument, or rewrite the "
                "expression (logsumexp for log of a sum of exp, log-space products).")  # fmt: skip


def _fix_underflow(event: Event) -> Fix:
    flush = event.flush
    assert flush is not None
    edit = policy_edit(event)
    if flush.constant is not None:
        tiny = number(format_of(narrow_dtype(event)).tiny)
        return Fix(edit=edit, advice=f"or write a constant of at least {tiny}, the smallest normal {flush.dtype}.")
    return Fix(edit=edit, advice=f"or bound the result of {flush.site.op} away from 0.")


def _singular_advice(event: Event) -> str:
    facts = format_of(narrow_dtype(event))
    name = event.site.op if event.site.op in _SINGULAR else event.kernel.split(".")[-1].strip("_")
    if event.full_rows:
        name = "softmax"
    text = _AFTER.get(event.site.op) or _SINGULAR.get(name) or "bound the arguments so that the result exists"
    return text.format(tiny=number(facts.tiny), eps=number(facts.eps)) + "."


def _inherited_advice(event: Event) -> str:
    if event.kind == "constant":
        return "write a finite number, for example torch.finfo(x.dtype).min, or mask it out before it is summed."
    kind = event.leaf.split(" ")[0]
    return {
        "parameter": "load or initialise the parameter again; its gradient is not the cause.",
        "buffer": "reset the buffer; running statistics go bad when an overflowing forward updates them.",
        "input": "check the data: this batch holds the value.",
        "optimizer": "clear the optimizer's state, or load an older checkpoint.",
    }.get(kind, "check where this tensor was made.")
