"""Dataclasses that a step makes anew each time: setting the fields of a frozen one takes three times as long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from typing_extensions import dataclass_transform  # which torch brings

T = TypeVar("T")


@dataclass_transform(kw_only_default=True, frozen_default=True, eq_default=False)
def read_only(cls: type[T]) -> type[T]:
    """Make a class a dataclass with keywords and slots; that nobody writes its fields is seen by the type checker alone."""
    return dataclass(kw_only=True, slots=True, eq=False)(cls)
