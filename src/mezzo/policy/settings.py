"""Every setting of a policy with its word and the place it is written at, for people to look at."""

from __future__ import annotations

import html
from collections.abc import Iterator

from .fields import PolicyFields
from .kinds import kinds
from .spelling import CONFIGS, FIELDS, spell, write_module_rule, write_op_rule
from .text import Written, written


def settings(policy: PolicyFields) -> Iterator[tuple[str, str]]:
    """Yield every setting of a policy with its word: "compute", "scaling.init_scale", "guard.patience"."""
    for name in FIELDS:
        yield name, spell(name, getattr(policy, name))
    yield "ops", policy.op_rules.table
    yield "scaling", "none" if policy.scaling is None else "dynamic" if policy.scaling.dynamic else "fixed"
    for name in CONFIGS:
        config = getattr(policy, name)
        if config is not None:
            yield from ((f"{name}.{option}", spell(option, getattr(config, option))) for option in kinds(type(config)))


def rules(policy: PolicyFields, text: Written) -> Iterator[tuple[str, str, str]]:
    """Yield every op and module rule: its kind, as it is spelled, and where it is written."""
    for i, (op, op_rule) in enumerate(policy.op_rules.edits):
        yield "op rule", write_op_rule(op, op_rule), text.where(("op", i))
    for i, module_rule in enumerate(policy.modules):
        yield "module rule", write_module_rule(module_rule), text.where(("module", i))


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
