"""What the Triton steps are made of: one block of one tensor, from what is stored to fp32 and back.

Precision: 16-bit values are widened exactly, computed on in fp32 and narrowed as split/ and rounding/ define; the same
arithmetic as formats.h and masters.h of the C++ kernels. Only what Triton's interpreter knows is used, so that the kernels
also run without a GPU.
"""

import torch
import triton
import triton.language as tl

from . import launch_once

OWN = tl.constexpr(0)
SPLIT = tl.constexpr(1)
MASTER = tl.constexpr(2)
KAHAN = tl.constexpr(3)
STOCHASTIC = tl.constexpr(4)
FP32 = tl.constexpr(0)
BF16 = tl.constexpr(1)
FP16 = tl.constexpr(2)


@triton.jit
def load_pointer(p_address, ALIGNED: tl.constexpr):
    """Return what an address points to, as bytes; the compiler makes vectors of what it knows to be a multiple of 16."""
    pointer = tl.load(p_address).to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def block_of(p_blocks, p_sizes, count, SIZE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the tensor of this program, the indices of its elements, and which of them exist."""
    block = tl.program_id(0)
    tensor = tl.load(p_blocks + block)
    indices = tl.multiple_of(tl.load(p_blocks + count + block), SIZE) + tl.arange(0, SIZE).to(tl.int64)
    size = tl.load(p_sizes + tensor)
    return tensor, indices, indices < (tl.multiple_of(size, 16) if ALIGNED else size)


@triton.jit
def is_nan(x):
    """Say where values are NaN."""
    return x != x  # noqa: PLR0124 - the definition of NaN


@triton.jit
def bits_of(x):
    """Return the bits of fp32 values as uint32."""
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def from_bits(bits):
    """Return the fp32 values of uint32 bits."""
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def mix(x):
    """Scatter uint32 over uint32; `rounding.mix`."""
    x = (x ^ (x >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def random_key(seed, step, STREAM: tl.constexpr):
    """Return the key of one tensor's random bits; `rounding.random_key`."""
    golden = tl.full((), 0x9E3779B9, tl.uint32)
    count = step.to(tl.int64).to(tl.uint32)
    return mix(count * golden + mix(seed.to(tl.uint32) + STREAM * golden))


@triton.jit
def narrow(x, FORMAT: tl.constexpr):
    """Return the 16 bits of the nearest value, ties to even, as uint16."""
    if FORMAT == BF16:
        bits = bits_of(x)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(is_nan(x), 0x7FC0, nearest).to(tl.uint16)
    else:
        return x.to(tl.float16).to(tl.uint16, bitcast=True)


@triton.jit
def widen(low, FORMAT: tl.constexpr):
    """Return the fp32 values of 16 bits held in uint16."""
    if FORMAT == BF16:
        return from_bits(low.to(tl.uint32) << 16)
    else:
        return low.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load(address, indices, mask, FORMAT: tl.constexpr):
    """Return values at an int64 address, widened; 0 beyond the end."""
    if FORMAT == FP32:
        return tl.load(address.to(tl.pointer_type(tl.float32)) + indices, mask=mask, other=0.0)
    else:
        low = tl.load(address.to(tl.pointer_type(tl.uint16)) + indices, mask=mask, other=0)
        return widen(low, FORMAT)


@triton.jit
def store_low(address, indices, mask, low):
    """Write 16-bit patterns to an int64 address."""
    tl.store(address.to(tl.pointer_type(tl.uint16)) + indices, low.to(tl.uint16), mask=mask)


@triton.jit
def store_fp32(address, indices, mask, x):
    """Write fp32 values to an int64 address."""
    tl.store(address.to(tl.pointer_type(tl.float32)) + indices, x, mask=mask)


@triton.jit
def stochastic_round(x, random_bits, FORMAT: tl.constexpr):
    """Return the 16 bits of a neighbour chosen stochastically; `rounding.stochastic_round`."""
    bits = bits_of(x)
    magnitude = bits & 0x7FFFFFFF
    is_finite = magnitude < 0x7F800000
    low = random_bits & 0xFFFF
    if FORMAT == BF16:
        return tl.where(is_finite, (bits + low) >> 16, narrow(x, BF16).to(tl.uint32)).to(tl.uint16)
    else:
        low = low >> 3
        steps = tl.floor(from_bits(magnitude) * 16777216.0 + low.to(tl.float32) * (1.0 / 8192))
        small = bits_of(steps * (1.0 / 16777216)) | (bits & 0x80000000)
        normal = ((bits + low) >> 13) << 13
        rounded = from_bits(tl.where(magnitude < 0x38800000, small, normal))
        return narrow(tl.where(is_finite, rounded, x), FP16)


@triton.jit
def read_master(value, aux, indices, mask, MODE: tl.constexpr, FORMAT: tl.constexpr):
    """Return the fp32 masters of a block; `weights.read_master`."""
    weight = load(value, indices, mask, FORMAT)
    if MODE == SPLIT:
        rest = tl.load(aux.to(tl.pointer_type(tl.int16)) + indices, mask=mask, other=0)
        joined = from_bits(bits_of(weight) + rest.to(tl.int32).to(tl.uint32, bitcast=True))
        return tl.where(is_nan(joined), weight, joined)
    elif MODE == MASTER:
        master = load(aux, indices, mask, FP32)
        return tl.where(widen(narrow(master, FORMAT), FORMAT) == weight, master, weight)
    elif MODE == KAHAN:
        rest = load(aux, indices, mask, FORMAT)
        half_spacing = tl.abs(weight) * (1.0 / 256 if FORMAT == BF16 else 1.0 / 2048)
        return tl.where(tl.abs(rest) <= half_spacing, weight + rest, weight)
    else:
        return weight


@triton.jit
def write_master(value, aux, indices, mask, master, random_bits, MODE: tl.constexpr, FORMAT: tl.constexpr):
    """Write a block of masters as weights and their aux state; `weights.store_master`."""
    if MODE == OWN:
        store_fp32(value, indices, mask, master)
    elif MODE == SPLIT:
        bits = tl.where(is_nan(master), 0x7FC00000, bits_of(master)).to(tl.uint32)
        high = (bits + 0x8000) >> 16
        store_low(value, indices, mask, high)
        store_low(aux, indices, mask, bits - (high << 16))
    elif MODE == MASTER:
        store_low(value, indices, mask, narrow(master, FORMAT))
        store_fp32(aux, indices, mask, master)
    elif MODE == KAHAN:
        low = narrow(master, FORMAT)
        weight = widen(low, FORMAT)
        rest = tl.where((bits_of(weight) & 0x7FFFFFFF) < 0x7F800000, master - weight, 0.0)
        store_low(value, indices, mask, low)
        store_low(aux, indices, mask, narrow(rest, FORMAT))
    else:
        store_low(value, indices, mask, stochastic_round(master, random_bits, FORMAT))


@triton.jit
def write_mean(address, indices, mask, x, random_bits, FORMAT: tl.constexpr):
    """Write a block of running means, bf16 ones stochastically."""
    if FORMAT == FP32:
        store_fp32(address, indices, mask, x)
    else:
        store_low(address, indices, mask, stochastic_round(x, random_bits, BF16))


@triton.jit
def read_grad(
    address, indices, mask, p_inv_scale, p_clip, FORMAT: tl.constexpr, SCALED: tl.constexpr, MAXIMIZE: tl.constexpr
):
    """Return a block of gradients unscaled, clipped and pointing down."""
    grad = load(address, indices, mask, FORMAT)
    if SCALED:
        grad = grad * tl.load(p_inv_scale) * tl.load(p_clip)
    return -grad if MAXIMIZE else grad


@triton.jit
def probe_kernel(p_number):
    """Write a number."""
    tl.store(p_number, 1.0)


def probe(device: torch.device) -> None:
    """Compile and launch a kernel that does next to nothing, which raises where none can run. Syncs: no."""
    launch_once(probe_kernel, torch.empty((), dtype=torch.float32, device=device))
