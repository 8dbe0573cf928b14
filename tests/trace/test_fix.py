"""The edit a diagnosis proposes is a policy, and training under it is healthy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mezzo.diagnose as diagnose
from mezzo.step import prepare
from mezzo.trace import explain_lint


class Normed(nn.Module):
    """A sick part in front of a normalisation, as in every transformer."""

    def __init__(self, sick: nn.Module) -> None:
        super().__init__()
        self.before, self.sick, self.norm, self.after = nn.Linear(8, 8), sick, nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.norm(self.sick(self.before(x))))


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = 1e3 * x
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class SmallEps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x - x
        return x / (x.abs().sum(-1, keepdim=True) + 1e-8)


class Stretched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(8, 8)
        nn.init.constant_(self.down.weight, 3e4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(x)


def report_of(model: nn.Module, policy: str) -> diagnose.TraceReport:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    amp = prepare(model, optimizer, policy=f"{policy}, scaling.init_scale=1")
    with diagnose.trace(model) as t:
        amp.backward(model(4 * torch.randn(4, 8)).float().square().mean())
        amp.step()
    return t.report


@pytest.mark.parametrize("sick", [Squares, SmallEps, Stretched])
def test_following_the_edits_leads_to_health(sick: Callable[[], nn.Module]) -> None:
    policy, edits = "fp16", []
    for _ in range(4):
        torch.manual_seed(0)
        report = report_of(Normed(sick()), policy)
        if report.is_healthy:
            break
        edit = report.faults[0].fix.edit
        assert edit and edit not in edits, report
        edits.append(edit)
        policy = f"{policy}, {edit}"
    assert report.is_healthy and edits, report
    assert edits[0].startswith(("module:sick", "sick"))


def test_gradients_that_overflow_where_they_are_added_up_are_told_so() -> None:
    def run(share: float) -> diagnose.TraceReport:
        model = nn.Linear(4, 1, bias=False).half()
        with diagnose.trace(model) as t:
            for _ in range(3):
                (model(torch.full((1, 4), 30.0).half()) * 1000 * share).sum().backward()
            torch.optim.SGD(model.parameters(), lr=1e-6).step()
        return t.report

    (found,) = run(1.0).findings
    assert found.verdict == "overflow" and found.fix.edit == "" and "None" not in found.fix.advice
    assert "divide each loss by the number of passes" in found.fix.advice
    assert run(1 / 3).findings == ()


class Residuals(nn.Module):
    """Each layer nearly doubles what came: after 24 of them a size that fp16 does not hold, and bf16 does."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(layers))
        for layer in self.layers:
            nn.init.eye_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.9 * layer(x)
        return F.layer_norm(x, (4,))


@pytest.mark.parametrize(("layers", "edit"), [(24, "compute=bf16"), (160, "")])
def test_growth_over_depth_that_fp32_holds_gets_an_edit(layers: int, edit: str) -> None:
    model, x = Residuals(layers), torch.linspace(-1, 1, 12).reshape(3, 4)
    with diagnose.trace(model) as t, torch.autocast("cpu", dtype=torch.float16):
        model(x).float().square().mean().backward()
    first = t.report.findings[0]
    assert (first.verdict, first.fix.edit) == ("exploding", edit)
    if edit:
        model = Residuals(layers)
        prepare(model, None, f"fp16, {edit}")
        loss = model(x).float().square().mean()
        loss.backward()
        assert loss.isfinite() and all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_singular_matrix_is_told_so() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    with diagnose.trace() as t:
        torch.linalg.slogdet(2 * weight)[1].backward()
    assert "multiple of the identity" in t.report.findings[0].fix.advice


@pytest.mark.parametrize(("dtype", "policy"), [(torch.float16, "fp16-master"), (torch.bfloat16, "bf16-master")])
def test_the_masters_that_an_optimizer_without_eps_is_told_to_keep_train(dtype: torch.dtype, policy: str) -> None:
    def step(policy: str = "") -> nn.Linear:
        torch.manual_seed(0)
        model = nn.Linear(4, 2).to(dtype)
        optimizer = torch.optim.Adam(model.parameters(), eps=0 if not policy else 1e-8)
        loss = model(torch.zeros(3, 4, dtype=dtype)).float().square().mean()
        if policy:
            amp = prepare(model, optimizer, policy=policy)
            amp.backward(loss)
            assert amp.step().applied
        else:
            loss.backward()
            optimizer.step()
        return model

    with diagnose.trace() as t:
        step()
    advice = t.report.findings[0].fix.advice
    assert f"({policy} as the policy)" in advice
    assert all(p.isfinite().all() for p in step(policy).parameters())


