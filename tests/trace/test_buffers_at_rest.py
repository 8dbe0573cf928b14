"""Buffers that rest in 16 bit: named by what their rounding does where they are used, whatever they are called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mezzo.diagnose as diagnose
from mezzo.trace import explain_lint
from mezzo.trace.buffers_at_rest import exact_integers
from mezzo.trace.records import Lint

BF16, FP16 = torch.bfloat16, torch.float16


class Turns(nn.Module):
    """Rotates by position times frequency, in fp32 throughout; only what the buffer holds may be rounded."""

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.register_buffer("theta", frequencies)

    def forward(self, x: Tensor) -> Tensor:
        phases = torch.outer(torch.arange(x.shape[1]).float(), self.theta.float())
        phases = torch.cat([phases, phases], -1)
        return self.body(x) * phases.cos().to(x.dtype)


def lints(model: nn.Module, cast: Callable[[nn.Module], object], *shape: int, is_seen: bool) -> list[Lint]:
    if not is_seen:
        cast(model)
    with diagnose.trace() as t:
        if is_seen:
            cast(model)
        x = torch.randn(*shape, dtype=next(model.parameters()).dtype)
        model(x).float().square().mean().backward()
    assert t.report.findings == ()
    return [x for x in t.report.record.lints if x.rule == "buffer-in-16-bit"]


def geometric() -> Tensor:
    return 10000.0 ** (-torch.arange(0, 4) / 4)


@pytest.mark.parametrize("is_seen", [False, True])
@pytest.mark.parametrize(("dtype", "tokens"), [(BF16, 2048), (FP16, 16384)])
def test_frequencies_that_turn_positions_into_other_phases_are_named(
    dtype: torch.dtype, tokens: int, is_seen: bool
) -> None:
    [found] = lints(Turns(geometric()), lambda m: m.to(dtype), 1, tokens, 8, is_seen=is_seen)
    said = explain_lint(found)
    assert "buffer theta, by which phases are" in said.why and "kept = module.buffer" in said.advice
    assert found.site.frame is not None and found.site.frame.function == "forward"


def kept_wide(model: nn.Module) -> None:
    kept = model.theta
    model.to(BF16)
    model.theta = kept


@pytest.mark.parametrize("is_seen", [False, True])
def test_what_it_advises_helps(is_seen: bool) -> None:
    assert lints(Turns(geometric()), kept_wide, 1, 2048, 8, is_seen=is_seen) == []


@pytest.mark.parametrize("is_seen", [False, True])
def test_few_positions_and_frequencies_that_16_bit_holds_are_no_risk(is_seen: bool) -> None:
    assert lints(Turns(geometric()), lambda m: m.to(BF16), 1, 16, 8, is_seen=is_seen) == []
    assert lints(Turns(2.0 ** -torch.arange(4)), lambda m: m.to(BF16), 1, 2048, 8, is_seen=is_seen) == []


class Holds(nn.Module):
    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("is_seen", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_row_of_positions_beyond_what_the_format_counts_is_named(dtype: torch.dtype, is_seen: bool) -> None:
    row = torch.arange(2 * exact_integers(dtype) + 1)
    [found] = lints(Holds(steps=row), lambda m: m.to(dtype), 2, 8, is_seen=is_seen)
    assert f"buffer steps, whole numbers up to {row[-1]:g}," in explain_lint(found).why


def back_again(model: nn.Module) -> None:
    model.half().float()


def test_numbers_that_a_cast_made_0_are_named_where_the_buffer_is_fp32_again() -> None:
    [found] = lints(Holds(w=torch.tensor([1e-8, 2e-8, 1e-8, 3e-8])), back_again, 2, 8, is_seen=True)
    assert "buffer w, of which a cast made 75% 0," in explain_lint(found).why


@pytest.mark.parametrize("is_seen", [False, True])
def test_tables_masks_and_whole_numbers_that_fit_are_no_risk(is_seen: bool) -> None:
    angles = torch.arange(64.0)
    model = Holds(
        cos_cached=angles.cos(),
        inv_freq=torch.ones(4),
        steps=torch.arange(200.0),
        mask=torch.zeros(600),
        counts=torch.full((600,), 900.0),
    )
    assert lints(model, lambda m: m.to(BF16), 2, 8, is_seen=is_seen) == []


@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_integers_are_exact_up_to_the_number_named(dtype: torch.dtype) -> None:
    top = int(exact_integers(dtype))
    assert torch.equal(torch.arange(top + 1).to(dtype).long(), torch.arange(top + 1))
    assert int(torch.tensor(top + 1).to(dtype)) != top + 1
