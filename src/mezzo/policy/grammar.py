"""The text form of a policy, read: a preset, then edits separated by commas; a later edit wins.

    fp16, output=fp32, ops=mezzo, op:cumsum=low, *.norm*=fp32, ?module:head=bf16, scaling.init_scale=1024

`written` writes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields

from ..errors import PolicyError, did_you_mean
from .parts import GuardConfig, OpRules, ScalingConfig, check, check_known
from .policy import Policy
from .presets import PRESETS
from .rule_text import (
    CONFIGS,
    FIELDS,
    ITEM,
    KEYS,
    PRECISIONS,
    PREFIXES,
    SCALING,
    is_pattern,
    read_module_rule,
    read_op_rule,
    split_edit,
)
from .spelling import kinds, read

_DOTTED = tuple(f"{name}.{field.name}" for name, config in CONFIGS.items() for field in fields(config))


def as_policy(value: Policy | str | os.PathLike[str]) -> Policy:
    """Return the policy that is meant: a policy itself, a policy's text, or a path that ends in ".toml".

    Raises:
        PolicyError: none of these, or it cannot be read.
    """
    if isinstance(value, Policy):
        return value
    if isinstance(value, os.PathLike) or (isinstance(value, str) and value.strip().endswith(".toml")):
        return Policy.load(value)
    if isinstance(value, str):
        return parse(value)
    raise PolicyError(f"a policy is a Policy, a text such as 'bf16, output=fp32', or a .toml path; got {value!r}.")


def parse(text: str) -> Policy:
    """Return the policy that a text describes; see `Policy.parse`."""
    items = list(_items(text))
    at, name = items[0]
    try:
        draft = _Draft(_preset(name))
        for at, item in items[1:]:  # noqa: B007  # the position of the edit that failed
            draft.edit(item)
    except PolicyError as error:
        raise PolicyError(f"cannot parse policy {text!r} at position {at}: {error}") from None
    try:
        return draft.policy()
    except PolicyError as error:
        raise PolicyError(f"cannot parse policy {text!r}: {error}") from None


def _items(text: str) -> Iterator[tuple[int, str]]:
    start = 0
    while True:
        match = ITEM.match(text, start)
        assert match is not None  # the empty text matches
        if text[match.end() : match.end() + 1] == '"':
            raise PolicyError(f"cannot parse policy {text!r} at position {match.end()}: the quote is not closed.")
        item = match[0]
        yield start + len(item) - len(item.lstrip()), item.strip()
        if match.end() == len(text):
            return
        start = match.end() + 1


def _preset(name: str) -> Policy:
    check("=" not in name, f"a policy starts with a preset ({', '.join(PRESETS)}): write 'fp32, {name}'.")
    check_known("preset", name.casefold(), PRESETS)
    return PRESETS[name.casefold()]


class _Draft:
    """A policy whose edits are still coming in, so that values which only fit together may come one by one."""

    def __init__(self, preset: Policy) -> None:
        self.preset = preset
        self.fields: dict[str, object] = {}
        self.table: object = preset.op_rules.table
        self.op_edits = list(preset.op_rules.edits)
        self.modules = list(preset.modules)
        self.configs: dict[str, dict[str, object] | None] = {name: _values(getattr(preset, name)) for name in CONFIGS}

    def edit(self, item: str) -> None:
        """Take in one edit.

        Writes: the draft.

        Raises:
            PolicyError: the short reason why the edit cannot be read.
        """
        check(bool(item), "an edit is empty; leave out the comma.")
        check(item.casefold() not in PRESETS, f"{item!r} is a preset, and a preset only comes first.")
        key, word = split_edit(item)
        self._set(key, word)

    def _set(self, key: str, word: str) -> None:
        prefix, _, name = key.partition(":")
        config, _, option = key.partition(".")
        bare = key.removeprefix("?").strip()
        if bare.startswith(('"', "module:")) or is_pattern(bare):
            self.modules.append(read_module_rule(key, word))
        elif prefix == "op" and name:
            self.op_edits.append(read_op_rule(name.strip(), word))
        elif config in CONFIGS and option:
            self._set_option(config, option, word)
        elif key in FIELDS:
            self.fields[key] = read(key, kinds(Policy)[key], word)
        elif key == "ops":
            self.table = read("op table", kinds(OpRules)["table"], word)
        elif key == "modules":
            check(word.casefold() == "none", f"modules={word} is unknown: 'modules=none' drops the rules so far.")
            self.modules.clear()
        elif key == "scaling":
            check_known("scaling", word.casefold(), SCALING)
            self.configs["scaling"] = None if word.casefold() == "none" else {}
        else:
            raise PolicyError(_unknown_key(key, word))

    def _set_option(self, config: str, option: str, word: str) -> None:
        known = kinds(CONFIGS[config])
        check_known("key", f"{config}.{option}", _DOTTED)
        values = self.configs[config] or {}
        self.configs[config] = {**values, option: read(f"{config}.{option}", known[option], word)}

    def policy(self) -> Policy:
        """Return the policy with every edit in it.

        Raises:
            PolicyError: the edits contradict each other.
        """
        scaling, guard = self.configs["scaling"], self.configs["guard"]
        return self.preset.replace(
            **self.fields,
            ops=OpRules(table=self.table, edits=tuple(self.op_edits)),  # type: ignore[arg-type]  # `read` gave a name
            modules=tuple(self.modules),
            scaling=None if scaling is None else ScalingConfig(**scaling),  # type: ignore[arg-type]  # as above
            guard=GuardConfig(**(guard or {})),  # type: ignore[arg-type]  # as above
        )


def _values(config: ScalingConfig | GuardConfig | None) -> dict[str, object] | None:
    return None if config is None else {field.name: getattr(config, field.name) for field in fields(config)}


def _unknown_key(key: str, word: str) -> str:
    folded = key.casefold()
    if folded != key and (folded in KEYS or folded.startswith(PREFIXES)):
        return f"keys are lower case: write '{folded}={word}', or 'module:{key}={word}' for modules called {key!r}."
    bare = key.removeprefix("?").strip()
    hint = did_you_mean(bare, (*KEYS, *_DOTTED))
    if hint.startswith(" Valid"):
        hint = f" Keys are {', '.join((*KEYS, 'op:NAME', 'module:PATTERN', 'scaling.FIELD', 'guard.FIELD'))}."
    if word.casefold() in PRECISIONS and '"' not in key:
        hint += f" A module called {bare!r} is written '{'?' if key != bare else ''}module:{bare}={word}'."
    return f"unknown key {key!r}.{hint}"
