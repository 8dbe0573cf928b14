"""The file form and the plain form: nothing is lost, a person can edit it, and a crash leaves no part of it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from tests.policy.policies import NO_DEFAULTS, policies
from tests.saved import through_a_file
from tests.train.test_checkpoint import full_disk

from mezzo.errors import PolicyError
from mezzo.policy import PRESETS, GuardConfig, ModuleRule, OpRules, Policy, Rule, ScalingConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("policies")


class OfAnotherLibrary(Sequence[str]):
    """A list as config libraries have them."""

    def __init__(self, *held: str) -> None:
        self._held = held

    def __getitem__(self, index: Any) -> Any:
        return self._held[index]

    def __len__(self) -> int:
        return len(self._held)


@pytest.mark.parametrize(
    "kind", [list, tuple, lambda rules: OfAnotherLibrary(*rules), lambda rules: dict(r.split("=") for r in rules)]
)
def test_rules_of_configs(kind: Any, tmp_path: Path) -> None:
    """Rules in any sequence, or in a table of names, which a YAML file or an override by name has."""
    found = Policy.from_dict(
        {"preset": "bf16", "modules": kind(["*.head=fp32", "?gone=bf16"]), "op_rules": kind(["mean=fp32"])}
    )
    assert found == Policy.parse("bf16, *.head=fp32, ?module:gone=bf16, op:mean=fp32")
    assert Policy.from_dict({"preset": "bf16", "modules": kind([])}) == Policy.parse("bf16")
    (tmp_path / "p.toml").write_text('preset = "bf16"\n[modules]\n"*.head" = "fp32"\n')
    assert Policy.load(tmp_path / "p.toml") == Policy.parse("bf16, *.head=fp32")
    with pytest.raises(PolicyError, match=r"^'modules', entry 2: .*'fp23'.*Did you mean 'fp32'"):
        Policy.from_dict({"modules": kind(["a=fp32", "b=fp23"])})


@settings(max_examples=100)
@given(policy=policies())
def test_load_is_the_inverse_of_save(folder: Path, policy: Policy) -> None:
    policy.save(folder / "p.toml")
    assert Policy.load(folder / "p.toml") == policy
    assert [path.name for path in folder.iterdir()] == ["p.toml"]


def leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from (key, *leaves(item))
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    else:
        yield value


@given(policies())
def test_the_plain_form_survives_a_weights_only_checkpoint(policy: Policy) -> None:
    document = policy.to_dict()
    assert {type(leaf) for leaf in leaves(document)} <= {str, int, float, bool}
    assert Policy.from_dict(through_a_file({"policy": document})["policy"]) == policy


@pytest.mark.parametrize("policy", [NO_DEFAULTS, *PRESETS.values()])
def test_no_field_is_lost(policy: Policy, tmp_path: Path) -> None:
    policy.save(str(tmp_path / "p.toml"))
    assert Policy.load(str(tmp_path / "p.toml")) == policy
    assert Policy.from_dict(policy.to_dict()) == policy


def test_the_file_is_one_a_person_can_edit(tmp_path: Path) -> None:
    Policy.parse("fp16, *.norm*=fp32, op:cumsum=low, scaling.init_scale=1024").save(tmp_path / "p.toml")
    assert (tmp_path / "p.toml").read_text() == (
        """\
# mezzo policy: fp16, op:cumsum=low, *.norm*=fp32, scaling.init_scale=1024
version = 1
compute = "fp16"
params = "fp32"
master = "none"
grads = "none"
reduce = "fp32"
state = "fp32"
output = "fp32"
loss = "fp32"
ops = "torch"
op_rules = [
    "cumsum=low",
]
modules = [
    "?LayerNorm=fp32_low_out",
    "?GroupNorm=fp32_low_out",
    "?*RMSNorm=fp32_low_out",
    "?*T5LayerNorm=fp32_low_out",
    "*.norm*=fp32",
]

[scaling]
init_scale = 1024.0
growth_factor = 2.0
backoff_factor = 0.5
growth_interval = 2000
min_scale = 1.0
max_scale = "none"
hysteresis = 1
dynamic = true

