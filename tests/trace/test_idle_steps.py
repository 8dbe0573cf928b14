"""Loops that train nothing whatever the numbers: gradients cleared before the step, a rate of 0, clipping of scaled gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mezzo
import mezzo.diagnose as diagnose
from mezzo.diagnose import TraceReport

Step = Callable[[nn.Module, torch.optim.Optimizer], None]


def clear(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()  # CLEARED


def set_to_zero(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)  # CLEARED


def clear_model(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.zero_grad()  # CLEARED


def clear_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad = None  # CLEARED


def zero_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        p.grad.zero_()  # CLEARED


CLEARS: list[Step] = [clear, set_to_zero, clear_model, clear_by_hand, zero_by_hand]


def followed(loop: Callable[[], object]) -> TraceReport:
    with diagnose.trace() as t:
        loop()
    return t.report


def loss_of(*models: nn.Module) -> Tensor:
    x = torch.ones(2, 4)
    for model in models:
        x = model(x)
    return x.square().mean()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("clears", CLEARS)
def test_gradients_cleared_before_the_step_are_a_fault_at_the_line_that_clears(
    clears: Step, optimizer: type[torch.optim.Optimizer]
) -> None:
    model = nn.Linear(4, 4)
    stepper = optimizer(model.parameters(), lr=0.1)  # type: ignore[call-arg]

    def loop() -> None:
        for _ in range(2):
            loss_of(model).backward()
            clears(model, stepper)
            stepper.step()

    report = followed(loop)
    [found] = report.findings
    assert report.answer == "faulty" and (found.verdict, found.op) == ("cleared-gradients", "zero_grad")
    assert found.frame is not None and "CLEARED" in line_of(found.frame.file, found.frame.line)
    assert f"{optimizer.__name__}.step (test_idle_steps.py:" in found.why and "any of its 2 steps" in found.why
    assert "Faulty: cleared-gradients in zero_grad" in str(report)


def line_of(file: str, line: int) -> str:
    return Path(file).read_text(encoding="utf-8").splitlines()[line - 1]


def cleared_first() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model).backward()
        optimizer.step()


def a_step_before_any_backward() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    optimizer.step()
    loss_of(model).backward()
    optimizer.step()


def two_nets() -> None:
    """The generator's backward fills the critic, whose gradients are dropped; the generator moves every third time."""
    maker, critic = nn.Linear(4, 4), nn.Linear(4, 4)
    first, second = torch.optim.Adam(maker.parameters()), torch.optim.Adam(critic.parameters())
    for i in range(4):
        second.zero_grad()
        loss_of(maker, critic).backward()
        second.step()
        first.zero_grad()
        if i % 3 == 0:
            loss_of(maker, critic).backward()
        first.step()


def a_closure() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.zero_grad()
        optimizer.step(closure)


def frozen_parts_and_accumulation() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    for i in range(4):
        loss_of(model).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()


def an_optimizer_with_gradients_of_its_own() -> None:
    class Sign(torch.optim.Optimizer):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                p.data.add_(p.kept.sign(), alpha=-0.1)

    model = nn.Linear(4, 4)
    optimizer = Sign(model.parameters(), {})
    for _ in range(3):
        loss_of(model).backward()
        for p in model.parameters():
            p.kept, p.grad = p.grad, None
        optimizer.step()


def prepared() -> None:
    for policy in ("bf16", "bf16, params=bf16, master=split", "fp16, params=fp16, master=fp32", "fp32"):
        model = nn.Linear(4, 4)
        amp = mezzo.prepare(model, mezzo.optim.AdamW(model.parameters(), lr=0.1), policy=policy)
        for _ in range(3):
            amp.backward(loss_of(model))
            amp.step()
            amp.zero_grad()


@pytest.mark.parametrize(
    "loop",
    [cleared_first, a_step_before_any_backward, two_nets, a_closure, frozen_parts_and_accumulation,
     an_optimizer_with_gradients_of_its_own, prepared],
)  # fmt: skip
def test_what_moves_weights_is_none(loop: Callable[[], None]) -> None:
    report = followed(loop)
    assert (report.answer, report.findings, report.record.lints) == ("healthy", (), ())


