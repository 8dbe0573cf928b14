"""The facts behind the op tables: each op has one rule a device, and a module's class says where its weights go."""

from __future__ import annotations

from collections import Counter

import pytest

from mezzo.policy import is_cast_at_use, is_matmul_like
from mezzo.policy.families import FAMILIES


def test_no_op_stands_in_two_families() -> None:
    counts = Counter(op for family in FAMILIES for op in family.ops)
    assert [op for op, count in counts.items() if count > 1] == []


def test_a_family_has_one_rule_a_device_and_says_why() -> None:
    for family in FAMILIES:
        devices = [device for _, named in family.torch for device in named]
        assert len(devices) == len(set(devices)) and family.reason, family.ops


@pytest.mark.parametrize(
    ("names", "is_cast", "is_stored"),
    [
        (("Linear", "Module"), True, True),
        (("Conv2d", "_ConvNd", "Module"), True, True),
        (("MultiheadAttention", "Module"), True, True),
        (("Embedding", "Module"), False, True),
        (("LayerNorm", "Module"), False, False),
        (("MyLinear", "Linear", "Module"), True, True),
        ((), False, False),
    ],
)
def test_which_weights_feed_low_ops(names: tuple[str, ...], is_cast: bool, is_stored: bool) -> None:
    assert (is_cast_at_use(names), is_matmul_like(names)) == (is_cast, is_stored)
