"""Errors: one family, and the clause that names the nearest spelling."""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mezzo import errors
from mezzo.errors import MezzoError, did_you_mean, shown

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_is_caught_as_a_mezzo_error(error: type[Exception]) -> None:
    assert issubclass(error, MezzoError)
    assert error.__doc__
    if error is not MezzoError:
        assert issubclass(error, ValueError | RuntimeError), "code that catches torch's own errors must still work"


@pytest.mark.parametrize(
    ("word", "known", "clause"),
    [
        ("bf61", ["bf16", "fp16"], " Did you mean 'bf16'?"),
        ("BF61", ["bf16", "fp16"], " Did you mean 'bf16'?"),
        ("layernorm", ["LayerNorm", "GroupNorm"], " Did you mean 'LayerNorm'?"),
        ("zzz", ["fp16", "bf16", "bf16"], " Valid: bf16, fp16."),
        ("", ["b", "a"], " Valid: a, b."),
        ("x", [], " Valid: ."),
        ("patience", ["patience", "guard.patience"], " Did you mean 'patience'?"),
        (None, ["one", "none"], " Did you mean 'none'?"),
        (3, ["bf16", "fp16"], " Valid: bf16, fp16."),
    ],
)
def test_the_nearest_spelling_is_named(word: object, known: list[str], clause: str) -> None:
    assert did_you_mean(word, known) == clause
    assert did_you_mean(word, iter(known)) == clause


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        (None, "None"),
        ("x" * 58, f"'{'x' * 58}'"),
        ("x" * 80, f"'{'x' * 56}..."),
        (-(10**90), f"-1{'0' * 55}..."),
    ],
)
def test_a_value_is_quoted_in_sixty_characters(value: object, text: str) -> None:
    assert shown(value) == text and len(text) <= 60


def test_a_value_is_quoted_in_one_line() -> None:
    assert shown(torch.ones(1).to_sparse()).startswith("tensor(indices=tensor([[0]]),        values=")
    assert "\n" not in shown(torch.arange(200))


def test_whole_numbers_that_python_does_not_print_are_named_by_their_class() -> None:
    assert shown(10**5000) == "int" and shown((10**5000, 1)) == "tuple"


def test_what_python_cannot_print_is_named_by_its_class() -> None:
    nested: list[object] = []
    for _ in range(10_000):
        nested = [nested]
    assert shown(nested) == "list" and shown({"a": nested}) == "dict"
    assert did_you_mean(10**5000, ["bf16", "fp16"]) == " Valid: bf16, fp16."


def test_a_long_list_is_never_printed() -> None:
    assert did_you_mean("zzz", [f"op{i}" for i in range(30)]).startswith(" Valid: op0, op1, op10,")
    many = [f"op{i}" for i in range(31)]
    assert did_you_mean("zzz", many) == " None of the 31 valid ones is like it."
    assert did_you_mean("softmax", many) == " None of the 31 valid ones is like it."
    assert did_you_mean("op300", many) == " Did you mean 'op30'?"


@given(st.lists(st.text("abcxyz_", min_size=1, max_size=8), min_size=1), st.data())
def test_one_wrong_letter_finds_the_way_back(known: list[str], data: st.DataObject) -> None:
    """A word of three letters or more with one letter doubled is never further away than a word it is not in."""
    word = data.draw(st.sampled_from(known))
    at = data.draw(st.integers(0, len(word) - 1))
    typo = word[: at + 1] + word[at:]
    clause = did_you_mean(typo, known)
    assert clause.startswith(" Did you mean '")
    assert clause.removeprefix(" Did you mean '").removesuffix("'?") in known
    if len(set(known)) == 1:
        assert clause == f" Did you mean '{word}'?"


@pytest.mark.parametrize(
    ("said", "shown_as"),
    [("it is full.\nmore", "it is full"), ("it is full", "it is full"), ("", "OSError"), (".", "OSError")],
)
def test_the_first_line_of_an_error_is_a_part_of_a_sentence(said: str, shown_as: str) -> None:
    assert errors.first_line(OSError(said)) == shown_as
