"""Facts about the number formats of mixed precision, and which of them a device computes natively."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .errors import FormatError, check_given, did_you_mean, first_line, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A binary floating-point format.

    Attributes:
        name: short name, as written in a policy.
        dtype: the torch dtype that stores it; tf32 is stored as float32.
        exponent_bits: width of the exponent field.
        mantissa_bits: stored fraction bits, without the hidden one.
        max: largest finite value.
        tiny: smallest normal value.
        smallest: smallest subnormal value.
        eps: distance from 1 to the next value.
    """

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    max: float
    tiny: float
    smallest: float
    eps: float

    @property
    def bits(self) -> int:
        """Width of a value as the arithmetic sees it: sign, exponent, fraction."""
        return 1 + self.exponent_bits + self.mantissa_bits


def _from_finfo(name: str, dtype: torch.dtype, exponent_bits: int, mantissa_bits: int) -> Format:
    info = torch.finfo(dtype)
    return Format(
        name=name, dtype=dtype, exponent_bits=exponent_bits, mantissa_bits=mantissa_bits, max=info.max,
        tiny=info.tiny, smallest=info.tiny * 2.0**-mantissa_bits, eps=info.eps,
    )  # fmt: skip


# Source of tf32: NVIDIA A100 architecture whitepaper: 8 exponent bits, 10 fraction bits, stored in 32.
_TF32 = replace(_from_finfo("tf32", torch.float32, 8, 10), max=(2.0 - 2.0**-10) * 2.0**127, eps=2.0**-10)

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        _from_finfo("fp64", torch.float64, 11, 52),
        _from_finfo("fp32", torch.float32, 8, 23),
        _TF32,
        _from_finfo("fp16", torch.float16, 5, 10),
        _from_finfo("bf16", torch.bfloat16, 8, 7),
        _from_finfo("e4m3", torch.float8_e4m3fn, 4, 3),
        _from_finfo("e5m2", torch.float8_e5m2, 5, 2),
    )
}

