"""The classifier: a BERT from random weights, or a pretrained model with a new head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, first_line
from .config import TrainConfig
from .hub import quiet

POSITION_SIZE = 0.03
"""Of the sinusoids, beside word vectors of standard deviation 0.02."""
LONGEST_WAVE = 1000.0


def _label_names(labels: Sequence[str]) -> dict[str, Any]:
    names = dict(enumerate(labels))
    return {"id2label": names, "label2id": {label: i for i, label in names.items()}}


def build_model(config: TrainConfig, labels: Sequence[str], tokenizer: Any) -> nn.Module:
    """Return a BERT classifier with random weights, drawn from torch's global generator; fp32, on the CPU.

    Its learned positions start as sinusoids; random ones cost a short training its first epochs.

    Args:
        config: gives the sizes.
        labels: class names in order.
        tokenizer: gives the vocabulary.
    """
    from transformers import BertConfig, BertForSequenceClassification

    shape = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.intermediate or 4 * config.hidden,
        max_position_embeddings=config.max_length,
        hidden_dropout_prob=config.dropout,
        attention_probs_dropout_prob=0.0,  # with dropout in it, torch's fused attention falls back to the slow one
        pad_token_id=tokenizer.pad_token_id,
        **{"attn_implementation": "sdpa", **_label_names(labels)},
    )
    model = BertForSequenceClassification(shape)
    with torch.no_grad():
        model.bert.embeddings.position_embeddings.weight.copy_(
            POSITION_SIZE * sinusoids(config.max_length, config.hidden)
        )
    return model


def sinusoids(positions: int, width: int) -> Tensor:
    """Return shape (positions, width), fp32: neighbouring positions look alike from the first update on.

    Source: Vaswani et al. 2017, section 3.5; the longest wave is shortened to 2 pi 1000, for short texts. Syncs: no.
    """
    index = torch.arange(positions, dtype=torch.float32)[:, None]
    pairs = -(-width // 2)
    angle = index * LONGEST_WAVE ** -(torch.arange(pairs, dtype=torch.float32) / pairs)
    return torch.cat([angle.sin(), angle.cos()], dim=1)[:, :width]


def load_model(name: str | Path, labels: Sequence[str] | None = None) -> nn.Module:
    """Return a classifier from a model folder or hub name; fp32 whatever it was saved in, on the CPU.

    Args:
        name: local folder or hub name.
        labels: class names in order; a head of another size is replaced by a random one. None keeps the saved head.

    Raises:
        ConfigError: no such model, no classifier for its kind, or the hub cannot be reached.
    """
    changes = {} if labels is None else _label_names(labels)
    try:
        with quiet():
            from transformers import AutoModelForSequenceClassification

            model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
                str(name), dtype=torch.float32, ignore_mismatched_sizes=labels is not None, **changes
            )
    except Exception as error:  # pickled weights, a damaged file, a kind without a classifier, ...
        raise ConfigError(
            f"the model {str(name)!r} cannot be loaded: {first_line(error)} "
            "Write the path of a model folder, or a hub name on a machine that reaches the hub."
        ) from None
    return model


def check_length(model: nn.Module, max_length: int) -> None:
    """Refuse texts longer than the model has positions for.

    Raises:
        ConfigError: they are.
    """
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if most is not None and max_length > most:
        raise ConfigError(
            f"max_length={max_length} is more than the {most} positions of the model; write {most} or less."
        )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's groups: matrices with weight decay; biases, norms and other vectors without.

    Source: Devlin et al. 2019, appendix A.2, as the reference code has it.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
