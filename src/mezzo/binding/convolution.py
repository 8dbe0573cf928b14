"""Convolutions of a prepared model whose gradients may be computed another way than torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._torch import num_function_modes
from ..casting import AttentionMode, casts_to_bf16
from ..formats import LOW_DTYPES
from ..kernels import convolution, has_weight_gradient
from .module_rules import put_back, set_modes_aside


def is_convolution(module: nn.Module) -> bool:
    """Whether a module's forward is that of torch's `Conv2d`. Host only."""
    original: Any = getattr(type(module), "_mezzo_class", type(module))
    is_own = isinstance(module, nn.Conv2d) and original.forward is nn.Conv2d.forward
    return is_own and original._conv_forward is nn.Conv2d._conv_forward


def run_convolution(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a `Conv2d`, with gradients by mezzo's kernel where a region casts to bf16 and that is the faster one: the same bits forward. Syncs: no."""
    aside = set_modes_aside(AttentionMode)
    try:
        operands = _operands(module, *args) if len(args) == 1 and not kwargs else None
        if operands is not None:
            return convolution(*operands, module.stride, module.padding)
    finally:
        put_back(aside)
    return type(module)._mezzo_class.forward(module, *args, **kwargs)


def _operands(module: Any, x: object) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return what a call multiplies, in bf16; None where it is torch's. Syncs: no."""
    if torch.compiler.is_compiling() or num_function_modes() or not isinstance(x, Tensor):
        return None
    if not (casts_to_bf16() and module.groups == 1 and module.padding_mode == "zeros" and module.dilation == (1, 1)):
        return None
    weight, bias = module.weight, module.bias
    if not all([isinstance(pair, tuple) and len(pair) == 2 for pair in (module.stride, module.padding)]):
        return None
    if not has_weight_gradient(x, weight, bias, module.stride, module.padding):
        return None
    given = (x, weight) if bias is None else (x, weight, bias)
    if not all([one.dtype in _CASTABLE for one in given]):
        return None
    low = [one.to(torch.bfloat16) for one in given]
    return low[0], low[1], low[2] if len(low) == 3 else None


_CASTABLE = (torch.float32, *LOW_DTYPES)
