from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mezzo.errors import ConfigError, PolicyError, shown
from mezzo.policy import Policy
from mezzo.train import TrainConfig
from mezzo.train.evaluate import epoch_batches

OTHER = {
    "data": "x.tsv", "dev_data": Path("d.tsv"), "test_data": Path("t.csv"), "text_column": "t", "label_column": "l", "limit": 7,
    "model": "bert", "vocab_size": 11, "layers": 3, "hidden": 12, "heads": 3, "intermediate": 5, "dropout": 0.5,
    "token_dropout": 0.25, "max_length": 9, "batch_size": 2, "micro_batches": 2, "epochs": 4, "lr": 0.5, "warmup": 0.5, "weight_decay": 0.5,
    "schedule": "linear", "dev_share": 0.25, "test_share": 0.25, "label_map": Path("m.json"), "rows": 9, "per_rank": True,
    "evaluate": False, "log_every": 7, "tracker": "wandb",
    "max_norm": 2.0, "ema": 0.5, "amp": False, "policy": "bf16", "device": "cpu", "eval_every": 3, "seed": 5, "out": Path("o"),
    "resume": True, "overwrite": False,
}  # fmt: skip


def test_every_field_survives_the_json_file(tmp_path: Path) -> None:
    config = TrainConfig(**OTHER)  # type: ignore[arg-type]
    same = {f.name for f in dataclasses.fields(config) if getattr(config, f.name) == getattr(TrainConfig(), f.name)}
    assert same == {"overwrite"}  # resume excludes it
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    assert TrainConfig.load(path) == config
    overwriting = config.replace(resume=False, overwrite=True)
    assert TrainConfig.from_dict(json.loads(json.dumps(overwriting.to_dict()))) == overwriting


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("epochs", 0, "epochs=0 must be at least 1"),
        ("limit", -1, "limit=-1 must not be negative"),
        ("dropout", 1.0, "dropout=1.0 must be at least 0 and below 1"),
        ("lr", 0.0, "lr=0.0 must be positive and finite."),
        ("lr", float("nan"), "lr=nan must be positive and finite."),
        ("lr", float("inf"), "lr=inf must be positive and finite."),
        ("weight_decay", float("nan"), "weight_decay=nan must not be negative, inf or nan."),
        ("weight_decay", float("inf"), "weight_decay=inf must not be negative, inf or nan."),
        ("warmup", float("nan"), "warmup=nan must be at least 0 and below 1."),
        ("seed", 2**44, f"seed={2**44} must be below 2^44."),
        ("epochs", 10**30, "epochs=1000000000000000000000000000000 must be a whole number of at most 64 bits."),
        ("max_norm", float("inf"), "max_norm=inf must be positive"),
        ("weight_decay", -0.1, "weight_decay=-0.1 must not be negative"),
        ("max_length", 2, "leaves no token"),
        ("heads", 3, "hidden=256 is not a multiple of heads=3"),
    ],
)
def test_values_outside_their_range_are_refused(name: str, value: float, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        TrainConfig(schedule="linear").replace(**{name: value})
    assert words in str(refusal.value)


def test_every_seed_below_the_ceiling_shuffles() -> None:
    config = TrainConfig(seed=2**44 - 1)
    assert sorted(epoch_batches([1, 2, 3], 3, seed=config.seed, epoch=2**20 - 1)[0]) == [0, 1, 2]


WRONG = {
    "float": ["x", None, [], True, 10**400, 1j],
    "int": ["3", None, 3.0, True, []],
    "bool": [None, 1, "no"],
    "str": [None, 3, True, b"x"],
    "Path": [None, 3, True, b"x"],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (f.name, value)
        for f in dataclasses.fields(TrainConfig)
        for value in WRONG.get(str(f.type).partition(" | ")[0], [None, 3, "zz"])
        if f.name != "policy" and not (value is None and str(f.type).endswith("| None"))
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: object) -> None:
    for build in (lambda: TrainConfig(**{name: value}), lambda: TrainConfig.from_dict({name: value})):  # type: ignore[arg-type]
        with pytest.raises(ConfigError) as refusal:
            build()
        assert str(refusal.value).startswith(f"{name}={shown(value)} ")


@pytest.mark.parametrize("name", ["data", "dev_data", "test_data", "label_map", "out", "model"])
def test_a_path_may_be_text_or_a_path(name: str) -> None:
    text, path = TrainConfig(**{name: "a/b.tsv"}), TrainConfig(**{name: Path("a/b.tsv")})  # type: ignore[arg-type]
    assert text == path == TrainConfig.from_dict(json.loads(json.dumps(path.to_dict())))
    for value in ("a\0", "\ud83d", "x" * 256):
        with pytest.raises(ConfigError, match=f"train was given .* for {name}, which no file can be called: "):
            TrainConfig(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{name}='.*' is not UTF-8, in which a run's files are written"):
        TrainConfig(**{name: "\udcff"})  # type: ignore[arg-type]


def test_resume_and_overwrite_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="contradict each other"):
        TrainConfig(resume=True, overwrite=True)


def test_unknown_option_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no option 'epoch'\. Did you mean 'epochs'\?"):
        TrainConfig().replace(epoch=3)


def test_unknown_policy_is_refused_before_anything_starts() -> None:
    with pytest.raises(PolicyError, match="Did you mean 'bf16'"):
        TrainConfig(policy="bf61")


@pytest.mark.parametrize("given", [Policy.parse("bf16"), torch.bfloat16, {"preset": "bf16"}, Path("p.toml")])
def test_a_policy_in_any_form_is_kept_as_text(given: Any, tmp_path: Path) -> None:
    Policy.parse("bf16").save(tmp_path / "p.toml")
    config = TrainConfig(policy=tmp_path / given if isinstance(given, Path) else given)
    assert config.policy == "bf16"
    for other in (None, 3, True, []):
        with pytest.raises(PolicyError, match="a policy is a Policy, a text such as"):
            TrainConfig(policy=other)  # type: ignore[arg-type]


def test_the_learning_rate_depends_on_where_the_weights_come_from() -> None:
    found = {hidden: TrainConfig(hidden=hidden, heads=2).learning_rate for hidden in (16, 64, 128, 256)}
    assert found == {16: 1e-3, 64: 1e-3, 128: 5e-4, 256: 2.5e-4}  # at 1e-3 the model of 256 ends at chance
    assert TrainConfig().learning_rate == found[256] and TrainConfig(lr=1e-3).learning_rate == 1e-3
    assert TrainConfig(model="bert").learning_rate == 3e-5
    assert TrainConfig(model="bert", lr=2e-5).learning_rate == 2e-5


def test_no_amp_is_fp32_whatever_the_policy_says() -> None:
    assert not TrainConfig(amp=False, policy="fp16").chosen_policy.is_low
    assert TrainConfig(amp=True, policy="fp16").chosen_policy.scaling is not None


@pytest.mark.parametrize(("asked", "ranks", "found"), [(0, 1, 1), (0, 2, 2), (2, 1, 2), (4, 2, 4)])
def test_a_batch_is_run_in_micro_batches(asked: int, ranks: int, found: int) -> None:
    assert TrainConfig(batch_size=8, micro_batches=asked).num_micro_batches(ranks) == found


@pytest.mark.parametrize(
    ("asked", "ranks", "words"),
    [
        (3, 2, "micro_batches=3 cannot be shared by 2 ranks; write a multiple of 2, or 0."),
        (0, 3, "batch_size=8 is the batch of all 3 ranks together and is run in 3 micro-batches, which would not be equal. Write --batch-size 6 or 9."),
        (0, 16, "Write --batch-size 16."),
    ],
)  # fmt: skip
def test_micro_batches_that_are_not_equal_are_refused(asked: int, ranks: int, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        TrainConfig(batch_size=8, micro_batches=asked).num_micro_batches(ranks)
    assert words in str(refusal.value)


@pytest.mark.parametrize("name", sorted(set(OTHER) - {"hidden", "heads"}))
def test_a_resumed_run_may_differ_in_place_and_precision_only(name: str) -> None:
    begun = TrainConfig(schedule="cosine")  # which has a warm-up
    changed = begun.replace(**{name: OTHER[name] if name != "overwrite" else True})
    allowed = name in {"resume", "overwrite", "out", "amp", "policy", "device", "log_every", "tracker"}
    assert (begun.differences(changed) == {}) is allowed
