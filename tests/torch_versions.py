"""What a version of torch lacks: a test of it is skipped there and says so; what mezzo lacks is never skipped."""

from __future__ import annotations

import inspect

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
ADAGRAD_STARTS_LATE = "len(state)" in inspect.getsource(torch.optim.Adagrad._init_group)
"""torch 2.11: Adagrad has a state for the parameters it was made with alone, and takes a step count of plain numbers only where all are."""
