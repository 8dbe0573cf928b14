"""Models of the ecosystem, built from tiny configurations, train without a finding or a warning."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import mezzo.diagnose as diagnose

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # the library's own
]
transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
IDS = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
KEEP_RIGHT, KEEP_LEFT = torch.ones(2, 12, dtype=torch.long), torch.ones(2, 12, dtype=torch.long)
KEEP_LEFT[1, 8:], KEEP_RIGHT[1, :4] = 0, 0
TEXT = {"input_ids": IDS, "attention_mask": KEEP_LEFT, "labels": IDS}
PADDED_LEFT = {**TEXT, "attention_mask": KEEP_RIGHT}


def causal(name: str, attention: str = "sdpa", **options: object) -> Callable[[], tuple[nn.Module, dict[str, object]]]:
    def build() -> tuple[nn.Module, dict[str, object]]:
        config = getattr(transformers, f"{name}Config")(**{**SMALL, "max_position_embeddings": 64, **options})
        config._attn_implementation = attention
        return getattr(transformers, f"{name}ForCausalLM")(config), PADDED_LEFT

    return build


def t5() -> tuple[nn.Module, dict[str, object]]:
    config = transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), TEXT


def roberta() -> tuple[nn.Module, dict[str, object]]:
    return transformers.RobertaForMaskedLM(transformers.RobertaConfig(**SMALL, max_position_embeddings=64)), TEXT


def vit() -> tuple[nn.Module, dict[str, object]]:
    options = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**options, image_size=16, patch_size=4))
    return model, {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])}


MODELS = {
    "llama": causal("Llama", num_key_value_heads=2),
    "llama-eager": causal("Llama", "eager", num_key_value_heads=2),
    "mistral-window": causal("Mistral", num_key_value_heads=2, sliding_window=4),
    "gpt-neox": causal("GPTNeoX"),
    "qwen2-moe": causal(
        "Qwen2Moe", num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, decoder_sparse_step=1,
    ),
    "t5": t5,
    "roberta": roberta,
    "vit": vit,
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("name", MODELS)
def test_no_finding(name: str, checkpointed: bool, dtype: torch.dtype) -> None:
    model, batch = MODELS[name]()
    if checkpointed:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, init_scale=1024.0)
    with diagnose.trace(model) as t:
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = model(**batch).loss
            scaler.scale(loss.float()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert [f"{f.verdict} {f.op} {f.path} {f.library}" for f in t.report.findings] == []
    assert [f"{x.rule} {x.site.path} {x.site.library}" for x in t.record.lints] == []
