"""How the value of one field is spelled: in a policy's text, in its file, in messages."""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import cache
from typing import Literal, Union, get_args, get_origin, get_type_hints

import torch

from ..errors import FormatError, PolicyError, did_you_mean
from ..formats import LOW_DTYPES, dtype_name, parse_dtype

Plain = str | int | float | bool
"""What a text or a TOML file can hold in one place."""
_DTYPES = (torch.float32, *LOW_DTYPES)
_TRUTH = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}
_EXACT = 1e16  # above it repr is shorter than all digits
_NOUNS = {float: "a number", int: "a whole number", bool: "true or false"}


def kinds(owner: type) -> Mapping[str, object]:
    """Return the type of every field of a dataclass, resolved."""
    return _hints(owner)


@cache
def _hints(owner: type) -> Mapping[str, object]:
    return get_type_hints(owner)


def options(kind: object) -> tuple[object, ...]:
    """Return the types a field may have: `float | None` gives both."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fits(kind: object, value: object) -> bool:
    if kind is types.NoneType:
        return value is None
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind is torch.dtype:
        return value in _DTYPES
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))  # type: ignore[arg-type]  # a class


def check_kinds(record: object) -> None:
    """Refuse a dataclass instance that has a value of the wrong type in a field of one word.

    Raises:
        PolicyError: the field, its value, and what it takes.
    """
    for name, kind in kinds(type(record)).items():
        value = getattr(record, name)
        if is_word(kind) and not any(_fits(option, value) for option in options(kind)):
            raise PolicyError(_complaint(name, kind, value))


def is_word(kind: object) -> bool:
    """Whether a field of this type is spelled in one word: a dtype, a mode, a number, a truth value."""
    known = (torch.dtype, float, int, bool, types.NoneType)
    return all(option in known or get_origin(option) is Literal for option in options(kind))


def _complaint(name: str, kind: object, value: object) -> str:
    main = options(kind)[0]
    if get_origin(main) is Literal:
        return f"{name}={value!r} is unknown.{did_you_mean(str(value), get_args(main))}"
    if main is torch.dtype:
        hint = "; write a torch dtype, or use Policy.parse" if isinstance(value, str) else ""
        return f"{name}={value!r} is not a dtype of mixed precision: fp32, fp16 or bf16{hint}."
    return f"{name}={value!r} must be {_NOUNS[main]}."  # type: ignore[index]  # a class of _NOUNS


def read(key: str, kind: object, word: str) -> object:
    """Return the value a word stands for; upper and lower case are the same.

    Args:
        key: the field, for messages and for the word of None.
        kind: the field's type, of `kinds`.
        word: what was written.

    Raises:
        PolicyError: not a value of that type; names the nearest one.
    """
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
        nouns = " or ".join([_NOUNS[main], *none])  # type: ignore[index]  # as above
        raise PolicyError(f"{key}={word} must be {nouns}.") from None


def _none(key: str) -> str:
    return "auto" if key == "compute" else "none"


def _choose(key: str, choices: Mapping[str, object], word: str) -> object:
    try:
        return choices[word.casefold()]
    except KeyError:
        raise PolicyError(f"unknown {key} {word!r}.{did_you_mean(word, choices)}") from None


def _read_dtype(key: str, word: str, none: list[str]) -> torch.dtype:
    try:
        dtype = parse_dtype(word)
    except FormatError:
        known = [*map(dtype_name, _DTYPES), *none]
        raise PolicyError(f"unknown {key} dtype {word!r}.{did_you_mean(word, known)}") from None
    if dtype not in _DTYPES:
        raise PolicyError(f"{key}={word} is not a dtype of mixed precision; write fp32, fp16 or bf16.")
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
