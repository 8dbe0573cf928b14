"""Copies of tensors, and the choice between old and new values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mezzo.step import copies
from mezzo.step.copies import choose_, copies_of


def many() -> list[Tensor]:
    return [
        torch.randn(3, 4),
        torch.randn(2, 6).t(),
        torch.tensor(2.5),
        torch.empty(0),
        torch.randn(5).bfloat16(),
        torch.arange(4),
        torch.tensor([True, False]),
        torch.nn.Parameter(torch.randn(2, 2)),
    ]


def test_copies_have_values_dtype_and_strides_and_share_no_memory() -> None:
    tensors = many()
    for copy, tensor in zip(copies_of(tensors), tensors, strict=True):
        assert torch.equal(copy, tensor)
        assert (copy.dtype, copy.stride()) == (tensor.dtype, tensor.stride())
        assert not copy.requires_grad
        assert copy.numel() == 0 or copy.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("large", [1, 2**18], ids=["one launch each", "one for all"])
@pytest.mark.parametrize("void", [True, torch.tensor(True), torch.tensor(False)])
def test_old_values_come_back_where_the_step_is_void(
    void: Tensor | bool, large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_LARGE", large)
    old, now = many(), many()
    was, new = copies_of(old), copies_of(now)
    choose_(list(zip(old, now, strict=True)), void)
    for tensor, want in zip(now, was if void else new, strict=True):
        assert torch.equal(tensor, want)


def test_nothing_is_chosen_among_nothing() -> None:
    assert copies_of([]) == []
    choose_([], True)
