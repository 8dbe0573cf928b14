"""A scaler's numbers from outside: what is packed is unpacked, and what no scaler may have is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mezzo.errors import CheckpointError, ScalerArgumentError, ScalerError
from mezzo.loss_scale import GradScaler
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


NO_COUNTS: list[Any] = [None, "x", math.nan, 3.5, -1, 2**31, 10**400, True, [1]]
DAMAGED: dict[str, list[Any]] = {
    "scale": [None, "x", [1], {}, torch.ones(2), 10**400, 1e39, 1e-60, -1.0],
    "growth_factor": [None, "x", 10**400, math.nan],
    "backoff_factor": [None, "x", 10**400, math.nan],
    "growth_interval": [None, "x", 10**400, 2.5],
    "_growth_tracker": NO_COUNTS,
    "_skipped_in_a_row": NO_COUNTS,
    "min_scale": [None, "x", [1], math.nan, 10**400, -1.0, torch.ones(2)],
    "max_scale": ["x", math.nan, -1.0, 10**400],
    "hysteresis": [None, "x", 0, 10**400],
    "patience": ["x", [1], -1, 0, math.nan, True, 10**400, 10**5000],
    "dynamic": [None, "x", 1],
}


@pytest.mark.parametrize("key", DAMAGED)
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_damaged_number_is_refused_and_the_state_before_stays(key: str, dynamic: bool) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    scaler, optimizer = GradScaler("cpu", init_scale=8.0), torch.optim.SGD([param], lr=0.5)
    for value in DAMAGED[key]:
        before = scaler.state_dict()
        with pytest.raises(
            CheckpointError, match=rf"load_state_dict\(\) got .*{key.removeprefix('_').replace('scale', '.*scale')}"
        ):
            scaler.load_state_dict({**before, "dynamic": dynamic, key: value})
        assert scaler.state_dict() == before
    for loss in (param.sum(), param.sum() * math.inf):
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert param.tolist() == [0.5, 0.5] and scaler.get_scale() == 4.0


@pytest.mark.parametrize(
    "change", [{"patience": None}, {"patience": math.inf}, {"growth_interval": 2**63 - 1}, {"max_scale": math.inf},
               {"scale": torch.tensor(64.0)}, {"_skipped_in_a_row": 2**31 - 1}]
)  # fmt: skip
def test_numbers_at_the_edge_of_their_range_are_loaded(change: dict[str, Any]) -> None:
    assert pack(unpack({**pack(SAVED), **change}, FRESH)) == {**pack(SAVED), **change}


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ({"patience": "x"}, "patience='x' must be > 0, or None."),
        ({"patience": math.nan}, "patience=nan must be > 0, or None."),
        ({"init_scale": 10**400}, f"init_scale=1{'0' * 56}... must be a number of at most 64 bits."),
        ({"init_scale": 1e39}, "init_scale=1e+39 must be finite and positive in fp32, which holds the loss scale."),
        ({"init_scale": 1e-60}, "init_scale=1e-60 must be finite and positive in fp32, which holds the loss scale."),
        ({"growth_interval": 10**5000}, "growth_interval=int must be a whole number of at most 64 bits."),
        ({"max_scale": math.nan, "dynamic": False}, "max_scale=nan must be > 0."),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded_cannot_be_asked_for(argument: dict[str, Any], said: str) -> None:
    with pytest.raises(ScalerArgumentError) as refusal:
        GradScaler("cpu", **argument)
    assert str(refusal.value) == said


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
              torch.tensor(8.0, requires_grad=True), 10**400]
)  # fmt: skip
def test_a_scale_that_cannot_be_is_refused(value: Any) -> None:
    with pytest.raises(ScalerError, match=r"new_scale="):
        given_scale(value, CONFIG)


@pytest.mark.parametrize("value", [1e39, 1e-60, torch.tensor(1e39, dtype=torch.float64)])
def test_a_scale_that_fp32_does_not_hold_is_refused(value: Any) -> None:
    with pytest.raises(ScalerError, match=r"new_scale="):
        given_scale(value, ScalingConfig.fixed(8.0))


def test_a_floor_lifts_the_first_scale_with_it() -> None:
    assert with_floor(CONFIG, 2.0) is CONFIG
    assert with_floor(CONFIG, 128.0).init_scale == 128.0
    assert with_floor(CONFIG, 1.0).init_scale == 64.0
