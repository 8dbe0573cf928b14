"""What a diagnosis prints, applied to the whole program that it was printed for, removes the fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.zoo import strangers
from tests.zoo.case import Case
from tests.zoo.faulty_forward import BF16, FP16
from tests.zoo.test_zoo import QUICK, STRANGERS, diagnosis, is_large, name
from torch import nn

import mezzo

assert STRANGERS  # loaded: they put their programs into `strangers`
PRESETS = {FP16: "fp16", BF16: "bf16"}


def is_twin(case: Case) -> bool:
    """Whether a program is left to the slow tests; of each kind of advice some are run in every suite."""
    return not case.build.__module__.startswith("tests.zoo.domain_m") and case.build not in QUICK


ROWS = [
    pytest.param(case, dtype, id=f"{case.name}-{name(dtype)}", marks=[pytest.mark.slow] * is_twin(case))
    for case in strangers.CASES
    for dtype in case.dtypes
    if dtype in PRESETS and case.verdict in ("overflow", "underflow") and not is_large(case.build)
]


def apply(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    """Run whatever comes under a policy: models are bound to it when first called, regions take its op rules."""
    run, bound = nn.Module.__call__, set()
    ops = ", ".join(part for part in policy.split(", ")[1:] if part.startswith(("op:", "compute=")))

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
        assert any(word in first.fix.advice for word in ("no rule", "no policy", "optimizer", "scale")), first.fix
        return
    apply(monkeypatch, f"{PRESETS[dtype]}, {first.fix.edit}")
    report = diagnosis(case.build, dtype)
    # that a scaler finds its level, or that weights which the program narrowed do not move or move far, is no inf or NaN
    found = [f for f in report.findings if f.verdict not in ("loss-scale", "lost-update", "exploding-step")]
    assert [f"{f.verdict} {f.op} {f.path} {f.frame} {f.why}" for f in found] == []
