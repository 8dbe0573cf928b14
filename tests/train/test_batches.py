from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.train.test_tokens import texts

from mezzo.train.evaluate import Batch, by_length, collate, epoch_batches, hide_tokens
from mezzo.train.model import encode, train_tokenizer

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=300)


@given(lengths=LENGTHS, size=st.integers(1, 9), seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_an_epoch_has_every_row_once(lengths: list[int], size: int, seed: int, epoch: int) -> None:
    batches = epoch_batches(lengths, size, seed=seed, epoch=epoch)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert sorted(map(len, batches))[1:] == [size] * (len(batches) - 1)
    assert batches == epoch_batches(lengths, size, seed=seed, epoch=epoch)
    assert sorted(row for batch in by_length(lengths, size) for row in batch) == list(range(len(lengths)))


def test_epochs_and_seeds_differ_and_no_global_generator_is_touched() -> None:
    lengths, before = [5] * 64, torch.get_rng_state()
    orders = {str(epoch_batches(lengths, 4, seed=seed, epoch=epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert torch.equal(torch.get_rng_state(), before)


def test_texts_of_like_length_share_a_batch() -> None:
    lengths = torch.randint(1, 100, (800,)).tolist()
    padded = sum(len(b) * max(lengths[row] for row in b) for b in epoch_batches(lengths, 8, seed=0, epoch=0))
    unsorted = sum(len(b) * max(lengths[row] for row in b) for b in (range(i, i + 8) for i in range(0, 800, 8)))
    assert padded - sum(lengths) < (unsorted - sum(lengths)) / 4


@pytest.mark.parametrize(("longest", "width"), [(1, 8), (8, 8), (9, 16), (20, 20)])
def test_padding_is_that_of_the_tokenizer_library(longest: int, width: int) -> None:
    tokenizer = train_tokenizer(texts(), 500, 20)
    tokens = [row[:longest] for row in encode(tokenizer, texts()[:5], 20)]
    batch = collate(tokens, [0, 1, 0, 1, 1], pad_id=tokenizer.pad_token_id, max_length=20)
    wanted = tokenizer.pad({"input_ids": tokens}, padding="max_length", max_length=width, return_tensors="pt")
    assert torch.equal(batch.ids_BT, wanted["input_ids"])
    assert torch.equal(batch.mask_BT, wanted["attention_mask"])
    assert batch.labels_B is not None
    assert batch.labels_B.tolist() == [0, 1, 0, 1, 1]


def test_hidden_tokens_are_never_marks_and_as_many_as_asked() -> None:
    ids = torch.randint(5, 100, (200, 50))
    ids[:, 0], ids[:, -5:] = 2, 0
    batch = Batch(ids_BT=ids, mask_BT=torch.ones_like(ids))
    hidden = hide_tokens(batch, 0.25, 4, [0, 1, 2, 3, 4]).ids_BT
    changed = hidden != ids
    assert bool((hidden[changed] == 4).all())
    assert not bool(changed[:, 0].any() | changed[:, -5:].any())
    count, share = 200 * 44, float(changed.sum()) / (200 * 44)
    assert abs(share - 0.25) < 5 * (0.25 * 0.75 / count) ** 0.5  # five standard deviations of a binomial


def test_hiding_nothing_draws_no_random_number() -> None:
    batch, before = Batch(ids_BT=torch.ones(2, 3, dtype=torch.int64), mask_BT=torch.ones(2, 3)), torch.get_rng_state()
    assert hide_tokens(batch, 0.0, 4, []) is batch
    assert torch.equal(torch.get_rng_state(), before)
