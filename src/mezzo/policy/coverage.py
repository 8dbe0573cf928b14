"""Whether every rule a person wrote for modules names a module that exists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from ..errors import PolicyError
from .policy import Policy
from .rule_text import write_module_rule


def check_modules(policy: Policy, modules: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Refuse a required module rule that matches nothing; see `Policy.check_modules`."""
    known = [(fqn, tuple(class_names)) for fqn, class_names in modules]
    for rule in policy.modules:
        if rule.required and not any(rule.matches(*module) for module in known):
            text = write_module_rule(rule)
            raise PolicyError(
                f"module rule '{text}': no module of the model has a name or class that matches '{rule.pattern}'."
                f"{_nearest(rule.pattern, known)} A rule that may match nothing is written '?{text}'."
            )


def _nearest(pattern: str, modules: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Name the module whose full name, last name or class is most like the pattern without its glob signs."""
    core = pattern.strip("*?.").casefold()
    best, nearest = 0.0, ""
    for fqn, class_names in modules:
        own_class = class_names[0] if class_names else ""
        for word in (fqn, fqn.rpartition(".")[2], own_class):
            score = SequenceMatcher(None, core, word.casefold()).ratio()
            if score > best:
                best, nearest = score, f" The nearest is '{fqn}'" + (f" ({own_class})." if own_class else ".")
    return nearest