@pytest.mark.parametrize(("warm_up", "verdicts"), [(1, []), (4, ["zero-learning-rate"])])
def test_a_rate_that_is_0_in_every_step_is_a_fault(warm_up: int, verdicts: list[str]) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step // warm_up)

    def loop() -> None:
        for _ in range(4):
            loss_of(model).backward()
            optimizer.step()
            schedule.step()

    report = followed(loop)
    assert [f.verdict for f in report.findings] == verdicts
    assert str(report).splitlines()[1].startswith("Faulty: zero-learning-rate" if verdicts else "Healthy")


@pytest.mark.parametrize(
    ("bound", "verdicts"),
    [(1.0, ["clip-before-unscale"]), (256.0, []), (float("inf"), []), (None, [])],
)
def test_clipping_scaled_gradients_is_a_fault_unless_the_bound_is_scaled(
    bound: float | None, verdicts: list[str]
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)

    def loop() -> None:
        scaler.scale(loss_of(model)).backward()
        if bound is None:
            nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        else:
            nn.utils.clip_grad_norm_(model.parameters(), bound)
        scaler.step(optimizer)
        scaler.update()

    assert [f.verdict for f in followed(loop).findings] == verdicts


def test_a_weighted_loss_is_not_scaled() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loop() -> None:
        (loss_of(model) * 10.0).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    report = followed(loop)
    assert (report.findings, report.record.lints) == ((), ())


@pytest.mark.parametrize(("rate", "is_told"), [(0.9, True), (0.3, False)])
@pytest.mark.parametrize("target", [1.0, 1e4])
def test_steps_that_diverge_and_stay_finite_are_told_once_the_script_ends(
    rate: float, target: float, is_told: bool
) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(64, 8), nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with diagnose.trace() as t:
        for _ in range(30):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), target * x.sum(1, keepdim=True)).backward()
            optimizer.step()  # DIVERGES
    assert [f.verdict for f in t.report.findings] == ["exploding-step"] * is_told
    if is_told:
        [found] = t.report.findings
        said = "30 steps of SGD, in which the loss grew from" if target == 1 else "one step of SGD made its weights"
        assert found.frame is not None and said in found.why
        assert "DIVERGES" in Path(found.frame.file).read_text(encoding="utf-8").splitlines()[found.frame.line - 1]


def test_adam_that_its_first_steps_threw_off_for_good_is_told() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=30.0)
    with diagnose.trace() as t:
        for step in range(16):
            optimizer.param_groups[0]["lr"] = min(step + 1, 10) * 3.0
            optimizer.zero_grad()
            nn.functional.mse_loss(model(torch.randn(32, 8)), torch.randn(32, 4)).backward()
            optimizer.step()
    [found] = t.report.findings
    assert found.verdict == "exploding-step"
    assert "16 steps of AdamW, in which the loss grew from 1." in found.why


