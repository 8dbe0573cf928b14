"""How one thing of a policy is spelled: the value of a field, a module rule, an op rule."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Mapping
from typing import Literal, get_args, get_origin

import torch

from ..errors import PolicyError, did_you_mean
from ..formats import dtype_name
from .fields import MODULE_RULES, GuardConfig, ModuleRule, PolicyFields, ScalingConfig, check, check_op, named_dtype
from .kinds import NOUNS, Rule, dtypes_in_words, dtypes_of, is_word, kinds, options

Plain = str | int | float | bool
"""What a text or a TOML file can hold in one place."""
FIELDS = tuple(name for name, kind in kinds(PolicyFields).items() if is_word(kind))
"""The fields of a policy that are spelled in one word."""
CONFIGS: dict[str, type[ScalingConfig] | type[GuardConfig]] = {"scaling": ScalingConfig, "guard": GuardConfig}
KEYS = (*FIELDS, "ops", "modules", "scaling")
PREFIXES = ("op:", "module:", *(f"{name}." for name in CONFIGS))
PRECISIONS = (*map(str, MODULE_RULES), "fp16", "bf16")
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_EDIT = re.compile(rf'((?:{_QUOTED}|[^"=])*)=([^"=]*)', re.DOTALL)
ITEM = re.compile(rf'(?:{_QUOTED}|[^",])*', re.DOTALL)
"""One edit of a policy's text, up to a comma that stands outside quotes."""

_TRUTH = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
_EXACT = 1e16  # above it repr is shorter than all digits


def read(key: str, kind: object, word: str) -> object:
    """Return the value of a field, of a type of `kinds`, that a word in upper or lower case stands for; a PolicyError names the nearest one."""
    main = options(kind)[0]
    none = [_none(key)] if types.NoneType in options(kind) else []
    if word.casefold() in none:
        return None
    if main is torch.dtype:
        return _read_dtype(key, word, none)
    if main is bool:
        return _choose(key, _TRUTH, word)
    if get_origin(main) is Literal:
        return _choose(key, {str(mode): mode for mode in get_args(main)}, word)
    try:
        return main(word)  # type: ignore[operator]  # int or float
    except ValueError:
        nouns = " or ".join([NOUNS[main], *none])
        raise PolicyError(f"{key}={word} must be {nouns}.") from None


def _none(key: str) -> str:
    return "auto" if key == "compute" else "none"


def _choose(key: str, choices: Mapping[str, object], word: str) -> object:
    try:
        return choices[word.casefold()]
    except KeyError:
        raise PolicyError(f"unknown {key} {word!r}.{did_you_mean(word, choices)}") from None


def _read_dtype(key: str, word: str, none: list[str]) -> torch.dtype:
    if (dtype := named_dtype(word)) is None:
        known = [*map(dtype_name, dtypes_of(key)), *none]
        raise PolicyError(f"unknown {key} dtype {word!r}.{did_you_mean(word, known)}")
    if dtype not in dtypes_of(key):
        raise PolicyError(f"{key}={word} is not a dtype of mixed precision; write {dtypes_in_words(key)}.")
    return dtype


def plain(key: str, value: object) -> Plain:
    """Return a field's value as a TOML file holds it: dtypes and modes by name, None by its word."""
    if value is None:
        return _none(key)
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    assert isinstance(value, str | int | float | bool)
    return float(value) if isinstance(value, float) else value


def spell(key: str, value: object) -> str:
    """Return the word that `read` turns back into the value: 1024 for 1024.0, true for True."""
    held = plain(key, value)
    if isinstance(held, float) and held.is_integer() and abs(held) < _EXACT:
        held = int(held)
    return str(held).lower() if isinstance(held, bool) else str(held)


def read_scaling(word: str) -> ScalingConfig | None:
    """Return the loss scale that "none", "dynamic" or a number for a fixed scale stand for; a PolicyError for anything else."""
    if word.casefold() in ("none", "dynamic"):
        return None if word.casefold() == "none" else ScalingConfig()
    try:
        scale = float(word)
    except ValueError:
        raise PolicyError(f"unknown scaling {word!r}.{did_you_mean(word, ('none', 'dynamic'))}") from None
    return ScalingConfig.fixed(scale)


def split_edit(text: str) -> tuple[str, str]:
    """Return key and value of "key=value", without the spaces around them; a PolicyError for what is not of that form."""
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

    Raises: PolicyError: a quote that is not closed, an empty pattern, an unknown precision.
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
    if any(sign in pattern for sign in ',;="') or pattern != pattern.strip():
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
    if (dtype := named_dtype(word)) is None:
        raise PolicyError(f"unknown module precision {word!r}.{did_you_mean(word, PRECISIONS)}")
    check(dtype_name(dtype) in PRECISIONS, f"a module cannot compute in {dtype_name(dtype)}; write fp32, fp16 or bf16.")
    return dtype


def read_op_rule(op: str, word: str) -> tuple[str, Rule]:
    """Return the pair that 'op=rule' stands for; a PolicyError names the nearest of an unknown op or rule."""
    check_op(op)
    check(word.casefold() != "widest", f"the op rule 'widest' is now called 'promote': write 'op:{op}=promote'.")
    try:
        return op, Rule(word.casefold())
    except ValueError:
        is_dtype = f" An op runs in the policy's compute dtype, 'op:{op}=low', or in fp32." if named_dtype(word) else ""
        raise PolicyError(f"unknown op rule {word!r}.{is_dtype or did_you_mean(word, map(str, Rule))}") from None


def write_op_rule(op: str, rule: Rule) -> str:
    """Return 'op=rule'."""
    return f"{op}={rule}"