def test_a_certainty_that_16_bit_rounds_is_named_with_what_computes_it_whole() -> None:
    layer = nn.Linear(8, 4)
    with diagnose.trace() as t, torch.autocast("cpu", dtype=torch.bfloat16):
        torch.log(1 - (layer(torch.randn(8, 8)) + 7).sigmoid()).mean().backward()
    assert t.report.findings[0].verdict == "underflow"
    assert "or better logsigmoid, or binary_cross_entropy_with_logits" in t.report.findings[0].fix.advice


@pytest.mark.filterwarnings("ignore:std")
def test_the_spread_of_one_number_is_left_out_or_gets_more() -> None:
    layer = nn.Linear(8, 4)
    with diagnose.trace() as t:
        (layer(torch.randn(1, 8)) / (layer(torch.randn(1, 8)).std(0) + 1e-5)).sum().backward()
    assert "give std more than one number" in t.report.findings[0].fix.advice


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_by_hand", [True, False])
def test_bf16_is_advised_where_it_is_not_the_format_that_overflows(dtype: torch.dtype, is_by_hand: bool) -> None:
    """The lowest number of fp32 lies beyond bf16 too."""
    model = nn.Linear(8, 8)
    with diagnose.trace(model) as t:
        h, lowest = model(torch.randn(4, 8)), torch.full((8, 8), torch.finfo(torch.float32).min)
        with torch.autocast("cpu", dtype):
            scores = h.to(dtype) @ lowest.to(dtype) if is_by_hand else h @ lowest
            scores.float().sum().backward()
    advice = t.report.findings[0].fix.advice
    assert ("bf16" in advice) == (dtype is torch.float16), advice


@pytest.mark.parametrize("factors", [torch.linalg.svd, torch.linalg.eigh])
def test_vectors_of_values_that_rounding_made_equal_are_underflow(factors: Callable[[Tensor], object]) -> None:
    weight = torch.diag(torch.tensor([1.0, 1.002, 0.998])).requires_grad_()

    def train(low: torch.dtype) -> Tensor:
        weight.grad = None
        found = factors(weight.to(low).float())
        (found[1] if factors is torch.linalg.eigh else found[0] @ found[2]).mul(
            torch.arange(9.0).view(3, 3)
        ).sum().backward()
        return weight.grad

    assert train(torch.float32).isfinite().all()
    with diagnose.trace() as t:
        assert not train(torch.bfloat16).isfinite().all()
    [found] = t.report.findings
    assert (found.verdict, found.phase, found.fix.edit) == ("underflow", "backward", "")
    assert "fp32" in found.why and "divides by that 0" not in found.why
    assert found.fix.advice.startswith("make the matrix in fp32, of numbers that were never 16 bit; or separate")


def test_a_logarithm_of_a_lost_constant_gets_one_edit_forward_and_backward() -> None:
    """The rules on ops that make the forward finite alone were offered for the backward."""
    model = nn.Linear(8, 1)
    with diagnose.trace(model) as t:
        with torch.autocast("cpu", dtype=torch.float16):
            likely = (model(torch.randn(32, 8) * 400)).sigmoid()
            loss = -((likely + 1e-8).log() + (1 - likely + 1e-8).log()).float().mean()
        loss.backward()
    assert {f.phase for f in t.report.findings} == {"forward", "backward"}
    assert {f.fix.edit for f in t.report.findings} == {"compute=bf16"}


def test_a_grid_of_fractions_is_not_said_to_be_whole() -> None:
    with diagnose.trace() as t:
        torch.arange(0, 1, 1e-3, dtype=torch.bfloat16)
    [lint] = t.record.lints
    assert explain_lint(lint).why.startswith("numbers of arange up to 1 lie closer together than those of bf16")
