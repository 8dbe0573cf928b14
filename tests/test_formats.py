"""Facts about the formats, checked bit by bit; spacing, names, and what this CPU computes natively."""

from __future__ import annotations

import math
import platform
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from mezzo.errors import FormatError
from mezzo.formats import (
    FORMATS,
    LOW_DTYPES,
    as_device,
    describe,
    dtype_name,
    format_of,
    is_count,
    is_number,
    native_support,
    parse_dtype,
    ulp,
)  # fmt: skip

NAMES = [name for name in FORMATS if name != "tf32"]
SIXTEEN = [torch.float16, torch.bfloat16]
EIGHT = [torch.float8_e4m3fn, torch.float8_e5m2]


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All bit patterns of a 16-bit or 8-bit dtype, in the order of their bits."""
    bits = 8 * dtype.itemsize
    return torch.arange(2**bits, dtype=torch.int32).to(torch.int16 if bits == 16 else torch.uint8).view(dtype)


@pytest.mark.parametrize("name", NAMES)
def test_a_format_is_what_its_bit_fields_say(name: str) -> None:
    """The value of a bit pattern by IEEE 754; e4m3fn spends only the last pattern on NaN, so its max is lower by one."""
    fmt = FORMATS[name]
    e, m = fmt.exponent_bits, fmt.mantissa_bits
    bias = 2 ** (e - 1) - 1
    assert fmt.bits == 8 * fmt.dtype.itemsize
    assert fmt.tiny == 2.0 ** (1 - bias)
    assert fmt.smallest == 2.0 ** (1 - bias - m)
    assert fmt.eps == 2.0**-m
    top = (2 - 2.0 ** (1 - m)) * 2.0 ** (bias + 1) if name == "e4m3" else (2 - 2.0**-m) * 2.0**bias
    assert fmt.max == top


def test_tf32_is_fp32_with_the_fraction_of_fp16() -> None:
    tf32, fp32, fp16 = FORMATS["tf32"], FORMATS["fp32"], FORMATS["fp16"]
    assert (tf32.bits, tf32.exponent_bits, tf32.mantissa_bits) == (19, fp32.exponent_bits, fp16.mantissa_bits)
    assert (tf32.eps, tf32.tiny, tf32.dtype) == (fp16.eps, fp32.tiny, torch.float32)
    # The largest value is that of fp32 with the 13 low fraction bits cleared.
    (bits,) = struct.unpack("<I", struct.pack("<f", fp32.max))
    (cleared,) = struct.unpack("<f", struct.pack("<I", bits & ~0x1FFF))
    assert tf32.max == cleared
    assert tf32.smallest == tf32.tiny * tf32.eps


@pytest.mark.parametrize("dtype", [*SIXTEEN, *EIGHT], ids=dtype_name)
def test_max_tiny_and_smallest_are_values_of_the_format(dtype: torch.dtype) -> None:
    fmt, values = format_of(dtype), every_value(dtype).double()
    finite = values[values.isfinite()]
    assert finite.max().item() == fmt.max
    assert finite[finite > 0].min().item() == fmt.smallest
    assert (finite == fmt.tiny).any()
    assert finite[finite > 1].min().item() - 1.0 == fmt.eps


class TestUlp:
    """`ulp` against the distance to the neighbouring bit pattern."""

    @pytest.mark.parametrize("dtype", [*SIXTEEN, *EIGHT], ids=dtype_name)
    def test_every_value(self, dtype: torch.dtype) -> None:
        """The next larger magnitude has the bit pattern one higher; at the top the spacing below holds."""
        values = every_value(dtype)
        half = len(values) // 2
        magnitudes = values[:half].double()
        above = torch.cat([magnitudes[1:], torch.tensor([torch.nan], dtype=torch.float64)])
        distance = torch.where(above.isfinite(), above - magnitudes, torch.nan)
        top = int((magnitudes == format_of(dtype).max).nonzero())
        distance[top] = magnitudes[top] - magnitudes[top - 1]
        assert torch.equal(magnitudes.isfinite(), distance.isfinite())
        for sign in (values[:half], values[half:]):
            got = ulp(sign) if dtype in SIXTEEN else ulp(sign.double(), dtype)
            assert got.dtype is torch.float64
            assert torch.equal(got.isnan(), distance.isnan())
            assert torch.equal(got.nan_to_num(), distance.nan_to_num())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
    def test_wide_formats_against_nextafter(self, dtype: torch.dtype) -> None:
        fmt = format_of(dtype)
        exponents = torch.arange(-1074 if dtype is torch.float64 else -149, 1024 if dtype is torch.float64 else 128)
        powers = torch.tensor([2.0**e for e in exponents.tolist()], dtype=torch.float64)
        fraction = torch.rand(len(powers), dtype=torch.float64) + 1
        values = torch.cat([powers, (powers * fraction).clamp(max=fmt.max)]).to(dtype)
        values = values[values < fmt.max / 2]
        above = torch.nextafter(values, torch.full_like(values, torch.inf))
        assert torch.equal(ulp(values), above.double() - values.double())
        assert torch.equal(ulp(-values), ulp(values))

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *SIXTEEN], ids=dtype_name)
    def test_specials(self, dtype: torch.dtype) -> None:
        fmt = format_of(dtype)
        values = torch.tensor(
            [0.0, -0.0, fmt.smallest, fmt.tiny, 1.0, fmt.max, torch.inf, -torch.inf, torch.nan], dtype=dtype
        )
        spacing = ulp(values)
        assert spacing[:6].tolist() == [*[fmt.smallest] * 4, fmt.eps, fmt.max * fmt.eps / (2 - fmt.eps)]
        assert spacing[6:].isnan().all()

    def test_of_another_format(self) -> None:
        values = torch.tensor([1.0, 3.0, 2.0**-14, 0.0])
        assert ulp(values, torch.bfloat16).tolist() == [2.0**-7, 2.0**-6, 2.0**-21, FORMATS["bf16"].smallest]
        assert ulp(values, torch.float16).tolist() == [2.0**-10, 2.0**-9, 2.0**-24, 2.0**-24]

    @pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 63), (2, 0, 5)])
    def test_shapes(self, shape: tuple[int, ...]) -> None:
        values = torch.rand(shape)
        assert ulp(values).shape == shape
        assert torch.equal(
            ulp(values.mT if values.dim() > 1 else values), ulp(values.mT.contiguous() if values.dim() > 1 else values)
        )

    def test_a_parameter_is_not_tracked_or_written(self) -> None:
        weight = torch.nn.Parameter(torch.ones(3))
        assert not ulp(weight).requires_grad
        assert torch.equal(weight, torch.ones(3))

    @pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
    def test_what_is_no_format_is_refused(self, dtype: torch.dtype) -> None:
        with pytest.raises(FormatError, match="is not a floating format mezzo knows"):
            ulp(torch.ones(2, dtype=dtype))
        with pytest.raises(FormatError, match="is not a floating format mezzo knows"):
            ulp(torch.ones(2), dtype)


class TestNames:
    """`parse_dtype`, `dtype_name`, `format_of`, `describe`."""

    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *SIXTEEN], ids=dtype_name)
    def test_every_spelling_of_a_dtype(self, dtype: torch.dtype) -> None:
        short = dtype_name(dtype)
        for word in (short, short.upper(), str(dtype), str(dtype).removeprefix("torch."), f" {short} "):
            assert parse_dtype(word) is dtype
        assert format_of(dtype).name == short

    @pytest.mark.parametrize(
        ("word", "dtype"), [("half", torch.float16), ("float", torch.float32), ("double", torch.float64)]
    )
    def test_spellings_of_torch(self, word: str, dtype: torch.dtype) -> None:
        assert parse_dtype(word) is getattr(torch, word) is dtype

    @pytest.mark.parametrize(
        ("word", "message"),
        [
            ("bf61", "unknown dtype 'bf61'. Did you mean 'bf16'?"),
            ("int8", "unknown dtype 'int8'. Valid: bf16, fp16, fp32, fp64, fp8."),
            ("", "unknown dtype ''. Valid: bf16, fp16, fp32, fp64, fp8."),
        ],
    )
    def test_an_unknown_dtype_names_the_nearest(self, word: str, message: str) -> None:
        with pytest.raises(FormatError) as raised:
            parse_dtype(word)
        assert str(raised.value) == message

    def test_every_dtype_has_a_name(self) -> None:
        assert [dtype_name(d) for d in (torch.int64, torch.bool, torch.float8_e5m2)] == ["int64", "bool", "float8_e5m2"]

    def test_tf32_is_no_dtypes_format(self) -> None:
        assert format_of(torch.float32).name == "fp32"
        assert [format_of(d).name for d in EIGHT] == ["e4m3", "e5m2"]

    def test_low_dtypes_are_the_16_bit_ones(self) -> None:
        assert {fmt.dtype for fmt in FORMATS.values() if fmt.bits == 16} == set(LOW_DTYPES)

    @pytest.mark.parametrize(
        ("tensor", "text"),
        [
            (torch.zeros(2, 3), "fp32[2,3] cpu"),
            (torch.tensor(1), "int64[] cpu"),
            (torch.empty(0, dtype=torch.bfloat16), "bf16[0] cpu"),
            (torch.empty(4, device="meta", dtype=torch.float16), "fp16[4] meta"),
        ],
    )
    def test_a_tensor_is_described_without_its_values(self, tensor: torch.Tensor, text: str) -> None:
        assert describe(tensor) == text


def cpu_flags() -> set[str]:
    """What the kernel reports of this CPU, read past torch."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


