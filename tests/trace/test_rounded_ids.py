"""Ids that rounding turned: of what has a gradient, and of data that meets one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.trace.test_amplified import BF16, FP32, LOW, Losses, low, named, traced
from torch import Tensor, nn

import mezzo.diagnose as diagnose
from mezzo.trace import explain_lint


def bins(m: nn.Linear, x: Tensor) -> Tensor:
    row = (low(torch.linspace(1, 40, len(x))) / 0.01).floor().long()
    return (m.weight[row % 8] - x).square().mean()


def edges(m: nn.Linear, x: Tensor) -> Tensor:
    row = torch.bucketize(low(torch.linspace(1, 1.2, len(x))), low(torch.linspace(1, 1.2, 256)))
    return (F.embedding(row % 8, m.weight) - x).square().mean()


def ties(m: nn.Linear, x: Tensor) -> Tensor:
    k = low(m(x).float() * 1e-4 + 1).topk(2, -1).indices
    return -m(x).float().gather(1, k).mean()


def nearest(m: nn.Linear, x: Tensor) -> Tensor:
    z, c = low(x + 40), low(m.weight * 4 + 40)
    d = (z * z).sum(-1, keepdim=True) - 2 * z @ c.T + (c * c).sum(-1)
    return (m.weight.index_select(0, d.argmin(-1)) - x).square().mean()


def codes_far_from_0(m: nn.Linear, x: Tensor) -> Tensor:
    z, codes = low(m(x).float() + 100), m.weight + 100
    near = codes[(z[:, None] - codes).float().square().sum(-1).argmin(-1)]
    return 1e-3 * (near - 100 - x).square().mean() + m(x).float().square().mean()


def edges_of_a_cloud(m: nn.Linear, x: Tensor) -> Tensor:
    q = low(x + 40)
    d = (q * q).sum(-1)[:, None] - 2 * q @ q.T + (q * q).sum(-1)
    return (m(x[d.topk(8, largest=False).indices] - x[:, None]).float().amax(1) - x).square().mean()


def costs_of_beams(m: nn.Linear, x: Tensor) -> Tensor:
    score = low(m(x).float() * 0.2 - 300)
    k = score.topk(3).indices
    return (score.gather(1, k).float().softmax(-1) * x.gather(1, k)).sum(-1).mean()


PICKS = [bins, edges, ties, nearest, codes_far_from_0, edges_of_a_cloud, costs_of_beams]


def neighbours(m: nn.Linear, x: Tensor) -> Tensor:
    h = low(m(x))
    d = (h * h).sum(-1)[:, None] - 2 * h @ h.T + (h * h).sum(-1)
    return m(x)[d.topk(8, largest=False).indices].float().amax(1).square().mean()


def noise_levels(m: nn.Linear, x: Tensor) -> Tensor:
    levels = m.weight.mean() + torch.linspace(0, 1, 1000)
    t = (low(torch.linspace(0, 0.99, len(x))) * 1000).long()
    return (x * levels[t, None]).square().mean()


def hardest(m: nn.Linear, x: Tensor) -> Tensor:
    y = torch.arange(len(x)) % 8
    k = low(F.cross_entropy(m(x).detach().float(), y, reduction="none")).topk(16).indices
    return F.cross_entropy(m(x)[k].float(), y[k])


def experts(m: nn.Linear, x: Tensor) -> Tensor:
    share, k = low(m(x)).softmax(-1).topk(2, -1)
    return ((m.weight[k] * share[..., None]).sum(1) - x).square().mean().float()


def in_order(m: nn.Linear, x: Tensor) -> Tensor:
    order = low(x[:, 0] * 1e-3 + 1).argsort()
    return m(x[order])[:, 0].float().diff().square().mean() + m(x)[order].float().square().mean()


def close_points(m: nn.Linear, x: Tensor) -> Tensor:
    q = low(x)
    near = x[(q[:, None] - q).square().sum(-1).topk(8, largest=False).indices] - x[:, None]
    return (m(near).float().amax(1) - x).square().mean()


def bins_of_data(m: nn.Linear, x: Tensor) -> Tensor:
    rows = (torch.linspace(1, 40, len(x)) * 97).long()
    return (low(m.weight)[rows % 8].float() - x).square().mean()


@pytest.mark.parametrize("loss_of", PICKS)
def test_ids_that_rounding_turned_are_named(loss_of: Losses) -> None:
    report = traced(loss_of)
    assert named(report, "rounded-index") == [loss_of.__name__], report
    assert "fp32 picks others in" in next(explain_lint(x).why for x in report.record.lints if x.rule == "rounded-index")
    assert not named(traced(loss_of, FP32), "rounded-index")


@pytest.mark.parametrize("loss_of", [neighbours, noise_levels, hardest, experts, in_order, close_points, bins_of_data])
def test_ids_whose_turning_changes_little_are_healthy(loss_of: Losses) -> None:
    assert traced(loss_of).document().verdict.startswith("Healthy")


def test_ids_that_rounding_turned_past_the_end_are_named_where_the_program_ends() -> None:
    def past(m: nn.Linear, x: Tensor) -> Tensor:
        return m.weight[(low(torch.tensor([0.1, 0.9999])) * 8).long()].square().mean()

    LOW[0] = BF16
    with pytest.raises(IndexError), diagnose.trace(None) as t:
        past(nn.Linear(8, 8), torch.zeros(1))
    assert named(t.report, "rounded-index") == ["past"]


def test_a_weight_that_is_a_whole_number_is_no_count() -> None:
    def far(m: nn.Linear, x: Tensor) -> Tensor:
        if not m.bias[0] == 1234:
            nn.init.constant_(m.bias, 1234.0)
        return (m(x).float() - x * 300 - 1234).square().mean()

    assert not named(traced(far), "integers-in-16-bit")


def same_labels(m: nn.Linear, x: Tensor) -> Tensor:
    t = low(torch.linspace(5, 5.02, len(x)))
    return ((m(x) @ m(x).T).float() * (t[:, None] == t).float()).mean()


def largest(m: nn.Linear, x: Tensor) -> Tensor:
    score = low(m(x).float() * 0.01 + 3)
    return (m(x).float() * (score == score.amax(-1, keepdim=True)).float()).mean()


def kept_rows(m: nn.Linear, x: Tensor) -> Tensor:
    t = low(torch.linspace(5, 5.02, len(x)))
    return m(x)[t != t[0]].float().square().mean()


def fixed_point(m: nn.Linear, x: Tensor) -> Tensor:
    now = low(x) + 10
    while not (now == (following := now + (now - 10) * 1e-3)).all() and float(now.float().square().mean()) < 200:
        now = following
    return (m(x).float() * (now.float() - 10)).square().mean()


def fixed_point_by_equal(m: nn.Linear, x: Tensor) -> Tensor:
    now = low(x) + 10
    while not torch.equal(now, following := now + (now - 10) * 1e-3) and float(now.float().square().mean()) < 200:
        now = following
    return (m(x).float() * (now.float() - 10)).square().mean()


def adaptive_steps(m: nn.Linear, x: Tensor) -> Tensor:
    y, rate, h, time = low(x) * 0.01 + 1, m(x).mean() + 1, 0.1, 0.0
    for _ in range(20):
        first = -y * low(rate)
        by_euler, by_heun = y + h * first, y + h / 2 * (first - (y + h * first) * low(rate))
        if (by_heun - by_euler).abs().max() < 2e-3:
            y, time = by_heun, time + h
        h = 0.5 * h
    return (y.float() - time).square().mean()


def factor_or_diagonal(m: nn.Linear, x: Tensor) -> Tensor:
    z = m(x[:16]).float()
    kernel = torch.exp(low(torch.cdist(z, z).square()) * -0.01).float() + 1e-3 * torch.eye(16)
    try:
        factor = torch.linalg.cholesky(kernel)
    except torch.linalg.LinAlgError:
        factor = kernel.diagonal().sqrt().diag()
    return torch.cholesky_solve(x[:16], factor).square().mean()


def factor_by_its_info(m: nn.Linear, x: Tensor) -> Tensor:
    z = m(x[:16]).float()
    kernel = torch.exp(low(torch.cdist(z, z).square()) * -0.01).float() + 1e-3 * torch.eye(16)
    factor, info = torch.linalg.cholesky_ex(kernel)
    return torch.cholesky_solve(x[:16], kernel.diagonal().sqrt().diag() if info.any() else factor).square().mean()


def codes_by_one_hot(m: nn.Linear, x: Tensor) -> Tensor:
    z, c = low(x + 40), low(m.weight * 4 + 40)
    d = (z * z).sum(-1, keepdim=True) - 2 * z @ c.T + (c * c).sum(-1)
    return (F.one_hot(d.argmin(-1), 8).float() @ m.weight.float() - x).square().mean()


def groups_of_equals(m: nn.Linear, x: Tensor) -> Tensor:
    of = low(torch.linspace(1, 1.01, len(x))).unique(return_inverse=True)[1]
    return torch.zeros_like(x).index_add(0, of, m(x).float()).square().mean()


ANSWERED = [
    same_labels, largest, kept_rows, fixed_point, fixed_point_by_equal, adaptive_steps, factor_or_diagonal, factor_by_its_info, codes_by_one_hot,
    groups_of_equals,
]  # fmt: skip


@pytest.mark.parametrize("loss_of", ANSWERED)
def test_answers_that_rounding_gave_are_named_where_a_gradient_or_the_host_goes_by_them(loss_of: Losses) -> None:
    assert named(traced(loss_of), "rounded-index") == [loss_of.__name__]
    assert not named(traced(loss_of, FP32), "rounded-index")


def ids_as_numbers(m: nn.Linear, x: Tensor) -> Tensor:
    row = (low(torch.linspace(1, 40, len(x))) / 0.01).floor().long()
    return (row.float()[:, None] / 4000 * m(x).float()).square().mean()


def the_best_so_far(m: nn.Linear, x: Tensor) -> Tensor:
    loss = m(x).square().mean()
    return loss.float() if loss < 1e3 else (loss * 0.5).float()


def a_margin(m: nn.Linear, x: Tensor) -> Tensor:
    z = m(x)
    return (z * (z > 0.1)).float().square().mean()


def what_is_not_0(m: nn.Linear, x: Tensor) -> Tensor:
    z = low(x).relu()
    return (m(x).float() * (z != 0).float()).square().sum() / (z != 0).sum()


def with_more_on_the_diagonal(m: nn.Linear, x: Tensor) -> Tensor:
    z = m(x[:16])
    kernel, info, more = (z @ z.T).float() - 0.1 * torch.eye(16), torch.ones(()), 0.0
    while info.any():
        factor, info = torch.linalg.cholesky_ex(kernel + more * torch.eye(16))
        more += 0.5
    return torch.cholesky_solve(x[:16], factor).square().mean()


@pytest.mark.parametrize(
    "loss_of", [ids_as_numbers, the_best_so_far, a_margin, what_is_not_0, with_more_on_the_diagonal]
)
def test_answers_that_fp32_gives_too_are_healthy(loss_of: Losses) -> None:
    report = traced(loss_of)
    assert report.answer == "healthy" and not named(report, "rounded-index")
