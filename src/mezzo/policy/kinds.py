"""What the fields of a policy may hold: rules for ops, and kinds read from annotations, so that text, file and value agree."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Mapping
from functools import cache, wraps
from inspect import signature
from pathlib import Path
from typing import Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch

from ..errors import MezzoError, PolicyError, did_you_mean, misfit_of, shown
from ..formats import FP8, MIXED_DTYPES, dtype_name, is_number, is_one_of

T = TypeVar("T")


class Rule(enum.Enum):
    """What a region does to an op's floating inputs. Ints, bools, complex and fp64 tensors are never cast."""

    LOW = "low"
    """Cast to the compute dtype: matmul-like."""
    FP32 = "fp32"
    """Cast up to fp32, fp32 result: sums many terms or has a steep derivative."""
    FP32_LOW_OUT = "fp32_low_out"
    """Compute in fp32, or in a kernel that accumulates in fp32; result in the compute dtype."""
    PROMOTE = "promote"
    """Promote to the widest floating input: several tensors that must agree."""
    AS_IS = "as_is"
    """Leave the inputs alone."""
    FORBID = "forbid"
    """Raise, naming the stable replacement."""

    def __str__(self) -> str:
        return self.value


FP32_RULES = (Rule.FP32, Rule.FP32_LOW_OUT)
"""Rules whose ops compute in fp32."""


def dtypes_of(name: str) -> tuple[torch.dtype, ...]:
    """Return the dtypes that a field may have: fp8 is for reductions alone."""
    return (*MIXED_DTYPES, FP8) if name == "reduce" else MIXED_DTYPES


def dtypes_in_words(name: str) -> str:
    """Return them for a message."""
    *most, last = map(dtype_name, dtypes_of(name))
    return f"{', '.join(most)} or {last}"


NOUNS: Mapping[object, str] = {
    float: "a number", int: "a whole number", bool: "true or false", str: "text", Path: "a path",
}  # fmt: skip


def by_name(kind: type[T]) -> type[T]:
    """Have a dataclass say in a PolicyError which fields it takes, where it is given others, or values without a name."""
    init: Callable[..., None] = kind.__init__
    name, known, is_text = kind.__name__, signature(kind).parameters, hasattr(kind, "parse")
    needed = [one for one, given in known.items() if given.default is given.empty]

    @wraps(init)
    def checked(self: T, *given: object, **fields: object) -> None:
        if given:
            parse = f" Text is read by {name}.parse({given[0]!r})." if isinstance(given[0], str) and is_text else ""
            raise PolicyError(f"{name} takes its fields by name, as in {name}({next(iter(known))}=...).{parse}")
        if not fields.keys() <= known.keys():
            raise PolicyError(f"{name} {misfit_of(init, fields, {})}")
        if lacking := [f"{one}=..." for one in needed if one not in fields]:
            raise PolicyError(f"{name} lacks {' and '.join(lacking)}, and needs {', '.join(needed)}.")
        init(self, **fields)

    kind.__init__ = checked  # type: ignore[assignment]  # of the class that is decorated, before anybody has it
    return kind


kinds: Callable[[type], Mapping[str, object]] = cache(get_type_hints)
"""Return the type of every field of a dataclass, resolved."""


def options(kind: object) -> tuple[object, ...]:
    """Return the types a field may have: `float | None` gives both."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fits(name: str, kind: object, value: object) -> bool:
    if kind is types.NoneType:
        return value is None
    if get_origin(kind) is Literal:
        return is_one_of(value, get_args(kind))
    if kind is torch.dtype:
        return is_one_of(value, dtypes_of(name))
    if kind is float and isinstance(value, float):
        return True  # of inf and NaN each field says what it takes
    return is_number(value) if kind in (int, float) and isinstance(value, int) else isinstance(value, kind)  # type: ignore[arg-type]  # a class


def check_kinds(record: object, raising: type[MezzoError] = PolicyError) -> None:
    """Refuse, by an error of `raising`, a dataclass instance that has a value of the wrong type in a field of one word. Host only."""
    for name, kind in kinds(type(record)).items():
        value = getattr(record, name)
        if is_word(kind) and not any(_fits(name, option, value) for option in options(kind)):
            raise raising(_complaint(name, kind, value))


def is_word(kind: object) -> bool:
    """Whether a field of this type is spelled in one word: a dtype, a mode, a number, a truth value, text, a path."""
    known = (torch.dtype, types.NoneType, *NOUNS)
    return all(option in known or get_origin(option) is Literal for option in options(kind))


def _complaint(name: str, kind: object, value: object) -> str:
    main = options(kind)[0]
    if get_origin(main) is Literal:
        return f"{name}={shown(value)} is unknown.{did_you_mean(value, get_args(main))}"
    if main is torch.dtype:
        hint = "; write a torch dtype, or use Policy.parse" if isinstance(value, str) else ""
        return f"{name}={shown(value)} is not a dtype of mixed precision: {dtypes_in_words(name)}{hint}."
    is_long = isinstance(value, int) and not is_number(int(value))
    return f"{name}={shown(value)} must be {NOUNS[main]}{' of at most 64 bits' if is_long else ''}."
