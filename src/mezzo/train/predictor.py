"""Classifies texts with a saved model."""

# B batch, C classes

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import prepare
from ..errors import ConfigError, DataError, kind_of, shown
from ..files import as_path
from ..formats import is_count
from ..policy import as_policy
from .dist_context import choose_device
from .evaluate import collate, logits_of
from .model import check_length, encode, load_model, load_tokenizer
from .text_files import is_text


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The most likely label of a text, and the probability that the model gives it."""

    label: str
    probability: float


class Predictor:
    """A saved classifier, ready to be asked; it keeps 16-bit copies of its weights where the policy casts them.

    Args:
        model: folder of a run, whose best model is meant, folder of a transformers classifier, or hub name.
        policy: precision of the forward pass, as text.
        device: "auto", "cpu", "cuda", ...
        max_length: tokens read of a text; 0 is what the model was trained with.

    Raises:
        ConfigError: the model cannot be loaded, or has fewer positions than `max_length`, which leaves room for a token.
        PolicyError: the policy cannot be read, or does not fit the model.
    """

    def __init__(self, model: str | Path, *, policy: str = "auto", device: str = "auto", max_length: int = 0) -> None:
        chosen = as_policy(policy)
        as_path("Predictor", "model", model)
        if not is_count(max_length):
            raise ConfigError(
                f"max_length={shown(max_length)} must be a whole number of 0 or more; 0 is what the model was trained with."
            )
        if 0 < max_length < 3:
            raise ConfigError(f"max_length={max_length} leaves no token beside the two marks; write 3 or more, or 0.")
        self._device = choose_device(device)
        self._tokenizer = load_tokenizer(model)
        self._model = prepare(load_model(model).to(self._device).eval(), policy=chosen, cache="persistent").model
        config: Any = self._model.config
        self._names = {int(index): str(label) for index, label in config.id2label.items()}
        most = getattr(config, "max_position_embeddings", self._tokenizer.model_max_length)
        self._max_length = max_length or min(self._tokenizer.model_max_length, most)
        check_length(self._model, self._max_length)

    @torch.inference_mode()
    def __call__(self, texts: Iterable[str]) -> list[Prediction | None]:
        """Classify texts.

        Args:
            texts: any number; whitespace around a text does not count.

        Returns:
            A prediction for each text, None for one that is empty.

        Raises: DataError: no list of texts, or something in it that is none. Syncs: yes.
        """
        texts = _list_of(texts)
        indices = [index for index, text in enumerate(texts) if text.strip()]
        found: list[Prediction | None] = [None] * len(texts)
        if not indices:
            return found
        tokens = encode(self._tokenizer, [texts[index].strip() for index in indices], self._max_length)
        pad_id = self._tokenizer.pad_token_id or 0
        batch = collate(tokens, None, pad_id=pad_id, max_length=self._max_length).to(self._device)
        logits_BC = logits_of(self._model, batch)
        best_B = logits_BC.softmax(-1).max(-1)
        for index, value, label in zip(indices, best_B.values.tolist(), best_B.indices.tolist(), strict=True):
            found[index] = Prediction(label=self._names[label], probability=value)
        return found


def _list_of(texts: Iterable[str]) -> list[str]:
    """Return texts in a list. One text alone would be answered letter by letter."""
    if isinstance(texts, str | bytes | Mapping) or not isinstance(texts, Iterable):
        raise DataError(f"predict was given {kind_of(texts)} for texts; give a list of them: [text].")
    texts = list(texts)
    for index, text in enumerate(texts):
        if not is_text(text):
            why = "holds half of a character, such as \\ud83d" if isinstance(text, str) else f"is {kind_of(text)}"
            raise DataError(f"text {index} of {len(texts)} {why}; each must be text that UTF-8 can write.")
    return texts
