"""Dividing by the scale: every dtype, layout and device; what is found; what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mezzo.errors import MasterError
from mezzo.formats import FORMATS
from mezzo.loss_scale.unscale import divide_, has_nonfinite, is_unusable

SCALE = 2.0**10
REAL = [torch.float32, torch.float64, torch.bfloat16]
ALL = [*REAL, torch.complex64, torch.complex128]
SHAPES = [(), (1,), (63,), (127,), (4, 5), (0,), (3, 0)]


def unscale_(grads: Sequence[Tensor], scale: Tensor) -> Tensor:
    """Divide gradients by a scale as a scaler does."""
    return divide_(grads, scale.reciprocal(), is_unusable(scale))


def sparse(values: Tensor, coalesced: bool) -> Tensor:
    indices = torch.arange(len(values)) // (1 if coalesced else 2)
    grad = torch.sparse_coo_tensor(indices[None], values, (len(values),), check_invariants=True)
    return grad.coalesce() if coalesced else grad


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda values: values,
    "transposed": lambda values: values.repeat(2, 1).t(),
    "every other": lambda values: values.repeat_interleave(2)[::2],
    "coalesced": lambda values: sparse(values, True),
    "uncoalesced": lambda values: sparse(values, False),
    "csr": lambda values: sparse_csr(values),
}


def sparse_csr(values: Tensor) -> Tensor:
    count = len(values)
    return torch.sparse_csr_tensor([0, count], torch.arange(count), values, (1, count), check_invariants=True)


@pytest.fixture(autouse=True)
def quiet_sparse() -> Iterator[None]:
    with torch.sparse.check_sparse_tensor_invariants():
        yield


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_divides_every_dtype_and_layout_exactly(dtype: torch.dtype, layout: str) -> None:
    true = torch.randn(8, dtype=dtype)
    grad, want = LAYOUTS[layout](true * SCALE), LAYOUTS[layout](true)
    assert float(unscale_([grad], torch.tensor(SCALE))) == 0.0
    assert torch.equal(grad.to_dense(), want.to_dense())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_divides_every_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    true = torch.randn(shape, dtype=dtype)
    grad = true * SCALE
    assert float(unscale_([grad], torch.tensor(SCALE))) == 0.0
    assert torch.equal(grad, true)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*ALL, torch.float16], ids=str)
def test_one_bad_element_is_found_wherever_it_is(dtype: torch.dtype, layout: str, bad: float) -> None:
    for index in (0, 7):
        values = torch.ones(8, dtype=dtype)
        values[index] = complex(1.0, bad) if dtype.is_complex else bad
        grads = [torch.ones(3, dtype=dtype), LAYOUTS[layout](values), torch.ones(2)]
        assert float(has_nonfinite(grads)) == 1.0
        if dtype is not torch.float16:
            assert float(unscale_(grads, torch.tensor(SCALE))) == 1.0


@pytest.mark.parametrize("dtype", [*ALL, torch.float16], ids=str)
def test_the_largest_and_smallest_values_are_finite(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    grad = torch.tensor([info.max, -info.max, info.tiny, info.tiny * info.eps, 0.0, -0.0], dtype=dtype)
    assert float(has_nonfinite([grad] * 40)) == 0.0


@pytest.mark.parametrize("dtype", [*REAL, torch.float16], ids=str)
def test_looking_changes_no_bit(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    grad = torch.tensor([1.1, -0.0, info.tiny * info.eps, info.max, math.inf, math.nan], dtype=dtype)
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[grad.element_size()]
    before = grad.view(integers).clone()
    assert float(has_nonfinite([grad])) == 1.0
    assert torch.equal(grad.view(integers), before)


def test_conjugate_views_are_divided_in_place() -> None:
    base = torch.randn(4, dtype=torch.complex64)
    grad = (base * SCALE).conj()
    unscale_([grad], torch.tensor(SCALE))
    assert grad.is_conj() and torch.equal(grad, base.conj())


def test_duplicates_of_a_sparse_gradient_that_overflow_only_while_scaled_are_no_overflow() -> None:
    largest = torch.finfo(torch.float32).max
    grad = sparse(torch.tensor([largest, largest]), coalesced=False)
    assert float(unscale_([grad], torch.tensor(4.0))) == 0.0
    assert grad.to_dense()[0].item() == largest / 2


def test_nothing_to_divide_finds_nothing() -> None:
    assert float(unscale_([], torch.tensor(SCALE))) == 0.0 == float(has_nonfinite([]))


@pytest.mark.parametrize("scale", [0.0, math.inf, -math.inf, math.nan, 2.0**-149, 2.0**-128])
def test_a_scale_without_a_finite_reciprocal_counts_as_a_finding(scale: float) -> None:
    """S6: such a scale would turn healthy gradients into NaN or zeros."""
    assert float(is_unusable(torch.tensor(scale))) == 1.0
    assert float(unscale_([torch.ones(2)], torch.tensor(scale))) == 1.0


@pytest.mark.parametrize("exponent", [-126, -1, 0, 16, 127])
def test_powers_of_two_of_fp32_are_usable(exponent: int) -> None:
    assert float(is_unusable(torch.tensor(2.0**exponent))) == 0.0


def test_fp16_gradients_are_refused_before_anything_is_written() -> None:
    fine, half = torch.full((2,), 8.0), torch.full((2, 3), 8.0, dtype=torch.float16)
    with pytest.raises(MasterError) as refusal:
        unscale_([fine, half], torch.tensor(8.0))
    assert str(refusal.value) == (
        "unscale_() got 1 fp16 gradients (the first: fp16[2,3] cpu), and dividing them in fp16 flushes small ones to "
        "zero. Divide an fp32 copy, or keep the weights in fp32."
    )
    assert fine.tolist() == [8.0, 8.0] and half.unique().tolist() == [8.0]


def test_why_fp16_gradients_are_refused() -> None:
    """Every fp16 value that scaling by 65536 lifted out of the flushed range is flushed again by an fp16 division."""
    smallest = FORMATS["fp16"].smallest
    scaled = torch.tensor([smallest / 4 * 65536.0], dtype=torch.float16)
    assert scaled.item() / 65536.0 == smallest / 4
    assert (scaled / 65536.0).item() == 0.0


def test_no_fp64_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """P30: devices without fp64 divide too; the reciprocal of a power of two is exact in fp32."""

    class NoDouble(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            assert not (isinstance(out, Tensor) and out.dtype is torch.float64), func
            return out

    grad = torch.randn(5)
    want = grad * 2.0**-16
    with NoDouble():
        unscale_([grad], torch.tensor(65536.0))
    assert torch.equal(grad, want)


class Calls(TorchDispatchMode):
    """Counts the passes over gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.factors: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._overloadpacket.__name__)
        if self.names[-1] == "_foreach_mul_":  # CUDA's kernel for many tensors takes a factor in their dtype alone
            self.factors.append(args[0][0].dtype is args[1].dtype)
        return func(*args, **(kwargs or {}))


