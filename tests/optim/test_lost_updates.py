"""The silent losses of 16-bit weights (traps S3, S3b, S18, S26), each beside torch's optimizer falling into it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mezzo.optim import AdamW, MasterWeights

BF16, FP16 = torch.bfloat16, torch.float16
KEEPING = {
    "split": lambda p, **o: AdamW(p, master="split", **o),
    "fp32": lambda p, **o: AdamW(p, master="fp32", **o),
    "kahan": lambda p, **o: AdamW(p, master="kahan", **o),
    "wrapped": lambda p, **o: MasterWeights(torch.optim.AdamW(p, **o)),
}


def take(optimizer: Any, p: torch.nn.Parameter, steps: int, value: float) -> None:
    for _ in range(steps):
        p.grad = torch.full_like(p, value)
        optimizer.step()


@pytest.mark.parametrize("build", KEEPING.values(), ids=KEEPING)
def test_s3_small_updates_arrive(build: Any) -> None:
    low, wide, trapped = (torch.nn.Parameter(torch.ones(8, dtype=dtype)) for dtype in (BF16, torch.float32, BF16))
    got, want = build([low], lr=1e-3, weight_decay=0.0), torch.optim.AdamW([wide], lr=1e-3, weight_decay=0.0)
    for optimizer, p in ((got, low), (want, wide), (torch.optim.AdamW([trapped], lr=1e-3, weight_decay=0.0), trapped)):
        take(optimizer, p, 300, 1.0)
    assert trapped[0].item() == 1.0
    assert abs(low[0].item() - wide[0].item()) <= wide[0].item() * torch.finfo(BF16).eps
    assert low[0].item() < 0.75


@pytest.mark.parametrize("build", KEEPING.values(), ids=KEEPING)
def test_s3b_weight_decay_arrives(build: Any) -> None:
    low, wide, trapped = (torch.nn.Parameter(torch.ones(8, dtype=dtype)) for dtype in (BF16, torch.float32, BF16))
    options = {"lr": 1e-3, "weight_decay": 1.0}
    for optimizer, p in (
        (build([low], **options), low),
        (torch.optim.AdamW([wide], **options), wide),
        (torch.optim.AdamW([trapped], **options), trapped),
    ):
        take(optimizer, p, 300, 0.0)
    assert trapped[0].item() == 1.0
    assert abs(low[0].item() - wide[0].item()) <= wide[0].item() * torch.finfo(BF16).eps
    assert wide[0].item() == pytest.approx(0.999**300, rel=1e-4)


def test_s18_eps_does_not_vanish_in_fp16() -> None:
    start, grad = torch.ones(4), torch.tensor([1e-3, 1e-4, 1e-5, 0.0])
    low, wide, trapped = (torch.nn.Parameter(start.to(dtype)) for dtype in (FP16, torch.float32, FP16))
    for optimizer, p in (
        (AdamW([low], lr=1e-3, master="fp32"), low),
        (torch.optim.AdamW([wide], lr=1e-3), wide),
        (torch.optim.AdamW([trapped], lr=1e-3), trapped),
    ):
        p.grad = grad.half().to(p.dtype)
        optimizer.step()
    assert not bool(trapped.isfinite().all())
    assert torch.equal(low, wide.half())


def test_s26_moments_have_the_dtype_that_was_asked_for() -> None:
    for asked in (torch.float32, BF16):
        p = torch.nn.Parameter(torch.ones(4, dtype=BF16))
        optimizer = AdamW([p], master="split", state_dtype=asked)
        take(optimizer, p, 1, 1.0)
        assert {optimizer.state[p][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {asked}
    inherited = torch.nn.Parameter(torch.ones(4, dtype=BF16))
    trapped = torch.optim.AdamW([inherited])
    take(trapped, inherited, 1, 1.0)
    assert trapped.state[inherited]["exp_avg_sq"].dtype is BF16
