"""Modules on an accelerator that take kept 16-bit copies of their weights by themselves, so that nothing has to see each op."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import own_parameters
from ..casting import kept_casts
from .module_rules import is_linear

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_UNCAST = (nn.Embedding, nn.EmbeddingBag, nn.modules.batchnorm._BatchNorm)
"""Modules whose weights no region casts."""


class KeepsCasts(Protocol):
    """The binding of a model whose casts are kept, on an accelerator, by rules that are torch's."""

    def by_mode(self) -> AbstractContextManager[object]:
        """Return a region that casts as the one around it, but sees each op and keeps the casts of weights."""
        ...


def with_kept_casts(module: nn.Module, binding: KeepsCasts) -> Callable[..., Any] | None:
    """Return what runs in place of a module's forward where casts are kept; None where its own forward casts no weight. Host only."""
    original: Any = getattr(type(module), "_mezzo_class", type(module))
    if is_linear(module):
        return _run_linear
    if isinstance(module, _CONVOLUTIONS) and original.forward in [kind.forward for kind in _CONVOLUTIONS]:
        return _run_convolution
    if isinstance(module, _UNCAST) or not any(p is not None for p in own_parameters(module).values()):
        return None

    def run_by_mode(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original.forward(module, *args, **kwargs)
        with binding.by_mode():
            return original.forward(module, *args, **kwargs)

    return run_by_mode


def _run_linear(module: nn.Linear, input: Tensor) -> Tensor:
    return F.linear(input, *_casts_of(module))


def _run_convolution(module: Any, input: Tensor) -> Tensor:
    out: Tensor = module._conv_forward(input, *_casts_of(module))
    return out


def _casts_of(module: Any) -> tuple[Tensor, Tensor | None]:
    weight, bias = module.weight, module.bias
    return (weight, bias) if torch.compiler.is_compiling() else kept_casts(weight, bias)
