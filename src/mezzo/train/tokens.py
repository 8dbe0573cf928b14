"""From text to token numbers: a tokenizer trained on the training texts, or the one of a pretrained model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, first_line
from .model import check_reachable, model_name, quiet

PAD, UNKNOWN, START, END, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
MARKS = (PAD, UNKNOWN, START, END, MASK)
MIN_COUNT = 2
"""What was seen once cannot be learned from: it is unknown."""


def _alphabet(texts: Iterable[str], size: int) -> list[str]:
    """Return the commonest characters; the library's own choice among equally common ones differs between runs."""
    counts = Counter(character for text in texts for character in text if not character.isspace())
    common = sorted((-count, character) for character, count in counts.items() if count >= MIN_COUNT)
    return [character for _, character in common[: max(size, 1)]]


def train_tokenizer(texts: Sequence[str], vocab_size: int, max_length: int) -> Any:
    """Train a byte-pair tokenizer of the transformers library; the same texts give the same tokenizer.

    Characters between punctuation are one word to it, so in a language written without spaces it learns words of
    several characters, which halves the length of a text against one token a character. `max_length` is what later users of
    the tokenizer are told.

    Raises:
        ConfigError: the transformers library is not installed.
    """
    try:
        from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    except ImportError:
        raise ConfigError("training needs the transformers package; pip install 'mezzo[text]'.") from None
    tokenizer = Tokenizer(models.BPE(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(handle_chinese_chars=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    texts_normal = [tokenizer.normalizer.normalize_str(text) for text in texts]
    most = len(MARKS) + 2 * sum(map(len, texts_normal))  # each character is an entry at most, and starts one at most
    alphabet = _alphabet(texts_normal, vocab_size - len(MARKS))
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocab_size, most),  # the library sets memory aside for all that it is asked for
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        min_frequency=MIN_COUNT,
        special_tokens=list(MARKS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(mark, tokenizer.token_to_id(mark)) for mark in (START, END)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", pair=f"{START} $A {END} $B:1 {END}:1", special_tokens=ends
    )
    return _wrap(tokenizer, max_length)


def _wrap(tokenizer: Any, max_length: int) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]  # transformers' own
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        cls_token=START,
        sep_token=END,
        mask_token=MASK,
        model_max_length=max_length,
    )


def tokenizer_text(tokenizer: Any) -> str:
    """Return all that `restore_tokenizer` needs of a tokenizer made by `train_tokenizer`."""
    return str(tokenizer.backend_tokenizer.to_str())


def restore_tokenizer(text: str, max_length: int) -> Any:
    """Return the tokenizer that `tokenizer_text` wrote down."""
    from tokenizers import Tokenizer

    return _wrap(Tokenizer.from_str(text), max_length)


def load_tokenizer(name: str | Path) -> Any:
    """Return the tokenizer of the folder of a run or model, or of a hub name. Raises: ConfigError: there is none, or the hub cannot be reached."""
    name = model_name(name)
    try:
        with quiet():
            from transformers import AutoTokenizer

            check_reachable(name)
            return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # a damaged file has many kinds
        raise ConfigError(
            f"no tokenizer for the model {name!r}: {first_line(error)}. "
            "Write the path of a folder that holds one, or a hub name on a machine that reaches the hub."
        ) from None


def encode(tokenizer: Any, texts: Sequence[str], max_length: int) -> list[list[int]]:
    """Return each text's token numbers, marks included, cut to `max_length`. An empty sequence gives none."""
    if not texts:
        return []
    found = tokenizer(list(texts), truncation=True, max_length=max_length, return_attention_mask=False)
    return [list(ids) for ids in found["input_ids"]]
