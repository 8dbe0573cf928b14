"""What a script looks at, drops or ends on counts as reached; what it repairs does not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mezzo.diagnose as diagnose

Guard = Callable[[Tensor], bool]


def loop(guard: Guard, is_bad: bool = True) -> None:
    """Three steps, the second with a logarithm of 0."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        p = model(torch.randn(8, 4)).sigmoid()
        loss = torch.log(p - p.detach() if is_bad and step == 1 else p).mean()
        if guard(loss):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def raising(loss: Tensor) -> bool:
    if loss != loss or loss.abs() == math.inf:
        raise FloatingPointError("bad loss")
    return False


def asserting(loss: Tensor) -> bool:
    assert not torch.isnan(loss) and not torch.isinf(loss)
    return False


def exiting(loss: Tensor) -> bool:
    if not torch.isfinite(loss):
        raise SystemExit(1)
    return False


GUARDS: dict[str, Guard] = {
    "isfinite": lambda loss: not torch.isfinite(loss),
    "item": lambda loss: not math.isfinite(loss.item()),
    "any": lambda loss: bool(torch.isnan(loss).any() or torch.isinf(loss).any()),
    "detached": lambda loss: not torch.isfinite(loss.detach()),
    "numpy": lambda loss: not math.isfinite(loss.detach().numpy()),
    "tolist": lambda loss: not math.isfinite(loss.tolist()),
    "compared": lambda loss: bool(loss < -1e9),
    "raising": raising,
    "asserting": asserting,
    "exiting": exiting,
}


def report_of(run: Callable[[], object]) -> diagnose.TraceReport:
    with diagnose.trace() as t:
        try:
            run()
        except (ArithmeticError, AssertionError, SystemExit):
            pass
    return t.report


@pytest.mark.parametrize("name", GUARDS)
def test_a_guarded_loss_is_a_fault(name: str) -> None:
    [found] = report_of(lambda: loop(GUARDS[name])).findings
    assert (found.verdict, found.op, found.step) == ("singularity", "log", 1)
    assert found.reached[0].startswith("read at ")


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_around_good_losses_is_healthy(name: str) -> None:
    assert report_of(lambda: loop(GUARDS[name], is_bad=False)).answer == "healthy"


