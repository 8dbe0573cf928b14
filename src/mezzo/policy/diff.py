"""How two policies differ."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import zip_longest

from .fields import PolicyFields, ScalingConfig
from .kinds import kinds
from .spelling import FIELDS, spell, write_module_rule, write_op_rule
from .text import config_edits, written


@dataclass(frozen=True, slots=True)
class Change:
    """One difference between two policies.

    Attributes:
        what: the field, "op rule" or "module rule".
        left: as it is spelled in the first policy; empty where that has nothing.
        right: as it is spelled in the second.
    """

    what: str
    left: str
    right: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyDiff:
    """The differences between two policies; false if they are equal.

    Attributes:
        left: text of the first.
        right: text of the second.
        changes: fields first, then op rules and module rules in their order.
    """

    left: str
    right: str
    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        if not self.changes:
            return f"no difference: {self.left}"
        rows = [(change.what, change.left or "-", change.right or "-") for change in self.changes]
        what, left = (max(len(row[i]) for row in rows) for i in (0, 1))
        lines = [f"{row[0]:<{what}}  {row[1]:<{left}}  {row[2]}" for row in rows]
        return "\n".join([f"left:  {self.left}", f"right: {self.right}", *lines])


def diff(left: PolicyFields, right: PolicyFields) -> PolicyDiff:
    """Return every difference between two policies; see `Policy.diff`."""
    changes = [Change(name, *(spell(name, getattr(policy, name)) for policy in (left, right))) for name in FIELDS]
    changes.append(Change("ops", left.op_rules.table, right.op_rules.table))
    if left.scaling is None or right.scaling is None:
        changes.append(Change("scaling", _scaling(left.scaling), _scaling(right.scaling)))
    else:
        changes += _config_changes("scaling", left.scaling, right.scaling)
    changes += _config_changes("guard", left.guard, right.guard)
    op_rules = ([write_op_rule(*edit) for edit in policy.op_rules.edits] for policy in (left, right))
    module_rules = ([write_module_rule(rule) for rule in policy.modules] for policy in (left, right))
    changes += _list_changes("op rule", *op_rules)
    changes += _list_changes("module rule", *module_rules)
    differing = tuple(change for change in changes if change.left != change.right)
    return PolicyDiff(left=str(written(left)), right=str(written(right)), changes=differing)


def _scaling(config: ScalingConfig | None) -> str:
    if config is None:
        return "none"
    fixed = spell("init_scale", config.init_scale), ScalingConfig.fixed(config.init_scale)
    word, base = ("dynamic", ScalingConfig()) if config.dynamic else fixed
    return ", ".join([word, *config_edits("scaling", config, base).values()])


def _config_changes(name: str, left: object, right: object) -> list[Change]:
    pairs = [(field, getattr(left, field), getattr(right, field)) for field in kinds(type(left))]
    return [Change(f"{name}.{field}", spell(field, one), spell(field, other)) for field, one, other in pairs]


def _list_changes(what: str, left: list[str], right: list[str]) -> list[Change]:
    blocks = SequenceMatcher(None, left, right, autojunk=False).get_opcodes()
    return [
        Change(what, old, new)
        for tag, i, j, k, m in blocks
        if tag != "equal"
        for old, new in zip_longest(left[i:j], right[k:m], fillvalue="")
    ]
