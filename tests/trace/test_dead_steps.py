"""Training that goes nowhere: gradients without a slope, steps and loops that blow up, states that stand still."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo.diagnose as diagnose
from mezzo.diagnose import TraceReport

Middle = Callable[[Tensor], Tensor]


def sign(x: Tensor) -> Tensor:
    return torch.sign(x)  # FLAT


def rounded(x: Tensor) -> Tensor:
    return x.round()  # FLAT


def saturated(x: Tensor) -> Tensor:
    return x.clamp(5.0, 6.0)  # FLAT


def dead(x: Tensor) -> Tensor:
    return torch.relu(x - 1e4)  # FLAT


def far_out(x: Tensor) -> Tensor:
    return torch.sigmoid(x + 1e4)  # FLAT


def nearest(x: Tensor) -> Tensor:
    picture, places = torch.arange(16.0).view(1, 1, 4, 4).expand(2, 1, 4, 4), x.view(2, 1, 2, 2)
    return F.grid_sample(picture, places, "nearest", "border", False).view(2, 2).repeat(1, 2)  # FLAT


def straight_through(x: Tensor) -> Tensor:
    return x + (x.round() - x).detach()


def weight_of_zero(x: Tensor) -> Tensor:
    return 0.0 * x + 1.0


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: torch.relu(-grad.abs()))
    return x.square()


def trained(middle: Middle, steps: int, alive_at: int = -1) -> TraceReport:
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *last.parameters()], lr=0.01)
    with diagnose.trace() as t:
        for step in range(steps):
            hidden = first(torch.randn(2, 4))
            optimizer.zero_grad()
            last(hidden if step == alive_at else middle(hidden)).square().mean().backward()
            optimizer.step()
    return t.report


@pytest.mark.parametrize("middle", [sign, rounded, saturated, dead, far_out, nearest])
def test_gradients_that_are_always_zero_are_a_fault_at_the_op_without_a_slope(middle: Middle) -> None:
    report = trained(middle, 32)
    [found] = report.findings
    names = {
        sign: "sign", rounded: "round", saturated: "clamp", dead: "relu", far_out: "sigmoid", nearest: "grid_sampler_2d",
    }  # fmt: skip
    assert report.answer == "faulty" and (found.verdict, found.op) == ("zero-gradients", names[middle])
    assert found.frame is not None
    assert "FLAT" in Path(found.frame.file).read_text(encoding="utf-8").splitlines()[found.frame.line - 1]
    assert "of weight was exactly 0 in each of 32 backward passes" in found.why


@pytest.mark.parametrize("middle", [straight_through, weight_of_zero, hooked])
def test_gradients_that_pass_or_are_stopped_on_purpose_are_no_fault(middle: Middle) -> None:
    assert trained(middle, 40).answer == "healthy"


@pytest.mark.parametrize(
    ("middle", "steps", "alive_at"), [(sign, 31, -1), (dead, 50, 0), (saturated, 50, 0), (sign, 50, 25), (sign, 50, 49)]
)
def test_one_gradient_or_too_few_steps_are_no_evidence(middle: Middle, steps: int, alive_at: int) -> None:
    assert trained(middle, steps, alive_at).answer == "healthy"


@pytest.mark.parametrize("middle", [sign, rounded])
def test_weights_that_are_quantised_after_they_were_trained_are_a_fault(middle: Middle) -> None:
    [found] = trained(middle, 50, 0).findings
    assert found.verdict == "zero-gradients"
    assert "of weight, after the first 1, was exactly 0 in each of 49 backward passes" in found.why


def replaced(steps: int, alive_at: int = -1, keeps_one: bool = False) -> TraceReport:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters() if keeps_one else model[1].parameters(), lr=0.1)
    old, model[1] = model[1], nn.Linear(4, 2)
    with diagnose.trace(model) as t:
        for step in range(steps):
            optimizer.zero_grad()
            (old if step == alive_at else model)(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()  # OTHERS
    return t.report


def test_an_optimizer_none_of_whose_weights_is_trained_is_a_fault_at_its_step() -> None:
    [found] = replaced(32).findings
    assert (found.verdict, found.op) == ("no-gradients", "step") and found.frame is not None
    assert "OTHERS" in Path(found.frame.file).read_text(encoding="utf-8").splitlines()[found.frame.line - 1]
    assert "none of the parameters of AdamW had a gradient in any of its 32 steps" in found.why


def test_an_optimizer_that_holds_what_a_layer_was_before_it_was_replaced_is_a_fault_at_its_step() -> None:
    [found] = replaced(32, keeps_one=True).findings
    assert (found.verdict, found.op) == ("no-gradients", "step") and found.frame is not None
    assert "OTHERS" in Path(found.frame.file).read_text(encoding="utf-8").splitlines()[found.frame.line - 1]
    lost = "none of the 2 parameters of AdamW that are in no module, while no optimizer holds 1.weight, 1.bias, had a gradient"
    assert lost in found.why


@pytest.mark.parametrize(
    "report",
    [lambda: replaced(31), lambda: replaced(40, 39), lambda: replaced(31, -1, True), lambda: replaced(40, 3, True)],
)
def test_one_gradient_of_an_optimizers_or_few_steps_are_no_evidence(report: Callable[[], TraceReport]) -> None:
    assert report().answer == "healthy"


def masters_by_hand(model: nn.Sequential, extra: nn.Parameter) -> tuple[torch.optim.Optimizer, Callable[[], object]]:
    """fp32 copies that a program steps by itself, one of a layer that has no gradient."""
    model[0].requires_grad_(False)
    copies = [nn.Parameter(p.detach().clone()) for p in model.parameters()]

    def hand_over() -> None:
        for copy, p in zip(copies, model.parameters(), strict=True):
            copy.grad = p.grad

    return torch.optim.AdamW(copies), hand_over


def a_part_only(model: nn.Sequential, extra: nn.Parameter) -> tuple[torch.optim.Optimizer, Callable[[], object]]:
    """One layer is trained, the gradients of the other go nowhere."""
    return torch.optim.AdamW(model[1].parameters()), list


def a_weight_that_waits(
    model: nn.Sequential, extra: nn.Parameter
) -> tuple[torch.optim.Optimizer, Callable[[], object]]:
    """A parameter of no module has no gradient, and every other is trained."""
    return torch.optim.AdamW([*model.parameters(), extra]), list


@pytest.mark.parametrize("make", [masters_by_hand, a_part_only, a_weight_that_waits])
def test_parameters_left_out_or_waiting_on_purpose_are_no_fault(
    make: Callable[[nn.Sequential, nn.Parameter], tuple[torch.optim.Optimizer, Callable[[], object]]],
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer, hand_over = make(model, nn.Parameter(torch.zeros(2)))
    with diagnose.trace() as t:
        for _ in range(40):
            model.zero_grad()
            model(torch.randn(2, 4)).square().mean().backward()
            hand_over()
            optimizer.step()
    assert t.report.answer == "healthy"


def test_an_optimizer_that_computes_without_gradients_is_no_fault() -> None:
    class Walk(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.data.add_(torch.randn_like(p), alpha=1e-3)

    walked, model = Walk([nn.Parameter(torch.zeros(3, 3))], lr=0.1), nn.Linear(4, 4)
    with diagnose.trace() as t:
        for _ in range(40):
            model(torch.ones(2, 4)).mean().backward()
            walked.step()
    assert t.report.answer == "healthy"


def weights(scale: float) -> nn.Parameter:
    return nn.Parameter(scale * torch.ones(8, 8))


@pytest.mark.parametrize(
    ("scale", "lr", "is_told"), [(0.5, 1e3, True), (0.0, 1e3, False), (0.5, 40.0, False), (1e-3, 0.2, False)]
)
def test_a_step_that_blows_weights_up_is_a_fault_at_its_line(scale: float, lr: float, is_told: bool) -> None:
    w = weights(scale)
    optimizer = torch.optim.Adam([w], lr=lr)
    with diagnose.trace() as t:
        w.sum().backward()
        optimizer.step()  # BLOWN UP
    assert [f.verdict for f in t.report.findings] == ["exploding-step"] * is_told
    if is_told:
        [found] = t.report.findings
        assert found.frame is not None and found.op == "step"
        assert "BLOWN UP" in Path(found.frame.file).read_text(encoding="utf-8").splitlines()[found.frame.line - 1]
        assert "one step of Adam made its weights 1999 times as large" in found.why


@pytest.mark.parametrize(("steps", "is_told"), [(64, False), (66, True)])
def test_a_number_in_16_bit_that_additions_no_longer_move_is_told(steps: int, is_told: bool) -> None:
    beta, model = torch.tensor(0.25, dtype=torch.bfloat16), nn.Linear(4, 4)
    with diagnose.trace() as t:
        for _ in range(steps):
            beta += 0.25 / 400
            model(torch.ones(2, 4)).mean().backward()
    assert [f.verdict for f in t.report.findings] == ["lost-update"] * is_told


@pytest.mark.parametrize(
    ("factor", "times", "dtype", "verdicts"),
    [
        (10.0, 30, torch.float32, ["exploding-loop", "overflow"]),
        (1e4, 12, torch.float32, ["overflow"]),
        (4.0, 20, torch.float16, ["overflow"]),
        (1.5, 20, torch.float32, []),
    ],
)
def test_a_line_whose_results_grow_from_call_to_call_is_named_before_what_overflows(
    factor: float, times: int, dtype: torch.dtype, verdicts: list[str]
) -> None:
    w = nn.Parameter(torch.tensor(factor, dtype=dtype))
    with diagnose.trace() as t:
        x = torch.ones(4, dtype=dtype)
        for _ in range(times):
            x = x * w  # GROWS
            if not x.detach().abs().max() < torch.finfo(dtype).max ** 0.5:
                break
        for _ in range(4):
            x = x * x.detach()
        x.sum().backward()
    assert [f.verdict for f in t.report.findings][: len(verdicts)] == verdicts


WRITES = ("multiplied", "data", "filled", "assigned", "scaled")


def cleared_by(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for p in model.parameters():
        if how == "never" or p.grad is None:
            continue
        if how == "deleted":
            del p.grad
        elif how == "replaced":
            p.grad = torch.zeros_like(p)
        elif how == "multiplied":
            p.grad.mul_(0)
        elif how == "data":
            p.grad.data.zero_()
        elif how == "filled":
            p.grad.data.fill_(0.0)
        elif how == "assigned":
            p.grad.data[:] = 0
        elif how == "scaled":
            p.grad.data *= 0
    if how == "optimizer":
        optimizer.zero_grad()


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize(
    ("how", "steps", "is_told"),
    [
        ("never", 9, True),
        ("never", 8, False),
        *((how, 12, False) for how in ("optimizer", "deleted", "replaced", *WRITES)),
    ],
)
def test_gradients_that_are_never_cleared_are_a_fault_at_the_step(
    how: str, steps: int, is_told: bool, clips: bool
) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with diagnose.trace() as t:
        for _ in range(steps):
            cleared_by(how, model, optimizer)
            for _ in range(2):  # micro-batches are added up on purpose
                model(torch.ones(2, 4)).square().mean().backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert [f.verdict for f in t.report.findings] == ["uncleared-gradients"] * is_told
    if is_told:
        assert "between the steps of SGD: each of 8 took" in t.report.findings[0].why


def test_gradients_that_are_cleared_once_in_a_while_are_no_fault() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with diagnose.trace() as t:
        for step in range(20):
            if step == 10:
                optimizer.zero_grad()
            model(torch.ones(2, 4)).square().mean().backward()
            optimizer.step()
    assert t.report.answer == "healthy"


@pytest.mark.parametrize("clears", [False, True])
def test_sparse_gradients_are_followed_as_far_as_they_have_memory(clears: bool) -> None:
    table = nn.Embedding(8, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
    with diagnose.trace() as t:
        for _ in range(10):
            table(torch.arange(4)).square().mean().backward()
            optimizer.step()
            if clears:
                optimizer.zero_grad()
    assert t.report.answer == "healthy"


def stepped(how: str, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
    if how == "by the scaler":
        scaler.step(optimizer)
        scaler.update()
        return
    if how == "unscaled":
        scaler.unscale_(optimizer)
    elif how == "divided":
        torch._foreach_div_(grads, scaler.get_scale())
    elif how == "divided as data":
        for grad in grads:
            grad.data /= scaler.get_scale()
    elif how == "replaced":
        for p in optimizer.param_groups[0]["params"]:
            p.grad = p.grad / scaler.get_scale()
    optimizer.step()  # SCALED
    if how == "unscaled":
        scaler.update()


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("optimize", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("how", ["as they are", "by the scaler", "unscaled", "divided", "divided as data", "replaced"])
def test_a_step_with_gradients_that_still_carry_the_scale_is_told(
    how: str, optimize: type[torch.optim.Optimizer], parts: int
) -> None:
    model = nn.Linear(4, 4)
    optimizer, scaler = optimize(model.parameters(), lr=1e-6), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with diagnose.trace() as t:
        for _ in range(3):
            for _ in range(parts):
                scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
            stepped(how, scaler, optimizer)
            optimizer.zero_grad()
    assert [f.verdict for f in t.report.findings] == ["scaled-step"] * (how == "as they are")
    if how == "as they are":
        [found] = t.report.findings
        assert found.frame is not None and (found.op, found.phase) == ("step", "optimizer")
        assert "SCALED" in Path(found.frame.file).read_text(encoding="utf-8").splitlines()[found.frame.line - 1]
        assert f"{optimize.__name__} stepped gradients that are still multiplied by 1024" in found.why


def test_a_loss_with_a_weight_of_its_own_carries_no_scale() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with diagnose.trace() as t:
        (1000 * model(torch.ones(2, 4)).square().mean()).backward()
        optimizer.step()
    assert t.report.answer == "healthy"


@pytest.mark.parametrize("optimize", [torch.optim.SGD, torch.optim.AdamW])
def test_a_scaler_that_is_off_gives_a_weight_of_the_loss_no_scale(optimize: type[torch.optim.Optimizer]) -> None:
    model, scaler = nn.Linear(4, 4), torch.amp.GradScaler("cpu", enabled=False)
    optimizer = optimize(model.parameters(), lr=1e-6, weight_decay=0.1)  # type: ignore[call-arg]  # torch's base class has neither
    with diagnose.trace() as t:
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(1024 * model(torch.ones(2, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert t.report.answer == "healthy" and t.report.findings == ()
