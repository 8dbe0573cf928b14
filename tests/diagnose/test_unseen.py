"""Nothing is called healthy that was not looked at: batches of NaN, batches without rows, steps that do not go backward."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.diagnose.test_agreement import square
from torch import Tensor, nn

import mezzo
import mezzo.diagnose as diagnose
from mezzo.cli.main import main

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
NAN, EMPTY = X * float("nan"), X[:0]


def total(model: nn.Module, x: Tensor) -> Tensor:
    """A loss that is 0 where there are no rows, and not NaN."""
    return model(x).float().square().sum()


def undefined(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) * 0 / 0).mean()


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def frozen() -> nn.Module:
    return net().requires_grad_(False)


class Branches(nn.Module):
    """A sum of a branch that 16 bit rounds and one that is NaN in any format."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + (self.b(x) * 0).log() * 0


class Slope(nn.Module):
    """A finite loss whose gradient is NaN in any format: that of a root at 0, times 0."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + (self.b * 0).sqrt()


def said(report: diagnose.Report) -> str:
    """The verdict of a report that is not healthy, on one line."""
    assert not report.is_healthy and not report.document().is_good
    assert report.document().verdict.split(":")[0] in " ".join(str(report).split())
    return report.document().verdict


LINTED = {
    "NaN": (net(), NAN, None, "Faulty: inherited in addmm, forward, module 0"),
    "empty": (net(), EMPTY, None, "Faulty: singularity in mean"),
    "empty, summed": (net(), EMPTY, total, "Not enough seen: every output and gradient was 0 or empty."),
    "a loss of NaN": (net(), X, undefined, "Faulty: singularity in div"),
    "frozen": (frozen(), X, None, "Not enough seen: nothing went backward. Looked at: 1 forward, 0 backwards"),
    "NaN, no weights": (nn.Softmax(-1), NAN, None, "Faulty: inherited in softmax"),
}


@pytest.mark.parametrize("case", LINTED)
def test_lint(case: str) -> None:
    model, batch, loss_fn, verdict = LINTED[case]
    assert said(diagnose.lint(model, batch, loss_fn)).startswith(verdict)


def test_lint_in_inference_mode() -> None:
    with torch.inference_mode():
        assert "nothing went backward" in said(diagnose.lint(net(), X))


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_lint_of_what_is_healthy(policy: str) -> None:
    # at the first scale of fp16 the gradients overflow, which a scaler mends
    assert diagnose.lint(net(), X, lambda m, x: 1e4 * total(m, x), policy).is_healthy
    report = diagnose.lint(nn.Softmax(-1), X, None, policy)
    assert report.is_healthy and "ops of one forward pass broke no lint rule" in str(report)


COMPARED = {
    "NaN": (net(), NAN, None, "the loss is not finite in fp32 either"),
    "empty": (net(), EMPTY, None, "the loss is not finite in fp32 either"),
    "empty, summed": (net(), EMPTY, total, "every gradient is 0 in fp32"),
    "empty, frozen": (frozen(), EMPTY, total, "every output is 0 in fp32"),
    "a loss of NaN": (net(), X, undefined, "the loss is not finite in fp32 either"),
    "one branch": (Branches(), X, lambda m, x: m(x).mean(), "the loss is not finite in fp32 either"),
    "a gradient": (Slope(), X, square, "the gradient of b is not finite in fp32 either"),
}


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("case", COMPARED)
def test_compare(case: str, policy: str) -> None:
    model, batch, loss_fn, why = COMPARED[case]
    report = diagnose.compare(model, batch, loss_fn, policy)
    assert said(report).startswith(f"Not enough seen: {why}")
    assert ("diagnose.trace(model)" in said(report)) is ("not finite" in why)
    assert report.proposals == report.tried == ()


@pytest.mark.parametrize("case", ["NaN", "a loss of NaN", "a gradient"])
def test_what_compare_says_to_call_names_the_op(case: str) -> None:
    model, batch, loss_fn, _ = COMPARED[case]
    with diagnose.trace(model) as t:
        (model(batch).square().mean() if loss_fn is None else loss_fn(model, batch)).backward()
    assert t.report.findings


def test_compare_where_the_policy_alone_is_not_finite() -> None:
    report = diagnose.compare(net(), X * 1e6, square, "fp16", tries=2)
    first = "The gradients hold inf or NaN under the policy, and not in fp32: the first comes from"
    assert said(report).startswith(f"{first} to, forward, module 0"), said(report)


SAME = {
    "NaN": (NAN, None, "output 0"),
    "empty": (EMPTY, None, "output 0"),
    "NaN, loss": (NAN, square, "loss"),
    "empty, loss": (EMPTY, square, "loss"),
    "empty, summed": (EMPTY, total, "loss"),
    "one row of NaN": (torch.cat([X, NAN[:1]]), None, "output 0"),
    "zeros of NaN": (X, undefined, "loss"),
}


@pytest.mark.parametrize("case", SAME)
def test_mismatch(case: str) -> None:
    batch, loss_fn, name = SAME[case]
    b = net(0 if case == "one row of NaN" else 1)
    assert said(diagnose.mismatch(net(), b, batch, loss_fn)).startswith(f"Not enough seen: {name}")


def test_mismatch_of_masks_and_empty_outputs_agrees() -> None:
    model = net()

    def masked(x: Tensor) -> tuple[Tensor, Tensor]:
        return model(x).masked_fill(torch.eye(4, dtype=torch.bool), -torch.inf), x[:0]

    assert diagnose.mismatch(masked, masked, X).is_healthy


def test_explain() -> None:
    assert said(diagnose.explain(net(), EMPTY, "bf16", budget_s=0)).startswith(
        "Not enough seen: no product had elements"
    )
    report = diagnose.explain(nn.LayerNorm(8), X, "bf16", budget_s=0)
    assert report.is_healthy and report.verdict().startswith("Nothing runs in 16 bit")


@pytest.mark.parametrize("context", [nullcontext, torch.inference_mode])
def test_explain_says_whether_the_step_went_backward(context: Callable[[], nullcontext[None]]) -> None:
    with context():
        assert diagnose.explain(net(), X, "bf16", budget_s=0).has_backward == (context is nullcontext)
    assert not diagnose.explain(frozen(), X, "bf16", budget_s=0).has_backward


def test_doctor_of_a_model_that_is_frozen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", f"{__file__}:frozen_subject", "--policy", "bf16"]) == 3
    assert "Not enough seen: nothing went backward" in " ".join(capsys.readouterr().out.split())
    assert main(["doctor", "--model", f"{__file__}:nan_subject", "--policy", "bf16"]) == 1


def frozen_subject() -> tuple[nn.Module, Tensor]:
    return frozen(), X


def nan_subject() -> tuple[nn.Module, Tensor]:
    return net(), NAN


def train(model: nn.Module, batch: Tensor, loss_fn: Callable[[nn.Module, Tensor], Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()


def test_watch_of_steps_that_are_all_skipped() -> None:
    model = net()
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    with diagnose.watch(amp, every=1) as w:
        amp.backward(undefined(model, X))
        amp.step()
    assert w.report.unseen == "no sampled step was taken" and not w.report.is_healthy
    assert w.report.warnings[0].startswith("1 of 1 steps were skipped for a loss")


def test_watch_of_a_loss_of_nan_in_a_loop_of_ones_own() -> None:
    model = net()
    with diagnose.watch(model, every=10) as w:
        train(model, X, undefined)
    assert any("gradient 2.weight: 64 of 64 sampled values are inf or NaN" in text for text in w.report.warnings)


def test_watch_of_a_batch_without_rows() -> None:
    model = net()
    with diagnose.watch(model, every=10) as w:
        train(model, EMPTY, lambda m, x: total(m, x) + sum(p.sum() for p in m.parameters()))
    assert said(w.report) == "Not enough seen: no activation was sampled."


def test_watch_of_a_model_that_was_compiled_before() -> None:
    model = net()
    compiled = torch.compile(model, backend="eager")
    train(compiled, X, total)
    with diagnose.watch(model, every=1) as w:
        train(compiled, X, total)
    assert said(w.report) == "Not enough seen: no activation was sampled."


@pytest.mark.parametrize("loss_fn", [square, total])
def test_watch_of_what_is_healthy(loss_fn: Callable[[nn.Module, Tensor], Tensor]) -> None:
    model = net()
    with diagnose.watch(model, every=10) as w:
        train(model, X, loss_fn)
    assert w.report.is_healthy and str(w.report).splitlines()[1] == "Healthy: 2 steps, one in 10 sampled."


def test_a_trace_of_a_batch_without_rows() -> None:
    model = net()
    with diagnose.trace(model) as t:
        total(model, EMPTY).backward()
    assert said(t.report).startswith("Not enough seen: every output and gradient was 0 or empty.")


def written_at_indices(h: Tensor, wide: bool) -> Tensor:
    buffer = torch.zeros(4, 4)
    buffer[torch.tensor([0, 1])] = h[:2].to(buffer.dtype) if wide else h[:2]
    return buffer


def masked(h: Tensor, wide: bool) -> Tensor:
    return (h.float() if wide else h.half()).masked_fill(h > 0, -1e9).clamp(-1)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return (x @ weight).half()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ ctx.saved_tensors[0], None


def in_a_function(h: Tensor, wide: bool) -> Tensor:
    return h.float() if wide else Doubled.apply(h.float(), torch.eye(4))


ADVICE = {
    written_at_indices: "source.to(target.dtype)", masked: "or x.float()", in_a_function: "Doubled.backward with mezzo.custom_bwd",
}  # fmt: skip


@pytest.mark.parametrize("written", ADVICE)
def test_an_error_of_dtypes_that_ends_the_program_is_told_with_what_to_write(
    written: Callable[[Tensor, bool], Tensor],
) -> None:
    layer = nn.Linear(4, 4)

    def run(wide: bool) -> diagnose.TraceReport:
        with suppress(RuntimeError), diagnose.trace(layer) as t:
            with torch.autocast("cpu", torch.bfloat16):
                h = layer(torch.ones(4, 4))
            written(h, wide).sum().backward()
        return t.report

    told = " ".join(str(run(False)).split())
    assert told.count(f"{Path(__file__).name}:") and "torch says: " in told
    assert ADVICE[written] in told
    assert run(True).is_healthy


@pytest.mark.parametrize("is_half", [True, False])
def test_a_refusal_of_torchs_scaler_is_told_with_what_to_write(is_half: bool) -> None:
    model = nn.Linear(4, 4).half() if is_half else nn.Linear(4, 4)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    with suppress(ValueError, AssertionError), diagnose.trace(model) as t:
        x = torch.ones(2, 4, dtype=model.weight.dtype, requires_grad=not is_half)
        scaler.scale((model(x) if is_half else x).float().sum()).backward()
        scaler.step(optimizer)
    told = " ".join(str(t.report).split())
    assert ("no model.half()" if is_half else "no parameter of the optimizer had a gradient") in told
