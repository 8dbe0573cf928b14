"""The roofline: arithmetic by hand, its laws, and the recipe's work against torch's own counter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from mezzo.bench.roofline import (
    STREAM_BYTES,
    PeakRates,
    Phase,
    measure_peak_rates,
    product_rate,
    products_in,
    roofline_seconds,
    stream_rate,
)
from mezzo.bench.variant import VARIANTS
from mezzo.bench.workload import Setting
from mezzo.bench.workloads.recipe import Recipe
from mezzo.errors import BenchError

CPU = torch.device("cpu")
PEAK_RATES = PeakRates(matmul={"fp32": 100.0, "bf16": 400.0}, stream={10: 50.0, 1000: 5.0})
RATES = st.floats(1.0, 1e15)
WORK = st.floats(0.0, 1e15)


def test_by_hand() -> None:
    computing = Phase(name="products", flops=1000.0, moved_bytes=2000.0)
    moving = Phase(name="update", moved_bytes=10_000.0)
    assert computing.seconds(PEAK_RATES, "fp32") == 2000.0 / 5.0
    assert Phase(name="p", flops=1e6).seconds(PEAK_RATES, "fp32") == 1e6 / 100.0
    assert roofline_seconds((computing, moving), PEAK_RATES, "bf16") == 400.0 + 2000.0
    assert roofline_seconds((), PEAK_RATES, "bf16") == 0.0


def test_what_fits_a_cache_is_held_to_the_rate_of_the_cache() -> None:
    assert PEAK_RATES.bandwidth(5) == PEAK_RATES.bandwidth(10) == PEAK_RATES.bandwidth(999) == 50.0
    assert PEAK_RATES.bandwidth(1000) == 5.0
    launch_bound = PeakRates(matmul={}, stream={10: 1.0, 1000: 5.0})
    assert launch_bound.bandwidth(10) == 5.0


@pytest.mark.parametrize(("kind", "cache_bytes"), [("cpu", 32 * 2**20), ("cuda", 50 * 2**20)])
def test_what_a_cache_does_not_hold_is_held_to_the_rate_of_memory(kind: str, cache_bytes: int) -> None:
    rates = PeakRates(
        matmul={}, stream={size: 200.0 if size <= 3 * cache_bytes else 50.0 for size in STREAM_BYTES[kind]}
    )
    update_of_ten_million_parameters = 26 * 10**7
    assert rates.bandwidth(update_of_ten_million_parameters) == 50.0


@given(matmul=RATES, stream=RATES, flops=WORK, moved=WORK, factor=st.floats(1.0, 100.0))
def test_laws(matmul: float, stream: float, flops: float, moved: float, factor: float) -> None:
    slow = PeakRates(matmul={"fp32": matmul}, stream={1: stream})
    fast = PeakRates(matmul={"fp32": matmul * factor}, stream={1: stream * factor})
    phase = Phase(name="p", flops=flops, moved_bytes=moved)
    assert phase.seconds(fast, "fp32") <= phase.seconds(slow, "fp32")
    assert slow.best(fast) == fast
    assert fast.best(slow) == fast
    split = (Phase(name="p", flops=flops), Phase(name="m", moved_bytes=moved))
    assert roofline_seconds(split, slow, "fp32") >= phase.seconds(slow, "fp32")


def test_an_emulated_format_is_held_to_the_rate_of_fp32() -> None:
    """Its operands may be widened; fp32 is not held to another one's rate."""
    emulated = PeakRates(matmul={"fp32": 100.0, "bf16": 20.0, "fp16": 5.0}, stream={1: 1.0})
    phase = Phase(name="products", flops=1000.0)
    assert [phase.seconds(emulated, name) for name in ("fp32", "bf16", "fp16")] == [10.0, 10.0, 10.0]
    assert phase.seconds(PEAK_RATES, "bf16") == 2.5


def test_an_unmeasured_format_is_an_error() -> None:
    with pytest.raises(BenchError, match="needs the matmul rate of fp16, but only fp32, bf16 were measured"):
        Phase(name="products", flops=1.0).seconds(PEAK_RATES, "fp16")


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_recipes_products_are_those_torch_counts(layers: int) -> None:
    recipe = Recipe(batch_size=4, in_size=8, out_size=3, num_layers=layers, num_batches=1, epochs=1)
    session = recipe.build(VARIANTS["fp32"], Setting(device=CPU, dtype=torch.bfloat16))
    with FlopCounterMode(display=False) as counter:
        session.run()
    assert sum(phase.flops for phase in recipe.roofline("fp32")) == counter.get_total_flops()


def test_the_recipes_update_moves_each_weight_once() -> None:
    from mezzo.bench.workloads.recipe import make_model

    recipe = Recipe(in_size=8, out_size=3, num_layers=3)
    weights = sum(p.numel() for p in make_model(8, 3, 3).parameters())
    assert recipe.roofline("fp32")[-1].moved_bytes == (4 + 4 + 4) * weights
    assert recipe.roofline("bf16")[-1].moved_bytes == (2 + 4 + 4) * weights


def test_measured_ceilings() -> None:
    before = torch.get_float32_matmul_precision()
    found = measure_peak_rates(CPU, ("bf16",), 0.1)  # fp32 too: what is emulated may be multiplied in it
    assert list(found.matmul) == ["fp32", "bf16"]
    assert min(*found.matmul.values(), *found.stream.values()) > 0
    assert torch.get_float32_matmul_precision() == before


def test_a_rate_is_operations_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mezzo.bench.roofline.fastest_seconds", lambda call, device, budget_s: (call(), 0.5)[1])
    assert product_rate(3, 5, "fp32", CPU, 1.0) == 2 * 3 * 5 * 5 / 0.5


def test_a_rate_of_memory_is_bytes_moved_over_the_least_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, found = iter((0.5, 1.0, 0.25)), []
    monkeypatch.setattr(
        "mezzo.bench.roofline.fastest_seconds", lambda call, device, budget_s: (found.append(call()), next(seconds))[1]
    )
    assert stream_rate(4096, CPU, 1.0) == 4096 / 0.25
    summed, copied, changed = found
    assert summed.shape == () and copied.nbytes == changed.nbytes == 4096 / 2


def test_tf32_is_set_back_after_an_error() -> None:
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ZeroDivisionError), products_in("tf32") as dtype:
        assert torch.get_float32_matmul_precision() == "high"
        assert dtype is torch.float32
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before
