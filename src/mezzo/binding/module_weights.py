"""What a module's weights tell of it: where the first stands, and how large the largest is that multiplies."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from .._torch import own_modules, own_parameters

Place = tuple[Mapping[str, nn.Parameter | None], str]
"""The registry in which a parameter stands, and its name there."""


def first_place(module: nn.Module) -> Place | None:
    """Return where the first of a module's parameters stands; None if it has none. Host only."""
    own = own_parameters(module)
    for name, parameter in own.items():
        if parameter is not None:
            return own, name
    for child in own_modules(module).values():
        if child is not None and (found := first_place(child)) is not None:
            return found
    return None


def largest_matrix(module: nn.Module) -> int:
    """Return the elements of the largest weight of a module that rows may be multiplied with; 1 if it has none. Host only."""
    layers = (inner for inner in module.modules() if not isinstance(inner, nn.Embedding))
    weights = (weight for layer in layers for weight in own_parameters(layer).values() if weight is not None)
    return max((weight.numel() for weight in weights if weight.dim() > 1), default=1)
