from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.train.small import tiny
from tests.train.test_tokens import texts
from transformers import AutoModelForSequenceClassification
from transformers.trainer_pt_utils import get_parameter_names

from mezzo.errors import ConfigError
from mezzo.train import TrainConfig
from mezzo.train.model import (
    POSITION_SIZE,
    build_model,
    check_length,
    load_model,
    parameter_groups,
    sinusoids,
    train_tokenizer,
)

LABELS = ("bad", "good", "mixed")


def config(**changes: object) -> TrainConfig:
    return tiny(Path("x.tsv"), Path("out")).replace(**changes)


def test_a_model_from_random_weights_has_the_shape_asked_for() -> None:
    tokenizer = train_tokenizer(texts(), 300, 24)
    model = build_model(config(intermediate=40, dropout=0.25), LABELS, tokenizer)
    shape = model.config
    assert (shape.hidden_size, shape.num_hidden_layers, shape.num_attention_heads) == (32, 2, 2)
    assert (shape.intermediate_size, shape.hidden_dropout_prob, shape.vocab_size) == (40, 0.25, len(tokenizer))
    assert (shape.max_position_embeddings, shape._attn_implementation) == (24, "sdpa")
    assert shape.id2label == {0: "bad", 1: "good", 2: "mixed"}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_positions_start_as_sinusoids() -> None:
    table = sinusoids(20, 6).double()
    for place in range(20):
        angles = [place / 1000.0 ** (pair / 3) for pair in range(3)]
        wanted = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)
        # the angle is rounded, the wave has slope 1 at most
        assert float((table[place] - wanted).abs().max()) <= 4 * max(place, 1) * torch.finfo(torch.float32).eps
    assert sinusoids(4, 5).shape == (4, 5)
    model = build_model(config(), LABELS, train_tokenizer(texts(), 300, 24))
    weights = model.bert.embeddings.position_embeddings.weight
    assert torch.equal(weights, POSITION_SIZE * sinusoids(24, 32))
    assert weights.requires_grad


def test_groups_are_those_of_the_transformers_trainer() -> None:
    model = build_model(config(), LABELS, train_tokenizer(texts(), 300, 24))
    decayed, free = parameter_groups(model, 0.01)
    wanted = set(get_parameter_names(model, [torch.nn.LayerNorm], [r"bias", r"layernorm", r"(?:^|\.)norm(?:$|\.)"]))
    names = {id(p): name for name, p in model.named_parameters()}
    assert {names[id(p)] for p in decayed["params"]} == wanted
    assert {names[id(p)] for p in free["params"]} == set(names.values()) - wanted
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.01, 0.0)


def test_frozen_parameters_are_in_no_group() -> None:
    model = build_model(config(), LABELS, train_tokenizer(texts(), 300, 24))
    model.bert.embeddings.requires_grad_(False)
    grouped = {id(p) for group in parameter_groups(model, 0.01) for p in group["params"]}
    assert grouped == {id(p) for p in model.parameters() if p.requires_grad}


def test_a_saved_16_bit_model_is_loaded_in_fp32_with_a_new_head(tmp_path: Path) -> None:
    saved = build_model(config(), LABELS, train_tokenizer(texts(), 300, 24)).bfloat16()
    saved.save_pretrained(tmp_path)
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path).dtype is torch.bfloat16  # what we must not get
    kept, other = load_model(tmp_path), load_model(tmp_path, ("x", "y"))
    assert {p.dtype for p in (*kept.parameters(), *other.parameters())} == {torch.float32}
    assert torch.equal(kept.classifier.weight, saved.classifier.weight.float())
    assert other.classifier.weight.shape == (2, 32)
    assert other.config.id2label == {0: "x", 1: "y"}
    assert torch.equal(other.bert.pooler.dense.weight, saved.bert.pooler.dense.weight.float())


def test_texts_longer_than_the_positions_are_refused() -> None:
    model = build_model(config(), LABELS, train_tokenizer(texts(), 300, 24))
    check_length(model, 24)
    with pytest.raises(
        ConfigError, match=r"max_length=25 is more than the 24 positions of the model; write 24 or less\."
    ):
        check_length(model, 25)


@pytest.mark.parametrize("name", ["no/such/folder/here", "."])
def test_no_model_is_one_clear_sentence(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as refusal:
        load_model(name, LABELS)
    assert f"the model {name!r} cannot be loaded" in str(refusal.value)
    assert "\n" not in str(refusal.value)
