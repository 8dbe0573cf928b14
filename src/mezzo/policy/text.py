"""The text form of a policy, read and written: a preset, then edits separated by commas; a later edit wins. And its table.

fp16, output=fp32, ops=mezzo, op:cumsum=low, *.norm*=fp32, ?module:head=bf16, scaling.init_scale=1024
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property

from ..errors import PolicyError, did_you_mean, kind_of
from . import spelling
from .fields import GuardConfig, OpRules, PolicyFields, ScalingConfig, check, check_known
from .kinds import kinds
from .presets import ALIASES, PRESET_FIELDS, PRESET_KEYS, preset_fields, refuse_key_elsewhere
from .spelling import CONFIGS, FIELDS, KEYS, PRECISIONS

_DOTTED = tuple(f"{name}.{field.name}" for name, config in CONFIGS.items() for field in fields(config))
_LONGEST = 1_000
"""Characters of an edit, and of a text that an error quotes."""
Setting = tuple[str, int]
"""What an edit sets: ("compute", 0), ("op", i), ("module", i), ("scaling.init_scale", 0)."""


def parse(text: str) -> PolicyFields:
    """Return the policy that a text describes; see `Policy.parse`."""
    check(isinstance(text, str),
          f"Policy.parse was given {kind_of(text)}; give text such as 'bf16, output=fp32'.")  # fmt: skip
    items = list(_items(text))
    at, name = items[0]
    try:
        if "=" in name:
            raise PolicyError(_no_preset([item for _, item in items]))
        draft = _Draft(preset_fields(name))
        for at, item in items[1:]:  # noqa: B007  # the position of the edit that failed
            draft.edit(item)
    except PolicyError as error:
        raise _unreadable(text, at, str(error)) from None
    try:
        return draft.policy()
    except PolicyError as error:
        raise _unreadable(text, None, str(error)) from None


def _no_preset(edits: list[str]) -> str:
    """Return what is wrong with a text that is edits alone; a PolicyError if the first is none. The preset of a dtype brings its loss scale."""
    key, _, word = map(str.strip, edits[0].partition("="))
    if key in PRESET_KEYS:
        return f"a policy starts with a preset: write {word!r}."
    draft = _Draft(PRESET_FIELDS["fp32"])
    draft.edit(edits[0])
    for edit in edits[1:]:
        with suppress(PolicyError):  # said of the text that is written instead
            draft.edit(edit)
    preset = spelling.plain("compute", draft.fields.get("compute", draft.preset.compute))
    return f"a policy starts with a preset ({', '.join(PRESET_FIELDS)}): write '{preset}, {', '.join(edits)}'."


def _unreadable(text: str, at: int | None, why: str) -> PolicyError:
    quoted = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return PolicyError(f"cannot parse policy {quoted!r}{'' if at is None else f' at position {at}'}: {why}")


def _items(text: str) -> Iterator[tuple[int, str]]:
    start = 0
    while True:
        match = spelling.ITEM.match(text, start)
        assert match is not None  # the empty text matches
        if text[match.end() : match.end() + 1] == '"':
            raise _unreadable(text, match.end(), "the quote is not closed.")
        item = match[0]
        at, item = start + len(item) - len(item.lstrip()), item.strip()
        if len(item) > _LONGEST:
            raise _unreadable(text, at, f"an edit of {len(item):,} characters begins here; {_LONGEST:,} are the most.")
        first, _, rest = item.partition(" ")
        commas = f"{first}, {rest.lstrip()}" if rest and first.casefold() in PRESET_FIELDS else item.replace(";", ",")
        if commas != item and '"' not in item:
            raise _unreadable(text, at, f"write {commas!r}, with commas.")
        yield at, item
        if match.end() == len(text):
            return
        start = match.end() + 1


class _Draft:
    """A policy whose edits are still coming in, so that values which only fit together may come one by one."""

    def __init__(self, preset: PolicyFields) -> None:
        self.preset = preset
        self.fields: dict[str, object] = {}
        self.table: object = preset.op_rules.table
        self.op_edits = list(preset.op_rules.edits)
        self.modules = list(preset.modules)
        self.configs: dict[str, dict[str, object] | None] = {name: _values(getattr(preset, name)) for name in CONFIGS}

    def edit(self, item: str) -> None:
        """Take in one edit; a PolicyError with the short reason why it cannot be read. Writes: the draft."""
        check(bool(item), "an edit is empty; leave out the comma.")
        check(
            item.casefold() not in (*PRESET_FIELDS, *ALIASES), f"{item!r} is a preset, and a preset only comes first."
        )
        key, word = spelling.split_edit(item)
        prefix, _, name = key.partition(":")
        config, _, option = key.partition(".")
        bare = key.removeprefix("?").strip()
        is_option = bool(option) and config not in CONFIGS and word.casefold() not in PRECISIONS
        if is_option and "Did" in did_you_mean(config, CONFIGS):
            raise PolicyError(_unknown_key(key, word))
        if bare.startswith(('"', "module:")) or spelling.is_pattern(bare):
            self.modules.append(spelling.read_module_rule(key, word))
        elif prefix == "op" and name:
            self.op_edits.append(spelling.read_op_rule(name.strip(), word))
        elif config in CONFIGS and option:
            self._set_option(config, option, word)
        elif key in FIELDS:
            self.fields[key] = spelling.read(key, kinds(PolicyFields)[key], word)
        elif key == "ops":
            self.table = spelling.read("op table", kinds(OpRules)["table"], word)
        elif key == "modules":
            check(word.casefold() == "none", f"modules={word} is unknown: 'modules=none' drops the rules so far.")
            self.modules.clear()
        elif key == "scaling":
            self.configs["scaling"] = _values(spelling.read_scaling(word))
        else:
            raise PolicyError(_unknown_key(key, word))

    def _set_option(self, config: str, option: str, word: str) -> None:
        known = kinds(CONFIGS[config])
        if option not in known:
            refuse_key_elsewhere(option)
        check_known("key", f"{config}.{option}", _DOTTED)
        values = self.configs[config] or {}
        self.configs[config] = {**values, option: spelling.read(f"{config}.{option}", known[option], word)}

    def policy(self) -> PolicyFields:
        """Return the policy with every edit in it; a PolicyError if they contradict each other."""
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
    if folded != key and (folded in KEYS or folded.startswith(spelling.PREFIXES)):
        return f"keys are lower case: write '{folded}={word}', or 'module:{key}={word}' for modules called {key!r}."
    bare = key.removeprefix("?").strip()
    refuse_key_elsewhere(bare)
    hint = did_you_mean(bare, (*KEYS, *_DOTTED))
    if hint.startswith(" Valid"):
        hint = f" Keys are {', '.join((*KEYS, 'op:NAME', 'module:PATTERN', 'scaling.FIELD', 'guard.FIELD'))}."
    if word.casefold() in PRECISIONS and '"' not in key:
        hint += f" A module called {bare!r} is written '{'?' if key != bare else ''}module:{bare}={word}'."
    return f"unknown key {key!r}.{hint}"


@dataclass(frozen=True, kw_only=True)
class Written:
    """A policy's text: the name of the preset it starts from, and spelled edits, in order, by what they set."""

    preset: str
    edits: Mapping[Setting, str]

    def __str__(self) -> str:
        return ", ".join([self.preset, *self.edits.values()])

    def where(self, setting: Setting) -> str:
        """Return where it is set: "edit 2", counted from 1, or "preset bf16"."""
        around = ("scaling", 0) if setting[0].startswith("scaling.") else setting
        number = self._numbers.get(setting, self._numbers.get(around))
        return f"preset {self.preset}" if number is None else f"edit {number}"

    @cached_property
    def _numbers(self) -> Mapping[Setting, int]:
        return {setting: number for number, setting in enumerate(self.edits, 1)}


