"""Policies as plain values (str, int, float, bool, list, dict) for checkpoints, and as TOML files a person can edit."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ..errors import PolicyError, shown
from ..files import as_path, write_text
from . import spelling
from .fields import GuardConfig, OpRules, PolicyFields, ScalingConfig, check, check_known
from .kinds import is_word, kinds, options
from .presets import PRESET_FIELDS, preset_fields, refuse_key_elsewhere
from .spelling import CONFIGS, FIELDS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VERSION = 1
_KEYS = ("version", "preset", *FIELDS, "ops", "op_rules", "modules", *CONFIGS)
_T = TypeVar("_T")


def to_document(policy: PolicyFields) -> dict[str, object]:
    """Return the policy in plain form, every field written out; see `Policy.to_dict`."""
    document: dict[str, object] = {"version": VERSION}
    document |= {name: spelling.plain(name, getattr(policy, name)) for name in FIELDS}
    document["ops"] = policy.op_rules.table
    document["op_rules"] = [spelling.write_op_rule(op, rule) for op, rule in policy.op_rules.edits]
    document["modules"] = [spelling.write_module_rule(rule) for rule in policy.modules]
    document["scaling"] = "none" if policy.scaling is None else _config_document(policy.scaling)
    document["guard"] = _config_document(policy.guard)
    return document


def _config_document(config: ScalingConfig | GuardConfig) -> dict[str, object]:
    return {name: spelling.plain(name, getattr(config, name)) for name in kinds(type(config))}


def from_document(document: Mapping[str, object]) -> PolicyFields:
    """Return the policy that a plain form describes; see `Policy.from_dict`."""
    check(isinstance(document, Mapping), f"a policy's plain form is a dict, not {type(document).__name__}.")
    for key in document:
        check(
            key not in PRESET_FIELDS,
            f"{key!r} is a preset, and stands under the key 'preset'. No config of DeepSpeed is read.",
        )
        refuse_key_elsewhere(key)
        check_known("key", key if isinstance(key, str) else shown(key), _KEYS)
    version = document.get("version", VERSION)
    is_read = isinstance(version, int) and version == VERSION
    check(is_read, f"'version': a policy of version {shown(version)}; this mezzo reads version {VERSION}.")
    preset = preset_fields(document["preset"]) if "preset" in document else PolicyFields()
    changes: dict[str, object] = {
        name: _value(name, kinds(PolicyFields)[name], document[name]) for name in FIELDS if name in document
    }
    if "modules" in document:
        changes["modules"] = (*preset.modules, *_rules("modules", document["modules"], spelling.read_module_rule))
    if "scaling" in document:
        changes["scaling"] = _scaling(document["scaling"], preset.scaling or ScalingConfig())
    if "guard" in document:
        changes["guard"] = _config("guard", preset.guard, document["guard"])
    table = _value("ops", kinds(OpRules)["table"], document.get("ops", preset.op_rules.table))
    edits = (*preset.op_rules.edits, *_rules("op_rules", document.get("op_rules", []), spelling.read_op_rule))
    return preset.replace(ops=OpRules(table=table, edits=edits), **changes)  # type: ignore[arg-type]  # values are checked


def _value(key: str, kind: object, value: object) -> object:
    """Read words; numbers and truth values pass, and the dataclass checks their type."""
    numeric = any(option in (int, float, bool) for option in options(kind))
    if not isinstance(value, str) or (numeric and value.casefold() != "none"):
        return value
    return spelling.read(key, kind, value)


def _rules(key: str, entries: object, read_rule: Callable[[str, str], _T]) -> tuple[_T, ...]:
    if isinstance(entries, Mapping):
        entries = [f"{name}={word}" for name, word in entries.items()]
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise PolicyError(f"{key!r}: a list of texts such as 'name=fp32' is wanted, not {shown(entries)}.")
    rules = []
    for number, one in enumerate(entries, 1):
        check(isinstance(one, str), f"{key!r}, entry {number}: a text such as 'name=fp32' is wanted, not {shown(one)}.")
        try:
            rules.append(read_rule(*spelling.split_edit(one)))
        except PolicyError as error:
            raise PolicyError(f"{key!r}, entry {number}: {error}") from None
    return tuple(rules)


def _scaling(value: object, base: ScalingConfig) -> ScalingConfig | None:
    if value is None:
        return None
    if isinstance(value, str | float | int) and not isinstance(value, bool):
        return spelling.read_scaling(value if isinstance(value, str) else shown(value))
    return _config("scaling", base, value)


_Config = TypeVar("_Config", ScalingConfig, GuardConfig)


def _config(key: str, base: _Config, values: object) -> _Config:
    if not isinstance(values, Mapping):
        raise PolicyError(f"{key!r}: a table of settings is wanted, not {shown(values)}.")
    known = {name: kind for name, kind in kinds(type(base)).items() if is_word(kind)}
    for name in values:
        check_known("key", f"{key}.{name}", [f"{key}.{option}" for option in known])
    settings = {name: _value(f"{key}.{name}", known[name], value) for name, value in values.items()}
    try:
        return replace(base, **settings)  # type: ignore[arg-type]  # the dataclass checks the types
    except PolicyError as error:
        raise PolicyError(f"{key!r}: {error}") from None


def save(policy: PolicyFields, path: str | os.PathLike[str], title: str) -> None:
    """Write a policy to a file, with a title as the comment on its first line; see `Policy.save`.

    Writes: a file beside the path, or beside what a link there names, synced to disk, then renamed to it; into a pipe or device.
    """
    path, text = as_path("Policy.save", "path", path, PolicyError), f"# {title}\n{_toml(to_document(policy))}"
    folder = Path(os.path.realpath(path)).parent
    why = "it is a folder" if path.is_dir() else f"there is no folder '{folder}'"
    check(not path.is_dir() and folder.is_dir(),
          f"cannot write the policy file '{path}': {why}. Name a file in a folder that is there.")  # fmt: skip
    write_text(path, text, several=True)


_LONGEST = 2**26
"""Characters of a file: a device has no end."""


def load(path: str | os.PathLike[str]) -> PolicyFields:
    """Read a policy from a file; see `Policy.load`."""
    path = as_path("Policy.load", "path", path, PolicyError)
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(_LONGEST + 1)
        document = tomllib.loads(text) if len(text) <= _LONGEST else {}
    except OSError as error:
        raise PolicyError(f"cannot read the policy file '{path}': {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:  # both tomllib.TOMLDecodeError and UnicodeDecodeError
        raise PolicyError(f"the policy file '{path}' is not TOML: {error}.") from error
    check(len(text) <= _LONGEST, f"the policy file '{path}' has more than {_LONGEST:,} characters, and no policy has so many.")  # fmt: skip
    check(bool(document), f"the policy file '{path}' sets nothing. Write preset = 'fp32' in it if fp32 is meant.")
    try:
        return from_document(document)
    except PolicyError as error:
        raise PolicyError(f"policy file '{path}': {error}") from None


def _toml(document: Mapping[str, object]) -> str:
    """Set a plain form as TOML: words first, then one table for each of its dicts."""
    words = [f"{key} = {_value_toml(value)}\n" for key, value in document.items() if not isinstance(value, Mapping)]
    tables = [f"\n[{key}]\n{_toml(value)}" for key, value in document.items() if isinstance(value, Mapping)]
    return "".join(words + tables)


def _value_toml(value: object) -> str:
    if isinstance(value, list):
        return "[" + "".join(f"\n    {_value_toml(item)}," for item in value) + "\n]" if value else "[]"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
