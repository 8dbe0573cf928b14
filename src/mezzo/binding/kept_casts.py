"""Modules on an accelerator that take kept 16-bit copies of their weights by themselves, so that nothing has to see each op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch import own_parameters
from ..casting import cast_key, kept_casts
from .forward import Bound, record
from .module_rules import FUSED, is_linear, run_unfused

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_UNCAST = (nn.Embedding, nn.EmbeddingBag, nn.modules.batchnorm._BatchNorm)
"""Modules whose weights no region casts."""


def with_kept_casts(module: nn.Module) -> Callable[..., Any] | None:
    """Return what runs in place of a module's forward where casts are kept; None where its own forward casts no weight. Host only."""
    original: Any = getattr(type(module), "_mezzo_class", type(module))
    if is_linear(module):
        return _run_linear
    if isinstance(module, _CONVOLUTIONS) and original.forward in [kind.forward for kind in _CONVOLUTIONS]:
        return _run_convolution
    if isinstance(module, _UNCAST) or all(p is None for p in own_parameters(module).values()):
        return None
    return _run_by_mode


def _run_linear(module: nn.Linear, input: Tensor) -> Tensor:
    return F.linear(input, *_casts_of(module))


def _run_convolution(module: Any, input: Tensor) -> Tensor:
    out: Tensor = module._conv_forward(input, *_casts_of(module))
    return out


def _run_by_mode(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a module that casts its weights who knows where, in a region that sees each op."""
    forward = run_unfused if isinstance(module, FUSED) else type(module)._mezzo_class.forward
    if torch.compiler.is_compiling():
        return forward(module, *args, **kwargs)
    with _bound(module).binding.by_mode():
        return forward(module, *args, **kwargs)


def _casts_of(module: Any) -> tuple[Tensor, Tensor | None]:
    weight, bias = module.weight, module.bias
    if torch.compiler.is_compiling():
        return weight, bias
    key = None if torch.is_grad_enabled() else cast_key(weight, bias)
    if key is None:
        return kept_casts(weight, bias)
    bound = _bound(module)
    if bound.kept is None or bound.kept[0] != key:
        bound.kept = key, kept_casts(weight, bias)
    return bound.kept[1]


def _bound(module: nn.Module) -> Bound:
    found = record(module)
    assert found is not None
    return found
