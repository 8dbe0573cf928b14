"""What steps did not do: skipped, moved nothing, had no gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mezzo
import mezzo.diagnose as diagnose
from mezzo.report import Chart


def unprepared(lr: float, factor: float = 1.0, steps: int = 4) -> diagnose.WatchReport:
    model = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with diagnose.watch(model, every=1) as w:
        for _ in range(steps):
            optimizer.zero_grad()
            (model(torch.randn(16, 8, dtype=torch.bfloat16)).float().mean() * factor).backward()
            optimizer.step()
    return w.report


def test_steps_that_move_nothing_are_no_health() -> None:
    report = unprepared(lr=1e-5)
    assert (report.idle, report.sampled) == (4, 4) and not report.is_healthy
    assert any("moved no sampled weight" in text for text in report.warnings)
    assert any("100% of its updates are rounded away" in text for text in report.warnings)


def test_a_long_run_is_drawn_from_its_first_step_to_its_last() -> None:
    model = nn.Linear(8, 8)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")
    with diagnose.watch(amp) as w:
        for _ in range(70):
            amp.zero_grad()
            amp.backward(model(torch.randn(16, 8)).float().square().mean())
            amp.step()
    charts = [b for b in w.report.document().details if isinstance(b, Chart) and b.kind == "lines"]
    assert len(charts) == 2 and all(chart.title.endswith(" (64 of 70)") for chart in charts)
    assert {(chart.labels[0], chart.labels[-1]) for chart in charts} == {("0", "69")}


def test_the_masters_that_are_named_fit_the_weights() -> None:
    assert any("Keep masters (bf16-master), or raise the rate." in text for text in unprepared(lr=1e-5).warnings)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
    with diagnose.watch(model, every=1) as w:
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).mean().backward()
            optimizer.step()
    assert w.report.idle == 4 and "spacing of the weights. Raise the rate." in w.report.warnings[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_weights_that_have_converged_are_healthy_and_16_bit_ones_are_not_told_from_lost(
    dtype: torch.dtype,
) -> None:
    model = nn.Linear(8, 1).to(dtype)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.01), torch.randn(64, 8).to(dtype)
    wanted = model(x).detach()
    with diagnose.watch(model, every=1) as w:
        for step in range(8):
            optimizer.zero_grad()
            (model(x) - wanted + 1e-6 * (step + 1)).square().mean().backward()
            optimizer.step()
    assert w.report.is_healthy is (dtype is torch.float32), w.report.warnings


def test_margins_that_come_to_be_kept_and_a_scale_that_finds_its_level_are_healthy() -> None:
    model = nn.Linear(8, 1)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), policy="fp16, scaling.init_scale=65536")
    x = torch.randn(64, 8)
    with diagnose.watch(amp, every=1) as w:
        for _ in range(40):
            amp.zero_grad()
            amp.backward((1 - model(x) * x[:, :1].sign()).clamp(min=0).sum())
            amp.step()
    assert w.report.skipped > 3 and w.report.steps[-1].loss is not None, w.report
    assert w.report.is_healthy, w.report.warnings


@pytest.mark.parametrize("clear", [lambda m: [p.grad.zero_() for p in m.parameters()], lambda m: m.zero_grad()])
def test_gradients_that_are_gone_before_the_step_are_not_called_rounded_away(
    clear: Callable[[nn.Module], object],
) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with diagnose.watch(model, every=1) as w:
        for _ in range(4):
            model(torch.randn(16, 8)).mean().backward()
            clear(model)
            optimizer.step()
    assert (w.report.cleared, w.report.idle) == (4, 0)
    [text] = w.report.warnings
    assert text.startswith(
        "in 4 of 4 sampled steps the gradients were 0 when the optimizer took them, and not after backward"
    )


def test_steps_skipped_for_what_no_scale_repairs_are_no_health() -> None:
    model = nn.Linear(8, 8)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), policy="bf16")
    with diagnose.watch(amp, every=1) as w:
        for factor in (1.0, 1.0, float("nan"), 1.0):
            amp.zero_grad()
            amp.backward(model(torch.randn(16, 8)).float().mean() * factor)
            amp.step()
    [text] = w.report.warnings
    assert text.startswith("1 of 4 steps were skipped for a loss, a buffer or gradients at scale 1 that are inf or NaN")


def test_a_rate_of_0_is_meant() -> None:
    report = unprepared(lr=0.0)
    assert (report.idle, report.sampled) == (0, 0)


def test_steps_that_move_are_healthy() -> None:
    report = unprepared(lr=10.0)
    assert report.idle == report.zero == 0 and report.is_healthy
    assert "Healthy: 4 steps, each sampled." in str(report)


def test_gradients_of_0_are_no_health() -> None:
    report = unprepared(lr=1.0, factor=0.0)
    assert report.zero == 4 and not report.is_healthy
    assert "every sampled gradient was 0 in 4 of 4 sampled steps" in report.warnings[0]


def prepared(policy: str, factor: float = 1.0, steps: int = 20) -> diagnose.WatchReport:
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())])
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
    return trained(amp, lambda: model(torch.randn(16, 64)).float().square().mean() * factor, steps)


def trained(amp: mezzo.Stepper, loss_fn: Callable[[], Tensor], steps: int) -> diagnose.WatchReport:
    with diagnose.watch(amp, every=1) as w:
        for _ in range(steps):
            amp.zero_grad()
            amp.backward(loss_fn())
            amp.step()
    return w.report


def test_many_skipped_steps_are_no_health() -> None:
    report = prepared("fp16, scaling.init_scale=1099511627776")
    assert report.skipped > 3 and not report.is_healthy
    assert report.warnings[0].startswith(f"{report.skipped} of 20 steps were skipped; the last because of: ")


def test_gradients_that_fp16_flushes_are_no_health() -> None:
    report = prepared("fp16, scaling=none", factor=1e-7, steps=3)
    assert report.zero == 3 and not report.is_healthy and "underflow" in report.warnings[0]


def test_gradients_that_fp16_flushes_in_part_are_named() -> None:
    report = prepared("fp16, scaling=none", factor=1e-4, steps=3)
    assert any("underflow" in text and "GradScaler" in text for text in report.warnings)


def test_a_run_with_a_scale_is_healthy() -> None:
    report = prepared("fp16", steps=6)
    assert report.is_healthy, report.warnings


def watched(model: nn.Module, lr: float = 0.1, steps: int = 8) -> diagnose.WatchReport:
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=lr), policy="bf16")
    return trained(amp, lambda: (model(torch.randn(16, 8)) - 1).square().mean(), steps)


def test_a_rate_of_0_in_all_steps_is_named_as_that() -> None:
    report = watched(nn.Linear(8, 8), lr=0.0)
    assert (report.still, report.sampled, report.idle) == (8, 0, 0)
    [text] = report.warnings
    assert "the learning rate was 0 in all 8 sampled steps" in text


def test_a_weight_behind_a_dead_relu_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    nn.init.constant_(model[0].bias, -100.0)
    [text] = watched(model).warnings
    assert (
        "the gradient of 0.weight, 2.weight was 0 in all 8 sampled steps" in text
    )  # what 2.weight multiplies is 0 too


def test_a_living_relu_and_a_table_are_healthy() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layers = nn.Embedding(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x) + 0 * self.table(torch.zeros(16).long())

    report = watched(Table())
    assert report.is_healthy, report.warnings


def test_what_no_gradient_reached_is_told_and_no_fault() -> None:
    class Detached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).detach())

    report = watched(Detached())
    assert report.is_healthy and report.unreached == ("first.weight", "first.bias")
    assert "no gradient" in str(report) and "first.weight, first.bias: in none of the sampled steps" in str(report)


def test_no_step_is_not_enough() -> None:
    with diagnose.watch(nn.Linear(2, 2)) as w:
        pass
    assert not w.report.is_healthy and "Not enough seen" in str(w.report)


class Averages(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.register_buffer("ema", torch.ones(4, dtype=dtype))
        self.register_buffer("mask", torch.ones(4, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        self.ema.mul_(0.999).add_(y.detach().mean(0), alpha=0.001)
        return y * self.mask.float()


def test_a_16_bit_state_that_the_run_writes_is_said_not_to_be_looked_at() -> None:
    for dtype, states in ((torch.bfloat16, ("ema",)), (torch.float32, ())):
        model = Averages(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with diagnose.watch(model, every=1) as w:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(2, 4)).square().mean().backward()
                optimizer.step()
        assert w.report.states == states
        assert ("not looked at" in str(w.report)) == bool(states)
        assert w.report.is_healthy


def test_gradients_that_fp16_flushes_under_a_small_scale_ask_for_a_larger_one() -> None:
    report = prepared("fp16, scaling=2", factor=5e-5, steps=3)
    told = [text for text in report.warnings if "underflow" in text]
    assert told and all("raise the loss scale" in text and "GradScaler" not in text for text in told)
    none_left = prepared("fp16, scaling=2", factor=1e-6, steps=3).warnings
    assert "underflow at a small loss scale" in none_left[0]


def two_layers(policy: str) -> tuple[nn.Sequential, list[torch.optim.Optimizer], mezzo.Stepper]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    return model, optimizers, mezzo.prepare(model, optimizers, policy)


def test_weights_that_no_step_was_to_move_are_not_rounded_away() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    amp = mezzo.prepare(model, optimizer, "bf16-master")
    with diagnose.watch(amp, every=1) as w:
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": list(model[2].parameters())})
            amp.zero_grad()
            amp.backward(model(torch.randn(16, 8)).square().mean())
            amp.step()
    assert w.report.is_healthy, w.report


def test_optimizers_that_step_in_turn_are_not_rounded_away() -> None:
    model, optimizers, amp = two_layers("fp32")
    with diagnose.watch(amp, every=1) as w:
        for step in range(6):
            amp.zero_grad()
            amp.backward(model(torch.randn(16, 8)).square().mean())
            amp.step(optimizer=optimizers[step % 2])
    assert w.report.is_healthy and len(w.report.tensors) == 3 + 4 + 4, w.report
    assert max(t.lost for t in w.report.tensors) < 0.1


def test_a_table_with_sparse_gradients_is_not_rounded_away() -> None:
    model = nn.EmbeddingBag(10, 8, sparse=True, mode="sum")
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    amp = mezzo.prepare(model, optimizer, "fp32")
    with diagnose.watch(amp, every=1) as w:
        for _ in range(4):
            amp.zero_grad()
            amp.backward(model(torch.randint(0, 4, (4, 4))).square().mean())
            amp.step()
    assert w.report.is_healthy and any(t.kind == "gradient" for t in w.report.tensors), w.report


def test_gradients_of_torch_func_are_seen_where_they_end_up() -> None:
    model = nn.Linear(8, 8)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), "bf16")

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).square().mean()

    with diagnose.watch(amp, every=1) as w:
        for _ in range(4):
            amp.zero_grad()
            found = torch.func.grad(loss)({n: p.detach() for n, p in model.named_parameters()}, torch.randn(16, 8))
            with amp.external_backward():
                for name, p in model.named_parameters():
                    p.grad = found[name]
            amp.step()
    assert not w.report.warnings and "Not enough seen: no activation was sampled." in str(w.report)
    assert [t.name for t in w.report.tensors if t.kind == "gradient"] == ["weight", "bias"]


def test_a_model_without_weights_of_its_own() -> None:
    model, scale = nn.Sequential(nn.Tanh()), nn.Parameter(torch.ones(()))
    amp = mezzo.prepare(model, torch.optim.SGD([scale], lr=0.1), "bf16")
    with diagnose.watch(amp, every=1) as w:
        amp.backward((model(torch.randn(4)) * scale).square().mean())
        amp.step()
    assert [t.kind for t in w.report.tensors] == ["activation"]
    assert w.report.zero == w.report.idle == 0


def test_two_optimizers_of_one_backward_without_prepare() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizers = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    with diagnose.watch(model, every=1) as w:
        for _ in range(4):
            model.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert w.report.zero == 0 and max(t.lost for t in w.report.tensors) < 0.1, w.report


@pytest.mark.parametrize("every", [2, 3, 4])
def test_tasks_that_take_turns_are_both_sampled(every: int) -> None:
    body, heads = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 1) for _ in range(2))
    model = nn.ModuleList([body, heads])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with diagnose.watch(model, every=every) as w:
        for step in range(12 * every):
            losses = [head(body(torch.randn(16, 8))).square().mean() for head in heads]
            optimizer.zero_grad()
            (losses[0] * (step % every == 0) + losses[1] * (step % every > 0)).backward()
            optimizer.step()
    assert w.report.sampled == 12 and not w.report.warnings, w.report.warnings


def test_steps_after_one_that_raised_are_counted() -> None:
    model, failing = nn.Linear(4, 1), [True]
    optimizer = mezzo.optim.MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))

    def hook(*_: object) -> None:
        if failing[0]:
            raise ValueError("somebody's hook")

    optimizer.inner.register_step_pre_hook(hook)
    with diagnose.watch(model, every=1) as w:
        for failing[0] in (True, False, True, False, False):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            with pytest.raises(ValueError, match="hook") if failing[0] else nullcontext():
                optimizer.step()
    assert (w.report.num_steps, w.report.sampled) == (3, 3)


@pytest.mark.parametrize("tool", [diagnose.watch, mezzo.monitor, lambda amp: mezzo.record(amp, "runs")])
def test_a_released_run_is_refused_and_left_alone(
    tool: Callable[[mezzo.Stepper], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(4, 1)
    amp = mezzo.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="fp32")
    amp.release()
    before = sorted(vars(amp))
    with pytest.raises(mezzo.errors.StepError, match="this stepper was released"):
        tool(amp)
    assert sorted(vars(amp)) == before and list(tmp_path.iterdir()) == []
    assert not any(m._forward_hooks for m in model.modules())
