"""torch's own test of autocast, which it ships, with mezzo's region in the place of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, TestAutocast

import mezzo

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own lists call deprecated functions
LOW_DTYPES = (torch.bfloat16, torch.float16)
Entry = tuple[Any, ...]


@pytest.fixture(autouse=True)
def names_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.amp, "autocast", mezzo.autocast)
    monkeypatch.setattr(torch, "autocast", mezzo.autocast)


class Runner(TestAutocast):
    """torch's checks of one op: dtypes as listed, and the bits of casting by hand."""

    def runTest(self) -> None:
        """Nothing: the checks are called from outside."""

    def check(self, entry: Entry, low: torch.dtype, run_as: torch.dtype, **options: Any) -> None:
        op, args, *rest = entry
        kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
        self._run_autocast_outofplace(op, args, run_as, device="cpu", add_kwargs=kwargs, amp_dtype=low, **options)


@pytest.mark.parametrize("low", LOW_DTYPES, ids=str)
@pytest.mark.parametrize("group", ["torch_16", "nn_16", "torch_fp32", "nn_fp32"])
def test_ops_with_a_dtype(group: str, low: torch.dtype) -> None:
    module = torch._C._nn if group.startswith("nn") else torch
    for entry in getattr(AutocastCPUTestLists(torch.device("cpu")), group):
        Runner().check(entry, low, low if group.endswith("16") else torch.float32, module=module)


@pytest.mark.parametrize("low", LOW_DTYPES, ids=str)
def test_ops_that_promote(low: torch.dtype) -> None:
    lists = AutocastCPUTestLists(torch.device("cpu"))
    index = LOW_DTYPES.index(low)
    for op, *args in lists.torch_need_autocast_promote:
        Runner().check((op, args[index]), low, torch.float32)
    for op, *args, out_type in lists.torch_expect_builtin_promote:
        Runner().check((op, args[index]), low, torch.float32, out_type=out_type)
    for op, *args, out_type in lists.methods_expect_builtin_promote:
        Runner().check((op, args[index]), low, torch.float32, out_type=out_type, module=None)


def test_the_check_sees_a_wrong_dtype() -> None:
    with pytest.raises(AssertionError):
        Runner().check(("mm", (torch.ones(2, 2), torch.ones(2, 2))), torch.bfloat16, torch.float32)
