"""The op lists that torch ships to test its own autocast: CPU lists by value, CUDA names by dtype on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.upstream.standalone import Standalone
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists, AutocastTestLists
from torch.utils._pytree import tree_leaves

from mezzo.casting.mode import CastMode
from mezzo.casting.op_rule_table import op_rule_table
from mezzo.casting.region import autocast
from mezzo.policy import OpRules

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own lists call deprecated functions
Case = tuple[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]]
# These reach cuDNN or CUDA itself, which no fake tensor replaces.
NEEDS_CUDA = {"cudnn_convolution", "cudnn_convolution_transpose", "gru_cell", "grid_sampler"}


def cases(lists: object) -> Iterator[Case]:
    for group in vars(lists).values():
        for name, *rest in (entry for entry in group if isinstance(entry, tuple)):
            if isinstance(rest[0], str):
                rest = [(rest[0], rest[1]), {}]
            kwargs = rest[1] if len(rest) > 1 and isinstance(rest[1], dict) else {}
            for space in (torch, torch._C._nn, torch.Tensor):
                function = getattr(space, name, None)
                operator = name.startswith("__")
                if function is not None and operator == (space is torch.Tensor and operator):
                    yield f"{space.__name__}.{name}", function, rest[0], kwargs


def result(case: Case, region: contextlib.AbstractContextManager[Any], values: bool) -> list[Any]:
    _, function, args, kwargs = case
    torch.manual_seed(0)
    try:
        with region:
            out = function(*args, **kwargs)
    except (RuntimeError, TypeError, AssertionError) as error:
        return [f"raised {isinstance(error, RuntimeError)}"]
    tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
    return [(t.dtype, t.tolist() if values else None) for t in tensors] or [out]


@contextlib.contextmanager
def torch_cuda(dtype: torch.dtype) -> Iterator[None]:
    """torch's CUDA autocast state on a machine without CUDA, where `torch.autocast` refuses."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
        torch.clear_autocast_cache()


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_cpu_lists(low: torch.dtype) -> None:
    book = op_rule_table(OpRules(), ("cpu",))
    seen = 0
    for case in cases(AutocastCPUTestLists("cpu")):
        want = result(case, torch.autocast("cpu", dtype=low), values=True)
        if want == ["raised True"]:
            continue  # the other 16-bit type mixed in: torch refuses to promote it, we do
        assert result(case, autocast("cpu", dtype=low), values=True) == want, case[0]
        assert result(case, Standalone(book, None, low), values=True) == want, case[0]
        seen += "raised" not in str(want[0])
    assert seen >= 40


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_cuda_names(low: torch.dtype) -> None:
    book = op_rule_table(OpRules(), ("cuda",))
    seen = 0
    with FakeTensorMode():
        for case in cases(AutocastTestLists("cuda")):
            if case[0].split(".")[-1] in NEEDS_CUDA:
                continue
            want = result(case, torch_cuda(low), values=False)
            if want == ["raised True"] and case[0] != "torch._C._nn.binary_cross_entropy":
                continue  # the other 16-bit type mixed in: torch refuses to promote it, we do
            assert result(case, Standalone(book, None, low), values=False) == want, case[0]
            with torch_cuda(low):
                assert result(case, CastMode(book, None), values=False) == want, case[0]
            seen += "raised" not in str(want[0])
    assert seen >= 90
