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


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("initialize", "mezzo.prepare"), ("scale_loss", "amp.backward"), ("amp", "mezzo.cuda"), ("AdamW", "mezzo.optim.AdamW"),
        ("watch", "mezzo.diagnose.watch"), ("half_function", "op:softmax=fp32"), ("save_checkpoint", "mezzo.distributed.save_checkpoint"),
        ("is_autocast_enabled", r"torch.is_autocast_enabled\('cpu'\)"), ("Accelerator", "mezzo.integrations.accelerate"),
        ("GradScalar", "Did you mean 'GradScaler'"), ("auto_cast", "Did you mean 'autocast'"),
    ],
)  # fmt: skip
def test_a_name_of_another_library(name: str, word: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'mezzo' has no attribute '{name}'.*{word}"):
        getattr(mezzo, name)


@pytest.mark.parametrize(
    ("name", "means"),
    [("mixed_bfloat16", "bf16"), ("mixed_float16", "fp16"), ("half", "fp16"), ("O0", "fp32"), ("16-mixed", "fp16"), ("bf16_mixed", "bf16")],
)  # fmt: skip
def test_a_policy_of_another_library(name: str, means: str) -> None:
    assert mezzo.Policy.parse(name) == mezzo.Policy.parse(means)


@pytest.mark.parametrize(
    ("name", "word"),
    [("O3", "write fp16-master"), ("float8", "torchao"), ("amp", "write bf16"), ("32", "write fp32"), ("16", "write fp16"), ("tf32", "set_float32_matmul_precision")],
)  # fmt: skip
def test_a_policy_that_is_none_here(name: str, word: str) -> None:
    with pytest.raises(mezzo.errors.PolicyError, match=f"unknown preset '{name}': .*{word}"):
        mezzo.Policy.parse(name)
