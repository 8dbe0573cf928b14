"""A stamp tells whether a tensor is still the one it was, where it was, and not written since."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mezzo.loss_scale import stamps_of
from mezzo.stamp import Stamp, versions_of


def nothing(tensor: Tensor) -> Tensor:
    return tensor


def written(tensor: Tensor) -> Tensor:
    return tensor.mul_(1.0)


def moved(tensor: Tensor) -> Tensor:
    tensor.data = tensor.data.clone()
    return tensor


def replaced(tensor: Tensor) -> Tensor:
    return tensor.clone()


def through_a_view(tensor: Tensor) -> Tensor:
    tensor[0] = 3.0
    return tensor


@pytest.mark.parametrize(
    ("change", "is_of", "is_current", "is_current_with_storage"),
    [
        (nothing, True, True, True),
        (written, True, False, False),
        (through_a_view, True, False, False),
        (moved, True, True, False),  # a swap of memory leaves the version as it is
        (replaced, False, False, False),
    ],
)
def test_what_a_stamp_notices(
    change: Callable[[Tensor], Tensor], is_of: bool, is_current: bool, is_current_with_storage: bool
) -> None:
    tensor = torch.ones(3)
    stamp, wide = Stamp.of(tensor), Stamp.of(tensor, with_storage=True)
    changed = change(tensor)
    assert (stamp.is_of(changed), stamp.is_current(changed), wide.is_current(changed)) == (
        is_of, is_current, is_current_with_storage,
    )  # fmt: skip


def test_it_keeps_no_tensor_alive_and_knows_none_that_takes_its_place() -> None:
    tensor = torch.ones(3)
    stamp = Stamp.of(tensor)
    del tensor
    gc.collect()
    assert stamp.tensor() is None
    assert not any(stamp.is_of(torch.ones(3)) for _ in range(100))


def test_many_at_once_are_those_of_each() -> None:
    tensors = {i: torch.ones(i + 1) for i in range(3)}
    tensors[1].add_(1)
    assert stamps_of(list(tensors.items())) == {i: Stamp.of(t) for i, t in tensors.items()}


def test_a_tensor_of_inference_mode_keeps_no_count() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2)
    assert Stamp.of(tensor).version == -1 and Stamp.of(tensor).is_current(tensor)
    assert stamps_of([(0, tensor), (1, torch.ones(1))])[0].version == -1
    assert versions_of([tensor, None, torch.ones(1).add_(1)]) == [-1, None, 1]
    assert versions_of([None, torch.ones(1)]) == [None, 0]
