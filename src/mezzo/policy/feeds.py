"""Which weights feed low ops, told by the class of the module that holds them."""

from __future__ import annotations

from collections.abc import Iterable

CAST_AT_USE = frozenset({"Linear", "_ConvNd", "MultiheadAttention", "Conv1D"})
"""Modules whose weights go into low ops and nowhere else, so that it does not matter who casts them, or when. Conv1D is
transformers' Linear with its weight transposed."""
LOOKED_UP = frozenset({"Embedding", "EmbeddingBag"})
"""Modules whose weights are handed on as they are stored, and meet low ops later."""


def is_cast_at_use(class_names: Iterable[str]) -> bool:
    """Whether a low op takes a module's own weights; by the names of its class and the classes above it."""
    return not CAST_AT_USE.isdisjoint(class_names)


def is_matmul_like(class_names: Iterable[str]) -> bool:
    """Whether a module's own weights end up in low ops, so that 16-bit storage loses nothing but their masters keep."""
    return not (CAST_AT_USE | LOOKED_UP).isdisjoint(class_names)
