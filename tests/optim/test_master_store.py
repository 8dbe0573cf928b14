"""Masters that exist during a step only: what opens holds the weight's master, what is written holds the stand-in's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mezzo.errors import MasterError
from mezzo.kernels import AUX_STATE
from mezzo.optim.master_store import Masters, Mode

pytestmark = pytest.mark.usefixtures("without_grad")
MODES: list[Mode] = ["split", "fp32", "kahan", "stochastic"]


@pytest.fixture
def without_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def opened(mode: Mode, seed: int = 0) -> tuple[Masters, torch.nn.Parameter]:
    masters, param = Masters(mode=mode, seed=seed), torch.nn.Parameter(torch.randn(300).bfloat16())
    masters.open(param, None)
    return masters, param


@pytest.mark.parametrize("mode", MODES)
def test_a_stand_in_begins_as_the_weight(mode: Mode) -> None:
    masters, param = opened(mode)
    assert torch.equal(masters.fp32_param(param), param.float())


@pytest.mark.parametrize("mode", MODES)
def test_what_was_written_is_what_opens_next(mode: Mode) -> None:
    masters, param = opened(mode)
    master = param.detach().float() * (1 + 2**-12)
    masters.advance(param.device, None)
    masters.fp32_param(param).data.copy_(master)
    aux = masters.write_(param, 0, None, None)
    masters.close(param)
    masters.open(param, aux)
    found, spacing = masters.fp32_param(param).detach(), 2**-7 * master.abs()
    exact = {"split": 0.0, "fp32": 0.0, "kahan": 2**-8, "stochastic": 1.0}[mode]
    assert bool(((found - master).abs() <= exact * spacing).all())
    assert (aux is None) == (mode not in AUX_STATE)


@pytest.mark.parametrize("mode", MODES)
def test_a_blocked_step_writes_and_counts_nothing(mode: Mode) -> None:
    masters, param = opened(mode)
    before, skip = param.detach().clone(), torch.tensor(True)
    masters.advance(param.device, skip)
    masters.fp32_param(param).data.add_(1)
    masters.write_(param, 0, None, skip)
    assert torch.equal(param, before)
    assert masters.count is None or masters.count.item() == 0


@pytest.mark.parametrize("mode", MODES)
def test_only_fp32_masters_hold_memory_between_steps(mode: Mode) -> None:
    masters, param = opened(mode)
    masters.close(param)
    assert masters.fp32_param(param).numel() == (300 if mode == "fp32" else 0)


def test_random_bits_follow_seed_and_index() -> None:
    def written(seed: int, index: int) -> torch.Tensor:
        masters = Masters(mode="stochastic", seed=seed)
        param = torch.nn.Parameter(torch.ones(300).bfloat16())
        masters.open(param, None)
        masters.advance(param.device, None)
        masters.fp32_param(param).data.fill_(1 + 2**-9)
        masters.write_(param, index, None, None)
        return param.detach()

    assert torch.equal(written(0, 0), written(0, 0))
    assert not torch.equal(written(0, 0), written(1, 0))
    assert not torch.equal(written(0, 0), written(0, 1))


def test_split_masters_of_fp16_are_refused() -> None:
    with pytest.raises(MasterError, match=r"split masters were asked for fp16\[2\] cpu"):
        Masters(mode="split", seed=0).mode_of(torch.nn.Parameter(torch.ones(2).half()))