def test_several_devices_are_divided_in_one_pass_for_each_device_and_dtype() -> None:
    """Device arithmetic on imitated devices: no values, but every rule about devices and dtypes is torch's."""
    with FakeTensorMode():
        grads = [
            torch.empty(3, device=device, dtype=dtype)
            for device in ("cpu", "cuda:0", "cuda:1")
            for dtype in (torch.float32, torch.bfloat16)
            for _ in range(4)
        ]
        with Calls() as calls:
            found = unscale_(grads, torch.empty((), device="cuda:1"))
    assert found.device == torch.device("cuda:1") and found.shape == () and found.dtype is torch.float32
    assert calls.names.count("_amp_foreach_non_finite_check_and_unscale_") == 4  # fp32 thrice, bf16 on the CPU
    assert calls.names.count("_foreach_mul_") == calls.names.count("_foreach_norm") == 2  # bf16 on CUDA
    assert calls.factors == [True, True]


def test_a_dtype_that_torchs_kernel_lacks_is_divided_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: the way bf16 goes on CUDA, run on values by telling it that the kernel takes no fp32."""
    kernel = torch.randn(9)
    foreach, broken = kernel.clone(), torch.tensor([1.0, math.nan])
    unscale_([kernel], torch.tensor(SCALE))
    monkeypatch.setattr("mezzo.loss_scale.unscale._KERNEL_DTYPES", ())
    assert float(unscale_([foreach], torch.tensor(SCALE))) == 0.0
    assert torch.equal(kernel, foreach)
    assert float(unscale_([foreach, broken], torch.tensor(SCALE))) == 1.0