[guard]
enabled = true
on_overflow = "skip"
patience = 25
restore_buffers = true
check_every = 1000
"""
    )


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("version = 1", Policy()),
        ('compute = "BFloat16"\nmaster = "NONE"', Policy(compute=torch.bfloat16)),
        ('compute = "auto"\noutput = "fp32"', Policy(compute=None, output=torch.float32)),
        ('scaling = "dynamic"', Policy(scaling=ScalingConfig())),
        ('scaling = "none"', Policy()),
        ("[scaling]\ninit_scale = 8", Policy(scaling=ScalingConfig(init_scale=8.0))),
        ("[guard]\npatience = 3", Policy(guard=GuardConfig(patience=3))),
        ('ops = "mezzo"\nop_rules = ["cumsum = low"]', Policy(ops=OpRules(table="mezzo", edits=(("cumsum", Rule.LOW),)))),
        ('modules = ["encoder=bf16", "? loss = low"]',
         Policy(modules=(ModuleRule(pattern="encoder", precision=torch.bfloat16),
                         ModuleRule(pattern="loss", precision=Rule.LOW, required=False)))),
    ],
)  # fmt: skip
def test_what_a_person_may_write(text: str, policy: Policy, tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(text)
    assert Policy.load(tmp_path / "p.toml") == policy


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[fp16]\nenabled = true", "'fp16' is a preset, and stands under the key 'preset'. No config of DeepSpeed is read."),
        ("loss_scale = 128", "unknown key 'loss_scale': write scaling=dynamic, or a number that never moves, as in scaling=1024."),
        ('comput = "bf16"', "unknown key 'comput'. Did you mean 'compute'?"),
        ('compute = "bf61"', "unknown compute dtype 'bf61'. Did you mean 'bf16'?"),
        ("compute = 16", "compute=16 is not a dtype of mixed precision: fp32, fp16 or bf16."),
        ('master = "spilt"', "unknown master 'spilt'. Did you mean 'split'?"),
        ('params = "bf16"', ("params=bf16 with master=none loses small updates; write master=split, fp32, kahan or "
                             "stochastic, or params=fp32.")),
        ('ops = "mezo"', "unknown ops 'mezo'. Did you mean 'mezzo'?"),
        ('op_rules = "cumsum=low"', "'op_rules': a list of texts such as 'name=fp32' is wanted, not 'cumsum=low'."),
        ('op_rules = ["cumsum=low", "cumsm=low"]', "'op_rules', entry 2: unknown op 'cumsm'. Did you mean 'cumsum'?"),
        ("op_rules = [1]", "'op_rules', entry 1: a text such as 'name=fp32' is wanted, not 1."),
        ('modules = ["norm"]', ("'modules', entry 1: 'norm' is not 'key=value'; a pattern with a comma, an equals sign or "
                                "a quote goes in double quotes.")),
        ('modules = ["a=fp32", "b=lwo"]', "'modules', entry 2: unknown module precision 'lwo'. Did you mean 'low'?"),
        ('scaling = "dynamc"', "unknown scaling 'dynamc'. Did you mean 'dynamic'?"),
        ("scaling = true", "'scaling': a table of settings is wanted, not True."),
        ("[scaling]\ninit_scal = 1", "unknown key 'scaling.init_scal'. Did you mean 'scaling.init_scale'?"),
        ('[scaling]\ninit_scale = "big"', "'scaling': init_scale='big' must be a number."),
        ("[scaling]\nbackoff_factor = 2", "'scaling': backoff_factor=2 must be in (0, 1)."),
        ("[guard]\nenabled = 1", "'guard': enabled=1 must be true or false."),
        ('[guard]\nenabled = "false"', "'guard': enabled='false' must be true or false."),
        ("[guard]\npatience = true", "'guard': patience=True must be a whole number."),
        ('[guard]\non_overflow = "retyr"', "unknown guard.on_overflow 'retyr'. Did you mean 'retry'?"),
        ("version = 2", "'version': a policy of version 2; this mezzo reads version 1."),
    ],
)  # fmt: skip
def test_an_error_names_file_and_key(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(text)
    with pytest.raises(PolicyError) as raised:
        Policy.load(path)
    assert str(raised.value) == f"policy file '{path}': {reason}"


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfpreset = 'bf16'\n", b"preset = 'bf16'\r\n"])
def test_what_editors_of_windows_write_is_read(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_bytes(content)
    assert Policy.load(tmp_path / "p.toml") == Policy.parse("bf16")


@pytest.mark.parametrize(("content", "reason"), [(b"compute = bf16", "Invalid value"), (b"\xff", "invalid start byte")])
def test_what_is_not_toml_is_named(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_bytes(content)
    with pytest.raises(PolicyError) as raised:
        Policy.load(path)
    assert str(raised.value).startswith(f"the policy file '{path}' is not TOML: ")
    assert reason in str(raised.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"cannot read the policy file '.*absent\.toml': No such file or directory\."):
        Policy.load(tmp_path / "absent.toml")


def test_from_dict_wants_a_dict() -> None:
    with pytest.raises(PolicyError, match="a policy's plain form is a dict, not list"):
        Policy.from_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [None, 3, b"p.toml", "a\0.toml", "\ud83d.toml", "x" * 300])
def test_what_is_no_path_is_refused(path: Any) -> None:
    for call, what in ((Policy.load, "load"), (Policy().save, "save")):
        with pytest.raises(PolicyError, match=f"Policy.{what} was given .* for path[;,] "):
            call(path)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "it is a folder"),
        ("folder", "it is a folder"),
        ("nope/p.toml", "there is no folder '.*nope'"),
        ("file/p.toml", "there is no folder '.*file'"),
    ],
)
def test_a_file_that_cannot_be_there_is_refused_before_anything_is_written(name: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(PolicyError, match=f"cannot write the policy file '.*': {why}. Name a file in a folder"):
        Policy().save(tmp_path / name)
    with pytest.raises(PolicyError, match=r"cannot write the policy file '\.': it is a folder"):
        Policy().save(".")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    NO_DEFAULTS.save(path)
    before = path.read_bytes()
    with full_disk(64), pytest.raises(OSError, match="File too large"):
        Policy.parse("fp16").save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one_and_a_pipe_takes_the_text(tmp_path: Path) -> None:
    policy, kept, link, pipe = (
        Policy.parse("bf16, *.norm=fp32"),
        tmp_path / "kept.toml",
        tmp_path / "link",
        tmp_path / "pipe",
    )
    link.symlink_to(kept)
    for _ in range(2):  # what it names is not there, then it is
        policy.save(link)
        assert link.is_symlink() and Policy.load(kept) == policy
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere" / "kept.toml")
    with pytest.raises(PolicyError, match="there is no folder"):
        policy.save(tmp_path / "lost")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    policy.save(pipe)
    assert os.read(reader, 10_000).decode() == kept.read_text() and pipe.is_fifo()
    os.close(reader)


@pytest.mark.parametrize("key", ["precision", "mixed_precision", "opt_level", "policy"])
def test_a_key_of_other_libraries_is_told_which_one_is_meant(key: str) -> None:
    with pytest.raises(PolicyError, match=f"unknown key '{key}': .* 'preset' of a table"):
        Policy.from_dict({key: "bf16"})
    assert Policy.from_dict({"preset": "bf16"}) == Policy.parse("bf16")
