"""What autocasting can do to one op."""

from __future__ import annotations

import enum


class Rule(enum.Enum):
    """What a region does to an op's floating inputs. Ints, bools, complex and fp64 tensors are never cast."""

    LOW = "low"
    """Cast to the compute dtype: matmul-like."""
    FP32 = "fp32"
    """Cast up to fp32, fp32 result: sums many terms or has a steep derivative."""
    FP32_LOW_OUT = "fp32_low_out"
    """Compute in fp32, or in a kernel that accumulates in fp32; result in the compute dtype."""
    PROMOTE = "promote"
    """Promote to the widest floating input: several tensors that must agree."""
    AS_IS = "as_is"
    """Leave the inputs alone."""
    FORBID = "forbid"
    """Raise, naming the stable replacement."""

    def __str__(self) -> str:
        return self.value


FP32_RULES = (Rule.FP32, Rule.FP32_LOW_OUT)
"""Rules whose ops compute in fp32."""
