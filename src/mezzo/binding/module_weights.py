"""What a module's tensors tell of it: where the first weight stands, how large the largest is that multiplies, what is wider than 16 bit."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._torch import NormBase, is_capturing, own_buffers, own_modules, own_parameters
from ..formats import LOW_DTYPES

ParameterEntry = tuple[Mapping[str, nn.Parameter | None], str]
"""The registry in which a parameter stands, and its name there."""


def first_entry(module: nn.Module) -> ParameterEntry | None:
    """Return where the first of a module's parameters stands; None if it has none. Host only."""
    own = own_parameters(module)
    if (name := next((name for name, parameter in own.items() if parameter is not None), None)) is not None:
        return own, name
    of_children = (first_entry(child) for child in own_modules(module).values() if child is not None)
    return next((found for found in of_children if found is not None), None)


def largest_matrix(module: nn.Module) -> int:
    """Return the elements of the largest weight of a module that rows may be multiplied with; 1 if it has none. Host only."""
    layers = (inner for inner in module.modules() if not isinstance(inner, nn.Embedding))
    weights = (weight for layer in layers for weight in own_parameters(layer).values() if weight is not None)
    return max((weight.numel() for weight in weights if weight.dim() > 1), default=1)


class WideTensors:
    """Tensors wider than 16 bit that modules hold beside parameters: buffers and plain attributes.

    A forward that casts one of its own to what it computes in (`self.pe = self.pe.to(x.dtype)`) does so for itself: what is stored
    stays as wide as it was. A tensor that is narrow when a forward begins, and no other is running, was made so on purpose.
    """

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[weakref.ref[nn.Module], str, list[Tensor | None]]] = [
            (weakref.ref(module), key, [None])
            for module in model.modules()
            if not isinstance(module, NormBase)  # whose kernel writes its statistics
            for key, value in {**vars(module), **own_buffers(module)}.items()
            if _wide(value) is not None
        ]
        self._running, self._lock = 0, threading.Lock()

    @classmethod
    def of(cls, model: nn.Module) -> WideTensors | Literal[False]:
        """Return those in a model; False for one that has none, whose forwards need not ask. Host only."""
        found = cls(model)
        return found if found._held else False

    @contextmanager
    def around(self, region: AbstractContextManager[object]) -> Iterator[None]:
        """Run a forward in a region, and put back what it narrows, with what it wrote. Writes: buffers and attributes. Syncs: no."""
        with self._lock:
            for module, key, kept in self._held:
                found = _wide(_registry(module(), key).get(key))
                kept[0] = kept[0] if found is None and self._running else found
            self._running += 1
        try:
            with region:
                yield
        finally:
            with self._lock:
                self._running -= 1
                self._put_back()

    def _put_back(self) -> None:
        for module, key, kept in self._held:
            registry, was = _registry(module(), key), kept[0]
            now: Any = registry.get(key)
            is_narrow = type(now) is Tensor and now.dtype in LOW_DTYPES and not now.requires_grad
            if was is not None and is_narrow and was.shape == now.shape:
                wide = _as_wide(now, was)
                registry[key] = was.copy_(wide) if is_capturing(was.device) else wide  # a graph knows it by its address
            kept[0] = was if self._running else None


def _registry(module: nn.Module | None, key: str) -> dict[str, Any]:
    """Return where a module keeps a buffer or an attribute; nowhere if it is gone. Host only."""
    if module is None:
        return {}
    return own_buffers(module) if key in own_buffers(module) else vars(module)


def _wide(value: Any) -> Tensor | None:
    """Return a plain tensor that is wider than 16 bit and that no gradient goes to; None for anything else. Host only."""
    is_plain = type(value) is Tensor and value.layout is torch.strided and not value.requires_grad
    is_wide = is_plain and value.dtype in (torch.float32, torch.float64)
    return value if is_wide else None


def _as_wide(now: Tensor, was: Tensor) -> Tensor:
    """Return a narrow tensor in the dtype of a wide one, whose values it has where it holds their rounding. Syncs: no."""
    with torch.inference_mode(False), torch.no_grad():
        was = was.to(now.device)
        return torch.where(was.to(now.dtype) == now, was, now.to(was.dtype))
