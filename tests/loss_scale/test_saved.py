"""A scaler's numbers from outside: what is packed is unpacked, and what no scaler may have is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mezzo.errors import CheckpointError, ScalerError
from mezzo.loss_scale.saved import Saved, given_scale, pack, unpack, with_floor
from mezzo.loss_scale.state import LossScale
from mezzo.policy import ScalingConfig

CONFIG = ScalingConfig(
    init_scale=64.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=7, min_scale=2.0, max_scale=2.0**20,
    hysteresis=3, dynamic=False,
)  # fmt: skip
SAVED = Saved(CONFIG, 9, LossScale(scale=64.0, growth_tracker=5, skipped_in_a_row=2))
FRESH = Saved(ScalingConfig(), None, LossScale(scale=1.0))


def test_what_is_packed_is_unpacked_whatever_it_is_read_into() -> None:
    assert unpack(pack(SAVED), FRESH) == SAVED


def test_torchs_scaler_loads_it_and_hands_it_back() -> None:
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(pack(SAVED))
    back = unpack(theirs.state_dict(), SAVED)
    assert back.state == LossScale(scale=64.0, growth_tracker=5)
    assert back.config == CONFIG and back.patience == 9


@pytest.mark.parametrize(
    "change, said",
    [
        ({"scale": math.nan}, "scale=nan"),
        ({"scale": 0.0}, "scale=0"),
        ({"scale": 1.0}, "at least min_scale=2"),
        ({"growth_interval": 0}, "no scaler may have"),
        ({"backoff_factor": 2.0}, "no scaler may have"),
    ],
)
def test_numbers_that_no_scaler_may_have(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        unpack({**pack(SAVED), **change}, FRESH)


def test_what_is_not_a_scalers_state() -> None:
    with pytest.raises(CheckpointError, match="empty dict"):
        unpack({}, FRESH)
    for other in (5, [1.0], "state"):
        with pytest.raises(CheckpointError, match="a scaler's state is a dict"):
            unpack(other, FRESH)  # type: ignore[arg-type]
    entries = pack(SAVED)
    del entries["_growth_tracker"]
    with pytest.raises(CheckpointError, match="misses _growth_tracker"):
        unpack(entries, FRESH)


@pytest.mark.parametrize("value", [2.0, 8, 2.0**20, torch.tensor(8.0), torch.tensor([8.0], dtype=torch.float64)])
def test_a_scale_within_the_bounds_is_taken(value: float | Tensor) -> None:
    scale, config = given_scale(value, CONFIG)
    assert scale.shape == () and scale.dtype is torch.float32 and float(scale) == float(value)
    assert config == CONFIG


@pytest.mark.parametrize(
    "value", [0.0, -1.0, math.inf, math.nan, 1.5, 2.0**21, True, "8", torch.ones(2), torch.tensor(3),
              torch.tensor(8.0, requires_grad=True)]
)  # fmt: skip
def test_a_scale_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(ScalerError, match=r"new_scale="):
        given_scale(value, CONFIG)


def test_a_floor_lifts_the_first_scale_with_it() -> None:
    assert with_floor(CONFIG, 2.0) is CONFIG
    assert with_floor(CONFIG, 128.0).init_scale == 128.0
    assert with_floor(CONFIG, 1.0).init_scale == 64.0
