"""The text form of a policy, written: the nearest preset and the fewest edits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .parts import ScalingConfig
from .policy import Policy
from .presets import PRESETS
from .rule_text import FIELDS, write_module_rule, write_op_rule
from .spelling import kinds, spell

Place = tuple[str, int]
"""What an edit sets: ("compute", 0), ("op", i), ("module", i), ("scaling.init_scale", 0)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A policy's text, by the places its edits set.

    Attributes:
        preset: name of the preset it starts from.
        edits: spelled edits, in order.
    """

    preset: str
    edits: Mapping[Place, str]

    def __str__(self) -> str:
        return ", ".join([self.preset, *self.edits.values()])

    def where(self, place: Place) -> str:
        """Return where a place is set: "edit 2", counted from 1, or "preset bf16"."""
        for number, edited in enumerate(self.edits, 1):
            if place == edited or (edited == ("scaling", 0) and place[0].startswith("scaling.")):
                return f"edit {number}"
        return f"preset {self.preset}"


def written(policy: Policy) -> Written:
    """Return the text of a policy; `parse(str(written(policy))) == policy`.

    The preset that needs the fewest edits is taken; of equals one with the same `compute`, then the earlier.
    """
    return min((_against(policy, name) for name in PRESETS), key=_edit_count)


def _edit_count(text: Written) -> tuple[int, bool]:
    return len(text.edits), ("compute", 0) in text.edits


def _against(policy: Policy, name: str) -> Written:
    preset, edits = PRESETS[name], dict[Place, str]()
    for field in FIELDS:
        if getattr(policy, field) != getattr(preset, field):
            edits[field, 0] = f"{field}={spell(field, getattr(policy, field))}"
    if policy.op_rules.table != preset.op_rules.table:
        edits["ops", 0] = f"ops={policy.op_rules.table}"
    for i, (op, rule) in enumerate(policy.op_rules.edits):
        edits["op", i] = f"op:{write_op_rule(op, rule)}"
    kept = len(preset.modules)
    if policy.modules[:kept] != preset.modules:
        edits["modules", 0], kept = "modules=none", 0
    for i, module_rule in enumerate(policy.modules[kept:], kept):
        edits["module", i] = write_module_rule(module_rule)
    edits.update(_scaling_edits(policy.scaling, preset.scaling))
    edits.update(_config_edits("guard", policy.guard, preset.guard))
    return Written(preset=name, edits=edits)


def _scaling_edits(scaling: ScalingConfig | None, preset: ScalingConfig | None) -> dict[Place, str]:
    if scaling == preset:
        return {}
    if scaling is None:
        return {("scaling", 0): "scaling=none"}
    return _config_edits("scaling", scaling, preset or ScalingConfig()) or {("scaling", 0): "scaling=dynamic"}


def _config_edits(name: str, config: object, base: object) -> dict[Place, str]:
    changed = [field for field in kinds(type(base)) if getattr(config, field) != getattr(base, field)]
    return {(f"{name}.{field}", 0): f"{name}.{field}={spell(field, getattr(config, field))}" for field in changed}