def written(policy: PolicyFields) -> Written:
    """Return the text of a policy; `parse(str(written(policy))) == policy`.

    The preset that needs the fewest edits is taken; of equals one with the same `compute`, then the earlier.
    """
    texts = [_against(policy, name) for name in PRESET_FIELDS]
    return min(texts, key=lambda text: (len(text.edits), ("compute", 0) in text.edits))


def _against(policy: PolicyFields, name: str) -> Written:
    preset, edits = PRESET_FIELDS[name], dict[Setting, str]()
    for field in FIELDS:
        if getattr(policy, field) != getattr(preset, field):
            edits[field, 0] = f"{field}={spelling.spell(field, getattr(policy, field))}"
    if policy.op_rules.table != preset.op_rules.table:
        edits["ops", 0] = f"ops={policy.op_rules.table}"
    for i, (op, rule) in enumerate(policy.op_rules.edits):
        edits["op", i] = f"op:{spelling.write_op_rule(op, rule)}"
    kept = len(preset.modules)
    if policy.modules[:kept] != preset.modules:
        edits["modules", 0], kept = "modules=none", 0
    for i, module_rule in enumerate(policy.modules[kept:], kept):
        edits["module", i] = spelling.write_module_rule(module_rule)
    edits.update(_scaling_edits(policy.scaling, preset.scaling))
    edits.update(config_edits("guard", policy.guard, preset.guard))
    return Written(preset=name, edits=edits)


