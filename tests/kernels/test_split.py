"""Split masters: every bf16 value, every kind of remainder, every special."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mezzo.kernels.ops.split import join, split

EVERY_HIGH = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
LOW = [0, 1, 0x3FFF, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF]


def fp32(bits: int | Tensor) -> Tensor:
    held = torch.as_tensor(bits, dtype=torch.int64)
    return torch.where(held >= 1 << 31, held - (1 << 32), held).to(torch.int32).view(torch.float32)


def same_bits(a: Tensor, b: Tensor) -> bool:
    word = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(word), b.view(word))


@pytest.mark.parametrize("low", [*LOW, "random"])
def test_all_65536_upper_halves_come_back(low: int | str) -> None:
    lows = torch.randint(0, 1 << 16, EVERY_HIGH.shape) if low == "random" else torch.full_like(EVERY_HIGH, int(low))
    master = ((EVERY_HIGH << 16) | lows.to(torch.int32)).view(torch.float32)
    weight, remainder = split(master)
    assert (weight.dtype, remainder.dtype) == (torch.bfloat16, torch.int16)
    back = join(weight, remainder)
    number = ~master.isnan()
    assert same_bits(back[number], master[number])
    assert bool(back[~number].isnan().all())
    assert bool(weight[~number].isnan().all())


@pytest.mark.parametrize("low", [*LOW, "random"])
def test_the_weight_is_the_nearest_with_ties_away_from_zero(low: int | str) -> None:
    lows = torch.randint(0, 1 << 16, EVERY_HIGH.shape) if low == "random" else torch.full_like(EVERY_HIGH, int(low))
    master = ((EVERY_HIGH << 16) | lows.to(torch.int32)).view(torch.float32)
    master = master[~master.isnan()]
    weight, _ = split(master)
    nearest = master.bfloat16()
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert same_bits(weight[~tie], nearest[~tie])
    truncated = (master.view(torch.int32) >> 16 << 16).view(torch.float32)
    assert bool((weight[tie].double().abs() > truncated[tie].double().abs()).all())


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F808000, 0xFF800001, 0x7FC00000, 0xFFC00000])
def test_every_nan_stays_in_sight(bits: int) -> None:
    weight, remainder = split(fp32(bits).reshape(1))
    assert weight.isnan().item()
    assert join(weight, remainder).isnan().item()


def test_specials() -> None:
    above = fp32(0x7F7F8000).item()  # half way from bf16's largest value to where the next would be
    master = torch.tensor(
        [0.0, -0.0, 1e-45, -1e-45, 1e-38, torch.finfo(torch.float32).max, torch.inf, -torch.inf, above]
    )
    weight, remainder = split(master)
    assert weight.tolist()[-4:] == [torch.inf, torch.inf, -torch.inf, torch.inf]
    assert master.isfinite().tolist()[-4:] == [True, False, False, True]
    assert remainder.tolist()[6:8] == [0, 0]
    assert same_bits(join(weight, remainder), master)


@given(st.integers(0, (1 << 32) - 1))
def test_join_undoes_split(bits: int) -> None:
    master = fp32(bits).reshape(1)
    back = join(*split(master))
    assert same_bits(back, master) or (master.isnan().item() and back.isnan().item())


@given(st.integers(0, (1 << 16) - 1), st.integers(-(1 << 15), (1 << 15) - 1))
def test_any_pair_stands_for_a_master_that_rounds_to_the_weight(high: int, low: int) -> None:
    """A weight written from outside beside an old remainder is still the weight."""
    weight = torch.tensor([high - (1 << 16) if high >> 15 else high], dtype=torch.int16).view(torch.bfloat16)
    master = join(weight, torch.tensor([low], dtype=torch.int16))
    again, _ = split(master)
    assert same_bits(again, weight) or (weight.isnan().item() and master.isnan().item())


def test_a_pruned_weight_is_zero_whatever_remainder_is_left() -> None:
    zero = torch.tensor([0.0, -0.0], dtype=torch.bfloat16).repeat(3)
    remainder = torch.tensor([-32768, -1, 5, -1, 32767, 1], dtype=torch.int16)
    assert bool((join(zero, remainder).abs() < 1e-40).all())


@pytest.mark.parametrize("shape", [(), (0,), (1,), (63,), (127,), (5, 0), (7, 9)])
def test_shapes(shape: tuple[int, ...]) -> None:
    master = torch.randn(shape)
    weight, remainder = split(master)
    assert weight.shape == remainder.shape == master.shape
    assert same_bits(join(weight, remainder).reshape(-1), master.reshape(-1))


def test_any_strides() -> None:
    master = torch.randn(6, 8)
    for view in (master.t(), master[::2], master[:, 1::3]):
        weight, remainder = split(view)
        assert same_bits(join(weight, remainder).contiguous(), view.contiguous())
        assert same_bits(join(weight.t(), remainder.t()).contiguous(), view.t().contiguous())
