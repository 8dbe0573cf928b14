"""What runs in place of a module's forward: the same op another way, or by kept casts of its weights.

On the CPU linear layers, convolutions and recurrent ones by mezzo's kernels, dropout and max pooling to the bit. On an accelerator
modules take kept 16-bit copies of their weights by themselves, so that nothing has to see each op.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling, is_exporting

from .._torch import forward_ad_level, functorch_level, is_unwatched, num_function_modes, own_parameters, tracing_state
from ..casting import AttentionMode, RecurrentMode, cast_key, casts_to_bf16, count_products, kept_casts
from ..formats import LOW_DTYPES, MIXED_DTYPES, native_support
from ..kernels import (
    FEWEST_GRU_STEPS,
    SMALLEST_LINEAR,
    convolution,
    dropout,
    is_large_lstm,
    linear,
    may_take_convolution,
    takes_convolution,
    takes_dropout,
    takes_linear,
)
from ..policy import Rule
from .forward import Binding, Bound, bound_of
from .hand_written import class_of, hand_written_gelu, hand_written_rms_norm, torchs_forward
from .module_rules import ModesAside, Precision

SMALLEST_POOL = 1 << 14
"""Elements of an input from which on two copies cost less than they save."""
FEWEST_CHANNELS = 8
_CONV_FORWARD = nn.Conv2d._conv_forward
_aten = torch.ops.aten
_OPS: dict[int, tuple[torch.memory_format, Any, Any]] = {
    4: (torch.channels_last, _aten.max_pool2d_with_indices, _aten.max_pool2d_with_indices_backward),
    5: (torch.channels_last_3d, _aten.max_pool3d_with_indices, _aten.max_pool3d_with_indices_backward),
}
"""By dimensions of an input: the layout in which its channels lie side by side, pooling, and its gradient."""
_UNCAST = (nn.Embedding, nn.EmbeddingBag, nn.modules.batchnorm._BatchNorm)
"""Modules whose weights no region casts."""
FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules that in evaluation call one fused kernel, past every rule and cast."""


def in_place_of_forward(module: nn.Module, binding: Binding, own: Precision) -> Callable[..., Any] | None:
    """Return what runs in place of the forward of a module's class, if anything does."""
    if binding.keeps_casts and own is None and (run := _with_kept_casts(module)) is not None:
        return run
    if isinstance(module, FUSED):
        return run_unfused
    if isinstance(module, nn.LSTM | nn.GRU) and own is None:
        return run_recurrent
    if binding.has_own_ops and own is None and (run := _own_op(module)) is not None:
        return run
    if not binding.fuses or own not in (None, Rule.FP32_LOW_OUT):
        return None
    hand_written = hand_written_gelu if own is None else hand_written_rms_norm
    tables = ((nn.Embedding, run_embedding), (nn.EmbeddingBag, run_embedding_bag)) if own is None else ()
    return next((run for kind, run in tables if _runs_as(module, kind)), None) or hand_written(module)


def _own_op(module: nn.Module) -> Callable[..., Any] | None:
    units = native_support("cpu", torch.bfloat16)
    has_pairs = units.reason == "avx512_bf16"  # beside tiles torch's are faster
    is_emulated = not units.native and torch.backends.cpu.get_cpu_capability() == "AVX512"
    if has_pairs and _runs_as(module, nn.Conv2d):
        return run_convolution
    if (has_pairs or is_emulated) and _runs_as(module, nn.Linear):
        return run_linear
    if _runs_as(module, nn.Dropout):
        return run_dropout
    return run_max_pool if _runs_as(module, nn.MaxPool2d, nn.MaxPool3d) else None


def _with_kept_casts(module: nn.Module) -> Callable[..., Any] | None:
    """Return what runs where casts are kept; None where the module's own forward casts no weight."""
    if _runs_as(module, nn.Linear):
        return _run_kept_linear
    if _runs_as(module, nn.Conv1d, nn.Conv2d, nn.Conv3d):
        return _run_kept_convolution
    if isinstance(module, _UNCAST) or all(p is None for p in own_parameters(module).values()):
        return None
    return _run_by_mode


