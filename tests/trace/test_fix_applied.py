"""The edit that a diagnosis prints, applied as it is printed, makes the step finite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
import mezzo.diagnose as diagnose

Function = Callable[[Tensor], Tensor]
PROGRAMS: dict[str, tuple[Function, str]] = {
    "eps in a logarithm": (lambda x: torch.log((x * 8).softmax(-1) * 0 + 1e-9), "fp16"),
    "eps in a quotient": (lambda x: x / (x.abs().sum() * 0 + 1e-9), "fp16"),
    "sigmoid rounds to 1": (lambda x: torch.log(1 - torch.sigmoid(x.abs() + 9)), "bf16"),
    "tanh rounds to 1": (lambda x: torch.log(1 - torch.tanh(x.abs() + 5)), "fp16"),
    "a number over a tensor": (lambda x: 0.5 / (x * 0 + 5e-6), "fp16"),
    "squares overflow": (lambda x: (x * 1e3).square().mean(-1).rsqrt(), "fp16"),
}


class Model(nn.Module):
    def __init__(self, compute: Function) -> None:
        super().__init__()
        self.layer, self.compute = nn.Linear(4, 4), compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.layer(x))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_printed_edit_makes_the_step_finite(name: str) -> None:
    compute, preset = PROGRAMS[name]
    model, x = Model(compute), torch.randn(3, 4)
    with diagnose.trace(model) as t:
        with torch.autocast("cpu", dtype={"fp16": torch.float16, "bf16": torch.bfloat16}[preset]):
            y = model(x)
        y.float().mean().backward()
    fix = t.report.findings[0].fix
    assert fix.edit
    mezzo.prepare(model, None, f"{preset}, {fix.edit}")
    assert model(x).isfinite().all()


class Pool(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return ((h * h).mean(-1) - h.mean(-1).square()).sqrt()


@pytest.mark.parametrize("policy", ["bf16", "bf16, module:1=fp32"])
def test_what_was_rounded_before_the_module_that_cancels_is_widened_too(policy: str) -> None:
    torch.manual_seed(0)
    x = 1e-2 * torch.randn(64, 64) + 6

    def step(policy: str) -> tuple[diagnose.TraceReport, Tensor]:
        model = nn.Sequential(nn.Linear(64, 64), Pool())
        model[0].load_state_dict({"weight": torch.eye(64) / 8, "bias": torch.full((64,), 0.5)})
        mezzo.prepare(model, None, policy)
        with diagnose.trace(model) as t:
            model(x).float().mean().backward()
        return t.report, next(model.parameters()).grad

    edit = step(policy)[0].findings[0].fix.edit
    assert edit == "module:0=fp32, module:1=fp32"
    report, grad = step(f"{policy}, {edit}")
    assert report.answer == "healthy" and grad.isfinite().all()


@pytest.mark.parametrize("divisor", [[0.0, 3.0], [0.0, -3.0]])
def test_the_printed_replacement_is_finite_with_its_gradients(divisor: list[float]) -> None:
    x, y = torch.tensor([0.1, 2.0], requires_grad=True), torch.tensor(divisor)
    with diagnose.trace() as t:
        (x / y).sum().backward()
    fix = t.report.findings[0].fix
    expression = fix.advice.removeprefix("write ").removesuffix(".")
    x.grad = None
    out = eval(expression, {"torch": torch, "x": x, "y": y})
    out.sum().backward()
    assert fix.tried and out.isfinite().all() and x.grad is not None and x.grad.abs().max() < 1e8


def test_a_norm_of_zero_is_no_count() -> None:
    x = torch.zeros(4, 8, requires_grad=True)
    with diagnose.trace() as t:
        h = x * 1.0
        (h / h.norm(dim=-1, keepdim=True)).sum().backward()
    assert t.report.findings[0].fix.advice == "write x / y.clamp(min=1e-06)."


def test_a_value_that_the_program_narrowed_is_named_where_it_did() -> None:
    x = torch.full((4,), 1e-5, requires_grad=True)
    with diagnose.trace() as t:
        kept = (1 - x).bfloat16()  # HERE
        (1 / (1 - kept[torch.tensor([0, 1])])).float().sum().backward()
    fix = t.report.findings[0].fix
    here = next(i for i, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.endswith("# HERE"))
    assert fix.edit == "" and f"test_fix_applied.py:{here}:" in fix.advice


def test_what_could_not_be_tried_is_an_idea() -> None:
    w = nn.Parameter(torch.zeros(3))
    with diagnose.trace() as t:
        torch.hypot(w, w * 1).sum().backward()
    assert t.report.findings[0].fix.tried == "" and "\n  idea " in str(t.report)


def test_the_old_name_names_the_new_one() -> None:
    x = torch.zeros(2, requires_grad=True)
    with diagnose.trace() as t:
        x.log().sum().backward()
    with pytest.raises(AttributeError, match="now called fix"):
        _ = t.report.findings[0].mend


# --- five programs a cause: what is printed, applied, trains ----------------------------------------------------------

OVERFLOWS: dict[str, Function] = {
    "square of activations": lambda h: ((900 * h + 900) ** 2).mean(-1).add(1).log(),
    "exp in fp16": lambda h: torch.exp(h.abs() + 12).add(1).log(),
    "sum of many": lambda h: (2e4 * h.abs() + 2e4).sum(-1).add(1).log(),
    "product by itself": lambda h: ((400 + h) @ (400 + h).T).add(1).abs().log(),
    "division by a small number": lambda h: ((h.abs() + 1) / 1e-5).add(1).log(),
}
Arguments = Callable[[Tensor], tuple[Tensor, ...]]
SINGULARITIES: dict[str, tuple[Callable[..., Tensor], Arguments]] = {
    "log of a probability of 0": (torch.log, lambda h: (h.relu(),)),
    "quotient by an empty mask": (torch.div, lambda h: (h, torch.zeros(4))),
    "quotient by a difference": (torch.div, lambda h: (h, torch.tensor([0.0, -2.0, 1.0, 0.5]))),
    "root of a negative number": (torch.sqrt, lambda h: (h,)),
    "angle of equal vectors": (torch.acos, lambda h: (F.pad(h[:, 1:].tanh(), (1, 0), value=1.0000002),)),
    "inverse of nothing": (torch.reciprocal, lambda h: (h.relu(),)),
    "logit of a certainty": (torch.logit, lambda h: (F.pad(h[:, 1:].sigmoid(), (1, 0), value=1.0),)),
}


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 4)


BATCH = torch.linspace(-1, 1, 12).reshape(3, 4)


def trains(forward: Callable[[], Tensor], parameters: list[Tensor]) -> bool:
    """Take five steps: every loss and gradient finite, and the weights move."""
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    before = [p.detach().clone() for p in parameters]
    for _ in range(5):
        loss = forward().float().mean()
        optimizer.zero_grad()
        loss.backward()
        assert loss.isfinite() and all(p.grad is not None and p.grad.isfinite().all() for p in parameters)
        optimizer.step()
    return any(bool((p != b).any()) for p, b in zip(parameters, before, strict=True))


def traced_fix(model: nn.Module, verdict: str, dtype: torch.dtype | None = None) -> diagnose.Finding:
    with diagnose.trace(model) as t:
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            y = model(BATCH)
        y.float().mean().backward()
    finding = t.report.findings[0]
    assert finding.verdict == verdict
    return finding


@pytest.mark.parametrize("name", OVERFLOWS)
def test_the_edit_against_an_overflow_trains(name: str) -> None:
    model = Model(OVERFLOWS[name])
    edit = traced_fix(model, "overflow", torch.float16).fix.edit
    mezzo.prepare(model, None, f"fp16, {edit}")
    assert trains(lambda: model(BATCH), list(model.parameters()))


SLOPES: dict[str, tuple[Function, str]] = {
    "log of a probability": (lambda h: torch.log(torch.sigmoid(h - 14).float() + 1e-9), "fp16"),
    "exp of an output": (lambda h: (8 * h.abs() + 16).float().exp(), "fp16"),
    "quotient by an eps": (lambda h: (h * 0) / ((h * 0).abs().sum(-1, keepdim=True) + 1e-8), "fp16, ops=mezzo"),
    "weights in fp16": (lambda h: (8 * h.abs() + 16).float().exp(), "fp16-master, compute=bf16"),
}
"""Functions that are finite in fp16, with gradients that are not."""


@pytest.mark.parametrize("name", SLOPES)
def test_the_edit_against_an_overflow_in_backward_trains(name: str) -> None:
    compute, preset = SLOPES[name]

    def prepared(policy: str) -> nn.Module:
        torch.manual_seed(0)
        model = Model(compute)
        mezzo.prepare(model, None, policy)
        return model

    with diagnose.trace(model := prepared(preset)) as t:
        model(BATCH).float().sum().backward()
    first = t.report.findings[0]
    assert (first.verdict, first.phase) == ("overflow", "backward")
    model = prepared(f"{preset}, {first.fix.edit}")
    model(BATCH).float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", SINGULARITIES)
def test_the_expression_against_a_singularity_trains(name: str) -> None:
    op, arguments = SINGULARITIES[name]
    layer = net()
    finding = traced_fix(Model(lambda h: op(*arguments(h))), "singularity")
    assert finding.fix.tried, finding.fix
    expression = finding.fix.advice.removeprefix("write ").split(", or better")[0].split(";")[0].removesuffix(".")
    names = {**vars(torch), "torch": torch}
    args = lambda: dict(zip("xy", arguments(layer(BATCH)), strict=False))  # noqa: E731
    assert trains(lambda: eval(expression, {**names, **args()}), list(layer.parameters()))


@pytest.mark.parametrize("size", [1e-6, 1e-7, 1e-8])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("is_handed_out", [False, True], ids=["backward", "grad"])
def test_the_scale_against_flushed_gradients_keeps_them(size: float, depth: int, is_handed_out: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(16, 16), nn.Tanh())])
    x = torch.randn(8, 16)

    def gradients(scale: float) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            y = model(x)
        loss = y.float().square().mean() * size * scale
        if is_handed_out:
            return list(torch.autograd.grad(loss, list(model.parameters())))
        loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    with diagnose.trace(model) as t:
        gradients(1.0)
    finding = t.report.findings[0]
    assert finding.verdict == "underflow" and "GradScaler" in finding.fix.advice
    scale = float(finding.fix.advice.split("a loss scale of ")[1].split(" ")[0])
    kept = gradients(scale)
    assert all(g.isfinite().all() for g in kept)
    assert sum(int((g == 0).sum()) for g in kept) <= 0.1 * sum(g.numel() for g in kept)


def advice_of(compute: Callable[[Tensor], Tensor]) -> tuple[str, str]:
    x = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
    with diagnose.trace() as t:
        compute(x).sum().backward()
    fix = t.report.findings[0].fix
    return fix.advice, fix.tried


NOTHING = torch.zeros(3)
DIVISORS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a count of a mask": (lambda x: (x * NOTHING).sum() / NOTHING.sum(), "write x / y.clamp(min=1)."),
    "whole numbers cast": (lambda x: x / torch.tensor([0, 2, 1]).float(), "write x / y.clamp(min=1)."),
    "a spread": (lambda x: x / torch.ones(4).std(), "write x / y.clamp(min=1e-06)."),
    "a range": (lambda x: x / (NOTHING.max() - NOTHING.min()), "write x / y.clamp(min=1e-06)."),
    "in place": (lambda x: (x * 1).div_((x * 0).abs().sum()), "write x / y.clamp(min=1e-06)."),
    "the number 0": (lambda x: x / 0.0, "the divisor is the number 0: divide by max(divisor, 1e-06)."),
}


@pytest.mark.parametrize("name", DIVISORS)
def test_a_divisor_is_bounded_by_what_it_is(name: str) -> None:
    compute, want = DIVISORS[name]
    assert advice_of(compute)[0] == want


BACKWARD: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "root": (lambda x: (x * 0).sqrt(), "x.clamp(min=1e-12).sqrt()"),
    "power": (lambda x: (x * 0).pow(0.5), "x.clamp(min=1e-06).pow(0.5)"),
    "power of a negative": (lambda x: x.pow(x.detach() * 0 + 2.5), "x.clamp(min=1e-06).pow(p)"),
    "angle": (lambda x: torch.acos(x * 0 + 1), "acos(x.clamp(-1 + 4.8e-07, 1 - 4.8e-07))"),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_what_backward_is_told_to_write_was_tried(name: str) -> None:
    compute, want = BACKWARD[name]
    advice, tried = advice_of(compute)
    reason = "its derivative at 0 is infinite: " if name == "root" else ""
    assert advice == f"{reason}write {want}." and tried == f"{want} on these values: finite, and so are its gradients"


def test_an_argument_far_below_0_is_not_called_a_cancellation() -> None:
    assert "difference" in advice_of(lambda x: (x * 0 - 1e-6).log())[0]
    assert "difference" not in advice_of(lambda x: (x - 7).log())[0]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"foreach": True}])
def test_an_infinite_rate_is_told_as_the_optimizers(
    kind: type[torch.optim.Optimizer], options: dict[str, bool]
) -> None:
    model = nn.Linear(4, 1)
    optimizer = kind(model.parameters(), lr=float("inf"), **options)
    with diagnose.trace() as t:
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    found = t.report.findings[0]
    assert (found.verdict, found.phase) == ("inherited", "optimizer")
    assert "inf, which reaches the weights" in found.why and "learning rate" in found.fix.advice


def test_an_infinity_in_the_data_is_no_mask() -> None:
    x = torch.ones(2, 4)
    x[1, 2] = -torch.inf
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1), nn.LayerNorm(1))
    with diagnose.trace(model) as t:
        model[3](model[2](x @ model[0].weight)).square().sum().backward()
    first = t.report.findings[0]
    assert (first.verdict, first.op) == ("inherited", "mm")


def test_a_weight_that_a_loop_by_hand_spoils_is_reached() -> None:
    model = nn.Linear(3, 1)
    with diagnose.trace(model) as t:
        grads = torch.func.grad(
            lambda p: torch.func.functional_call(model, p, torch.zeros(3)).mul(0).square().sum().sqrt()
        )({n: p.detach() for n, p in model.named_parameters()})
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.sub_(0.1 * grads[name])
    first = t.report.findings[0]
    assert (first.verdict, first.op, t.report.answer) == ("singularity", "sqrt", "faulty")
    assert "parameter weight" in first.reached


def test_what_a_rules_own_cast_narrows_is_undone_by_a_rule() -> None:
    """A norm computes in fp32 and leaves in fp16: no line of the program casts there."""

    def prepared(policy: str) -> mezzo.Stepper:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 1))
        nn.init.constant_(model[1].weight, 6e4)
        return mezzo.prepare(model, torch.optim.SGD(model.parameters()), f"{policy}, scaling=none")

    x = torch.randn(32, 8)
    amp = prepared("fp16")
    with diagnose.trace(amp.model) as t:
        amp.backward(amp.model(x).mean())
    edit = t.report.findings[0].fix.edit
    assert edit == "module:1=fp32, module:2=fp32"
    amp = prepared(f"fp16, {edit}")
    amp.backward(amp.model(x).mean())
    assert amp.step()


ENGINES = ["bf16", "bf16, ops=mezzo", "bf16, op:erfinv=fp32"]
"""The dispatcher, and twice the function mode: on these programs their rules are the same."""
CAST: dict[str, tuple[Function, str]] = {
    "half()": (lambda x: (x * 3e5).half(), ""),
    "type_as()": (lambda x: (x * 3e5).type_as(x.half()), ""),
    "to()": (lambda x: (x * 3e5).to(torch.float16), ""),
    "cast of a rule": (lambda x: F.linear(x * 3e5, torch.full((4, 4), 1e-6)), "op:linear=fp32"),
    "cast of a composite's rule": (
        lambda x: F.scaled_dot_product_attention(x[None] * 1e-9, x[None] * 1e-9, x[None] * 3e5),
        "op:scaled_dot_product_attention=fp32",
    ),
}


@pytest.mark.parametrize("name", CAST)
@pytest.mark.parametrize("policy", ENGINES)
def test_who_narrowed_a_value_is_told_alike_in_each_engine(policy: str, name: str) -> None:
    compute, edit = CAST[name]
    with diagnose.trace() as t, mezzo.autocast("cpu", policy=policy.replace("bf16", "fp16")):
        compute(torch.ones(4, 4, requires_grad=True)).float().mean().backward()
    assert t.report.findings[0].fix.edit == edit
    with mezzo.autocast("cpu", policy=f"{policy.replace('bf16', 'fp16')}, {edit}" if edit else "fp16"):
        assert compute(torch.ones(4, 4)).isfinite().all() == bool(edit)


@pytest.mark.parametrize("policy", ENGINES)
def test_what_the_program_reads_and_adds_in_a_region_is_seen_in_each_engine(policy: str) -> None:
    with diagnose.trace() as read, mezzo.autocast("cpu", policy=policy):
        assert not torch.log(torch.zeros(3) - 1).sum().item() > 0
    total = torch.full((4,), 1000.0, dtype=torch.bfloat16)
    with diagnose.trace() as added, mezzo.autocast("cpu", policy=policy), torch.no_grad():
        for _ in range(4):
            total.add_(torch.ones(4))
    assert [f.verdict for r in (read, added) for f in r.report.findings] == ["singularity", "lost-update"]


@pytest.mark.parametrize("policy", ENGINES)
def test_a_constant_inside_of_torchs_own_function_is_not_the_programs_in_any_engine(policy: str) -> None:
    found = []
    for compute in (lambda x: F.normalize(x, dim=-1), lambda x: x.clamp_min(1e-12)):
        with (
            diagnose.trace() as t,
            mezzo.autocast("cpu", policy=policy.replace("bf16", "fp16").replace("ops=mezzo", "op:erf=fp32")),
        ):
            compute(torch.ones(2, 4).half()).float().sum()
        found.append([lint.rule for lint in t.report.record.lints])
    assert found == [[], ["constant-lost"]]
