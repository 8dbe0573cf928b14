"""Real models from the transformers library, and torch's own recurrent nets, train under the region."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from mezzo import Policy, checkpoint_contexts
from mezzo.casting import autocast

BF16 = torch.bfloat16
MEZZO = Policy(compute=BF16, ops="mezzo")
REGIONS = {"dispatcher": {"dtype": BF16}, "mode": {"policy": MEZZO}}
TINY = {"num_attention_heads": 2, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def bert() -> nn.Module:
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=2, attn_implementation="sdpa", **TINY))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32, attn_implementation="sdpa")
    )


def llama() -> nn.Module:
    """Its rotary embedding nests `torch.autocast(enabled=False)`."""
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, attn_implementation="sdpa", **TINY))


def batch(model: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, 50, (4, 12))
    labels = torch.randint(0, 2, (4,)) if isinstance(model, BertForSequenceClassification) else ids
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def gradients(build: Any, region: dict[str, Any], **checkpointing: Any) -> tuple[float, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = build()
    model.eval()  # no dropout, gradients all the same
    if checkpointing:
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        model.config.use_cache = False
    with autocast("cpu", **region):
        loss = model(**batch(model)).loss
    loss.backward()
    return loss.item(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("build", [bert, gpt2, llama])
@pytest.mark.parametrize("name", REGIONS)
def test_training_lowers_the_loss(build: Any, name: str) -> None:
    torch.manual_seed(0)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        with autocast("cpu", **REGIONS[name]):
            loss = model(**batch(model)).loss
        assert loss.dtype is torch.float32
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("build", [bert, gpt2, llama])
@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize(
    "kwargs",
    [{"use_reentrant": False}, {"use_reentrant": False, "context_fn": checkpoint_contexts}],
    ids=["unchanged", "context_fn"],
)
def test_gradient_checkpointing_gives_the_same_gradients(build: Any, name: str, kwargs: dict[str, Any]) -> None:
    loss, want = gradients(build, REGIONS[name])
    again, got = gradients(build, REGIONS[name], **kwargs)
    assert again == loss
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_rotary_embeddings_stay_in_fp32() -> None:
    torch.manual_seed(0)
    model = llama()
    rotary = model.model.rotary_emb
    x, positions = torch.zeros(1, 64, 16), torch.arange(64)[None]
    exact = rotary(x, positions)
    for region in REGIONS.values():
        with autocast("cpu", **region):
            assert all(torch.equal(a, b) for a, b in zip(rotary(x, positions), exact, strict=True))


@pytest.mark.parametrize("build", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_nets_match_torch_under_the_dispatcher(build: Any) -> None:
    torch.manual_seed(0)
    net, x = build(4, 4), torch.randn(5, 2, 4)
    with torch.autocast("cpu", dtype=BF16, cache_enabled=False):
        want, _ = net(x)
    with autocast("cpu", dtype=BF16):
        got, _ = net(x)
    assert got.dtype == want.dtype and torch.equal(got, want)
    with autocast("cpu", policy=MEZZO):
        out, _ = net(x)
        out.float().sum().backward()
    assert out.isfinite().all() and all(p.grad is not None for p in net.parameters())
