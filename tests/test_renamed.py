"""A former name says the new one."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import mezzo
from mezzo.policy import presets


@pytest.mark.parametrize(("old", "new"), [("dist", "distributed"), ("scaling", "loss_scale")])
def test_a_folder(old: str, new: str) -> None:
    with pytest.raises(ImportError, match=f"mezzo.{old} is now called mezzo.{new}"):
        exec(f"from mezzo import {old}")
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
        ("initialize", "mezzo.prepare"), ("scale_loss", "amp.backward"), ("fully_shard", "mezzo.distributed.fully_shard"), ("FusedAdam", "keep the optimizer"), ("AdamW", "mezzo.optim.AdamW"),
        ("watch", "mezzo.diagnose.watch"), ("half_function", "op:softmax=fp32"), ("save_checkpoint", "mezzo.distributed.save_checkpoint"),
        ("is_autocast_enabled", r"torch.is_autocast_enabled\('cpu'\)"), ("Accelerator", "mezzo.integrations.accelerate"),
        ("GradScalar", "Did you mean 'GradScaler'"), ("auto_cast", "Did you mean 'autocast'"), ("decorate", "mezzo.prepare"),
        ("fp8_autocast", "torchao"), ("convert_to_float8_training", "torchao"), ("register_half_function", "op:softmax=fp32"),
        ("DynamicScale", "mezzo.GradScaler"), ("ShardedGradScaler", "mezzo.GradScaler"), ("AdamW8bit", "keep the optimizer"),
        ("DebugUnderflowOverflow", "mezzo doctor"), ("NanDetector", "mezzo doctor"), ("check_numerics", "mezzo doctor"),
        ("enable_operator_stats_collection", "mezzo.diagnose.explain"), ("DTypePolicy", "mezzo.prepare"), ("cast_model", "mezzo.prepare"),
        ("network_to_half", "mezzo.prepare"), ("prep_param_lists", "mezzo.prepare"), ("get_policy", "mezzo.prepare"), ("setup", "amp.backward"),
        ("all_finite", "result.applied"), ("Float16Module", "mezzo.prepare"), ("DelayedScaling", "torchao"),
    ],
)  # fmt: skip
def test_a_name_of_another_library(name: str, word: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'mezzo' has no attribute '{name}'.*{word}"):
        getattr(mezzo, name)
    with pytest.raises(ImportError, match=word):
        exec(f"from mezzo import {name}")
    assert not hasattr(mezzo, name)


@pytest.mark.parametrize(
    ("name", "word"),
    [("FusedAdam", "keep the optimizer of torch"), ("Lion", "keep the optimizer"), ("AdamW8bit", "keep the optimizer"), ("AdmW", "Did you mean 'AdamW'"), ("clip_grad_norm_", r"amp.step\(max_norm")],
)  # fmt: skip
def test_an_optimizer_of_another_library(name: str, word: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'mezzo.optim' has no attribute '{name}'.*{word}"):
        getattr(mezzo.optim, name)
    with pytest.raises(ImportError, match=word):
        exec(f"from mezzo.optim import {name}")


def test_programs_of_torch_amp_change_their_import_alone() -> None:
    """The names of `torch.amp` are there, and those of apex's say what is written here."""
    import mezzo.amp

    assert all(hasattr(mezzo.amp, name) for name in torch.amp.__all__)
    assert mezzo.amp.autocast is mezzo.autocast and mezzo.amp.GradScaler is mezzo.GradScaler
    with pytest.raises(AttributeError, match=r"'initialize'.*amp = mezzo.prepare\(model, optimizer, policy\)"):
        mezzo.amp.initialize  # noqa: B018


@pytest.mark.parametrize(
    ("name", "means"),
    [("mixed_bfloat16", "bf16"), ("mixed_float16", "fp16"), ("half", "fp16"), ("O0", "fp32"), ("16-mixed", "fp16"), ("bf16_mixed", "bf16")],
)  # fmt: skip
def test_a_policy_of_another_library(name: str, means: str) -> None:
    assert mezzo.Policy.parse(name) == mezzo.Policy.parse(means)


@pytest.mark.parametrize(
    ("name", "word"),
    [("O3", "write fp16-master"), ("float8", "torchao"), ("amp", "write bf16"), ("32", "write fp32"), ("16", "write fp16"), ("tf32", "set_float32_matmul_precision"),
     ("mxfp8", "torchao"), ("nvfp4", "torchao"), ("nf4", "torchao"), ("amp_fp8", "torchao"), ("transformer-engine-float16", "torchao")],
)  # fmt: skip
def test_a_policy_that_is_none_here(name: str, word: str) -> None:
    with pytest.raises(mezzo.errors.PolicyError, match=f"unknown preset '{name}': .*{word}"):
        mezzo.Policy.parse(name)


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        ("master_grad=true", "grads=fp32"), ("custom_white_list=softmax", "op:softmax=low"), ("custom_black_list=softmax", "op:softmax=fp32"),
        ("excluded_layers=head", "module:head=fp32"), ("full_precision_layers=head", "module:head=fp32"), ("allow_tf32=true", "set_float32_matmul_precision"),
        ("kahan_sum=true", "master=kahan"), ("stochastic_rounding=true", "master=stochastic"),
        ("initial_loss_scale=1024", "scaling=1024"), ("init_loss_scaling=1024", "scaling=1024"), ("loss_scale_window=100", "scaling.growth_interval"),
    ],
)  # fmt: skip
def test_an_edit_of_another_library(edit: str, word: str) -> None:
    with pytest.raises(
        mezzo.errors.PolicyError, match=f"unknown key '{edit.partition('=')[0]}': write .*{re.escape(word)}"
    ):
        mezzo.Policy.parse(f"bf16, {edit}")


@pytest.mark.parametrize(
    "sentence", sorted({*mezzo._ELSEWHERE.values(), *presets._INSTEAD.values(), *presets._KEYS_INSTEAD.values()})
)
def test_the_edits_that_are_advised_are_read(sentence: str) -> None:
    for edit in re.findall(r"'([^']*=[^']*)'", sentence):
        mezzo.Policy.parse(edit if edit.startswith("fp16, ") else f"fp16, {edit}")


def test_a_stepper_is_made_by_prepare() -> None:
    model = nn.Linear(1, 1)
    for given in ((model, torch.optim.SGD(model.parameters()), "bf16"), (model,), ()):
        with pytest.raises(mezzo.errors.StepTypeError, match=r"write amp = mezzo\.prepare\(model, optimizer, policy\)"):
            mezzo.Stepper(*given)  # type: ignore[arg-type]
    assert type(model) is nn.Linear


def test_an_option_of_another_librarys_loss_scale() -> None:
    with pytest.raises(mezzo.errors.PolicyError, match=r"'loss_scale_window': write scaling\.growth_interval=2000"):
        mezzo.Policy.parse("fp16, scaling.loss_scale_window=1000")
    assert not mezzo.Policy.parse("fp16, guard.enabled=false").guard.enabled  # which is a key elsewhere, too
