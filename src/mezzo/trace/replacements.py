"""Arithmetic that has a value where an op had none: written for the user, and run on the values that failed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Run = Callable[..., Tensor]
_LARGEST = 1e12
"""A gradient beyond this is finite and of no use."""


@dataclass(frozen=True, slots=True)
class Replacement:
    """An expression to write instead of an op.

    Attributes:
        text: as it is written; x and y stand for the op's arguments.
        run: computes it.
        count: number of tensors it takes.
    """

    text: str
    run: Run
    count: int = 1


def bound(dtype: torch.dtype) -> float:
    """Return a distance from 0 that keeps quotients and logarithms usable in a format."""
    return 1e-4 if dtype is torch.float16 else 1e-6


def _clamped(name: str, low: float) -> Replacement:
    op: Run = getattr(torch, name)
    return Replacement(f"{name}(x.clamp(min={low:g}))", lambda x: op(x.clamp(min=low)))


def _inside(name: str, dtype: torch.dtype) -> Replacement:
    op: Run = getattr(torch, name)
    eps = 4 * torch.finfo(dtype).eps
    return Replacement(f"{name}(x.clamp(-1 + {eps:.2g}, 1 - {eps:.2g}))", lambda x: op(x.clamp(-1 + eps, 1 - eps)))


def _quotients(divisor: Tensor, low: float) -> Iterator[Replacement]:
    """Offer quotients: by a count of at least 1, by a positive divisor, by one of either sign."""
    if bool((divisor >= 0).all()):
        if bool((divisor == divisor.round()).all()):
            yield Replacement("x / y.clamp(min=1)", lambda x, y: x / y.clamp(min=1), 2)
        yield Replacement(f"x / y.clamp(min={low:g})", lambda x, y: x / y.clamp(min=low), 2)
    else:
        yield Replacement(
            f"x / torch.where(y.abs() < {low:g}, {low:g}, y)", lambda x, y: x / torch.where(y.abs() < low, low, y), 2
        )


def _offers(op: str, inputs: list[Tensor]) -> Iterator[Replacement]:
    dtype = inputs[0].dtype
    low = bound(dtype)
    if op in ("log", "log2", "log10"):
        yield _clamped(op, low)
    elif op == "log1p":
        yield Replacement(f"log1p(x.clamp(min=-1 + {low:g}))", lambda x: torch.log1p(x.clamp(min=-1 + low)))
    elif op in ("sqrt", "rsqrt"):
        floor = low if op == "rsqrt" or dtype is torch.float16 else low**2
        yield Replacement(f"x.clamp(min={floor:g}).{op}()", lambda x: getattr(x.clamp(min=floor), op)())
    elif op in ("acos", "asin", "atanh"):
        yield _inside(op, dtype)
    elif op == "logit":
        yield Replacement(f"torch.logit(x, eps={low:g})", lambda x: torch.logit(x, eps=low))
    elif op == "reciprocal":
        for offer in _quotients(inputs[0], low):
            yield Replacement(offer.text.replace("x / ", "1 / ").replace("y", "x"), lambda x, o=offer: o.run(1.0, x))
    elif op == "div" and len(inputs) > 1:
        yield from _quotients(inputs[1], low)


def works(replacement: Replacement, inputs: list[Tensor]) -> bool:
    """Say whether an expression is finite on these values, and the gradients of those that want one too. Syncs: yes."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in inputs[: replacement.count]]
    wanted = [t for t in leaves if t.requires_grad]
    out = replacement.run(*leaves)
    grads = torch.autograd.grad(out.float().sum(), wanted, allow_unused=True) if wanted else ()
    finite = all(bool((g.isfinite() & (g.abs() < _LARGEST)).all()) for g in grads if g is not None)
    return finite and bool(out.isfinite().all())


def replacement_for(op: str, inputs: list[Tensor]) -> str:
    """Return an expression that was run on the inputs of an op that failed and is finite there, gradients included.

    Args:
        op: plain name.
        inputs: its tensors, finite.

    Returns:
        The expression; empty where none is known or none works.

    Syncs: yes.
    """
    if not inputs or not inputs[0].is_floating_point() or not all(bool(t.isfinite().all()) for t in inputs):
        return ""
    found: list[str] = []

    def run() -> None:
        try:
            found.extend(r.text for r in _offers(op, inputs) if works(r, inputs))
        except RuntimeError:  # shapes or formats that the expression does not take
            pass

    # inside a dispatch mode autograd records nothing; another thread has neither the mode nor that state
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0] if found else ""
