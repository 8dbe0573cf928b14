"""What rounding alone moved out of an op's domain: the rules that are proposed, applied as they are, train; a cast by hand is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mezzo
import mezzo.diagnose as diagnose


class Layer(nn.Module):
    """A linear layer and what is computed from its output."""

    def __init__(self, rest: Callable[[Tensor], Tensor], offset: float, spread: float) -> None:
        super().__init__()
        self.layer, self.rest = nn.Linear(16, 32), rest
        with torch.no_grad():
            self.layer.weight.mul_(spread)
            self.layer.bias.fill_(offset)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.layer(x))


class Nested(nn.Module):
    """The same one level down, where a rule names a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def by_moments(h: Tensor) -> Tensor:
    mean = h.mean(-1, keepdim=True)
    return (h - mean) / ((h * h).mean(-1, keepdim=True) - mean * mean + 1e-5).sqrt()


def by_expansion(h: Tensor) -> Tensor:
    codes = 3 + 0.1 * torch.sin(torch.arange(256.0)).reshape(8, 32)
    squares = (h * h).sum(-1, keepdim=True) - 2 * h @ codes.T + (codes * codes).sum(-1)
    return (-squares.sqrt()).softmax(-1)


def angle(h: Tensor) -> Tensor:
    a = F.normalize(h, dim=-1)
    return (a @ a.T * 0.9999).acos().cos()


PROGRAMS = {
    "variance by moments, bf16": ("bf16", by_moments, 20.0, 1.0),
    "variance by moments, fp16": ("fp16", by_moments, 20.0, 1.0),
    "distance by expansion": ("bf16", by_expansion, 3.0, 0.05),
    "angle of equal directions": ("bf16", angle, 1.0, 0.01),
}


def losses_under(policy: str, model: nn.Module) -> list[float]:
    torch.manual_seed(1)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), policy)
    losses = []
    for _ in range(6):
        amp.zero_grad()
        loss = (model(torch.randn(32, 16)) - 0.5).square().mean()
        amp.backward(loss)
        assert amp.step().applied
        losses.append(loss.item())
    return losses


def fault_of(policy: str, model: nn.Module) -> diagnose.Finding:
    torch.manual_seed(1)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), policy)
    with diagnose.trace(model) as t:
        amp.backward((model(torch.randn(32, 16)) - 0.5).square().mean())
    return t.report.faults[0]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("is_nested", [False, True])
def test_the_rules_train_as_fp32_does(name: str, is_nested: bool) -> None:
    policy, rest, offset, spread = PROGRAMS[name]

    def made() -> nn.Module:
        torch.manual_seed(0)
        layer = Layer(rest, offset, spread)
        return Nested(layer) if is_nested else layer

    found = fault_of(policy, made())
    assert found.verdict == "underflow" and found.fix.edit
    want = losses_under("fp32", made())
    assert losses_under(f"{policy}, {found.fix.edit}", made()) == pytest.approx(want, rel=0.05)


def test_a_rule_that_was_run_says_so() -> None:
    fix = fault_of("bf16", Layer(by_moments, 20.0, 1.0)).fix
    assert fix.tried == f"sqrt under {fix.edit} on these values: finite"


def test_a_cast_by_hand_is_named() -> None:
    model = Layer(lambda h: h.float().tanh().to(torch.bfloat16).float().atanh(), 4.0, 0.1)
    fix = fault_of("bf16", model).fix
    assert not fix.edit and "no rule brings back what to() rounds at" in fix.advice


