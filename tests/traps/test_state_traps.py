"""Silent traps of what a run keeps: S3, S7, S18, S25, S26, S31 to S33, S36, S37."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.distributed.ranks import run
from torch import Tensor, nn

import mezzo
from mezzo.errors import InvariantError, MasterError, PolicyError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def fed(weight: Tensor, lr: float, make: Any, steps: int = 100) -> tuple[Tensor, Any, nn.Parameter]:
    torch.manual_seed(0)
    p = nn.Parameter(weight)
    optimizer = make([p], lr)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        p.grad = (torch.randn(weight.shape, generator=generator) + 0.3).to(p.dtype)
        optimizer.step()
    return p.detach(), optimizer, p


def start() -> Tensor:
    return (torch.randn(2000, generator=torch.Generator().manual_seed(2)) * 0.02).to(BF16)


def test_s3_stock_small_updates_vanish() -> None:
    moved, _, _ = fed(start(), 1e-6, lambda p, lr: torch.optim.AdamW(p, lr))
    assert (moved != start()).float().mean() < 0.1


def test_s3_ours_it_is_refused_without_masters_and_exact_with_them() -> None:
    model = nn.Linear(4, 4).to(BF16)
    with pytest.raises(MasterError, match="updates smaller than half their spacing vanish"):
        mezzo.prepare(model, torch.optim.AdamW(model.parameters()), "bf16")
    with pytest.raises(MasterError):
        mezzo.optim.AdamW(model.parameters())
    _, optimizer, p = fed(start(), 1e-6, lambda p, lr: mezzo.optim.AdamW(p, lr, master="split"))
    exact, _, _ = fed(start().float(), 1e-6, lambda p, lr: torch.optim.AdamW(p, lr))
    # The same gradients, rounded to bf16 for one and not for the other.
    torch.testing.assert_close(optimizer.master(p), exact, rtol=1e-3, atol=2e-6)
    assert (optimizer.master(p) != start().float()).float().mean() > 0.99


def decayed(make: Any) -> Any:
    p = nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = make([p])
    for _ in range(500):
        p.grad = torch.zeros(4, dtype=BF16)
        optimizer.step()
    return optimizer.master(p)[0].item() if hasattr(optimizer, "master") else p[0].item()


def test_s3b_stock_decay_and_averages_do_nothing() -> None:
    assert decayed(lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1)) == 1.0
    average, weight = torch.ones(4, dtype=BF16), torch.full((4,), 2.0, dtype=BF16)
    for _ in range(2000):
        average.lerp_(weight, 0.001)
    assert average[0].item() == 1.0


def test_s3b_ours_decay_and_averages_are_of_the_masters() -> None:
    want = (1 - 1e-3 * 0.1) ** 500
    got = decayed(lambda p: mezzo.optim.AdamW(p, lr=1e-3, weight_decay=0.1, master="split"))
    assert got == pytest.approx(want, rel=500 * torch.finfo(FP32).eps)
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, 2.0)
    optimizer = mezzo.optim.AdamW(model.parameters(), lr=0.0, master="split")
    amp = mezzo.prepare(model, optimizer, "bf16-master, output=fp32")
    average = torch.ones(4, 4)
    amp.on_applied(lambda: average.lerp_(amp.export_weights()["weight"], 0.001))
    for _ in range(200):
        amp.zero_grad()
        amp.backward(amp.model(torch.ones(1, 4)).sum())
        amp.step()
    torch.testing.assert_close(average, torch.full((4, 4), 2 - 0.999**200), rtol=1e-5, atol=0)


def batch_norm_run(step: Any, model: nn.Module) -> None:
    torch.manual_seed(0)
    for place in range(6):
        step(torch.full((8, 4), 1e5) if place == 1 else torch.randn(8, 4))
    model.eval()


def test_s7_stock_a_skipped_step_poisons_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=FP16):
            loss = model(x).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    batch_norm_run(step, model)
    assert all(p.isfinite().all() for p in model.parameters())
    assert not model(torch.randn(2, 4)).isfinite().all()


@pytest.mark.parametrize("fused", [False, True])
def test_s7_ours_its_statistics_are_taken_back(fused: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    make = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    amp = mezzo.prepare(model, make, "fp16, output=fp32, scaling.init_scale=1024")
    results = []

    def step(x: Tensor) -> None:
        amp.zero_grad()
        amp.backward(amp.model(x).pow(2).mean())
        results.append(bool(amp.step()))

    batch_norm_run(step, model)
    assert results == [True, False, True, True, True, True]
    assert model[1].running_mean.isfinite().all() and model[1].num_batches_tracked.item() == 5
    assert model(torch.randn(2, 4)).isfinite().all()


def test_s18_stock_eps_vanishes_in_fp16() -> None:
    w = nn.Parameter(torch.ones(4, dtype=FP16))
    optimizer = torch.optim.Adam([w], lr=1e-3)
    w.grad = torch.tensor([1e-3, 1e-4, 1e-5, 0.0], dtype=FP16)
    optimizer.step()
    assert not w.isfinite().all()
    assert F.normalize(torch.zeros(4, dtype=FP16), dim=0).isnan().all()


def test_s18_ours_the_optimizer_computes_in_fp32_and_lint_names_the_constant() -> None:
    w = nn.Parameter(torch.ones(4, dtype=FP16))
    optimizer = mezzo.optim.AdamW([w], lr=1e-3, weight_decay=0.0, master="fp32")
    w.grad = torch.tensor([1e-3, 1e-4, 1e-5, 0.0], dtype=FP16)
    exact = nn.Parameter(torch.ones(4))
    exact.grad = w.grad.float()
    optimizer.step()
    torch.optim.AdamW([exact], lr=1e-3, weight_decay=0.0).step()
    assert torch.equal(optimizer.master(w), exact.detach())

    class Unit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.normalize(self.proj(x), dim=-1)

    report = mezzo.diagnose.lint(Unit(), torch.randn(2, 4), lambda m, b: m(b).float().sum(), policy="fp16")
    assert "constant-lost" in [warning.lint.rule for warning in report.warnings]


def test_s25_ours_what_was_asked_for_is_what_is_there() -> None:
    model = nn.Linear(4, 4)
    optimizer = mezzo.optim.AdamW(model.parameters(), master="split")
    amp = mezzo.prepare(model, optimizer, "bf16-master, output=fp32")
    amp.backward(amp.model(torch.ones(2, 4)).sum())
    amp.step()
    masters = next(row for row in amp.report(strict=True).rows if row.what == "masters")
    assert (masters.declared, masters.observed) == ("split", (("split", 2),)) and masters.nbytes == 2 * 20
    model.weight.data = model.weight.data.float()  # an upcast behind the policy's back
    with pytest.raises(InvariantError, match=r"weights of low ops are declared bf16, and 1 are not \(weight\)"):
        amp.report(strict=True)


def moments(make: Any, policy: str) -> set[torch.dtype]:
    model = nn.Linear(4, 4)
    amp = mezzo.prepare(model, make(model.parameters()), policy)
    amp.backward(amp.model(torch.ones(2, 4)).sum())
    amp.step()
    entries = amp.optimizers[0].state.values()
    return {entry[name].dtype for entry in entries for name in ("exp_avg", "exp_avg_sq")}


def test_s26_stock_moments_take_the_dtype_of_the_weights() -> None:
    _, optimizer, p = fed(start(), 1e-3, lambda p, lr: torch.optim.AdamW(p, lr), steps=1)
    assert optimizer.state[p]["exp_avg"].dtype is BF16


def test_s26_ours_the_policy_says_what_moments_are() -> None:
    assert moments(lambda p: mezzo.optim.AdamW(p, master="split"), "bf16-master, output=fp32") == {FP32}
    narrow = "bf16-master, state=bf16, output=fp32"
    assert moments(lambda p: mezzo.optim.AdamW(p, master="split", state_dtype=BF16), narrow) == {BF16}
    with pytest.raises(PolicyError, match="declares state=bf16, and the optimizer stores moments in fp32"):
        moments(lambda p: mezzo.optim.AdamW(p, master="split"), narrow)


def test_s31_stock_a_16_bit_gradient_stops_growing() -> None:
    p = nn.Parameter(torch.ones(1, dtype=BF16))
    for _ in range(400):
        p.sum().backward()
    assert p.grad is not None and p.grad.item() == 256.0


def test_s31_ours_it_accumulates_in_the_declared_dtype() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = mezzo.optim.SGD(model.parameters(), lr=0.0, master="split")
    amp = mezzo.prepare(model, optimizer, "bf16-master, grads=fp32, output=fp32")
    for _ in range(400):
        amp.backward(amp.model(torch.ones(1, 1)).sum())
    assert amp.step().grad_norm == 400.0
    assert mezzo.Policy.parse("bf16").reduce is FP32


def _reduced(rank: int, world: int, policy: str) -> float:
    model = nn.Linear(1, 1, bias=False)
    ddp = nn.parallel.DistributedDataParallel(model)
    amp = mezzo.prepare(ddp, torch.optim.SGD(ddp.parameters(), lr=0.0), policy)
    amp.backward(ddp(torch.full((1, 1), 1.0 if rank else 1024.0)).sum())
    assert model.weight.grad is not None
    return model.weight.grad.item()


@pytest.mark.distributed
def test_s31_ours_gradients_travel_in_fp32_unless_told_otherwise() -> None:
    assert run(2, _reduced, "fp32") == [512.5, 512.5]
    assert run(2, _reduced, "fp32, reduce=bf16") == [512.0, 512.0]


def _stock_decisions(rank: int, world: int) -> float:
    p, scaler = nn.Parameter(torch.ones(2)), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler.scale((p * (math.inf if rank else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return float(scaler.get_scale())


def _our_decisions(rank: int, world: int) -> tuple[bool, float, list[float]]:
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    amp = mezzo.prepare(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), "fp32, scaling.init_scale=65536")
    amp.backward(ddp(torch.ones(1, 2)).sum())
    if rank:
        with amp.unscaled_grads() as grads:
            grads["module.bias"].fill_(math.inf)
    result = amp.step()
    return result.applied, amp.scale, [float(v) for p in ddp.parameters() for v in p.detach().flatten()]


@pytest.mark.distributed
def test_s32_stock_each_rank_decides_for_itself() -> None:
    assert run(2, _stock_decisions) == [65536.0, 32768.0]


@pytest.mark.distributed
def test_s32_ours_all_ranks_decide_alike() -> None:
    one, two = run(2, _our_decisions)
    assert one == two and one[:2] == (False, 32768.0)


def test_s33_stock_a_scaler_that_is_not_saved_starts_over() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    saved = {"model": {}, "optimizer": {}}  # what a loop of before mixed precision saves
    assert "scale" not in str(saved) and torch.amp.GradScaler("cpu").get_scale() != scaler.get_scale()


def test_s33_ours_one_object_holds_scale_and_masters() -> None:
    def fresh() -> mezzo.Stepper:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = mezzo.optim.AdamW(model.parameters(), lr=1e-5, master="fp32")
        return mezzo.prepare(model, optimizer, "fp16-master, output=fp32, scaling.init_scale=4")

    amp, other = fresh(), fresh()
    amp.backward(amp.model(torch.ones(2, 4)).sum())
    amp.step()
    other.load_state_dict(amp.state_dict())
    for name, value in amp.export_weights().items():
        assert torch.equal(other.export_weights()[name], value)
    assert other.scale == amp.scale == 4.0 and other.counters() == amp.counters()


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2", "float8_e4m3fn"])
def test_s36_ours_there_is_no_fp8_whose_ranks_could_differ(dtype: str) -> None:
    """Scales from the largest value need a group of ranks to agree on it; fp8 is refused; on the wire each block has its own scale."""
    with pytest.raises(PolicyError):
        mezzo.Policy.parse(f"bf16, compute={dtype}")


def test_s37_ours_weights_that_came_in_another_dtype_are_not_taken_silently() -> None:
    """A loader that gives bf16 where it gave fp32 before."""
    loaded = nn.Linear(4, 4, dtype=BF16)
    with pytest.raises(MasterError, match="2 of 2 trainable parameters are 16 bit"):
        mezzo.prepare(loaded, torch.optim.AdamW(loaded.parameters()), "bf16")
    with pytest.raises(PolicyError, match=r"2 of 2 trainable parameters .* and policy=bf16 stores weights in fp32"):
        mezzo.prepare(loaded, mezzo.optim.AdamW(loaded.parameters(), master="split"), "bf16")