class TestNativeSupport:
    """`native_support` against what the kernel says of this CPU."""

    @pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="x86 Linux flags")
    @pytest.mark.parametrize(
        ("dtype", "units"),
        [(torch.bfloat16, {"avx512_bf16", "amx_bf16"}), (torch.float16, {"amx_fp16"}), (torch.float8_e4m3fn, set())],
        ids=["bf16", "fp16", "e4m3"],
    )
    def test_this_cpu(self, dtype: torch.dtype, units: set[str]) -> None:
        support = native_support("cpu", dtype)
        assert support.native == bool(units & cpu_flags())
        if not support.native:
            assert support.reason == f"no CPU unit for {dtype_name(dtype)}"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_name)
    @pytest.mark.parametrize("device", ["cpu", "cuda", torch.device("mps")])
    def test_wide_formats_are_native_everywhere(self, device: object, dtype: torch.dtype) -> None:
        support = native_support(device, dtype)  # type: ignore[arg-type]
        assert support.native
        assert support.reason == "every device computes it"

    @pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64])
    def test_what_is_no_float_is_refused(self, dtype: torch.dtype) -> None:
        with pytest.raises(FormatError, match="is not a floating dtype; ask for one of fp64, fp32"):
            native_support("cpu", dtype)

    def test_a_device_that_does_not_report_says_so(self) -> None:
        assert native_support("xpu", torch.float16).reason == "assumed: xpu does not report its units"

    @pytest.mark.skipif(torch.cuda.is_available(), reason="asks about a device that is not there")
    def test_a_device_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(FormatError, match=r"what cuda computes cannot be read here: .*(CUDA|NVIDIA)"):
            native_support("cuda", torch.float16)

    @pytest.mark.parametrize("device", ["zz", "", "cpu:x", None, [], 3.5, torch.float32])
    def test_what_is_no_device_is_refused(self, device: Any) -> None:
        for ask in (as_device, lambda given: native_support(given, torch.float16)):
            with pytest.raises(FormatError) as refusal:
                ask(device)
            assert f"there is no device {device!r}; write one of torch's, such as 'cpu' or 'cuda:0'." == str(
                refusal.value
            )

    def test_a_device_is_itself(self) -> None:
        assert as_device("cuda:1") == as_device(torch.device("cuda", 1)) == torch.device("cuda:1")

    @pytest.mark.cuda
    def test_this_gpu(self) -> None:
        capability = torch.cuda.get_device_capability()
        assert native_support("cuda", torch.float16).native == (capability >= (7, 0))
        assert native_support("cuda", torch.bfloat16).native == (capability >= (8, 0))
        assert native_support("cuda", torch.float8_e4m3fn).native == (capability >= (8, 9))