_SPELLINGS: dict[str, torch.dtype] = {
    "fp64": torch.float64, "float64": torch.float64, "double": torch.float64, "f64": torch.float64,
    "fp32": torch.float32, "float32": torch.float32, "float": torch.float32, "f32": torch.float32,
    "fp16": torch.float16, "float16": torch.float16, "half": torch.float16, "f16": torch.float16,
    "bf16": torch.bfloat16, "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip
_WITHOUT_FP64 = {"mps"}
FP8 = torch.float8_e4m3fn
"""Of reduced gradients alone, in blocks with a scale each."""
_SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", FP8: "fp8"}
LOW_DTYPES = (torch.float16, torch.bfloat16)
MIXED_DTYPES = (torch.float32, *LOW_DTYPES)
"""What a region casts, and casts to."""
SMALLEST, LARGEST = FORMATS["fp32"].smallest, FORMATS["fp32"].max


def is_number(value: object, low: float = -LARGEST, high: float = LARGEST) -> bool:
    """Whether a value from outside is a number that torch takes, from `low` to `high`: no flag, no NaN, a whole one of 64 bits.

    >>> is_number(1e-3, 0), is_number(10**400), is_number(float("inf"), 0), is_number(float("inf"), 0, float("inf"))
    (True, False, False, True)
    """
    is_whole = isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    return (is_whole or isinstance(value, float)) and low <= value <= high  # type: ignore[operator]  # a number by now


def is_count(value: object, low: int = 0, bits: int = 63) -> bool:
    """Whether a value from outside is a whole number from `low` of so many bits; counters on a device have 31."""
    return isinstance(value, int) and is_number(value, low, 2**bits - 1)


def is_one_of(value: object, known: Iterable[object]) -> bool:
    """Whether a value from outside is one of some words, dtypes or None; nobody else's `==` is asked."""
    return any(value is one or (isinstance(value, str) and value == one) for one in known)


def number_of(value: Any) -> Any:
    """Return what a tensor of one element, or a number of numpy's, holds; anything else as it is. Syncs: for a tensor."""
    try:
        return getattr(value, "item", lambda: +value)()  # a flag counts as 0 or 1, as in torch
    except (RuntimeError, TypeError, ValueError):
        return value


def parse_dtype(name: str) -> torch.dtype:
    """Return the torch dtype a name stands for.

    Args:
        name: fp64, fp32, fp16, bf16 or fp8 (e4m3), or torch's spelling with or without "torch.".

    Raises:
        FormatError: unknown name; the nearest valid spelling is named.

    >>> parse_dtype("bf16"), parse_dtype("torch.float16")
    (torch.bfloat16, torch.float16)
    """
    try:
        return _SPELLINGS[name.strip().casefold().removeprefix("torch.")]
    except (AttributeError, KeyError, TypeError):
        raise FormatError(f"unknown dtype {shown(name)}.{did_you_mean(name, _SHORT.values())}") from None


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: fp32, bf16, or torch's own name for the rest.

    >>> dtype_name(torch.bfloat16), dtype_name(torch.int64)
    ('bf16', 'int64')
    """
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


def widest(device: torch.device) -> torch.dtype:
    """Return the widest floating dtype a device computes in: fp32 on Apple's GPUs, fp64 on every other."""
    return torch.float32 if device.type in _WITHOUT_FP64 else torch.float64


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in the `widest` dtype of its device. Syncs: no."""
    return tensor.to(widest(tensor.device))


def overflowing(dtype: torch.dtype, tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return which tensors, by name and with their largest magnitude, a dtype of the range of fp16 or less does not hold. Syncs: for such a dtype.

    >>> overflowing(torch.float16, [("a", torch.tensor([-1e5])), ("b", torch.tensor([65504.0]))])
    ['a (100000)']
    """
    facts, found = torch.finfo(dtype), []
    for name, tensor in tensors if facts.max < 1e6 else ():
        own: Tensor = getattr(tensor, "to_local", lambda t=tensor: t)().detach()  # of a sharded one this rank's part
        if own.numel() and not own.is_meta and own.is_floating_point() and own.element_size() > 1:
            top = float(own.abs().amax())
            if facts.max * (1 + facts.eps / 4) <= top < math.inf:  # below, it rounds to the largest number
                found.append(f"{name} ({top:g})")
    return found


def extremes(tensor: Tensor) -> tuple[float, float]:
    """Return the least and the largest number in a dense tensor, or its part on this rank; both NaN where it holds one, 0 where it holds none. Syncs: yes."""
    own: Tensor = getattr(tensor, "to_local", lambda: tensor)().detach()
    is_plain = type(own) in (Tensor, torch.nn.Parameter)  # other classes may have no such op
    if not is_plain or own.numel() == 0 or own.is_meta or own.layout is not torch.strided:
        return 0.0, 0.0
    values = torch.view_as_real(own.resolve_conj()) if own.is_complex() else own
    least, largest = torch.stack(torch.aminmax(values.float() if values.element_size() == 1 else values)).tolist()
    return least, largest


def format_of(dtype: torch.dtype) -> Format:
    """Return the facts of the format a floating dtype stores.

    Raises:
        FormatError: not one of the formats in `FORMATS`.
    """
    for fmt in FORMATS.values():
        if fmt.dtype is dtype and fmt.name != "tf32":
            return fmt
    raise FormatError(f"{shown(dtype)} is not a floating format mezzo knows.{did_you_mean(dtype, FORMATS)}")


def describe(tensor: object) -> str:
    """Return dtype, shape and device of a tensor in one word for messages; anything else as they show it. Syncs: no.

    >>> describe(torch.zeros(2, 3))
    'fp32[2,3] cpu'
    """
    if not isinstance(tensor, Tensor):
        return shown(tensor)
    sizes = "nested" if tensor.is_nested else ",".join(map(str, tensor.shape))  # a nested one may have no shape
    return f"{dtype_name(tensor.dtype)}[{sizes}] {tensor.device}"


def ulp(values: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the distance from each value's magnitude to the next larger one in a format.

    Args:
        values: any shape; fp64, fp32, fp16 or bf16.
        dtype: the format whose spacing is asked; the dtype of `values` when left out.

    Returns:
        The shape of `values`, fp64, or fp32 where the device has none; NaN where a value is not finite.

    Raises:
        FormatError: `dtype` is not a floating format of `FORMATS`.

    Syncs: no.
    Source: IEEE 754-2019; the spacing below `tiny` is that of the subnormals.

    >>> ulp(torch.tensor([1.0, 2.0]), torch.bfloat16).tolist()
    [0.0078125, 0.015625]
    """
    check_given("ulp", "values", values, Tensor, "a tensor", FormatError)
    fmt = format_of(values.dtype if dtype is None else dtype)
    magnitude = widened(values.detach()).abs()
    _, exponent = torch.frexp(magnitude.clamp(min=fmt.tiny))
    spacing = torch.ldexp(torch.ones_like(magnitude), exponent - 1 - fmt.mantissa_bits)
    return torch.where(magnitude.isfinite(), spacing, torch.nan)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeSupport:
    """Whether a device has arithmetic units for a dtype.

    Attributes:
        native: True if matrix products in this dtype run on units made for it.
        reason: where that was read.
    """

    native: bool
    reason: str


# Source: CUDA C++ Programming Guide, arithmetic throughput by compute capability.
_CUDA_SINCE = {torch.float16: (7, 0), torch.bfloat16: (8, 0)}
_CPU_FLAGS = {
    torch.bfloat16: ("_is_avx512_bf16_supported", "_is_amx_tile_supported"),
    torch.float16: ("_is_amx_fp16_supported",),
}


def as_device(device: torch.device | str) -> torch.device:
    """Return the device that is meant, which need not be here. Host only.

    Raises:
        FormatError: torch has no such device.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise FormatError(
            f"there is no device {shown(device)}; write one of torch's, such as 'cpu' or 'cuda:0'."
        ) from None


def why_not_here(device: torch.device) -> str:
    """Say why nothing can be computed on a device; empty if it can. Starts it. Syncs: yes."""
    if device.type == "meta":
        return "nothing has values on it"
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # as many kinds as devices; some say it at length, or ask for a bug report
        line = first_line(error)
        is_long = isinstance(error, NotImplementedError | ImportError) or "INTERNAL ASSERT" in line
        return "this torch has no such device" if is_long else line
    return ""


def native_support(device: torch.device | str, dtype: torch.dtype) -> NativeSupport:
    """Say whether a device multiplies matrices of a dtype natively, from what it reports of itself.

    Emulation does not count: torch's own `is_bf16_supported()` says yes for emulated bf16.

    Args:
        device: the device asked about; CUDA is started for a CUDA device.
        dtype: any floating dtype.

    Returns:
        The answer and where it was read. fp32 and fp64 are native everywhere.

    Raises:
        FormatError: not a floating dtype, or a device that does not exist or is not here.

    Syncs: no.
    """
    device = as_device(device)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise FormatError(f"{shown(dtype)} is not a floating dtype; ask for one of {', '.join(FORMATS)}.")
    if dtype in (torch.float32, torch.float64):
        return NativeSupport(native=True, reason="every device computes it")
    if device.type == "cuda":
        try:
            capability = torch.cuda.get_device_capability(device)
        except (AssertionError, RuntimeError) as error:  # a torch without CUDA asserts
            raise FormatError(f"what {device} computes cannot be read here: {first_line(error)}.") from None
        since = _CUDA_SINCE.get(dtype, (8, 9))
        found = f"compute capability {capability[0]}.{capability[1]}, needed {since[0]}.{since[1]}"
        return NativeSupport(native=capability >= since, reason=found)
    if device.type == "cpu":
        flags = [flag for flag in _CPU_FLAGS.get(dtype, ()) if getattr(torch.cpu, flag, lambda: False)()]
        units = ", ".join(flag.removeprefix("_is_").removesuffix("_supported") for flag in flags)
        return NativeSupport(native=bool(flags), reason=units or f"no CPU unit for {dtype_name(dtype)}")
    return NativeSupport(native=True, reason=f"assumed: {device.type} does not report its units")


def memory_bytes() -> int:
    """Return the bytes of memory that the machine has; 0 where no one says. Host only."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0
