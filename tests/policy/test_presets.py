"""The presets: their fields, and which modules their norm rules reach."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mezzo.policy import PRESETS, OpRules, Policy, Rule, ScalingConfig
from mezzo.policy.presets import NORM_PATTERNS


def test_the_presets_are_these() -> None:
    assert tuple(PRESETS) == ("fp32", "fp16", "bf16", "fp16-master", "bf16-master", "auto")
    assert PRESETS["fp32"] == Policy()


@pytest.mark.parametrize(
    ("name", "compute", "params", "master", "scaling"),
    [
        ("fp16", torch.float16, torch.float32, "none", ScalingConfig()),
        ("bf16", torch.bfloat16, torch.float32, "none", None),
        ("fp16-master", torch.float16, torch.float16, "fp32", ScalingConfig()),
        ("bf16-master", torch.bfloat16, torch.bfloat16, "split", None),
        ("auto", None, torch.float32, "none", None),
    ],
)
def test_what_a_preset_says(
    name: str, compute: torch.dtype | None, params: torch.dtype, master: str, scaling: ScalingConfig | None
) -> None:
    preset = PRESETS[name]
    assert (preset.compute, preset.params, preset.master, preset.scaling) == (compute, params, master, scaling)
    assert preset.ops == OpRules(table="torch")
    assert {preset.state, preset.loss, preset.reduce, preset.output} == {torch.float32}
    assert [rule.pattern for rule in preset.modules] == list(NORM_PATTERNS)
    assert all(rule.precision is Rule.FP32_LOW_OUT and not rule.required for rule in preset.modules)


def class_names(module: nn.Module) -> list[str]:
    return [c.__name__ for c in type(module).__mro__]


class ChannelsFirst(nn.LayerNorm):
    """A LayerNorm under another name, as vision models have it."""


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4), ChannelsFirst(4)], ids=lambda norm: type(norm).__name__
)
def test_norm_layers_have_the_rule(norm: nn.Module) -> None:
    rule = PRESETS["bf16"].module_rule("x", class_names(norm))
    assert rule is not None
    assert rule.precision is Rule.FP32_LOW_OUT


def test_norm_layers_of_transformers_have_the_rule() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    for norm in (llama.LlamaRMSNorm(4), t5.T5LayerNorm(4)):
        assert PRESETS["bf16"].module_rule("x", class_names(norm)) is not None


@pytest.mark.parametrize(
    "name",
    ["Wav2Vec2EncoderStableLayerNorm", "HubertEncoderLayerStableLayerNorm", "RobertaPreLayerNormLayer", "LayerNormMLP",
     "Wav2Vec2GroupNormConvLayer", "EsmFold2AdaptiveLayerNorm", "VoxtralRealtimeTextAdaRmsNorm", "ConvDropoutLayerNorm",
     "BatchNorm2d", "Linear"],
)  # fmt: skip
def test_layers_that_hold_matrix_products_have_none(name: str) -> None:
    """Names of transformers' models that end in or hold a norm's name and compute far more than a norm."""
    assert PRESETS["bf16"].module_rule("x", [name, "Module", "object"]) is None


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_without_norms_is_accepted(name: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    PRESETS[name].check_modules((fqn, class_names(module)) for fqn, module in model.named_modules())