def _runs_as(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether a module is of one of torch's classes and has the forward that torch wrote for one. Host only."""
    return isinstance(module, kinds) and class_of(module).forward in map(torchs_forward, kinds)


def run_unfused(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a module in `FUSED`, without its fused kernel where casting is on.

    torch leaves that kernel out under autocast, but asks for CUDA's alone: on the CPU the switch of CUDA says so too.
    """
    forward = class_of(module).forward
    is_hidden = torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")
    if module.training or not is_hidden:
        return forward(module, *args, **kwargs)
    torch.set_autocast_enabled("cuda", True)
    try:
        return forward(module, *args, **kwargs)
    finally:
        torch.set_autocast_enabled("cuda", False)


def run_recurrent(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of recurrent layers: by mezzo's kernel where that is faster and nobody looks on; an LSTM that is exported with its casts, past which torch decomposes it."""
    forward, binding = class_of(module).forward, _bound(module).binding
    is_own = binding.has_own_ops and not is_compiling() and _may_take(module, *args)
    low = binding.low_dtype() if is_exporting() and isinstance(module, nn.LSTM) else None
    if low is None and not is_own:
        return forward(module, *args, **kwargs)
    with RecurrentMode() if low is None else binding.region(low, traced=True):
        return forward(module, *args, **kwargs)


def _may_take(module: nn.RNNBase, input: object = None, *_: object) -> bool:
    """Whether layers are given a tensor of a size from which it pays to see each of their ops."""
    if not isinstance(input, Tensor):
        return False
    if isinstance(module, nn.GRU):
        return input.dim() > 1 and input.shape[module.batch_first and input.dim() == 3] >= FEWEST_GRU_STEPS
    width = module.input_size
    is_trained = module.training or torch.is_grad_enabled()
    return is_trained and is_large_lstm(input.numel() // width, width, module.hidden_size)


def run_linear(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a `Linear`, by mezzo's kernel where a region casts to bf16, it is the faster one and nobody looks on."""
    if len(args) != 1 or kwargs or is_compiling():
        return nn.Linear.forward(module, *args, **kwargs)
    x, weight, bias = args[0], module.weight, module.bias
    if not isinstance(x, Tensor) or x.numel() * module.out_features <= SMALLEST_LINEAR:
        return F.linear(x, weight, bias)
    with ModesAside(AttentionMode) as aside:
        if not num_function_modes() and tracing_state() is None and casts_to_bf16() and takes_linear(x, weight, bias):
            count_products(aside, x, weight)
            return linear(x, weight, bias)
    return F.linear(x, weight, bias)


def run_convolution(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a `Conv2d`, with gradients by mezzo's kernel where a region casts to bf16 and that is the faster one: the same bits forward. Syncs: no."""
    x = args[0] if len(args) == 1 and not kwargs and not is_compiling() else None
    if isinstance(x, Tensor) and module.groups == 1 and may_take_convolution(x, module.weight):
        with ModesAside(AttentionMode):
            operands = _convolved(module, x)
            if operands is not None:
                return convolution(*operands, module.stride, module.padding)
    return class_of(module).forward(module, *args, **kwargs)


def _convolved(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Return what a call multiplies, in bf16; None where it is torch's. Syncs: no."""
    is_torchs = getattr(module._conv_forward, "__func__", None) is _CONV_FORWARD
    if num_function_modes() or not (is_torchs and casts_to_bf16()):
        return None
    weight, bias, pairs = module.weight, module.bias, (module.stride, module.padding)
    is_plain = module.padding_mode == "zeros" and module.dilation == (1, 1)
    if not (is_plain and all([isinstance(pair, tuple) and len(pair) == 2 for pair in pairs])):
        return None
    given = (x, weight) if bias is None else (x, weight, bias)
    if not takes_convolution(x, weight, bias, *pairs) or any([one.dtype not in MIXED_DTYPES for one in given]):
        return None
    low = torch.bfloat16
    return x.to(low), weight.to(low), None if bias is None else bias.to(low)


def run_dropout(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a `Dropout`, with torch's random numbers drawn by mezzo's kernel where that is the faster one and nobody looks on."""
    if len(args) == 1 and not kwargs and module.training and not (module.inplace or is_compiling()):
        x = args[0]
        with ModesAside(AttentionMode):
            if isinstance(x, Tensor) and not num_function_modes() and takes_dropout(x, module.p):
                return dropout(x, module.p)
    return class_of(module).forward(module, *args, **kwargs)


_BAG = signature(nn.EmbeddingBag.forward)
_MOST_IN_16_BIT = 16
"""Terms that 16 bit sums within 3%, where all are of one row."""


def run_embedding(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an `Embedding`; the gradients of one row of a 16-bit table are summed in fp32, as on other devices. torch adds one after the other in 16 bit, and a sum of 256 takes no 1 any more."""
    weight, forward = module.weight, class_of(module).forward
    if len(args) != 1 or kwargs or not _sums_in_16_bit(module, args[0]):
        return forward(module, *args, **kwargs)
    with torch.no_grad():
        rows = forward(module, *args)
    options = weight.shape[0], -1 if module.padding_idx is None else module.padding_idx, module.scale_grad_by_freq
    return _Embedding.apply(rows, weight, args[0], options)  # type: ignore[no-untyped-call]  # torch's own


def run_embedding_bag(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an `EmbeddingBag`; rows of a 16-bit table, and the gradients of one row, are summed in fp32. Writes: the table, where it has a `max_norm`."""
    weight, forward = module.weight, class_of(module).forward
    if not args or not _sums_in_16_bit(module, args[0]):
        return forward(module, *args, **kwargs)
    given = _BAG.bind(module, *args, **kwargs).arguments
    indices, factors, padding = args[0], given.get("per_sample_weights"), module.padding_idx
    if module.max_norm is not None:
        torch.embedding_renorm_(weight.detach(), indices.reshape(-1), module.max_norm, module.norm_type)
    met, places = indices.unique(return_inverse=True)  # each row once: its gradient is rounded, not added to, in 16 bit
    sums = F.embedding_bag(
        places, weight.index_select(0, met).float(), given.get("offsets"),
        mode=module.mode, per_sample_weights=None if factors is None else factors.float(),
        scale_grad_by_freq=module.scale_grad_by_freq, include_last_offset=module.include_last_offset,
        padding_idx=None if padding is None or padding not in met else int((met == padding).nonzero()),
    )  # fmt: skip
    return sums.to(weight.dtype)


def _sums_in_16_bit(module: Any, indices: object) -> bool:
    """Whether torch would sum gradients of rows in 16 bit, eagerly, where nothing but a mode looks on."""
    weight = module.weight
    return (
        not is_compiling()
        and weight.requires_grad
        and weight.dtype in LOW_DTYPES
        and weight.is_cpu
        and type(indices) is Tensor
        and indices.numel() > _MOST_IN_16_BIT
        and not module.sparse
        and torch.is_grad_enabled()
        and functorch_level() is None
        and tracing_state() is None
        and forward_ad_level() < 0
    )


class _Embedding(torch.autograd.Function):
    """Rows that were looked up, with the gradient of their table: the sum of each row in fp32, rounded once."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, indices: Tensor, options: tuple[int, int, bool]) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.options, ctx.dtype = options, weight.dtype
        return rows.data  # no view of torch's, and not the input: either may not be written in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        (indices,), (height, padding, scales) = ctx.saved_tensors, ctx.options
        sum_rows, wide = _aten.embedding_dense_backward, grad.float()
        if height <= indices.numel():
            return None, sum_rows(wide, indices, height, padding, scales).to(ctx.dtype), None, None
        met, places = indices.unique(return_inverse=True)  # else a table in fp32 would be made, of rows that hold 0
        sums = sum_rows(wide, places, len(met), -1, scales).to(ctx.dtype)
        table = sums.new_zeros(height, sums.shape[-1]).index_copy_(0, met.long(), sums)
        if padding >= 0:
            table[padding] = 0
        return None, table, None, None


def run_max_pool(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a `MaxPool2d` or `MaxPool3d` on channels that lie side by side, of which torch takes many at a time: 6 times as fast with both copies."""
    if len(args) == 1 and not kwargs and _lies_apart(module, args[0]):
        options = module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode
        return _MaxPool.apply(args[0], options)  # type: ignore[no-untyped-call]  # torch's own
    return class_of(module).forward(module, *args, **kwargs)


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
        not is_compiling()
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


def _run_kept_linear(module: nn.Linear, input: Tensor) -> Tensor:
    return F.linear(input, *_casts_of(module))


def _run_kept_convolution(module: Any, input: Tensor) -> Tensor:
    out: Tensor = module._conv_forward(input, *_casts_of(module))
    return out


def _run_by_mode(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the forward of a module that casts its weights who knows where, in a region that sees each op and keeps those casts."""
    forward = run_unfused if isinstance(module, FUSED) else class_of(module).forward
    low = None if is_compiling() else _bound(module).binding.low_dtype()
    if low is None:
        return forward(module, *args, **kwargs)
    with _bound(module).binding.kept_region(low, "persistent"):
        return forward(module, *args, **kwargs)


CALL_FORWARD = (run_unfused, run_recurrent, _run_by_mode)
"""What calls the forward that a class has at the time, whichever that is."""
TRACED_AS_WRITTEN = (
    run_convolution,
    run_dropout,
    run_embedding,
    run_embedding_bag,
    run_linear,
    run_max_pool,
    _run_kept_convolution,
    _run_kept_linear,
)
"""What a compiler finds nothing else in than the forward of the class."""


def _casts_of(module: Any) -> tuple[Tensor, Tensor | None]:
    weight, bias = module.weight, module.bias
    if is_compiling():
        return weight, bias
    key = None if torch.is_grad_enabled() else cast_key(weight, bias)
    if key is None:
        return kept_casts(weight, bias)
    bound = _bound(module)
    if bound.kept is None or bound.kept[0] != key:
        bound.kept = key, kept_casts(weight, bias)
    return bound.kept[1]


def _bound(module: nn.Module) -> Bound:
    found = bound_of(module)
    assert found is not None
    return found
