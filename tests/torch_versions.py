"""What a version of torch lacks: a test of it is skipped there and says so; what mezzo lacks is never skipped."""

from __future__ import annotations

import pytest
import torch

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])

traces_regions = pytest.mark.skipif(
    TORCH < (2, 12), reason="torch 2.11: its compiler cannot trace torch.set_autocast_enabled"
)
knows_subclasses = pytest.mark.skipif(
    TORCH < (2, 12), reason="torch 2.11: its compiler takes every torch.autocast for torch's own, so ours is none"
)
warns_of_breaks = pytest.mark.filterwarnings(
    "ignore:Dynamo does not know how to trace:UserWarning", "ignore:The .grad attribute of a Tensor:UserWarning"
)
"""torch 2.11: its compiler breaks the graph at a region that it cannot trace, and warns of that and of its own look at `.grad`."""
