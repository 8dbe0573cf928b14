from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mezzo.errors import ConfigError
from mezzo.train.model import encode, load_tokenizer, restore_tokenizer, tokenizer_text, train_tokenizer
from mezzo.train.text_files import read_reviews

SIZE = 700  # cuts the alphabet among characters that are equally common
AGAIN = """
from tests.train.test_tokens import SIZE, texts
from mezzo.train.model import tokenizer_text, train_tokenizer
import sys; sys.stdout.write(tokenizer_text(train_tokenizer(texts(), SIZE, 32)))
"""


@functools.cache
def texts() -> list[str]:
    """Return some reviews, which take seconds to read, and two lines of English."""
    reviews = [row.text.strip() for row in read_reviews()[:3000:10]]
    return [*reviews, "Books, hotels and laptops", "a good book, a good hotel"]


@pytest.mark.slow
def test_another_process_trains_the_same_tokenizer() -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TOKENIZERS_PARALLELISM": "false"}
    other = subprocess.run(
        [sys.executable, "-c", AGAIN], capture_output=True, check=True, env=environment, cwd=Path(__file__).parents[2]
    )
    assert other.stdout.decode() == tokenizer_text(train_tokenizer(texts(), SIZE, 32))


def test_it_reads_chinese_and_spaced_text_and_knows_what_it_does_not_know() -> None:
    tokenizer = train_tokenizer(texts(), 2500, 32)
    text = "这本书的内容不错, Good Hotel"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == text.lower().replace(" ", "")
    assert [tokenizer.convert_ids_to_tokens(ids)[i] for i in (0, -1)] == ["[CLS]", "[SEP]"]
    assert len(ids) < len(text.replace(" ", ""))  # several characters a token
    assert tokenizer.unk_token_id in tokenizer("\u16a0")["input_ids"]


@pytest.mark.parametrize("size", [300, 2000])
def test_the_vocabulary_has_no_more_entries_than_asked(size: int) -> None:
    assert len(train_tokenizer(texts(), size, 32)) <= size


def test_saved_and_restored_it_is_the_same(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(texts(), 500, 16)
    tokenizer.save_pretrained(tmp_path)
    wanted = encode(tokenizer, texts(), 16)
    assert encode(load_tokenizer(tmp_path), texts(), 16) == wanted
    assert encode(AutoTokenizer.from_pretrained(tmp_path), texts(), 16) == wanted
    restored = restore_tokenizer(tokenizer_text(tokenizer), 16)
    assert encode(restored, texts(), 16) == wanted
    assert restored.all_special_ids == tokenizer.all_special_ids
    assert restored.model_max_length == 16


def test_a_long_text_keeps_its_end_mark() -> None:
    tokenizer = train_tokenizer(texts(), 500, 8)
    (ids,) = encode(tokenizer, ["book " * 50], 8)
    assert len(ids) == 8
    assert ids[-1] == tokenizer.sep_token_id
    assert encode(tokenizer, [], 8) == []


def test_no_tokenizer_is_one_clear_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(refusal.value)
    assert "Write the path of a folder that holds one" in str(refusal.value)


def test_the_sentence_of_a_damaged_tokenizer_ends_before_the_advice(tmp_path: Path) -> None:
    train_tokenizer(texts(), 500, 16).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"[^.]\. Write the path of a folder that holds one"):
        load_tokenizer(tmp_path)
