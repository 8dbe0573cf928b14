"""`lint`: one traced pass that reports code which loses numbers, before it costs a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import plural
from ..policy import PolicyLike, as_policy
from ..report import Block, Document, Heading, Pairs, Report
from ..trace import LintWarning, Trace, check_model, explain_lint, line_pairs, short_line
from .trial import LossFn, backward, bind_copy, check_trial, loss_of, scale_of


@dataclass(frozen=True, kw_only=True, slots=True)
class LintReport(Report):
    """What a lint pass saw.

    Attributes:
        policy: the policy's text, empty where the model ran as it is.
        warnings: in the order they were seen.
        flaw: what the trace of the step says instead of "healthy", as where it met NaN or did not go backward; else empty.
    """

    model: str
    policy: str
    warnings: tuple[LintWarning, ...]
    ops: int
    has_backward: bool
    flaw: str

    def document(self) -> Document:
        """Return the layout."""
        count = len(self.warnings)
        passes = "forward and backward" if self.has_backward else "forward"
        clean = f"Clean: {self.ops:,} ops of one {passes} pass broke no lint rule."
        broken = f"{count} {plural('lint rule', count)} broken." if count else ""
        verdict = " ".join(filter(None, (broken, self.flaw))) or clean
        under_policy = f" under {self.policy}" if self.policy else ""
        blocks: list[Block] = []
        for warning in self.warnings:
            site = warning.lint.site
            where = f" {short_line(site.frame)}".rstrip()
            pairs = (("why", warning.why), *line_pairs(site.frame, site.library), ("instead", warning.advice))
            blocks += [Heading(text=f"{warning.lint.rule}:{where}, module {site.path}"), Pairs(pairs=pairs)]
        return Document(
            title=f"mezzo lint of {self.model}{under_policy}",
            verdict=verdict,
            is_good=not count and not self.flaw,
            blocks=tuple(blocks),
        )


def _fitting(scale: float, loss: Tensor) -> float:
    """Halve a loss scale until it and the loss times it fit the loss's format, as a scaler would. Syncs: yes."""
    size, most = max(1.0, abs(float(loss.detach()))), torch.finfo(loss.dtype).max
    while scale > 1 and not size * scale <= most:
        scale /= 2
    return scale


def lint(model: nn.Module, batch: Any, loss_fn: LossFn | None = None, policy: PolicyLike | None = None) -> LintReport:
    """Run one forward and backward and report broken lint rules, with file and line of each.

    Rules: whole numbers beyond a format's exact range, constants that round to 0 or inf, squares close to overflow, a small x lost in log(1 + x),
    finite differences that are rounding, ops that make rounding large, ids that rounding turned, rows masked altogether, frequency and statistics buffers in 16 bit, running sums in 16 bit, backward inside a region,
    16-bit weights under autocast, a loss that ends in 16 bit, clipping before unscaling, fp16 without a loss scale.

    Args:
        model: is left as it was: weights, gradients, buffers, mode and random state.
        batch: a tensor, a tuple of positional or a dict of named arguments of `model`, or whatever `loss_fn` takes.
        loss_fn: computes the loss from (model, batch); without it, the mean of the squares of every floating output.
        policy: the precision to run under; None runs the model as it is, in the region the caller is in.

    Returns:
        The report; its `is_healthy` says that there is nothing to change.

    Raises:
        PolicyError: the policy does not fit the model.
        ConfigError: no model, batch or loss.

    Writes: nothing. Syncs: yes.
    """
    check_model("lint", model)
    check_trial("lint", batch, loss_fn)
    chosen = None if policy is None else as_policy(policy)
    with bind_copy(model, chosen) as runnable:
        trace = Trace(runnable, of_risks=True)
        with trace:
            loss = loss_of(runnable, batch, loss_fn)
            scale = scale_of(chosen, model)
            backward(loss, _fitting(scale, loss))
    found = trace.report
    # without a policy, the caller's scaler is not known here
    lints = [x for x in found.record.lints if x.rule != "no-loss-scale" or (chosen is not None and scale == 1)]
    # without weights there is nothing that could go backward; what is no fault is the first loss scale, and no step is taken at it
    is_told = found.faults or (found.unseen and not found.findings and any(True for _ in model.parameters()))
    return LintReport(
        model=type(model).__name__,
        policy="" if chosen is None else str(chosen),
        warnings=tuple(explain_lint(x) for x in lints),
        ops=found.record.ops,
        has_backward=loss.requires_grad,
        flaw=found.document().verdict if is_told else "",
    )