def test_a_loss_that_starts_at_nothing_may_grow() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with diagnose.trace() as t:
        for step in range(20):
            optimizer.zero_grad()
            (1e-6 * 10**step * model(torch.ones(1, 4)).square().mean()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
    assert t.report.answer == "healthy"


@pytest.mark.parametrize(
    ("alive", "steps", "is_told"),
    [(10, 60, True), (10, 43, True), (10, 41, False), (64, 96, False), (36, 40, False)],
)
@pytest.mark.parametrize(
    ("decay", "rates", "moved"),
    [(lambda x: max(0.0, 1 - x), "0", "no weight"), (lambda x: 1e-6**x, "0, or at most a millionth of 0.001,", "weights hardly")],
)  # fmt: skip
def test_a_schedule_that_ends_long_before_the_loop_is_told(
    decay: Callable[[float], float], rates: str, moved: str, alive: int, steps: int, is_told: bool
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: decay(step / alive))
    with diagnose.trace() as t:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            schedule.step()
    assert [f.verdict for f in t.report.findings] == ["zero-learning-rate"] * is_told
    if is_told:
        said = f"the learning rate was {rates} in each of the {steps - 10} steps of AdamW after the first 10: {moved} moved."
        assert (t.report.findings[0].why, t.report.findings[0].step) == (said, 10)


def factor_of_zero(loss: Tensor, step: int) -> Tensor:
    return (step // 100) * loss  # NOTHING


def product_with_a_mask(loss: Tensor, step: int) -> Tensor:
    return loss * torch.zeros(3).sum()  # NOTHING


@pytest.mark.parametrize("weigh", [factor_of_zero, product_with_a_mask])
@pytest.mark.parametrize(("start", "steps", "is_told"), [(0, 40, True), (0, 31, False), (80, 40, False)])
def test_an_optimizer_all_of_whose_gradients_are_zero_is_told(
    weigh: Callable[[Tensor, int], Tensor], start: int, steps: int, is_told: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with diagnose.trace() as t:
        for step in range(start, start + steps):
            optimizer.zero_grad()
            weigh(model(torch.randn(8, 4)).square().mean(), step).backward()
            optimizer.step()
    is_told = is_told or (steps == 40 and weigh is product_with_a_mask)
    assert [f.verdict for f in t.report.findings] == ["zero-gradients"] * is_told
    if is_told:
        [found] = t.report.findings
        assert (found.op, found.phase) == ("mul", "backward") and "every parameter of SGD" in found.why
        assert found.frame is not None
        assert "NOTHING" in Path(found.frame.file).read_text(encoding="utf-8").splitlines()[found.frame.line - 1]


@pytest.mark.parametrize("zeros", ["all", "last", "low rank"])
def test_weights_of_zero_that_get_gradients_of_zero_are_told(zeros: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    for p in model.parameters() if zeros == "all" else model[2].parameters() if zeros == "last" else [model[0].weight]:
        nn.init.zeros_(p)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y = torch.randn(32, 4), torch.randint(2, (32,))
    with diagnose.trace() as t:
        for _ in range(40):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()  # DEAD
            optimizer.step()
    assert {f.verdict for f in t.report.findings} == ({"zero-gradients"} if zeros == "all" else set())
    if zeros == "all":
        assert all(f.op == "addmm" and "weight was exactly 0 in each of 40" in f.why for f in t.report.findings)


@pytest.mark.parametrize(
    ("start", "between", "end", "is_told"),
    [
        ("judge", "", "maker", False),
        ("maker judge", "", "", False),
        ("judge", "maker", "", False),
        ("", "", "maker judge", False),
        ("", "", "maker", True),
        ("maker", "maker", "", True),
    ],
)
@pytest.mark.parametrize("way", ["none", "zeros", "data"])
def test_of_two_networks_in_turn_one_may_leave_gradients_that_the_other_clears(
    start: str, between: str, end: str, is_told: bool, way: str
) -> None:
    nets = {"maker": nn.Linear(4, 2), "judge": nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))}
    optimizers = {name: torch.optim.Adam(net.parameters()) for name, net in nets.items()}

    def clear(names: str) -> None:
        for p in (p for name in names.split() for p in nets[name].parameters()):
            if way == "data" and p.grad is not None:
                p.grad.data.zero_()
        for name in names.split():
            if way != "data":
                optimizers[name].zero_grad(set_to_none=way == "none")

    with diagnose.trace() as t:
        for _ in range(10):
            fake = nets["maker"](torch.randn(8, 4))
            clear(start)
            (nets["judge"](torch.randn(8, 2)) - nets["judge"](fake.detach())).square().mean().backward()
            nn.utils.clip_grad_norm_(nets["judge"].parameters(), 1.0)
            optimizers["judge"].step()
            clear(between)
            nets["judge"](fake).square().mean().backward()
            optimizers["maker"].step()
            clear(end)
    assert [f.verdict for f in t.report.findings] == ["uncleared-gradients"] * is_told, t.report.findings


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_without_a_storage_are_cleared_too(set_to_none: bool) -> None:
    table = nn.Embedding(8, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    with diagnose.trace() as t:
        for _ in range(10):
            optimizer.zero_grad(set_to_none=set_to_none)
            table(torch.randint(0, 8, (4,))).square().mean().backward()
            optimizer.step()
    assert t.report.answer == "healthy"
