"""The named policies that every policy text starts from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from ..errors import PolicyError
from ..formats import dtype_name
from .fields import ModuleRule, PolicyFields, ScalingConfig, check, check_known, named_dtype
from .kinds import Rule

# Norm layers compute in fp32 and hand on 16 bit. Not "*LayerNorm": whole encoders have names that end so.
NORM_PATTERNS = ("LayerNorm", "GroupNorm", "*RMSNorm", "*T5LayerNorm")
_NORMS = tuple(ModuleRule(pattern=pattern, precision=Rule.FP32_LOW_OUT, required=False) for pattern in NORM_PATTERNS)
_FP16 = PolicyFields(compute=torch.float16, modules=_NORMS, output=torch.float32, scaling=ScalingConfig())
_BF16 = PolicyFields(compute=torch.bfloat16, modules=_NORMS, output=torch.float32)

PRESET_FIELDS: Mapping[str, PolicyFields] = MappingProxyType(
    {
        "fp32": PolicyFields(),
        "fp16": _FP16,
        "bf16": _BF16,
        "fp16-master": _FP16.replace(params=torch.float16, master="fp32"),
        "bf16-master": _BF16.replace(params=torch.bfloat16, master="split"),
        "auto": PolicyFields(compute=None, modules=_NORMS, output=torch.float32),
    }
)
"""fp32: no casting. fp16, bf16: low ops in that type, fp16 with loss scaling. -master: weights stored in that type,
updated in fp32 precision. auto: the device decides between bf16, fp16 and fp32. What leaves a model is fp32, so that a
loss may be computed outside of it."""


def _by_name(values: Mapping[str, str]) -> Mapping[str, str]:
    return MappingProxyType({name: value for names, value in values.items() for name in names.split()})


ALIASES = _by_name({
    "32-true no o0": "fp32",
    "16-mixed fp16-mixed fp16_mixed mixed_fp16 o1": "fp16",
    "bf16-mixed bf16_mixed mixed_bf16": "bf16",
    "16-true o2": "fp16-master",
    "bf16-true": "bf16-master",
})  # fmt: skip
"""Names of Lightning, Accelerate, apex and Keras for presets. Lightning's "true" stores weights in 16 bit; here their updates are kept too."""

_FP8 = "mezzo computes in fp32, fp16 or bf16; write bf16, and for fp8 weights torchao beside it"
_INSTEAD = _by_name({
    "amp mixed apex native": "write bf16, or fp16 where the device has no bf16; auto decides",
    "float8 e4m3 e5m2 mxfp8 nvfp4 mxfp4 nf4 int8 int4 amp_fp8 transformer-engine transformer-engine-fp16": _FP8,
    "16": "write fp16, or fp16-master for weights stored in it",
    "32": "write fp32",
    "o3": "fp16 without fp32 weights loses small updates; write fp16-master, which keeps them",
    "none off false disabled": "write fp32, which casts nothing",
    "tf32": "TF32 is a setting of torch; write fp32, and torch.set_float32_matmul_precision('high')",
})  # fmt: skip
_KEYS_INSTEAD = _by_name({
    "loss_scale init_loss_scale init_loss_scaling initial_loss_scale initial_scale": "scaling=dynamic, or a number that never moves, as in scaling=1024",
    "initial_scale_power": "scaling.init_scale=65536, the scale itself",
    "loss_scale_window": "scaling.growth_interval=2000",
    "min_loss_scale": "scaling.min_scale=1",
    "enabled": "fp32, and nothing else, where nothing is to be cast",
    "keep_batchnorm_fp32": "a rule for the modules, as in '*.bn*=fp32'; batch norms keep their statistics in fp32 without one",
    "excluded_layers full_precision_layers fp32_modules": "a rule for the modules, as in 'module:head=fp32'",
    "custom_white_list custom_black_list": "op rules, as in 'op:softmax=low' and 'op:softmax=fp32'",
    "param_dtype": "params= for the dtype in which weights are stored, compute= for that in which they are multiplied",
    "policy precision mixed_precision opt_level amp_level": "the preset first, as in 'bf16', or as the key 'preset' of a table",
    "dtype compute_dtype half_dtype": "the preset of the dtype first, as in 'bf16', or compute=",
    "output_dtype cast_model_outputs": "output=",
    "grad_accum_dtype master_grad": "grads=fp32",
    "kahan_sum stochastic_rounding": "master=kahan or master=stochastic",
    "allow_tf32 fp32_precision": "torch.set_float32_matmul_precision('high') beside the policy",
    "cache_enabled": "it in mezzo.autocast(cache_enabled=...); a prepared model has cache=",
})  # fmt: skip
PRESET_KEYS = ("preset", "policy", "precision", "mixed_precision", "opt_level", "amp_level", "dtype")
"""What other libraries call a preset, where it has a name."""


def refuse_key_elsewhere(key: str) -> None:
    """Refuse, by a PolicyError, a key that other libraries have, with what is written here."""
    check(key not in _KEYS_INSTEAD, f"unknown key {key!r}: write {_KEYS_INSTEAD.get(key)}.")


def preset_fields(name: object) -> PolicyFields:
    """Return the preset of a name, upper or lower case, those of other libraries among them; a PolicyError names the nearest."""
    if not isinstance(name, str):
        raise PolicyError(f"'preset': a name such as 'bf16' is wanted, not {name!r}.")
    word, dash, kind = name.casefold().partition("-")
    dtype = named_dtype(word)
    preset = f"{word if dtype is None else dtype_name(dtype)}{dash}{kind}"  # torch's spelling too
    preset = ALIASES.get(preset := preset.replace("bfloat16", "bf16").replace("float16", "fp16"), preset)
    check(
        not preset.endswith((".toml", ".json", ".yaml", ".yml")),
        f"unknown preset {name!r}: a file is read by Policy.load(path), and is TOML.",
    )
    check(preset not in _INSTEAD, f"unknown preset {name!r}: {_INSTEAD.get(preset, '')}.")
    check(
        dtype is None or preset in PRESET_FIELDS or dtype_name(dtype) in PRESET_FIELDS,
        f"unknown preset {preset!r}: no preset computes in {preset.removesuffix('-master')}; write fp32, fp16, bf16 or auto.",
    )
    check_known("preset", preset, PRESET_FIELDS)
    return PRESET_FIELDS[preset]
