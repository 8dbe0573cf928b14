"""What a diagnosis prints, applied to the whole program that it was printed for, removes the fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.zoo import strangers
from tests.zoo.case import Case
from tests.zoo.faulty_forward import BF16, FP16
from tests.zoo.test_zoo import STRANGERS, diagnosis, is_large, name
from torch import Tensor, nn

import mezzo
from mezzo.trace import collector

assert STRANGERS  # loaded: they put their programs into `strangers`
PRESETS = {FP16: "fp16", BF16: "bf16"}
ROWS = [
    pytest.param(case, dtype, id=f"{case.name}-{name(dtype)}")
    for case in strangers.CASES
    for dtype in case.dtypes
    if dtype in PRESETS and case.verdict in ("overflow", "underflow") and not is_large(case.build)
]


def apply(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Run whatever comes under a policy: models are bound to it when first called, regions take its op rules."""
    run, bound = nn.Module.__call__, set()
    ops = ", ".join(part for part in policy.split(", ")[1:] if part.startswith("op:"))

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not bound and next(self.parameters(), None) is not None:
            bound.add(self)
            mezzo.prepare(self, None, policy)
        return run(self, *args, **kwargs)

    def region(device: str, dtype: torch.dtype | None = None, enabled: bool = True) -> mezzo.autocast:
        preset = policy.split(", ", maxsplit=1)[0]
        return mezzo.autocast(device, policy=", ".join(filter(None, (preset, ops))), enabled=enabled)

    monkeypatch.setattr(nn.Module, "__call__", call)
    monkeypatch.setattr(torch, "autocast", region)


@pytest.mark.parametrize(("case", "dtype"), ROWS)
def test_the_printed_edit_removes_the_fault(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    first = diagnosis(case.build, dtype).findings[0]
    if not first.fix.edit:
        assert "no rule" in first.fix.advice or "optimizer" in first.fix.advice or "scale" in first.fix.advice
        return
    apply(monkeypatch, f"{PRESETS[dtype]}, {first.fix.edit}")
    report = diagnosis(case.build, dtype)
    assert [f"{f.verdict} {f.op} {f.path} {f.frame} {f.why}" for f in report.findings] == []


def pasted(text: str, operands: Any) -> tuple[Tensor, list[Tensor]]:
    """Evaluate an expression as a reader would paste it. Returns: its value, and the tensors it was made of."""
    leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in operands.tensors]
    names = dict(zip("xy", leaves, strict=False)) | ({"p": leaves[1]} if len(leaves) > 1 else {})
    return eval(text, {**vars(torch), "torch": torch, **names}), [t for t in leaves if t.requires_grad]


@pytest.fixture
def offers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Replacements that are printed, with what the op was given."""
    found: list[tuple[str, Any]] = []
    offer: Callable[[str, Any], str] = collector.replacement_for

    def noted(op: str, operands: Any) -> str:
        text = offer(op, operands)
        if text:
            found.append((text, operands))
        return text

    monkeypatch.setattr(collector, "replacement_for", noted)
    return found


ARITHMETIC = [c for c in strangers.CASES if c.verdict == "singularity" and not is_large(c.build)]


@pytest.mark.parametrize("case", ARITHMETIC, ids=[c.name for c in ARITHMETIC])
def test_the_printed_replacement_pasted_is_finite_with_its_gradients(case: Case, offers: list[tuple[str, Any]]) -> None:
    fix = diagnosis(case.build, case.dtypes[0]).findings[0].fix
    assert bool(fix.tried) == any(text in fix.advice for text, _ in offers)
    for text, operands in offers:
        value, leaves = pasted(text, operands)
        assert value.isfinite().all(), text
        if leaves:
            grads = torch.autograd.grad(value.float().sum(), leaves, allow_unused=True)
            assert all(g is None or g.isfinite().all() for g in grads), text
