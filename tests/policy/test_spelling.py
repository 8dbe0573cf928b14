"""One value, one word, and back; and what a word that stands for nothing is told."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from mezzo.errors import PolicyError
from mezzo.policy import GuardConfig, ModuleRule, Rule, ScalingConfig
from mezzo.policy.fields import PolicyFields
from mezzo.policy.kinds import kinds
from mezzo.policy.spelling import (
    is_pattern,
    read,
    read_module_rule,
    read_op_rule,
    read_scaling,
    spell,
    split_edit,
    write_module_rule,
)

WORDS: list[tuple[type, str, object, str]] = [
    (PolicyFields, "compute", None, "auto"), (PolicyFields, "compute", torch.bfloat16, "bf16"),
    (PolicyFields, "output", None, "none"), (PolicyFields, "master", "split", "split"),
    (ScalingConfig, "init_scale", 1024.0, "1024"), (ScalingConfig, "backoff_factor", 0.1, "0.1"),
    (ScalingConfig, "init_scale", 2.0**100, "1.2676506002282294e+30"), (GuardConfig, "enabled", True, "true"),
    (GuardConfig, "patience", 7, "7"),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "key", "value", "word"), WORDS)
def test_a_word_is_read_back(owner: type, key: str, value: object, word: str) -> None:
    assert spell(key, value) == word
    found = read(key, kinds(owner)[key], word.upper())
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: read("compute", kinds(PolicyFields)["compute"], "bf61"), "unknown compute dtype 'bf61'. Did you mean 'bf16'?"),
        (lambda: read("params", kinds(PolicyFields)["params"], "fp64"), "params=fp64 is not a dtype of mixed precision"),
        (lambda: read("master", kinds(PolicyFields)["master"], "spilt"), "unknown master 'spilt'. Did you mean 'split'?"),
        (lambda: read("enabled", kinds(GuardConfig)["enabled"], "treu"), "unknown enabled 'treu'. Did you mean 'true'?"),
        (lambda: read("patience", kinds(GuardConfig)["patience"], "many"), "patience=many must be a whole number."),
        (lambda: read_scaling("dynamik"), "unknown scaling 'dynamik'. Did you mean 'dynamic'?"),
        (lambda: read_op_rule("softmax", "widest"), "write 'op:softmax=promote'"),
        (lambda: read_module_rule("head", "fp8"), "a module cannot compute in"),
        (lambda: split_edit("fp16"), "'fp16' is not 'key=value'"),
    ],
)  # fmt: skip
def test_a_word_that_stands_for_nothing(call: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(message)):
        call()


@pytest.mark.parametrize("pattern", ["*.norm*", "LayerNorm", "encoder", "a,b", 'a"b', " x ", "?x", "ops"])
@pytest.mark.parametrize("required", [True, False])
def test_a_module_rule_is_read_back(pattern: str, required: bool) -> None:
    rule = ModuleRule(pattern=pattern, precision=Rule.FP32, required=required)
    assert read_module_rule(*split_edit(write_module_rule(rule))) == rule


@pytest.mark.parametrize(
    ("key", "found"), [("*.norm", True), ("Linear", True), ("a.b", True), ("head", False), ("Ops", False)]
)
def test_which_bare_keys_are_patterns(key: str, found: bool) -> None:
    assert is_pattern(key) is found


def test_fixed_scales_and_none() -> None:
    assert read_scaling("none") is None
    assert read_scaling("1024") == ScalingConfig.fixed(1024.0) and read_scaling("Dynamic") == ScalingConfig()