class Loss(nn.Module):
    """A model that computes its own loss, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor, is_bad: bool) -> dict[str, Tensor]:
        p = self.head(x).sigmoid()
        return {"loss": torch.log(p - p.detach() if is_bad else p).mean(), "p": p}


def drops(bad_step: int) -> None:
    model = Loss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        out = model(torch.randn(8, 4), step == bad_step)
        if step == bad_step:
            continue
        optimizer.zero_grad()
        out["loss"].backward()
        optimizer.step()


class Actor(nn.Module):
    """Logits of which a buffer forbids one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.register_buffer("forbidden", torch.tensor([0.0, -torch.inf, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.forbidden


def test_logits_that_a_buffer_forbids_may_leave_a_model() -> None:
    def run() -> None:
        actor = Actor()
        with torch.no_grad():
            chosen = torch.distributions.Categorical(logits=actor(torch.randn(8, 4))).sample()
        nn.functional.cross_entropy(actor(torch.randn(8, 4)), chosen).backward()

    assert report_of(run).answer == "healthy"


@pytest.mark.parametrize("bad_step", [0, 1, 3])
def test_an_output_that_nobody_differentiates_is_a_fault(bad_step: int) -> None:
    [found] = report_of(lambda: drops(bad_step)).findings
    assert (found.verdict, found.op, found.reached) == ("singularity", "log", ("output output['loss'] of Loss",))


def test_an_op_that_refuses_bad_values_is_where_they_arrive() -> None:
    def run() -> None:
        p = torch.log(nn.Linear(4, 4)(torch.randn(2, 4)).softmax(-1) - 1)
        with pytest.raises(RuntimeError):
            torch.multinomial(p, 1)

    [found] = report_of(run).findings
    assert (found.verdict, found.op) == ("singularity", "log")


def unguarded_exit() -> None:
    model = nn.Linear(4, 1)
    loss = torch.log(model(torch.randn(4, 4)).sigmoid() * 0).mean()
    assert loss.shape == (1,), "an error that has nothing to do with the loss"


def test_a_loss_that_was_there_when_the_program_ended_is_a_fault() -> None:
    trace = diagnose.trace()
    with pytest.raises(AssertionError, match="nothing to do"), trace:
        unguarded_exit()
    [found] = trace.report.findings
    assert (found.verdict, found.op, found.reached) == ("singularity", "log", ("exit when the program ended",))


def screened() -> None:
    model = nn.Linear(4, 4)
    x = torch.randn(4, 4)
    x[0, 0] = math.nan
    if torch.isnan(x).any():
        x = torch.nan_to_num(x)
    model(x).sum().backward()


def repaired() -> None:
    model = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=torch.float16):
        h = model(torch.randn(8, 4)).exp() * 1e6
    if torch.isinf(h).any():
        h = h.clamp(max=6e4)
    h.float().mean().backward()


def best_so_far() -> None:
    model, best = nn.Linear(4, 1), torch.tensor(math.inf)
    for _ in range(2):
        loss = model(torch.randn(8, 4)).square().mean()
        if loss < best:
            best = loss.detach()
        loss.backward()


def metric() -> None:
    model = nn.Linear(4, 1)
    model(torch.randn(8, 4)).mean().backward()
    hits = torch.tensor(0.0)
    precision = hits / (hits + 0)
    assert math.isnan(precision.item()) and torch.isnan(precision)


def two_inputs_one_loss() -> None:
    """A row of padding gives NaN in both outputs, and neither is used."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(4, 4)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            scores = (self.q(x) @ x.T).masked_fill(~keep, -math.inf)
            return scores.softmax(-1)

    model = Attention()
    keep = torch.ones(3, 3, dtype=torch.bool)
    keep[2] = False
    a, b = model(torch.randn(3, 4), keep), model(torch.randn(3, 4), keep)
    good = torch.where(keep, a, 0.0) + torch.where(keep, b, 0.0)
    good.sum().backward()


@pytest.mark.parametrize("run", [screened, repaired, best_so_far, metric, two_inputs_one_loss])
def test_what_a_program_asks_and_settles_is_no_fault(run: Callable[[], None]) -> None:
    report = report_of(run)
    assert [f"{f.verdict} {f.op} {f.reached}" for f in report.findings] == [] and report.answer == "healthy"


def test_a_metric_without_a_value_is_told_apart() -> None:
    where = r", but for metrics that have no value \(div at \S*test_evidence\.py:\d+\)\.$"
    assert re.search(where, report_of(metric)._verdict()) and not re.search(where, report_of(screened)._verdict())


class TestAnswers:
    def test_nothing_traced(self) -> None:
        report = report_of(lambda: None)
        assert (report.answer, report.is_healthy) == ("not enough seen", False)
        assert "no op of torch ran" in str(report)

    def test_nothing_went_backward(self) -> None:
        report = report_of(lambda: nn.Linear(4, 1)(torch.randn(2, 4)))
        assert report.answer == "not enough seen" and "nothing went backward" in str(report)

    def test_inference_is_looked_at(self) -> None:
        def run() -> None:
            with torch.no_grad():
                nn.Linear(4, 1)(torch.randn(2, 4))

        report = report_of(run)
        assert report.answer == "healthy" and "1 forward, 0 backwards" in " ".join(str(report).split())

    def test_an_error_of_its_own(self) -> None:
        trace = diagnose.trace()
        with pytest.raises(ValueError, match="own"), trace:
            nn.Linear(4, 1)(torch.randn(2, 4)).sum().backward()
            raise ValueError("own")
        assert trace.report.answer == "not enough seen" and "ended by itself with ValueError('own')" in str(
            trace.report
        )

    def test_healthy_says_what_was_looked_at(self) -> None:
        text = " ".join(str(report_of(lambda: loop(lambda _: False, is_bad=False))).split())
        assert (
            "Healthy: no inf or NaN reached a loss, gradient, weight, buffer, output or the host in 3 forwards, 3 backwards, 3 updates"
            in text
        )


class Parts(nn.Module):
    """Two layers, and what stands between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(4, 4), nn.Linear(4, 1), between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


def cut(h: Tensor) -> Tensor:
    return h.detach()


def looked_at(h: Tensor) -> Tensor:
    assert h.detach().isfinite().all()
    return h


def run_of(model: nn.Module, steps: int = 2) -> diagnose.TraceReport:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with diagnose.trace(model) as t:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            assert float(loss.detach()) >= 0
    return t.report


def test_a_part_that_was_detached_is_named_by_the_line() -> None:
    report = run_of(Parts(cut))
    assert report.answer == "healthy"  # many are meant to have no gradient
    assert [name for name, _ in report.record.unreached] == ["first.weight", "first.bias"]
    lines = {frame for _, frame in report.record.unreached}
    assert {(frame.file, frame.function) for frame in lines if frame} == {(__file__, "cut")}
    assert "no gradient  first.weight, first.bias: detached at" in str(report) and "return h.detach()" in str(report)


def test_a_part_without_gradients_that_no_line_detached_is_named() -> None:
    model = Parts(looked_at)
    model.spare = nn.Linear(2, 2)
    report = run_of(model)
    assert report.record.unreached == (("spare.weight", None), ("spare.bias", None))
    assert "no gradient  spare.weight, spare.bias" in str(report)


def test_what_is_frozen_or_reached_another_way_is_not() -> None:
    frozen = Parts(cut)
    frozen.first.requires_grad_(False)
    assert run_of(frozen).record.unreached == ()
    assert run_of(Parts(looked_at)).record.unreached == ()
    assert run_of(Parts(lambda h: h.detach() + h)).record.unreached == ()


def test_a_derivative_is_no_metric() -> None:
    """The derivative of a spread at 0 is set to 0 by torch: no value is missing. Where it is read, it is training's."""
    model = nn.Linear(4, 4)
    with diagnose.trace(model) as t:
        spread = model(torch.ones(2, 4)).std(0)
        (1 - spread).relu().mean().backward()
    assert t.report.answer == "healthy" and "no value" not in str(t.report)
