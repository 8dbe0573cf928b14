"""A BERT of any size from the transformers library, with the least work of its forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .roofline import Phase

IMPORTS = ("transformers.models.bert.modeling_bert",)
"""What a workload with a BERT loads ahead of its memory's baseline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BertSize:
    """The numbers that make a BERT classifier.

    Attributes:
        layers: encoder layers.
        width: hidden size, a multiple of `heads`.
        heads: attention heads.
        labels: classes.
        vocabulary: tokens in the embedding.
        dropout: probability, in the hidden layers and the attention.
    """

    layers: int
    width: int
    heads: int
    labels: int = 2
    vocabulary: int = 21128
    dropout: float = 0.0

    @property
    def forward_width(self) -> int:
        """Width of the feed-forward part."""
        return 4 * self.width

    def products(self, batch: int, tokens: int) -> float:
        """Return the floating-point operations of the matrix products of one forward."""
        rows = batch * tokens
        projections = 2.0 * rows * self.width * (4 * self.width + 2 * self.forward_width)
        attention = 2 * 2.0 * batch * tokens * tokens * self.width
        head = 2.0 * batch * self.width * (self.width + self.labels)
        return self.layers * (projections + attention) + head

    @property
    def product_weights(self) -> int:
        """Number of weights and biases in the layers that multiply."""
        layer = (
            4 * self.width * self.width + 4 * self.width + 2 * self.width * self.forward_width + self.forward_width
            + self.width
        )  # fmt: skip
        return self.layers * layer + self.width * self.width + self.width + (self.width + 1) * self.labels

    def forward_phase(self, batch: int, tokens: int, bytes_per_weight: int) -> Phase:
        """Return the least work of one forward: every product, every weight read once."""
        return Phase(
            name="forward",
            flops=self.products(batch, tokens),
            moved_bytes=float(bytes_per_weight * self.product_weights),
        )


class BertLogits(nn.Module):
    """A BERT classifier whose output is the logits alone.

    Args:
        size: its numbers; weights are drawn from torch's random state.
    """

    def __init__(self, size: BertSize) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=size.vocabulary, hidden_size=size.width, num_hidden_layers=size.layers,
            num_attention_heads=size.heads, intermediate_size=size.forward_width,
            hidden_dropout_prob=size.dropout, attention_probs_dropout_prob=size.dropout,
        )  # fmt: skip
        config.num_labels = size.labels
        self.bert = BertForSequenceClassification(config)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the logits, shape [batch, labels]."""
        logits: Tensor = self.bert(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


def random_tokens(size: BertSize, batch: int, tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return random token numbers and a mask of ones, both int64 [batch, tokens]."""
    ids = torch.randint(size.vocabulary, (batch, tokens), device=device)
    return ids, torch.ones_like(ids)


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return the cross entropy of token numbers, mask and labels, shape ()."""
    ids, mask, labels = batch
    return nn.functional.cross_entropy(model(ids, mask).float(), labels)
