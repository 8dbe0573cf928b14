"""How one edit, one module rule and one op rule are spelled."""

from __future__ import annotations

import json
import re

import torch

from ..errors import FormatError, PolicyError, did_you_mean
from ..formats import dtype_name, parse_dtype
from .parts import MODULE_RULES, GuardConfig, ModuleRule, ScalingConfig, check, check_op
from .policy import Policy
from .rule import Rule
from .spelling import is_word, kinds

FIELDS = tuple(name for name, kind in kinds(Policy).items() if is_word(kind))
"""The fields of a policy that are spelled in one word."""
CONFIGS: dict[str, type[ScalingConfig] | type[GuardConfig]] = {"scaling": ScalingConfig, "guard": GuardConfig}
SCALING = ("none", "dynamic")
"""The words for no loss scaling and for loss scaling with its defaults."""
KEYS = (*FIELDS, "ops", "modules", "scaling")
PREFIXES = ("op:", "module:", *(f"{name}." for name in CONFIGS))
PRECISIONS = (*map(str, MODULE_RULES), "fp16", "bf16")
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_EDIT = re.compile(rf'((?:{_QUOTED}|[^"=])*)=([^"=]*)', re.DOTALL)
ITEM = re.compile(rf'(?:{_QUOTED}|[^",])*', re.DOTALL)
"""One edit of a policy's text, up to a comma that stands outside quotes."""


def split_edit(text: str) -> tuple[str, str]:
    """Return key and value of "key=value", without the spaces around them.

    Raises:
        PolicyError: not of that form.
    """
    match = _EDIT.fullmatch(text)
    if match is None:
        raise PolicyError(
            f"{text!r} is not 'key=value'; a pattern with a comma, an equals sign or a quote goes in double quotes."
        )
    return match[1].strip(), match[2].strip()


def is_pattern(key: str) -> bool:
    """Whether a bare key can only be a pattern over modules: it has a glob sign, a dot or a capital first letter."""
    folded = key.casefold()
    taken = folded in KEYS or folded.startswith(PREFIXES)
    return not taken and (any(sign in key for sign in "*?[.") or key[:1].isupper())


def read_module_rule(key: str, word: str) -> ModuleRule:
    """Return the rule that '?pattern=precision' stands for.

    Args:
        key: the pattern, bare or in double quotes, after "?" (optional rule) and "module:", where those are wanted.
        word: low, fp32, fp32_low_out, fp16 or bf16.

    Raises:
        PolicyError: a quote that is not closed, an empty pattern, an unknown precision.
    """
    pattern = key.removeprefix("?").strip().removeprefix("module:").strip()
    if '"' in pattern:
        try:
            pattern = json.loads(pattern)
        except json.JSONDecodeError:
            raise PolicyError(
                f'the pattern {pattern!r} is not one quoted text; inside quotes write \\" for a quote and \\\\ for a backslash.'
            ) from None
    return ModuleRule(pattern=pattern, precision=_read_precision(word), required=not key.startswith("?"))


def write_module_rule(rule: ModuleRule) -> str:
    """Return the edit that `read_module_rule` turns back into the rule."""
    pattern = rule.pattern
    if any(sign in pattern for sign in ',="') or pattern != pattern.strip():
        pattern = f"module:{json.dumps(pattern, ensure_ascii=False)}"
    elif not is_pattern(pattern) or pattern.startswith("?"):
        pattern = f"module:{pattern}"
    precision = rule.precision
    word = dtype_name(precision) if isinstance(precision, torch.dtype) else str(precision)
    return f"{'' if rule.required else '?'}{pattern}={word}"


def _read_precision(word: str) -> Rule | torch.dtype:
    folded = word.casefold()
    if folded in map(str, MODULE_RULES):
        return Rule(folded)
    try:
        dtype = parse_dtype(word)
    except FormatError:
        raise PolicyError(f"unknown module precision {word!r}.{did_you_mean(word, PRECISIONS)}") from None
    check(dtype_name(dtype) in PRECISIONS, f"a module cannot compute in {dtype_name(dtype)}; write fp32, fp16 or bf16.")
    return dtype


def read_op_rule(op: str, word: str) -> tuple[str, Rule]:
    """Return the pair that 'op=rule' stands for.

    Raises:
        PolicyError: an unknown op or rule; names the nearest one.
    """
    check_op(op)
    check(word.casefold() != "widest", f"the op rule 'widest' is now called 'promote': write 'op:{op}=promote'.")
    try:
        return op, Rule(word.casefold())
    except ValueError:
        raise PolicyError(f"unknown op rule {word!r}.{did_you_mean(word, map(str, Rule))}") from None


def write_op_rule(op: str, rule: Rule) -> str:
    """Return 'op=rule'."""
    return f"{op}={rule}"