class Kalman(nn.Module):
    """A filter whose covariance rounding makes indefinite long before the likelihood is asked of it; its own casts round nothing of H and I."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.noise = nn.Parameter(torch.tensor(-6.01))
        self.motion = nn.Parameter(torch.tensor([[0.99, 0.11], [-0.01, 0.99]]))
        self.low = low

    def forward(self, z: Tensor) -> Tensor:
        low, loss = self.low, torch.zeros(())
        spread, state, sensor = torch.eye(2).to(low) * 100, torch.zeros(2).to(low), torch.tensor([[1.0, 0.0]]).to(low)
        motion = self.motion.to(low)
        for seen in z:
            state = motion @ state
            spread = motion @ spread @ motion.T + self.noise.exp().to(low) * torch.eye(2).to(low)
            size, error = (sensor @ spread @ sensor.T)[0, 0] + 1e-3, seen.to(low) - state[0]
            gain = (spread @ sensor.T) / size
            state, spread = state + gain[:, 0] * error, (torch.eye(2).to(low) - gain @ sensor) @ spread
            loss = loss + (size.log() + error * error / size).float() / len(z)
        return loss


def filtered(policy: str, low: torch.dtype) -> tuple[float, diagnose.TraceReport]:
    torch.manual_seed(0)
    model, z = Kalman(low), (torch.randn(20) * 0.1).cumsum(0)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), policy)
    with diagnose.trace(model) as t:
        loss = model(z)
        amp.backward(loss)
    return float(loss.detach()), t.report


def test_a_run_that_was_lost_before_its_last_ops_gets_rules_and_blames_no_cast() -> None:
    want, _ = filtered("fp32", torch.float32)
    _, report = filtered("bf16", torch.bfloat16)
    assert report.faults[0].verdict == "underflow" and report.faults[0].op == "log"
    got, under = filtered(f"bf16, {report.faults[0].fix.edit}", torch.bfloat16)
    assert not under.faults and got == pytest.approx(want, rel=0.05)


def test_the_rules_of_a_loss_outside_of_modules_train_as_fp32_does() -> None:
    """The op that failed alone was offered, which repairs nothing where the variance was negative before it."""

    def loss(policy: str) -> Tensor:
        torch.manual_seed(0)
        model, x = nn.Linear(8, 16), torch.randn(64, 8) * 0.05 + 4
        with mezzo.autocast("cpu", policy=policy):
            h = model(x)
            spread = (h * h).mean(0) - h.mean(0) ** 2
            found = ((h - h.mean(0)) / (spread + 1e-6).sqrt()).float().square().mean()
        found.backward()
        return found

    with diagnose.trace() as t:
        loss("bf16")
    found = t.report.faults[0]
    assert (found.verdict, found.op) == ("underflow", "sqrt") and found.fix.tried
    assert float(loss(f"bf16, {found.fix.edit}").detach()) == pytest.approx(float(loss("fp32").detach()), rel=0.01)


class Weighted(nn.Module):
    """A loss with weights of classes in a buffer, one of which fp16 makes 0."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 4)
        self.register_buffer("w", torch.tensor([1.0, 2.0, 1e-8, 3.0]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.body(x)
        return nn.functional.cross_entropy(z if self.w.dtype is z.dtype else z.float(), y, weight=self.w)


def of_weighted(halve: Callable[[Weighted], object]) -> diagnose.TraceReport:
    torch.manual_seed(0)
    model = Weighted()
    with diagnose.trace() as t:
        halve(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 8).half(), torch.full((8,), 2)).backward()
            optimizer.step()
    return t.report


def test_a_buffer_that_a_cast_of_the_model_flushed_is_named_and_no_rule_is_offered() -> None:
    found = of_weighted(lambda model: model.half()).findings[0]
    assert (found.verdict, found.op, found.fix.edit) == ("underflow", "nll_loss", "")
    assert (
        "no rule brings back what half() rounds at" in found.fix.advice and "hold buffer w before" in found.fix.advice
    )
    assert "kept = module.x; the cast; module.x = kept" in found.fix.advice


def test_the_advice_for_such_a_buffer_trains() -> None:
    def kept(model: Weighted) -> None:
        before = model.w
        model.half()
        model.w = before

    assert of_weighted(kept).answer == "healthy"
