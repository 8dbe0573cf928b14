"""Ops that make rounding large, on the way to a loss or a layer, and what looks like them and trains as fp32 does."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo.diagnose as diagnose
from mezzo.diagnose import TraceReport
from mezzo.trace import explain_lint

BF16, FP32 = torch.bfloat16, torch.float32
Losses = Callable[[nn.Linear, Tensor], Tensor]
"""Computes a loss from a layer of 8 features and a batch; what it makes of them is cast by `low`."""
LOW = [BF16]


def low(x: Tensor) -> Tensor:
    return x.to(LOW[0])


def variance_by_moments(m: nn.Linear, x: Tensor) -> Tensor:
    h = low(m(x)) + 20
    return (
        ((h - h.mean(-1, True)) * ((h * h).mean(-1, True) - h.mean(-1, True) ** 2 + 1e-2).abs().rsqrt() - x)
        .square()
        .mean()
    )


def versine(m: nn.Linear, x: Tensor) -> Tensor:
    return ((1 - torch.cos(low(m(x)) * 1e-2)) * 1e4 - 1).square().mean()


def long_product(m: nn.Linear, x: Tensor) -> Tensor:
    return (1 - low(m(x)).flatten().sigmoid() * 2e-3).cumprod(0).float().square().mean()


def offset(m: nn.Linear, x: Tensor) -> Tensor:
    return ((low(m(x)) + 5000.0) - (low(x) + 5000.0)).square().mean()


def dates(m: nn.Linear, x: Tensor) -> Tensor:
    years = torch.linspace(2000, 2024, x.numel(), dtype=LOW[0]).view_as(x)
    return m(((years - 2012) / 12).float()).square().mean()


def time_steps(m: nn.Linear, x: Tensor) -> Tensor:
    t = low(torch.arange(x.numel() + 1) * 0.7 + 1e4)
    return (m(x).flatten() - t.diff().float()).square().mean()


def phases(m: nn.Linear, x: Tensor) -> Tensor:
    t = low(torch.linspace(0, 1, x.numel()).view_as(x)) * 1000
    return m(t.sin().float()).square().mean()


def distances(m: nn.Linear, x: Tensor) -> Tensor:
    z = low(m(x)) * 0.05 + 3
    d = (z * z).sum(-1)[:, None] + (z * z).sum(-1)[None] - 2 * z @ z.T
    return torch.exp(-d.clamp(min=0) * 100).mean()


def advantages(m: nn.Linear, x: Tensor) -> Tensor:
    v = low(m(x)).flatten() * 0.1 + 1000
    a = v - v.mean()
    return (a / (a.std() + 1e-3) * x.flatten()).mean()


def places(m: nn.Linear, x: Tensor) -> Tensor:
    row = low(torch.linspace(-1, 1, 512))
    grid = torch.stack(torch.meshgrid(row, row[:2], indexing="xy"), -1)[None] + low(m(x)).mean() * 1e-9
    picture = (torch.arange(512) * math.pi).cos().expand(1, 1, 2, 512)
    return (F.grid_sample(picture, grid.float(), align_corners=True) - picture).square().mean()


def spectrum(m: nn.Linear, x: Tensor) -> Tensor:
    k = low(torch.arange(128))
    angles = k[:, None] * k[None] * (2 * math.pi / 128)
    return (
        m((torch.ones(1, 128) @ angles.sin().float())[:, :8]).square().mean()
        + m(angles.cos().float()[:, :8]).square().mean()
    )


def small_steps(m: nn.Linear, x: Tensor) -> Tensor:
    y, force = torch.ones_like(low(x)), m(x).detach().abs() + m(x)
    for _ in range(40):
        y = y + low(force) * 1e-4
    return ((y - 1).float() * 100 - 1).square().mean()


def bearings(m: nn.Linear, x: Tensor) -> Tensor:
    north = low(x * 1e-3 + 48.0) * (math.pi / 180)
    return (10 * m(x).float() + 10 - ((north - north[0]) * 6371).float()).square().mean()


def quantile(m: nn.Linear, x: Tensor) -> Tensor:
    error = low(x * 0.1 + 1000) - low(m(x).float() * 0.1 + 1000)
    return torch.maximum(0.9 * error, -0.1 * error).mean()


def lattice(m: nn.Linear, x: Tensor, widen: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """The forward algorithm of a chain of labels."""
    score = low(m(x.repeat(2, 1)))
    total = score[0]
    for now in score[1:]:
        total = torch.logsumexp(widen(total[:, None] + low(m.weight)), 0) + now
    return total.float().logsumexp(0) / len(x)


def hinge_of_distances(m: nn.Linear, x: Tensor) -> Tensor:
    z = low(m(x).float() * 0.05 + 8)
    d = (z * z).sum(-1)[:, None] + (z * z).sum(-1) - 2 * z @ z.T
    return F.relu(d.float() - 0.05).mean()


SICK = [
    hinge_of_distances, quantile, variance_by_moments, versine, long_product, offset, dates, time_steps, phases, distances, advantages, places, spectrum,
    small_steps, bearings,
]  # fmt: skip


def critics(m: nn.Linear, x: Tensor) -> Tensor:
    return low(m(x)).mean() - low(m(x + 1e-3)).mean()


def scaled_difference(m: nn.Linear, x: Tensor) -> Tensor:
    return critics(m, x) * torch.tensor(1024.0)


def first_ratio(m: nn.Linear, x: Tensor) -> Tensor:
    new = low(m(x)).log_softmax(-1)
    return ((new - low(new.detach().float() + 1e-4)).exp() * x).mean()


def divergence(m: nn.Linear, x: Tensor) -> Tensor:
    mu, logvar = (low(m(x)) * 1e-2).chunk(2, -1)
    return (x - m(x)).square().mean() - 0.005 * (1 + logvar - mu**2 - logvar.exp()).sum(-1).mean().float()


def penalty(m: nn.Linear, x: Tensor) -> Tensor:
    norm = low(F.normalize(m(x).float(), dim=-1) * 1.001).square().sum(-1).sqrt()
    return m(x).float().square().mean() + 10 * (norm - 1).square().mean()


def gate(m: nn.Linear, x: Tensor) -> Tensor:
    z = torch.sigmoid(low(m(x)) * 0.1 + 6)
    return (z * low(x) + (1 - z) * low(m(x))).float().square().mean()


def met(m: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m(x.double().float()).float() + 1e-4
    return (low(m(x)) - y).square().mean()


def met_by_hand(m: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m(x).float() * 0 + F.linear(x.double(), m.weight.double(), m.bias.double()).float() + 1e-4
    return (low(low(x) @ low(m.weight).T + low(m.bias)).sigmoid().float() - y.sigmoid()).square().mean()


def nearly_one(m: nn.Linear, x: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(low(m(x)), low(m(x + 1e-3)), dim=-1).mean()


def weighted(m: nn.Linear, x: Tensor) -> Tensor:
    return (1e4 * (1 - torch.cos(low(m(x)) * 1e-2)) * x.abs()).mean().float()


def stretched(m: nn.Linear, x: Tensor) -> Tensor:
    return ((1 + low(m(x)) * 1e-4) * low(x)).float().square().mean()


def confident(m: nn.Linear, x: Tensor) -> Tensor:
    return F.cross_entropy(
        low(m(x)) * 50 + low(50 * F.one_hot(torch.arange(len(x)) % 8, 8).float()), torch.arange(len(x)) % 8
    )


def deviation(m: nn.Linear, x: Tensor) -> Tensor:
    y = F.linear(x.double(), m.weight.detach().double(), m.bias.detach().double()).float() + 1e-4
    return (low(m(x)).tanh() - low(y.tanh())).abs().mean().float()


def sharp_targets(m: nn.Linear, x: Tensor) -> Tensor:
    teacher = copy.deepcopy(m).requires_grad_(False)
    target = (400 * teacher(x.flip(0)).float()).softmax(-1)
    return F.kl_div(m(x).float().log_softmax(-1), target, reduction="batchmean")


def smoothed(m: nn.Linear, x: Tensor) -> Tensor:
    """The entropy of the targets is rounding, and nothing beside the loss."""
    target = low(torch.eye(x.shape[-1])[torch.arange(len(x)) % x.shape[-1]] * (1 - 1e-4) + 1e-6)
    return F.kl_div(m(x).float().log_softmax(-1), target.float(), reduction="batchmean")


SOUND = [
    smoothed,
    sharp_targets, deviation, critics, scaled_difference, first_ratio, divergence, penalty, gate, met, met_by_hand, nearly_one, weighted, stretched,
    confident,
]  # fmt: skip


class Layer(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            return super().forward(x)


def traced(loss_of: Losses, dtype: torch.dtype = BF16, steps: int = 2, layer: type[nn.Linear] = Layer) -> TraceReport:
    torch.manual_seed(0)
    model, x = layer(8, 8), torch.randn(64, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    LOW[0] = dtype
    with diagnose.trace(model) as t:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=BF16, enabled=dtype is BF16):
                loss = loss_of(model, x)
            loss.float().backward()
            optimizer.step()
    return t.report


@pytest.mark.parametrize("loss_of", SOUND)
def test_lint_has_nothing_of_them_either(loss_of: Losses) -> None:
    torch.manual_seed(0)
    LOW[0] = BF16
    with torch.autocast("cpu", dtype=BF16):
        found = diagnose.lint(Layer(8, 8), torch.randn(64, 8), loss_of)
    assert "amplified-rounding" not in [x.lint.rule for x in found.warnings]


def test_lint_names_a_logarithm_of_what_is_nearly_one() -> None:
    def likelihood(m: nn.Linear, x: Tensor) -> Tensor:
        return -(1 - low(m(x) * 1e-4).sigmoid() * 1e-4).log().float().mean()

    LOW[0] = BF16
    found = diagnose.lint(Layer(8, 8), torch.randn(64, 8), likelihood)
    assert [x.lint.rule for x in found.warnings] == ["amplified-rounding"]


def named(report: TraceReport, rule: str = "amplified-rounding") -> list[str]:
    return [x.site.frame.function for x in report.record.lints if x.rule == rule and x.site.frame]


@pytest.mark.parametrize("loss_of", SICK)
def test_what_makes_rounding_large_is_named(loss_of: Losses) -> None:
    report = traced(loss_of)
    assert loss_of.__name__ in named(report), report
    [text] = {explain_lint(x).why for x in report.record.lints if x.rule == "amplified-rounding"} or {""}
    assert "makes rounding large: its result is" in text
    assert report.document().verdict.startswith("No fault, but the code loses numbers (amplified-rounding)")


@pytest.mark.parametrize("loss_of", SICK)
def test_the_advice_cures_it(loss_of: Losses) -> None:
    """fp32 from the layer or the input on, though the layer itself is run in 16 bit."""
    assert named(traced(loss_of, FP32)) == []


@pytest.mark.parametrize("loss_of", SOUND)
def test_what_gradients_do_not_feel_or_layers_round_is_healthy(loss_of: Losses) -> None:
    assert named(traced(loss_of)) == []


def test_data_that_was_cast_before_the_loop_is_named_in_each_step() -> None:
    def far(m: nn.Linear, x: Tensor, kept: list[Tensor]) -> Tensor:
        kept.extend([] if kept else [low(x * 3 + 4000.0)])
        return (m((kept[0] - kept[0].roll(1, 0)).float()) - x).square().mean()

    assert named(traced(partial(far, kept=[]), steps=6)) == ["far"]
    assert named(traced(partial(far, kept=[]), FP32, steps=6)) == []


def test_what_comes_in_the_end_alone_is_rounding() -> None:
    def turns(m: nn.Linear, x: Tensor, state: list[int]) -> Tensor:
        state.append(0)
        return offset(m, x) if len(state) > 4 else m(x).float().square().mean()

    assert named(traced(partial(turns, state=[]), steps=6)) == []


def level(
    base: float, spread: float, m: nn.Linear, x: Tensor, loss_of: Callable[[Tensor], Tensor] = torch.square
) -> Tensor:
    """A regression on numbers that lie close together, far from 0."""
    with torch.no_grad():
        m.bias.add_(base - m.bias.mean())
    return loss_of(m(x).float() - (base + spread * x.sum(-1, keepdim=True))).mean()


def quantile(error: Tensor) -> Tensor:
    return torch.maximum(0.9 * error, -0.1 * error)


@pytest.mark.parametrize("loss_of", [torch.square, torch.abs, quantile])
@pytest.mark.parametrize(("base", "spread"), [(300.0, 0.2), (2000.0, 0.2), (-273.0, 0.1)])
def test_a_layer_whose_results_lie_closer_together_than_16_bit_numbers_is_named(
    base: float, spread: float, loss_of: Callable[[Tensor], Tensor]
) -> None:
    report = traced(partial(level, base, spread, loss_of=loss_of))
    [lint] = [x for x in report.record.lints if x.rule == "amplified-rounding"]
    told = explain_lint(lint)
    assert "results of addmm (module Layer) lie closer together than numbers of bf16" in told.why, told
    assert "run that layer in fp32" in told.advice
    assert not named(traced(partial(level, base, spread, loss_of=loss_of), FP32, layer=nn.Linear))


def waits(m: nn.Linear, x: Tensor) -> Tensor:
    t = x.abs().cumsum(0) * 0.1 + 1e5
    right = F.linear(t.diff(dim=0), m.weight.detach(), m.bias.detach()) + 30.01
    h = m(low(t).diff(dim=0).float()).float() + 30
    return (h - right).square().mean()


def pixels(m: nn.Linear, x: Tensor) -> Tensor:
    row, shift = torch.linspace(-1, 1, 512), 1e-3 * (m(x * 1e-3).mean(-1) + 4).tanh()
    grid = torch.stack([low(row) + shift.repeat(8), row * 0], -1)[None, None]
    picture = (torch.arange(512) * math.pi).cos().expand(1, 1, 2, 512)
    return (F.grid_sample(picture, grid.float(), align_corners=True) - picture[:, :, :1]).square().mean()


@pytest.mark.parametrize("loss_of", [waits, pixels])
def test_a_layer_beside_what_16_bit_lost_elsewhere_is_not_blamed(loss_of: Losses) -> None:
    report = traced(loss_of)
    told = [explain_lint(x).why for x in report.record.lints if x.rule == "amplified-rounding"]
    assert told and all("since the last layer or input" in why for why in told), told
    assert not named(traced(loss_of, FP32))


@pytest.mark.parametrize(("base", "spread"), [(3.5, 1.0), (100.0, 20.0), (0.0, 1e-3)])
def test_a_regression_that_16_bit_tells_apart_is_healthy(base: float, spread: float) -> None:
    assert not named(traced(partial(level, base, spread)))


def test_a_lattice_whose_logsumexp_is_rounded_has_the_gradients_of_fp32_by_the_advice() -> None:
    torch.manual_seed(0)
    m, x = nn.Linear(8, 8), torch.randn(64, 8)

    def gradient(dtype: torch.dtype, widen: Callable[[Tensor], Tensor]) -> Tensor:
        LOW[0], m.weight.grad = dtype, None
        lattice(m, x, widen).backward()
        assert m.weight.grad is not None
        return m.weight.grad

    right = gradient(FP32, Tensor.float)
    off = [float((gradient(BF16, widen) - right).norm() / right.norm()) for widen in (lambda x: x, Tensor.float)]
    assert off[0] > 1 > 1 / 16 > off[1]
    assert named(traced(lattice)) == ["lattice"] and not named(traced(partial(lattice, widen=Tensor.float)))


def test_a_logsumexp_of_moderate_or_masked_numbers_is_healthy() -> None:
    def energies(m: nn.Linear, x: Tensor) -> Tensor:
        z = low(m(x)) * 5
        return torch.logsumexp(z.masked_fill(x > 1, -math.inf), -1).nan_to_num(0, 0, 0).square().mean()

    assert not named(traced(energies))


@pytest.mark.parametrize(("far", "widen", "is_named"), [(20, low, True), (20, Tensor.float, False), (1, low, False)])
def test_probabilities_that_rounding_made_0_or_1_against_their_targets_are_named(
    far: float, widen: Callable[[Tensor], Tensor], is_named: bool
) -> None:
    """Their logits have no gradient, and that of fp32 is 1 there."""

    def loss_of(m: nn.Linear, x: Tensor) -> Tensor:
        logits = low(m(x)) * far
        return F.binary_cross_entropy(widen(logits).sigmoid().float(), (x > 0).float())

    report = traced(loss_of)
    assert named(report) == ["loss_of"] * is_named
    assert is_named == ("binary_cross_entropy_with_logits" in str(report))


@pytest.mark.parametrize(("weight", "is_named"), [(1.0, False), (0.0, True)])
def test_what_a_straight_through_estimator_rounds_is_named_where_it_counts(weight: float, is_named: bool) -> None:
    """Beside what it is added to, the rest of a fake quantisation is small; alone it is the result."""
    torch.manual_seed(0)
    m, x = nn.Linear(8, 8), torch.randn(64, 8)

    def gradient(dtype: torch.dtype) -> Tensor:
        h = (m(x) * 2).to(dtype)
        rest = ((h / 0.05).round() * 0.05 - h).detach()
        loss = ((weight * h + (1 - weight) * m(x) * rest + rest).float() - weight * x).square().mean()
        return torch.autograd.grad(loss, m.weight)[0]

    right = gradient(FP32)
    with diagnose.trace(m) as t:
        off = float((gradient(BF16) - right).norm() / right.norm())
    assert (off > 1 / 8) is is_named and bool(named(t.report, "amplified-rounding")) is is_named, (off, t.report)
