"""Stochastic and compensated rounding against the values they lie between."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mezzo.formats import format_of, ulp
from mezzo.kernels.ops.rounding import compensate, mix, random_bits, random_key, restore, stochastic_round

LOW = [torch.float16, torch.bfloat16]
EVERY = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
EVERY_NOISE = torch.arange(1 << 16)


def drawn(count: int, seed: int = 7) -> Tensor:
    return random_bits(random_key(seed, torch.tensor(3.0)), torch.empty(count))


@pytest.mark.parametrize("dtype", LOW)
def test_all_65536_values_are_kept_whatever_the_chance(dtype: torch.dtype) -> None:
    values = EVERY.view(dtype)
    number = ~values.isnan()
    for bits in (0, 1, 0x7FFF, 0x8000, 0xFFFF):
        got = stochastic_round(values.float(), dtype, torch.full(values.shape, bits))
        assert torch.equal(got.view(torch.int16)[number], values.view(torch.int16)[number])
        assert bool(got[~number].isnan().all())


@pytest.mark.parametrize("dtype", LOW)
def test_over_all_chances_the_mean_is_exact(dtype: torch.dtype) -> None:
    """Every 16-bit chance once: no statistics, the mean itself, on normal and subnormal values, both signs."""
    fmt = format_of(dtype)
    starts = torch.tensor(
        [1.0, 1.5, 300.0, fmt.tiny, fmt.tiny * 0.75, fmt.smallest * 3, fmt.smallest * 0.5, fmt.max / 2]
    )
    inside = torch.tensor([0.0, 2**-7, 0.125, 0.3, 0.5, 0.999])
    values = torch.cat([starts[:, None].double() + ulp(starts, dtype)[:, None] * inside]).flatten().float()
    for value in torch.cat([values, -values]):
        got = stochastic_round(value.expand(1 << 16), dtype, EVERY_NOISE).double()
        spacing = ulp(value, dtype).item()
        # the chance has 16 (bf16) or 13 (fp16) bits; fp32 sums of a subnormal and a chance round once more
        assert abs(got.mean().item() - value.item()) <= spacing * 2.0 ** -(23 - fmt.mantissa_bits - 1)
        assert bool(((got - value.double()).abs() < spacing).all())


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("value", [1.001, -1.001, 3e-5, -3.3e-7, 1e-8, 0.02, 1234.5, 6e4])
def test_drawn_noise_is_unbiased_within_4_sigma(dtype: torch.dtype, value: float) -> None:
    count = 100_000
    x = torch.tensor(value)
    got = stochastic_round(x.expand(count), dtype, drawn(count)).double()
    spacing = ulp(x, dtype).item()
    below = math.floor(x.item() / spacing) * spacing
    chance = (x.item() - below) / spacing
    sigma = spacing * math.sqrt(chance * (1 - chance) / count)
    resolution = spacing * 2.0 ** -(23 - format_of(dtype).mantissa_bits)
    assert abs(got.mean().item() - x.item()) <= 4 * sigma + resolution
    assert set(got.unique().tolist()) <= {below, below + spacing}


@pytest.mark.parametrize("dtype", LOW)
def test_unbiased_over_steps_too(dtype: torch.dtype) -> None:
    steps, value = 20_000, 1.003
    keys = torch.stack([random_key(11, torch.tensor(float(step))) for step in range(2000)])
    bits = mix(torch.arange(steps // 2000)[:, None] ^ keys).flatten()
    got = stochastic_round(torch.tensor(value).expand(steps), dtype, bits).double()
    spacing = torch.finfo(dtype).eps
    chance = (value - 1) / spacing % 1
    assert abs(got.mean().item() - value) <= 4 * spacing * math.sqrt(chance * (1 - chance) / steps) + spacing * 2**-13


@pytest.mark.parametrize("dtype", LOW)
def test_specials_of_chance(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    for bits in (0, 0xFFFF):
        got = stochastic_round(values, dtype, torch.full(values.shape, bits))
        assert torch.equal(got.view(torch.int16), values.to(dtype).view(torch.int16))
        assert stochastic_round(torch.tensor([torch.nan]), dtype, torch.tensor([bits])).isnan().item()
    between = torch.tensor([format_of(dtype).max]) * (1 + torch.finfo(dtype).eps / 8)
    assert stochastic_round(between, dtype, torch.tensor([0])).item() == format_of(dtype).max
    assert stochastic_round(between, dtype, torch.tensor([0xFFFF])).item() == math.inf


def test_noise_is_a_function_of_seed_step_stream_and_place() -> None:
    like = torch.empty(64, 3)
    key = random_key(5, torch.tensor(2.0), 1)
    assert torch.equal(random_bits(key, like), random_bits(random_key(5, torch.tensor(2), 1), like))
    assert torch.equal(random_bits(key, like).flatten()[:32], random_bits(key, torch.empty(32)))
    others = [
        random_key(6, torch.tensor(2.0), 1),
        random_key(5, torch.tensor(3.0), 1),
        random_key(5, torch.tensor(2.0), 0),
    ]
    for other in others:
        assert (random_bits(other, like) == random_bits(key, like)).float().mean().item() < 0.01
    assert int(random_bits(key, like).min()) >= 0
    assert int(random_bits(key, like).max()) < 1 << 32


def test_noise_bits_are_fair_and_neighbours_independent() -> None:
    count = 1 << 16
    bits = (drawn(count)[:, None] >> torch.arange(32)) & 1
    sigma = 0.5 / math.sqrt(count)
    assert bool(((bits.double().mean(0) - 0.5).abs() <= 4 * sigma).all())
    for lag in (1, 2, 64):
        agree = (bits[lag:] == bits[:-lag]).double().mean(0)
        assert bool(((agree - 0.5).abs() <= 4 * sigma).all())


def test_mix_is_a_bijection_and_the_same_on_ints() -> None:
    x = torch.arange(1 << 18) * 16381
    assert mix(x).unique().numel() == x.numel()
    assert [mix(int(value)) for value in x[:50]] == mix(x[:50]).tolist()


@pytest.mark.parametrize("dtype", LOW)
def test_compensation_error_is_bounded(dtype: torch.dtype) -> None:
    fmt = format_of(dtype)
    master = torch.cat([torch.randn(20_000) * scale for scale in (1e-6, 1e-3, 1.0, 1e3)])
    master = torch.cat([master, EVERY.view(dtype).float(), EVERY.view(dtype).float() * (1 + 2**-10)])
    master = master[master.abs() <= fmt.max]
    weight, rest = compensate(master, dtype)
    assert torch.equal(weight, master.to(dtype))
    error = (restore(weight, rest).double() - master.double()).abs()
    bound = torch.maximum(weight.double().abs() * (fmt.eps / 2) ** 2 * 2, torch.tensor(fmt.smallest / 2).double())
    assert bool((error <= bound).all())


@pytest.mark.parametrize("dtype", LOW)
def test_compensation_comes_back_and_specials_stay(dtype: torch.dtype) -> None:
    values = EVERY.view(dtype)
    number = ~values.isnan()
    weight, rest = compensate(values.float(), dtype)
    assert torch.equal(weight.view(torch.int16)[number], values.view(torch.int16)[number])
    assert bool((rest[number] == 0).all())
    assert bool(restore(weight, rest)[~number].isnan().all())
    huge = torch.tensor([torch.finfo(torch.float32).max, -torch.inf])
    weight, rest = compensate(huge, dtype)
    assert restore(weight, rest).tolist() == [torch.inf, -torch.inf]


@pytest.mark.parametrize("dtype", LOW)
def test_a_weight_written_from_outside_drops_its_compensation(dtype: torch.dtype) -> None:
    _, rest = compensate(torch.tensor([1.0 + torch.finfo(dtype).eps * 0.4]), dtype)
    assert rest.item() != 0
    for written in (0.0, -0.0, 1e-3, -1e-4):
        weight = torch.tensor([written], dtype=dtype)
        assert restore(weight, rest).item() == weight.item()
