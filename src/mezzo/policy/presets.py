"""The named policies that every policy text starts from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from .parts import ModuleRule, ScalingConfig
from .policy import Policy
from .rule import Rule

# Norm layers compute in fp32 and hand on 16 bit. Not "*LayerNorm": whole encoders have names that end so.
NORM_PATTERNS = ("LayerNorm", "GroupNorm", "*RMSNorm", "*T5LayerNorm")
_NORMS = tuple(ModuleRule(pattern=pattern, precision=Rule.FP32_LOW_OUT, required=False) for pattern in NORM_PATTERNS)
_FP16 = Policy(compute=torch.float16, modules=_NORMS, scaling=ScalingConfig())
_BF16 = Policy(compute=torch.bfloat16, modules=_NORMS)

PRESETS: Mapping[str, Policy] = MappingProxyType(
    {
        "fp32": Policy(),
        "fp16": _FP16,
        "bf16": _BF16,
        "fp16-master": _FP16.replace(params=torch.float16, master="fp32"),
        "bf16-master": _BF16.replace(params=torch.bfloat16, master="split"),
        "auto": Policy(compute=None, modules=_NORMS),
    }
)
"""fp32: no casting. fp16, bf16: low ops in that type, fp16 with loss scaling. -master: weights stored in that type,
updated in fp32 precision. auto: the device decides between bf16, fp16 and fp32."""
