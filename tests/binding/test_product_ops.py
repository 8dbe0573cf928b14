"""Every op of torch's op database that is a product, or made of one, means the same in fp32 as emulated: dtypes, shapes, errors, near values."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
from typing import Any

import pytest
import torch
from tests.binding.test_products import LOW, Calls, needs_emulation
from tests.tolerance import relative
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mezzo.casting import products

NAMES = (
    "linear bilinear matmul __rmatmul__ mm bmm mv dot addmm addbmm baddbmm addmv einsum multi_dot chain_matmul tensordot inner outer kron "
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d scaled_dot_product_attention multi_head_attention_forward".split()
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own samples call beta and deprecated functions


def products_of_torch() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db  # whose import takes seconds

    return [op for op in op_db if op.name.removeprefix("nn.functional.").removeprefix("linalg.") in NAMES]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setattr(products, "REUSE", 0)
    return Calls(monkeypatch)


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def results(
    op: Any, sample: Any, low: torch.dtype, mode: Any
) -> tuple[list[Tensor], list[Tensor | None]] | type[Exception]:
    """Return what a call gives and the gradients of its operands, or the kind of its error."""
    torch.manual_seed(0)
    given = [t for t in tensors((sample.input, sample.args, sample.kwargs)) if t.requires_grad and t.is_leaf]
    try:
        with torch.autocast("cpu", low), mode:
            found = tensors(op.op(sample.input, *sample.args, **sample.kwargs))
        sums = [one.float().sum() for one in found if one.requires_grad]
        return found, list(torch.autograd.grad(sums, given, allow_unused=True)) if sums and given else []
    except Exception as error:
        return type(error)


def is_near(found: Tensor | None, want: Tensor | None, low: torch.dtype) -> bool:
    if found is None or want is None or found.dtype is not want.dtype or found.shape != want.shape:
        return found is want
    if not found.is_floating_point() or not want.numel() or not bool(want.isfinite().all()):
        return bool(torch.equal(found.isfinite(), want.isfinite()))
    return bool((found.double() - want.double()).abs().max() <= 16 * relative(low) * want.double().abs().max())


@LOW
def test_products_in_fp32_mean_what_emulated_ones_do(low: torch.dtype, calls: Calls) -> None:
    needs_emulation(low)
    wrong, num_samples = [], 0
    for op in products_of_torch():
        for dtype in (torch.float32, low, torch.float64, torch.complex64):
            if dtype not in op.dtypes:
                continue
            for sample in islice(op.sample_inputs_func(op, "cpu", dtype, dtype.is_floating_point), 30):
                num_samples += 1
                want, found = (results(op, sample, low, mode) for mode in (nullcontext(), products.ProductMode()))
                if isinstance(want, type) or isinstance(found, type):
                    is_same = want is found
                else:
                    pairs = [
                        (*pair, low)
                        for have, own in zip(found, want, strict=True)
                        for pair in zip(have, own, strict=True)
                    ]
                    is_same = all(is_near(*pair) for pair in pairs)
                if not is_same:
                    wrong.append(f"{op.name} {dtype} {[tuple(t.shape) for t in tensors((sample.input, sample.args))]}")
    assert not wrong
    assert num_samples > 500
    assert calls.count > 100
