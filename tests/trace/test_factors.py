"""Matrices without the factors they should have: whose fault it is that a factorisation raises, and what mends it."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

import mezzo
import mezzo.diagnose as diagnose
from mezzo.diagnose import TraceReport


class Process(nn.Module):
    """A Gaussian process whose kernel has rank 8 and noise on its diagonal: that much is lost in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 8))
        self.noise = nn.Parameter(torch.tensor(-6.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.net(x)
        kernel = h @ h.t() + self.noise.exp() * torch.eye(len(x))
        factor = torch.linalg.cholesky(kernel)  # RAISES
        return (y * torch.cholesky_solve(y, factor)).sum() + factor.diagonal().log().sum()


def steps(policy: str) -> TraceReport:
    torch.manual_seed(0)
    x, model = torch.linspace(-2, 2, 48)[:, None], Process()
    amp = mezzo.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2), policy)
    with diagnose.trace() as t:
        try:
            for _ in range(3):
                amp.zero_grad()
                amp.backward(model(x, (2 * x).sin()))
                amp.step()
        except torch.linalg.LinAlgError:
            pass
    return t.report


def test_a_matrix_that_only_16_bit_leaves_without_a_factor_is_underflow_and_the_edit_mends_it() -> None:
    [found] = steps("bf16").findings
    assert (found.verdict, found.op, found.module) == ("underflow", "linalg_cholesky", "")
    assert found.frame is not None and found.frame.function == "forward"
    assert found.reached == ("read linalg_cholesky, which raised",)
    assert found.fix.edit == "op:matmul=fp32" and found.fix.tried == "mm in fp32 on these values: finite"
    assert steps(f"bf16, {found.fix.edit}").answer == "healthy"


def nearly_singular() -> Tensor:
    """A kernel of points of which two nearly meet: its fp32 values have a Cholesky factor in fp64, and none in fp32."""
    for seed in range(100):
        points = torch.rand(24, 2, generator=torch.Generator().manual_seed(seed))
        points[-1] = points[0] + 1e-4
        kernel = (-((points[:, None] - points) / 0.2).square().sum(-1) / 2).exp()
        if torch.linalg.cholesky_ex(kernel).info and not torch.linalg.cholesky_ex(kernel.double()).info:
            return kernel
    raise AssertionError("no such kernel")


def test_a_matrix_that_is_singular_to_the_rounding_of_fp32_does_not_overflow() -> None:
    kernel = nearly_singular()
    with diagnose.trace() as t, pytest.raises(torch.linalg.LinAlgError):
        torch.linalg.cholesky(kernel.requires_grad_()).sum().backward()
    [found] = t.report.findings
    assert (found.verdict, found.op) == ("singularity", "linalg_cholesky")
    assert "no factors in fp32" in found.why and "identity" in found.fix.advice


SINGULAR = {
    "linalg_cholesky": lambda a: torch.linalg.cholesky(a - 2 * a.abs().amax() * torch.eye(3)),
    "linalg_inv": lambda a: torch.linalg.inv(torch.cat([a[:2], a[:1]])),
    "linalg_solve": lambda a: torch.linalg.solve(torch.cat([a[:2], a[:1]]), torch.ones(3)),
}


@pytest.mark.parametrize("op", SINGULAR)
def test_a_matrix_without_factors_in_any_format_is_singular(op: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    with diagnose.trace() as t, pytest.raises(torch.linalg.LinAlgError):
        SINGULAR[op](model(torch.ones(3, 3) + torch.eye(3))).sum().backward()
    [found] = t.report.findings
    assert (found.verdict, found.op, found.phase) == ("singularity", op, "forward")
    assert "multiple of the identity" in found.fix.advice


@pytest.mark.parametrize("asks", ["raises", "info"])
def test_who_adds_to_the_diagonal_until_there_is_a_factor_is_healthy(asks: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)

    def factor(a: Tensor) -> Tensor:
        if asks == "info":
            found, info = torch.linalg.cholesky_ex(a)
            return found if not info.any() else factor(a + torch.eye(3))
        try:
            return torch.linalg.cholesky(a)
        except torch.linalg.LinAlgError:
            return factor(a + torch.eye(3))

    with diagnose.trace() as t:
        for _ in range(3):
            a = model(torch.randn(3, 3))
            factor(a + a.t()).square().sum().backward()
    assert t.report.answer == "healthy"


class Samples(nn.Module):
    """Draws an action from weights that it does not normalise; `depth` is how small they are."""

    def __init__(self, depth: float) -> None:
        super().__init__()
        self.body, self.depth = nn.Linear(8, 4), depth

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.exp(self.body(x) - self.depth)
        action = torch.multinomial(weights, 1)  # RAISES
        return self.body(x).log_softmax(-1).gather(1, action).mean()


def sampled(policy: str, depth: float) -> TraceReport:
    torch.manual_seed(0)
    model = Samples(depth)
    amp = mezzo.prepare(model, torch.optim.Adam(model.parameters(), lr=1e-2), policy)
    with diagnose.trace() as t, suppress(RuntimeError):
        for _ in range(4):
            amp.zero_grad()
            amp.backward(model(torch.randn(8, 8)))
            amp.step()
    return t.report


def test_weights_of_a_draw_that_16_bit_makes_0_are_underflow_and_the_edit_trains() -> None:
    [found] = sampled("fp16, scaling=none", 30.0).findings
    assert (found.verdict, found.op, found.phase) == ("underflow", "multinomial", "forward")
    assert found.frame is not None and found.frame.function == "forward"
    assert "exp flushed 100.0% of its results to 0 in fp16" in found.why and found.fix.edit
    after = sampled(f"fp16, scaling=none, {found.fix.edit}", 30.0)
    assert not after.findings and after.record.updates == 4


def test_a_draw_that_fp32_refuses_too_is_not_put_down_to_16_bit() -> None:
    assert not [f for f in sampled("fp16, scaling=none", 200.0).findings if f.verdict == "underflow"]
    assert sampled("fp16, scaling=none", 1.0).findings == ()
