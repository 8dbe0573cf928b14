"""Dropout and max pooling of a prepared model on the CPU: what torch computes, to the bit, another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import is_unwatched, num_function_modes
from ..casting import AttentionMode
from ..kernels import dropout, takes_dropout
from .module_rules import put_back, set_modes_aside

SMALLEST_POOL = 1 << 14
"""Elements of an input from which on two copies cost less than they save."""
FEWEST_CHANNELS = 8
_aten = torch.ops.aten
_OPS: dict[int, tuple[torch.memory_format, Any, Any]] = {
    4: (torch.channels_last, _aten.max_pool2d_with_indices, _aten.max_pool2d_with_indices_backward),
    5: (torch.channels_last_3d, _aten.max_pool3d_with_indices, _aten.max_pool3d_with_indices_backward),
}
"""By dimensions of an input: the layout in which its channels lie side by side, pooling, and its gradient."""


def equal_op(module: nn.Module) -> Callable[..., Any] | None:
    """Return what runs in place of a module's forward, for one that is torch's and may run another way. Host only."""
    original: Any = getattr(type(module), "_mezzo_class", type(module))
    for kinds, run in (((nn.Dropout,), run_dropout), ((nn.MaxPool2d, nn.MaxPool3d), run_max_pool)):
        if isinstance(module, kinds) and original.forward in [kind.forward for kind in kinds]:
            return run
    return None


def run_dropout(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a `Dropout`, with torch's random numbers drawn by mezzo's kernel where that is the faster one and nobody looks on."""
    if len(args) == 1 and not kwargs and module.training and not (module.inplace or torch.compiler.is_compiling()):
        x, aside = args[0], set_modes_aside(AttentionMode)
        try:
            if isinstance(x, Tensor) and not num_function_modes() and takes_dropout(x, module.p):
                return dropout(x, module.p)
        finally:
            put_back(aside)
    return type(module)._mezzo_class.forward(module, *args, **kwargs)


def run_max_pool(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a `MaxPool2d` or `MaxPool3d` on channels that lie side by side, of which torch takes many at a time: 6 times as fast with both copies."""
    if len(args) == 1 and not kwargs and _lies_apart(module, args[0]):
        options = module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode
        return _MaxPool.apply(args[0], options)  # type: ignore[no-untyped-call]  # torch's own
    return type(module)._mezzo_class.forward(module, *args, **kwargs)


class _MaxPool(torch.autograd.Function):
    """torch's pooling, with input, result and gradient laid out as torch's would lie: else every op after it copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, options: tuple[Any, ...]) -> Tensor:
        layout, pool, _ = _OPS[x.dim()]
        out, indices = pool(x.contiguous(memory_format=layout), *options)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(x, indices.contiguous())
            ctx.options = options
        return out.contiguous()  # type: ignore[no-any-return]  # torch types it loosely

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, indices = ctx.saved_tensors
        return _OPS[x.dim()][2](grad.contiguous(), x, *ctx.options, indices), None


def _lies_apart(module: Any, x: object) -> bool:
    """Whether an input is one of many channels, each of which lies by itself, whose windows share or touch one another."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and x.dim() in _OPS
        and x.is_cpu
        and x.numel() >= SMALLEST_POOL
        and x.shape[1] >= FEWEST_CHANNELS
        and x.is_floating_point()
        and x.is_contiguous()
        and not module.return_indices
        and isinstance(module.kernel_size, int)
        and isinstance(module.stride, int)
        and module.stride <= module.kernel_size
        and is_unwatched()
    )
