"""What to write in place of an op that failed: expressions that are run on the values it failed on before they are offered."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .measure import is_finite
from .ops import plain

Run = Callable[..., Tensor]
_LARGEST = 1e12
"""A gradient beyond this is finite and of no use."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """An expression to write instead of an op, in which x and y stand for its arguments, and what computes it from `count` tensors."""

    text: str
    run: Run
    count: int = 1


def bound(dtype: torch.dtype) -> float:
    """Return a distance from 0 that keeps quotients and logarithms usable in a format."""
    return 1e-4 if dtype is torch.float16 else 1e-6


def _beside_one(dtype: torch.dtype) -> float:
    """Return a distance from 1 that the format resolves, so that what keeps it is not rounded to 1."""
    return float(4 * torch.finfo(dtype).eps)


def _quotients(divisor: Tensor, low: float, is_count: bool) -> Iterator[Replacement]:
    """Offer quotients: by a count of at least 1, by a positive divisor, by one of either sign."""
    if bool((divisor >= 0).all()):
        if not divisor.is_floating_point() or (is_count and bool((divisor == divisor.round()).all())):
            yield Replacement("x / y.clamp(min=1)", lambda x, y: x / y.clamp(min=1), 2)
        yield Replacement(f"x / y.clamp(min={low:g})", lambda x, y: x / y.clamp(min=low), 2)
    else:
        text = f"x / torch.where(y.abs() < {low:g}, {low:g}, y)"
        yield Replacement(text, lambda x, y: x / torch.where(y.abs() < low, low, y), 2)


def _powers(operands: OpInputs, low: float) -> Iterator[Replacement]:
    if len(operands.tensors) > 1:
        yield Replacement(f"x.clamp(min={low:g}).pow(p)", lambda x, p: x.clamp(min=low).pow(p), 2)
    elif operands.numbers:
        p = operands.numbers[0]
        yield Replacement(f"x.clamp(min={low:g}).pow({p:g})", lambda x: x.clamp(min=low).pow(p))


@dataclass(frozen=True, slots=True)
class OpInputs:
    """What an op that failed was given: tensors, those that want a gradient marked so, and the Python numbers among its arguments.

    Attributes:
        is_count: the last tensor was counted: a sum that no gradient goes through, or whole numbers cast.
        saved: the arguments of a forward op by name, where its gradient failed.
    """

    tensors: list[Tensor]
    numbers: list[float]
    is_count: bool = False
    saved: list[tuple[str, Tensor]] = field(default_factory=list)


def saved_operands(node: Any) -> OpInputs:
    """Return what the forward op of an autograd node was given, from what autograd saved of it. Syncs: no."""
    try:
        result = getattr(node, "_saved_result", None)
        first = getattr(node, "_saved_self", None)
        if first is None and isinstance(result, Tensor) and node.name() == "SqrtBackward0":
            first = result.square()
        exponent = getattr(node, "_saved_exponent", None)
        found = {"self": first, "other": getattr(node, "_saved_other", None), "exponent": exponent}
    except RuntimeError:  # freed, or unpacked by a checkpoint
        return OpInputs([], [])
    saved = [
        (name, own.detach().requires_grad_())
        for name, t in found.items()
        if isinstance(t, Tensor) and t.is_floating_point() and (own := plain(t)) is not None
    ]
    return OpInputs([t for _, t in saved], [float(exponent)] if isinstance(exponent, (int, float)) else [], saved=saved)


_FUSED = {
    "SoftmaxBackward0": "log_softmax in place of the log of a softmax",
    "SigmoidBackward0": "logsigmoid, or binary_cross_entropy_with_logits, in place of the log of a sigmoid",
    "SumBackward1": "logsumexp in place of the log of a sum of exp",
    "LinalgDetBackward0": "torch.linalg.slogdet(a).logabsdet in place of the log of a determinant",
} | dict.fromkeys(("ProdBackward0", "ProdBackward1", "CumprodBackward0"), "the sum of logarithms in place of the log of a product") | dict.fromkeys(
    ("ErfBackward0", "ErfcBackward0", "SpecialNdtrBackward0"), "torch.special.log_ndtr in place of the log of a normal distribution's cdf"
)  # fmt: skip
_FACTORS = ("MulBackward0", "DivBackward0", "ExpBackward0")


def fused_with(op: str, argument: Tensor) -> str:
    """Return the function that computes a logarithm without the number it is taken of; empty where none does. Syncs: no."""
    node: Any = argument.grad_fn if op in ("log", "log2", "log10") else None
    for _ in range(2):
        if node is None or node.name() in _FUSED:
            break
        # 1 - p, p + eps, clamp
        node = next((following for following, _ in node.next_functions if following is not None), None)
    name = "" if node is None else node.name()
    if name == "SumBackward1":  # of exp, or of its products with others
        terms = [node]
        for _ in _FACTORS:
            terms = [f for term in terms for f, _ in term.next_functions if f is not None and f.name() in _FACTORS]
            if any(f.name() == "ExpBackward0" for f in terms):
                return _FUSED[name]
        return ""
    return _FUSED.get(name, "")


def _offers(op: str, operands: OpInputs) -> Iterator[Replacement]:
    inputs = operands.tensors
    dtype = inputs[0].dtype
    low = bound(dtype)
    if op in ("log", "log2", "log10"):
        yield Replacement(f"{op}(x.clamp(min={low:g}))", lambda x: getattr(torch, op)(x.clamp(min=low)))
    elif op == "log1p":
        edge = max(low, _beside_one(dtype))
        yield Replacement(f"log1p(x.clamp(min=-1 + {edge:.2g}))", lambda x: torch.log1p(x.clamp(min=-1 + edge)))
    elif op in ("sqrt", "rsqrt"):
        floor = low if op == "rsqrt" or dtype is torch.float16 else low**2
        yield Replacement(f"x.clamp(min={floor:g}).{op}()", lambda x: getattr(x.clamp(min=floor), op)())
    elif op in ("acos", "asin", "atanh"):
        eps = _beside_one(dtype)
        text = f"{op}(x.clamp(-1 + {eps:.2g}, 1 - {eps:.2g}))"
        yield Replacement(text, lambda x: getattr(torch, op)(x.clamp(-1 + eps, 1 - eps)))
    elif op == "logit":
        edge = max(low, _beside_one(dtype))
        yield Replacement(f"torch.logit(x, eps={edge:.2g})", lambda x: torch.logit(x, eps=edge))
    elif op == "pow":
        yield from _powers(operands, low)
    elif op == "reciprocal":
        for offer in _quotients(inputs[0], low, operands.is_count):
            yield Replacement(offer.text.replace("x / ", "1 / ").replace("y", "x"), lambda x, o=offer: o.run(1.0, x))
    elif op == "div" and len(inputs) > 1:
        yield from _quotients(inputs[1], low, operands.is_count)


def works(replacement: Replacement, inputs: list[Tensor]) -> bool:
    """Say whether an expression is finite on these values, and the gradients of those that want one too. Syncs: yes."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs[: replacement.count]]
    wanted = [t for t in leaves if t.requires_grad]
    out = replacement.run(*leaves)
    grads = torch.autograd.grad(out.float().sum(), wanted, allow_unused=True) if wanted else ()
    finite = all(bool((g.isfinite() & (g.abs() < _LARGEST)).all()) for g in grads if g is not None)
    return finite and bool(out.isfinite().all())


def replacement_for(op: str, operands: OpInputs) -> str:
    """Return an expression that was run on the finite operands of an op that failed and is finite there, gradients included.

    Empty where none is known or none works. Syncs: yes.
    """
    inputs = operands.tensors
    # a divisor may be counted
    floating = inputs[: {"div": 1, "reciprocal": 0}.get(op)]
    is_floating = all(t.is_floating_point() for t in floating)
    if not inputs or not is_floating or not all(map(is_finite, inputs)):
        return ""
    found: list[str] = []

    def run() -> None:
        with suppress(RuntimeError):  # shapes or formats that the expression does not take
            found.extend(r.text for r in _offers(op, operands) if works(r, inputs))

    # inside a dispatch mode autograd records nothing; another thread has neither the mode nor that state
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0] if found else ""
