"""The gradient pass against fp64."""

from __future__ import annotations

import math

import pytest
import torch
from tests.tolerance import relative
from torch import Tensor

from mezzo.kernels import registry
from mezzo.kernels.ops.gradients import CHUNK, norm_and_finite

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(), (0,), (1,), (63,), (127,), (5, 0, 3), (33, 129), (CHUNK - 1,), (2 * CHUNK + 7,)]


def exact(grads: list[Tensor]) -> float:
    return math.sqrt(sum(grad.double().pow(2).sum().item() for grad in grads))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, 1.0, 1024.0, 2.0**-3])
def test_norm_equals_fp64(dtype: torch.dtype, scale: float | None) -> None:
    grads = [torch.randn(shape).to(dtype) for shape in SHAPES]
    check = norm_and_finite(grads, None if scale is None else torch.tensor(1.0 / scale))
    want = exact(grads) / (scale or 1.0)
    assert check.norm.dtype is torch.float32
    assert check.norm.shape == ()
    assert abs(check.norm.item() - want) <= want * relative(torch.float32, CHUNK)
    assert check.norm.isfinite().item() is True
    each = torch.tensor([exact([grad]) / (scale or 1.0) for grad in grads])
    torch.testing.assert_close(check.tensor_norms, each, rtol=relative(torch.float32, CHUNK), atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 126, -1])
def test_one_bad_element_is_found_and_counted(dtype: torch.dtype, bad: float, place: int) -> None:
    grads = [torch.randn(127).to(dtype), torch.randn(2 * CHUNK + 1).to(dtype), torch.randn(()).to(dtype)]
    grads[1].view(-1)[place] = bad
    check = norm_and_finite(grads, torch.tensor(0.5))
    assert check.norm.isfinite().item() is False
    assert check.tensor_norms.isfinite().tolist() == [True, False, True]
    assert check.count_nonfinite().tolist() == [0, 1, 0]


@pytest.mark.parametrize("inv_scale", [math.inf, math.nan])
def test_a_scale_that_cannot_divide_is_found(inv_scale: float) -> None:
    for grad in (torch.ones(3), torch.zeros(3)):
        assert norm_and_finite([grad], torch.tensor(inv_scale)).norm.isfinite().item() is False


def test_the_largest_values_of_the_16_bit_formats_are_finite() -> None:
    largest = torch.full((CHUNK + 1,), torch.finfo(torch.float16).max, dtype=torch.float16)
    assert norm_and_finite([largest]).norm.isfinite().item() is True
    beyond = torch.tensor([torch.finfo(torch.bfloat16).max], dtype=torch.bfloat16)
    check = norm_and_finite([beyond])
    assert check.norm.isfinite().item() is True  # fp32 cannot hold its square; fp64 can
    assert check.norm.item() == beyond.item() and check.count_nonfinite().tolist() == [0]


def test_small_terms_are_not_absorbed_by_a_large_sum() -> None:
    grad = torch.ones(1 << 25, dtype=torch.bfloat16)
    grad[:64] = 4096.0
    want = math.sqrt(64 * 4096.0**2 + grad.numel() - 64)
    assert abs(norm_and_finite([grad]).norm.item() - want) <= want * relative(torch.float32, CHUNK)


def test_layouts_dtypes_and_devices_may_be_mixed() -> None:
    sparse = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 2.0, 2.0]), (4,), check_invariants=True
    )
    grads = [
        torch.full((2, 2), 2.0, dtype=torch.bfloat16).t(),
        sparse,
        torch.tensor([3.0 + 4.0j]),
        torch.ones(4, dtype=torch.float16)[::2],
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]
    check = norm_and_finite(grads)
    torch.testing.assert_close(check.tensor_norms.square(), torch.tensor([16.0, 13.0, 25.0, 2.0, 120.0]))

    assert not sparse.is_coalesced()


@pytest.mark.parametrize("inv_scale", [None, torch.tensor(0.25)])
def test_dtypes_that_one_compiled_pass_reads_need_no_pass_each(inv_scale: Tensor | None) -> None:
    grads = [torch.randn(300).to(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16)]
    check = norm_and_finite(grads, inv_scale)
    assert check.tensor_norms.tolist() == [norm_and_finite([grad], inv_scale).norm.item() for grad in grads]
    compiled = registry.choose("gradients", torch.device("cpu"), torch.bfloat16).backend == "cpu"
    assert (check.known is not None) == (compiled and inv_scale is None)


def test_no_gradients_have_norm_zero() -> None:
    check = norm_and_finite([])
    assert check.norm.item() == 0.0
    assert check.count_nonfinite().shape == check.tensor_norms.shape == (0,)


def test_gradients_are_read_only_and_outside_autograd() -> None:
    grad = torch.randn(9, requires_grad=True)
    before = (grad._version, grad.detach().clone())
    check = norm_and_finite([grad], torch.tensor(0.25))
    assert not check.norm.requires_grad
    assert grad._version == before[0]
    assert torch.equal(grad, before[1])


class TestLateNorm:
    """The norm of norms, which few steps are asked for."""

    @pytest.mark.parametrize("count", [1, 7, 33, 300])
    def test_it_is_torchs_to_the_last_bit(self, count: int) -> None:
        grads = [torch.randn(5) for _ in range(count)]
        check = norm_and_finite(grads)
        assert check.known is not None and float(check.known) == check.norm.item()
        assert check.norm.equal(torch.linalg.vector_norm(check.tensor_norms))

    @pytest.mark.parametrize("value", [1.0, 0.0, 1e-20, 3e38, math.inf, math.nan])
    def test_whether_it_is_finite_or_small_needs_no_sum(self, value: float) -> None:
        check = norm_and_finite([torch.tensor([value]), torch.tensor([1.0])])
        assert check.known is not None
        norm = float(check.known)
        assert check.known.is_finite() == math.isfinite(norm) == bool(check.norm.isfinite())
        for bound in (0.0, 0.9, 1.0, 2.0, 1e39):
            assert check.known.is_at_most(bound, 1.0) == (norm <= bound)
