"""What fields may hold is read from their annotations: a value of another type is named, with what the field takes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from mezzo.errors import ConfigError, PolicyError
from mezzo.formats import FP8
from mezzo.policy.kinds import check_kinds, dtypes_of, is_word, kinds, options


@dataclass
class Record:
    dtype: torch.dtype | None = None
    mode: Literal["one", "two"] = "one"
    share: float = 0.5
    count: int = 1
    flag: bool = False
    name: str | None = None
    place: Path = Path()
    others: tuple[str, ...] = ()


FITS: list[dict[str, Any]] = [
    {}, {"dtype": torch.bfloat16}, {"mode": "two"}, {"share": 2}, {"count": 3}, {"flag": True}, {"others": 7},
]  # fmt: skip
REFUSED = {
    "dtype": (torch.float64, "dtype=torch.float64 is not a dtype of mixed precision: fp32, fp16 or bf16"),
    "mode": ("tow", "mode='tow' is unknown. Did you mean 'two'?"),
    "share": (True, "share=True must be a number."),
    "count": (1.5, "count=1.5 must be a whole number."),
    "flag": (1, "flag=1 must be true or false."),
    "name": (3, "name=3 must be text."),
    "place": (None, "place=None must be a path."),
}


@pytest.mark.parametrize("values", FITS)
def test_values_that_fit(values: dict[str, Any]) -> None:
    check_kinds(Record(**values))


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_do_not(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(PolicyError, match=re.escape(message)):
        check_kinds(Record(**{name: value}))
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_kinds(Record(**{name: value}), ConfigError)


def test_a_name_of_a_dtype_says_how_to_parse_it() -> None:
    with pytest.raises(PolicyError, match=r"use Policy\.parse"):
        check_kinds(Record(dtype="bf16"))  # type: ignore[arg-type]  # what is tested


def test_fp8_is_for_traffic_alone() -> None:
    assert FP8 in dtypes_of("reduce") and FP8 not in dtypes_of("compute")


def test_words_are_what_is_spelled_in_one() -> None:
    assert {name for name, kind in kinds(Record).items() if is_word(kind)} == {
        "dtype",
        "mode",
        "share",
        "count",
        "flag",
        "name",
        "place",
    }
    assert options(kinds(Record)["dtype"]) == (torch.dtype, type(None))
