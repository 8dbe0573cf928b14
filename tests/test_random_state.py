"""Random numbers go on as if a block had drawn none."""

from __future__ import annotations

import pytest
import torch

from mezzo import random_state


def test_what_a_block_draws_is_given_back_also_after_an_error() -> None:
    torch.manual_seed(3)
    want = [torch.rand(2) for _ in range(2)]
    torch.manual_seed(3)
    first = torch.rand(2)
    with pytest.raises(KeyError), random_state.kept():
        torch.rand(100)
        torch.manual_seed(8)
        raise KeyError
    assert torch.equal(first, want[0]) and torch.equal(torch.rand(2), want[1])


def test_a_state_is_taken_up_again_any_number_of_times() -> None:
    state = random_state.get()
    drawn = torch.rand(4)
    for _ in range(2):
        random_state.set_(state)
        assert torch.equal(torch.rand(4), drawn)
