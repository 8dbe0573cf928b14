"""The plain form of a policy: str, int, float, bool, list and dict, for TOML files and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from ..errors import PolicyError
from .parts import GuardConfig, ModuleRule, OpRules, ScalingConfig, check, check_known
from .policy import Policy
from .rule import Rule
from .rule_text import (
    CONFIGS,
    FIELDS,
    SCALING,
    read_module_rule,
    read_op_rule,
    split_edit,
    write_module_rule,
    write_op_rule,
)
from .spelling import is_word, kinds, options, plain, read

VERSION = 1
_KEYS = ("version", *FIELDS, "ops", "op_rules", "modules", *CONFIGS)
_T = TypeVar("_T")


def to_document(policy: Policy) -> dict[str, object]:
    """Return the policy in plain form, every field written out; see `Policy.to_dict`."""
    document: dict[str, object] = {"version": VERSION}
    for name in FIELDS:
        document[name] = plain(name, getattr(policy, name))
    document["ops"] = policy.op_rules.table
    document["op_rules"] = [write_op_rule(op, rule) for op, rule in policy.op_rules.edits]
    document["modules"] = [write_module_rule(rule) for rule in policy.modules]
    document["scaling"] = "none" if policy.scaling is None else _config_document(policy.scaling)
    document["guard"] = _config_document(policy.guard)
    return document


def _config_document(config: ScalingConfig | GuardConfig) -> dict[str, object]:
    return {name: plain(name, getattr(config, name)) for name in kinds(type(config))}


def from_document(document: Mapping[str, object]) -> Policy:
    """Return the policy that a plain form describes; see `Policy.from_dict`."""
    check(isinstance(document, Mapping), f"a policy's plain form is a dict, not {type(document).__name__}.")
    for key in document:
        check_known("key", str(key), _KEYS)
    version = document.get("version", VERSION)
    check(version == VERSION, f"'version': a policy of version {version!r}; this mezzo reads version {VERSION}.")
    changes: dict[str, object] = {
        name: _value(name, kinds(Policy)[name], document[name]) for name in FIELDS if name in document
    }
    if "modules" in document:
        changes["modules"] = _rules("modules", document["modules"], _module_rule)
    if "scaling" in document:
        changes["scaling"] = _scaling(document["scaling"])
    if "guard" in document:
        changes["guard"] = _config("guard", GuardConfig, document["guard"])
    table = _value("ops", kinds(OpRules)["table"], document.get("ops", "torch"))
    edits = _rules("op_rules", document.get("op_rules", []), _op_rule)
    return Policy(ops=OpRules(table=table, edits=edits), **changes)  # type: ignore[arg-type]  # values are checked


def _value(key: str, kind: object, value: object) -> object:
    """Read words; numbers and truth values pass, and the dataclass checks their type."""
    numeric = any(option in (int, float, bool) for option in options(kind))
    if not isinstance(value, str) or (numeric and value.casefold() != "none"):
        return value
    return read(key, kind, value)


def _rules(key: str, entries: object, read_rule: Callable[[str], _T]) -> tuple[_T, ...]:
    if not isinstance(entries, list):
        raise PolicyError(f"{key!r}: a list of texts such as 'name=fp32' is wanted, not {entries!r}.")
    rules = []
    for number, entry in enumerate(entries, 1):
        check(isinstance(entry, str), f"{key!r}, entry {number}: a text such as 'name=fp32' is wanted, not {entry!r}.")
        try:
            rules.append(read_rule(entry))
        except PolicyError as error:
            raise PolicyError(f"{key!r}, entry {number}: {error}") from None
    return tuple(rules)


def _module_rule(entry: str) -> ModuleRule:
    return read_module_rule(*split_edit(entry))


def _op_rule(entry: str) -> tuple[str, Rule]:
    return read_op_rule(*split_edit(entry))


def _scaling(value: object) -> ScalingConfig | None:
    if value is None:
        return None
    if isinstance(value, str):
        check_known("scaling", value.casefold(), SCALING)
        return None if value.casefold() == "none" else ScalingConfig()
    return _config("scaling", ScalingConfig, value)


_Config = TypeVar("_Config", ScalingConfig, GuardConfig)


def _config(key: str, config: type[_Config], values: object) -> _Config:
    if not isinstance(values, Mapping):
        raise PolicyError(f"{key!r}: a table of settings is wanted, not {values!r}.")
    known = {name: kind for name, kind in kinds(config).items() if is_word(kind)}
    for name in values:
        check_known("key", f"{key}.{name}", [f"{key}.{option}" for option in known])
    settings = {name: _value(f"{key}.{name}", known[name], value) for name, value in values.items()}
    try:
        return config(**settings)  # type: ignore[arg-type]  # the dataclass checks the types
    except PolicyError as error:
        raise PolicyError(f"{key!r}: {error}") from None