NO_NUMBERS = [None, "1", True, [1], 1j, torch.ones(()), math.nan, math.inf, -math.inf, 1e39, -1e300, 2**64, -(10**400)]


@pytest.mark.parametrize(
    "value", [0, -3, 2.5, 2**63 - 1, -(2**63), FORMATS["fp32"].max, 2.0**-149, 10**400, *NO_NUMBERS]
)
def test_a_number_is_what_torch_takes_as_one_of_fp32(value: object) -> None:
    """As an operand and as the number of a foreach list, which is read as fp32 where the tensor is."""
    try:
        torch.full((), value, dtype=torch.float32)  # type: ignore[call-overload]
        takes = not isinstance(value, (bool, torch.Tensor)) and math.isfinite(value)  # type: ignore[arg-type]
    except (RuntimeError, TypeError, OverflowError):
        takes = False
    assert is_number(value) is takes


def test_bounds_belong_to_the_range_and_nan_to_none() -> None:
    assert is_number(1, 1) and is_number(2.0, 1, 2) and is_number(math.inf, 0, math.inf)
    assert not (is_number(0, 1) or is_number(2.5, 1, 2) or is_number(math.nan, -math.inf, math.inf))
    assert not (is_number(10**400, 0, math.inf) or is_number(2**63, 0, math.inf))


@pytest.mark.parametrize("value", [0, 7, 2**31 - 1, -1, 2**63, 10**400, 1.0, "1", True, None, math.nan])
def test_a_count_is_a_whole_number_of_so_many_bits(value: object) -> None:
    assert is_count(value) is is_count(value, bits=31) is (value in (0, 7, 2**31 - 1) and type(value) is int)
    assert is_count(2**31) and not is_count(2**31, bits=31)
    assert not is_count(0, 1) and is_count(1, 1)
