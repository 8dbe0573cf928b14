"""A former name says the new one."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
from torch import nn

import mezzo


@pytest.mark.parametrize(("old", "new"), [("dist", "distributed"), ("scaling", "loss_scale")])
def test_a_folder(old: str, new: str) -> None:
    with pytest.raises(ImportError, match=f"mezzo.{old} is now called mezzo.{new}"):
        importlib.import_module(f"mezzo.{old}")
    with pytest.raises(AttributeError, match=f"mezzo.{old} is now called mezzo.{new}"):
        getattr(mezzo, old)


def train(words: list[str]) -> object:
    from mezzo.cli.train import parse

    return parse(words)


@pytest.mark.parametrize(
    ("use", "word"),
    [
        (lambda: mezzo.prepare(nn.Linear(1, 1)).agree, "amp.consensus"),
        (lambda: mezzo.Policy.parse("bf16, op:add=widest"), "op:add=promote"),
        (lambda: train(["--parts", "4"]), "--micro-batches"),
        (lambda: train(["--parts=4"]), "--micro-batches"),
    ],
)
def test_a_word(use: Callable[[], object], word: str) -> None:
    with pytest.raises((AttributeError, mezzo.errors.PolicyError, mezzo.errors.ConfigError), match=word):
        use()
