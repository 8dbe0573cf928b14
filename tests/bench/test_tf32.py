"""TF32 is on for the variant that says so, and off for every other: torch lets convolutions use it by itself."""

from __future__ import annotations

import pytest
import torch

from mezzo.bench.worker import set_tf32


@pytest.mark.parametrize(("is_on", "precision"), [(True, "high"), (False, "highest")])
def test_products_and_convolutions_are_set_alike(is_on: bool, precision: str) -> None:
    torch.backends.cudnn.allow_tf32 = not is_on
    set_tf32(is_on)
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (precision, is_on)