def _scaling_edits(scaling: ScalingConfig | None, preset: ScalingConfig | None) -> dict[Setting, str]:
    if scaling == preset:
        return {}
    if scaling is None:
        return {("scaling", 0): "scaling=none"}
    if not scaling.dynamic:
        word, base = spelling.spell("init_scale", scaling.init_scale), ScalingConfig.fixed(scaling.init_scale)
        return {("scaling", 0): f"scaling={word}", **config_edits("scaling", scaling, base)}
    return config_edits("scaling", scaling, preset or ScalingConfig()) or {("scaling", 0): "scaling=dynamic"}


def config_edits(name: str, config: object, base: object) -> dict[Setting, str]:
    """Return the edits that make one config of another, by what they set. Host only."""
    changed = [field for field in kinds(type(base)) if getattr(config, field) != getattr(base, field)]
    words = {f"{name}.{field}": spelling.spell(field, getattr(config, field)) for field in changed}
    return {(key, 0): f"{key}={word}" for key, word in words.items()}


def settings(policy: PolicyFields) -> Iterator[tuple[str, str]]:
    """Yield every setting of a policy with its word: "compute", "scaling.init_scale", "guard.patience"."""
    for name in FIELDS:
        yield name, spelling.spell(name, getattr(policy, name))
    yield "ops", policy.op_rules.table
    yield "scaling", "none" if policy.scaling is None else "dynamic" if policy.scaling.dynamic else "fixed"
    for name in CONFIGS:
        config = getattr(policy, name)
        if config is not None:
            for option in kinds(type(config)):
                yield f"{name}.{option}", spelling.spell(option, getattr(config, option))


def rules(policy: PolicyFields, text: Written) -> Iterator[tuple[str, str, str]]:
    """Yield every op and module rule: its kind, as it is spelled, and where it is written."""
    for i, (op, op_rule) in enumerate(policy.op_rules.edits):
        yield "op rule", spelling.write_op_rule(op, op_rule), text.where(("op", i))
    for i, module_rule in enumerate(policy.modules):
        yield "module rule", spelling.write_module_rule(module_rule), text.where(("module", i))


def to_html(policy: PolicyFields) -> str:
    """Return a table of settings and rules, each with where it is written; what was edited is bold."""
    text = written(policy)
    rows = [(key, word, text.where((key, 0))) for key, word in settings(policy)] + list(rules(policy, text))
    cells = "".join(_row(*(html.escape(cell) for cell in row)) for row in rows)
    head = "<tr><th>setting</th><th>value</th><th>written</th></tr>"
    return f"<table><caption><code>{html.escape(str(text))}</code></caption>{head}{cells}</table>"


def _row(name: str, word: str, where: str) -> str:
    value = f"<b>{word}</b>" if where.startswith("edit") else word
    return f"<tr><td>{name}</td><td>{value}</td><td>{where}</td></tr>"
