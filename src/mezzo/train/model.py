"""The classifier and its tokenizer: made for the data, or pretrained, from a library that is kept quiet."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor, nn

from ..errors import ConfigError, check_given, first_line, is_out_of_memory
from ..formats import memory_bytes
from .config import RunFolder, TrainConfig

POSITION_SIZE = 0.03
"""Of the sinusoids, beside word vectors of standard deviation 0.02."""
LONGEST_WAVE = 1000.0
PATIENCE_S = 2.0


def _label_names(labels: Sequence[str]) -> dict[str, Any]:
    names = dict(enumerate(labels))
    return {"id2label": names, "label2id": {label: i for i, label in names.items()}}


def build_model(config: TrainConfig, labels: Sequence[str], tokenizer: Any) -> nn.Module:
    """Return a BERT classifier with random weights, drawn from torch's global generator; fp32, on the CPU.

    Its learned positions start as sinusoids; random ones cost a short training its first epochs.

    Raises: ConfigError: its weights alone are more than the machine's memory.
    """
    from transformers import BertConfig, BertForSequenceClassification

    _check_fits(config, len(tokenizer))
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
    positions = model.bert.embeddings.position_embeddings.weight
    with torch.no_grad():
        positions.copy_(POSITION_SIZE * sinusoids(config.max_length, config.hidden))
    return model


def _check_fits(config: TrainConfig, entries: int) -> None:
    """Refuse a BERT that the machine's memory does not hold, before it is filled. Raises: ConfigError."""
    width, memory = config.hidden, memory_bytes()
    layer = 4 * width**2 + 2 * width * (config.intermediate or 4 * width)
    weights = 4 * ((entries + config.max_length) * width + config.layers * layer)
    if memory and weights > memory:
        raise ConfigError(
            f"hidden={width}, layers={config.layers}, intermediate={config.intermediate} and max_length={config.max_length} make "
            f"{weights / 2**30:.0f} GiB of weights, and this machine has {memory / 2**30:.0f} GiB of memory. Write a smaller model."
        )


def sinusoids(positions: int, width: int) -> Tensor:
    """Return shape (positions, width), fp32: neighbouring positions look alike from the first update on.

    Source: Vaswani et al. 2017, section 3.5; the longest wave is shortened to 2 pi 1000, for short texts. Syncs: no.
    """
    index = torch.arange(positions, dtype=torch.float32)[:, None]
    pairs = -(-width // 2)
    angle = index * LONGEST_WAVE ** -(torch.arange(pairs, dtype=torch.float32) / pairs)
    return torch.cat([angle.sin(), angle.cos()], dim=1)[:, :width]


def model_name(name: str | Path) -> str:
    """Return what holds the model of a name: for the folder of a run, that of its best one. Raises: ConfigError: it has none yet."""
    run = RunFolder(path=Path(name))
    is_model = run.is_run is False
    if not is_model and run.best.is_dir():
        return str(run.best)
    if not is_model and run.checkpoint.exists():
        raise ConfigError(f"the run in {name} has no model yet: none of its evaluations is done.")
    return str(name)


def load_model(name: str | Path, labels: Sequence[str] | None = None) -> nn.Module:
    """Return a classifier from the folder of a run or model, or a hub name; fp32 whatever it was saved in, on the CPU.

    A head of another size than there are labels is replaced by a random one; None keeps the saved head.

    Raises: ConfigError: no such model, no classifier for its kind, or the hub cannot be reached.
    """
    changes, name = {} if labels is None else _label_names(labels), model_name(name)
    with _loading(f"the model {name!r} cannot be loaded", "a model folder"):
        from transformers import AutoModelForSequenceClassification

        model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
            name, dtype=torch.float32, ignore_mismatched_sizes=labels is not None, **changes
        )
    return model


@contextmanager
def _loading(failed: str, wanted: str) -> Iterator[None]:
    """Turn what the library, kept quiet, raises inside the block into a ConfigError: pickled weights, a damaged file, a kind without a classifier, ..."""
    try:
        with quiet():
            yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"{failed}: {first_line(error)}. Write the path of {wanted}, or a hub name on a machine that reaches the hub."
        ) from None


def check_length(model: nn.Module, max_length: int) -> None:
    """Refuse texts longer than the model has positions for. Raises: ConfigError."""
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if most is not None and max_length > most:
        raise ConfigError(
            f"max_length={max_length} is more than the {most} positions of the model; write {most} or less."
        )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return AdamW's groups: matrices with weight decay; biases, norms and other vectors without.

    Source: Devlin et al. 2019, appendix A.2, as the reference code has it.
    """
    check_given("parameter_groups", "model", model, nn.Module, "a model")
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the library's progress bars off standard error while inside, and on ranks but the first its log as well.

    Raises: ConfigError: the library is not installed. Writes: switches of the library, and sets them back.
    """
    try:
        from transformers.utils import logging
    except ImportError:
        raise ConfigError("this needs the transformers package; pip install 'mezzo[text]'.") from None
    was_on, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers' own
    if os.environ.get("RANK", "0") != "0":
        logging.set_verbosity(50)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_on:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # transformers' own


def check_reachable(name: str) -> None:
    """Refuse a name that no folder has, and no model in the cache, where the hub cannot be asked: its own client retries for a minute. Raises: OSError."""
    if Path(name).is_dir():
        if not any(Path(name).glob("*config.json")):  # also those of adapters
            raise OSError("the folder holds no model: it has no config.json.")
        return
    if Path(name).is_file():
        raise OSError(f"it is a file, in the folder '{Path(name).parent}'.")
    if name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1:
        raise OSError("there is no such folder.")
    from huggingface_hub import try_to_load_from_cache

    is_cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    if not is_cached and not _answers():
        raise OSError("there is no such folder, no model of that name in the cache, and the hub cannot be reached.")


def _answers() -> bool:
    """Whether the hub takes connections; behind a proxy that is not asked."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies():
        return True
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        with socket.create_connection((host.hostname or "", host.port or 443), timeout=PATIENCE_S):
            return True
    except OSError:
        return False


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
    the tokenizer are told. Raises: ConfigError: the transformers library is not installed.
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
    with _loading(f"no tokenizer for the model {name!r}", "a folder that holds one"):
        from transformers import AutoTokenizer

        check_reachable(name)
        return AutoTokenizer.from_pretrained(name)


def encode(tokenizer: Any, texts: Sequence[str], max_length: int) -> list[list[int]]:
    """Return each text's token numbers, marks included, cut to `max_length`. An empty sequence gives none."""
    if not texts:
        return []
    found = tokenizer(list(texts), truncation=True, max_length=max_length, return_attention_mask=False)
    return [list(ids) for ids in found["input_ids"]]
