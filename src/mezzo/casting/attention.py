"""Attention, LSTMs and GRUs on a CPU, by the kernels that are faster, and of attention more precise, than torch's for 16 bit."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._torch import dynamo_pass_through, function_modes, has_amx, is_unwatched, safe_softmax
from ..kernels import (
    attention,
    draws_faster,
    dropout,
    is_emulated,
    recurrent,
    takes_attention,
    takes_dropout,
    takes_recurrent,
)
from .frame import bind_recompute
from .op_rule_table import decomposed_composites
from .wide import is_castable, outside_autocast, saved_as_given

LONGEST = 256
"""Keys up to which the fp32 kernel is the faster one, forward and backward: 1.6 times at 128 keys, 1.1 at 256, 0.8 at 1024
(torch 2.13, EPYC with AVX-512)."""
LARGEST_BESIDE_TILES = 160 * 64
"""Elements of a head's keys up to which it is where the CPU multiplies tiles (AMX): 1.4 times at 160 keys of 64, 0.9 at 192.
Forward alone torch's 16-bit kernel is the faster one there."""
SMALLEST = 2048
"""Elements of the query from which either is: 2.7 times at 4096, 0.7 at 512."""


def is_attention(cls: type[nn.Module]) -> bool:
    """Whether modules of a class are of attention: by its name or that of a class above it, or since a method names torch's op. Host only."""
    own = cls.__mro__[: cls.__mro__.index(nn.Module)]
    if any(base.__name__.endswith("Attention") for base in own):
        return True
    methods = [method for base in own for method in vars(base).values() if inspect.isfunction(method)]
    return any(_names_attention(getattr(inspect.unwrap(one), "__code__", one.__code__)) for one in methods)


def _names_attention(code: CodeType) -> bool:
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return not _OPS.isdisjoint(code.co_names) or any(map(_names_attention, inner))


_OPS = frozenset({"scaled_dot_product_attention", "multi_head_attention_forward"})


def has_own_attention(device_type: str | None) -> bool:
    """Whether attention on a device may be faster another way than torch's: on a CPU, or with models that lie on several."""
    return device_type in (None, "cpu")


def is_large(args: Iterable[object], kwargs: Mapping[str, object]) -> bool:
    """Whether a module of attention is given a tensor of a size from which `AttentionMode` pays for seeing each of its ops."""
    return any(isinstance(given, Tensor) and given.numel() >= SMALLEST for given in (*args, *kwargs.values()))


_MOST_IDLE = 3
"""Calls of a module of attention that met none, by a formula of its own or with dropout that torch draws, after which its ops are no longer watched."""


@dynamo_pass_through
def run_attention(
    idle: list[int], module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Run a module of attention under `AttentionMode`, unless that never had anything to do.

    `idle` counts calls that met none, in evaluation and in training; it is far below 0 once there was one. Writes: `idle`.
    """
    is_training, is_compiling = module.training, torch.compiler.is_compiling()
    if not is_compiling and idle[is_training] >= _MOST_IDLE:
        return forward(module, *args, **kwargs)
    mode = AttentionMode(is_training)
    with mode:
        out = forward(module, *args, **kwargs)
    if not is_compiling:
        idle[is_training] = -sys.maxsize if mode.has_met else idle[is_training] + 1
    return out


class AttentionMode(TorchFunctionMode):
    """Have `scaled_dot_product_attention` in a region on the CPU run as it is fastest, where a backward pass may follow.

    torch's 16-bit kernel for the CPU is slow in backward, ten times forward at 128 keys. Where there is a kernel of mezzo's for the
    gradients (`kernels.attention`), forward is torch's and backward that one. Else short attention is computed by torch's fp32 kernel, which
    reads the same values, widened exactly, and only the result and the gradients of the inputs are rounded, where the other
    rounds the probabilities too. Query, key and value wait for backward in 16 bit, as they were given; the price is the
    result, which waits in fp32.

    With dropout torch's formula runs, its random numbers drawn by mezzo's kernel where that is faster. Tiny sequences and tensors that
    are not plain are left to torch and the region.

    Args:
        trains: a backward pass may follow although gradients are off, as in a reentrant checkpoint's first run.

    Attributes:
        has_met: whether there was a call that may run its own way; not known of compiled ones.

    Syncs: no.
    """

    def __init__(self, trains: bool = False) -> None:
        super().__init__()
        self.has_met = False
        self.has_grad = torch.is_grad_enabled()  # a reentrant checkpoint's first run has none
        self.trains = trains or self.has_grad

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.dropout:
            return self._drop(*args, **kwargs)
        if func is F.multi_head_attention_forward and not torch.compiler.is_compiling():
            with self:
                return decomposed_composites()[func](*args, **kwargs)
        if func is Tensor.unflatten and torch.compiler.is_compiling():  # written in Python, which it does not follow
            return args[0].unflatten(*args[1:], **kwargs)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        inputs, low = (query, key, value), torch.get_autocast_dtype("cpu")
        given = (*inputs, attn_mask, is_causal, enable_gqa)
        is_eager, draws = not torch.compiler.is_compiling(), dropout_p > 0 and draws_faster()
        if is_eager and (draws or not dropout_p):
            self.has_met = True
        takes = torch.is_autocast_enabled("cpu") and all(map(is_castable, inputs)) and query.numel() >= SMALLEST
        if takes and draws and _is_well_formed(*given):
            return _dropped(query.to(low), key.to(low), value.to(low), attn_mask, dropout_p, is_causal, scale)
        takes = takes and not dropout_p
        is_own = takes and self.trains and low is torch.bfloat16 and takes_attention(*given)
        if not (is_own or (takes and is_eager and self._gains(key))):
            return F.scaled_dot_product_attention(
                *inputs, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if self.has_grad and is_eager:
            bind_recompute(AttentionMode, True)  # made before a reentrant checkpoint turns gradients on
        if is_own:
            return attention(query.to(low), key.to(low), value.to(low), attn_mask, is_causal, scale)
        return _wide(inputs, attn_mask, is_causal, scale=scale, enable_gqa=enable_gqa).to(low)

    def _drop(self, input: Tensor, p: float, training: bool, inplace: bool) -> Tensor:
        if torch.compiler.is_compiling() or inplace or not training or not takes_dropout(input, p):
            return F.dropout(input, p, training, inplace)
        self.has_met = True
        return dropout(input, p)

    def _gains(self, key: Tensor) -> bool:
        """Whether the fp32 kernel is faster than torch's 16-bit one for so many keys."""
        if is_emulated(torch.get_autocast_dtype("cpu")):
            return True
        if has_amx():
            return self.trains and key.shape[-2:].numel() <= LARGEST_BESIDE_TILES
        return key.shape[-2] <= LONGEST


def _is_well_formed(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> bool:
    """Whether torch takes these for attention, and nobody looks on."""
    if not (query.dim() == key.dim() == value.dim() == 4 and is_unwatched()):
        return False
    (batch, heads, _, width), kv_heads = query.shape, key.shape[1]
    is_plain = mask is None or (type(mask) is Tensor and mask.is_cpu and not is_causal)
    shares = kv_heads == heads or (enable_gqa and kv_heads > 0 and heads % kv_heads == 0)
    return is_plain and shares and key.shape[:3] == value.shape[:3] and key.shape[::3] == (batch, width)


def _dropped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, is_causal: bool, scale: float | None
) -> Tensor:
    """Return torch's formula of attention with dropout, to the bit, but for how fast its random numbers are drawn.

    Source: torch, aten/src/ATen/native/transformers/attention.cpp, _scaled_dot_product_attention_math.
    """
    low, groups = query.dtype, query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(low).float()
    with outside_autocast():
        if is_causal:
            mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device="cpu").tril()
        if mask is not None and mask.dtype is torch.bool:
            mask = torch.where(mask, 0.0, -math.inf).float()
        wide, keys, values = query.float(), key.float(), value.float()
        if groups > 1:
            keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        root = math.sqrt(abs(scale))
        scores = (wide * math.copysign(root, scale)) @ (keys * root).transpose(-2, -1)
        weights = safe_softmax(scores if mask is None else scores.add_(mask), -1)
        weights = dropout(weights, p) if takes_dropout(weights, p) else torch.dropout(weights, p, True)
        return (weights @ values).to(low)


def _wide(inputs: Sequence[Tensor], mask: Tensor | None, is_causal: bool, **options: Any) -> Tensor:
    mask = mask.float() if mask is not None and mask.is_floating_point() else mask
    with outside_autocast():
        query, key, value = wide = [t.float() for t in inputs]
        with saved_as_given("query, key or value of an attention", inputs, wide, query.dtype):
            return F.scaled_dot_product_attention(query, key, value, mask, 0.0, is_causal, **options)


class RecurrentMode(TorchFunctionMode):
    """Have `torch.lstm` and `torch.gru` in a region on the CPU run as they are fastest in bf16.

    What mezzo's kernel is not for, packed sequences and projections among them, is left to torch and the region.

    Syncs: no.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.lstm, torch.gru) and casts_to_bf16():
            is_unseen = all(isinstance(mode, AttentionMode) for mode in function_modes())
            is_whole = len(args) == 9 and isinstance(args[3], bool)  # not a packed sequence
            if is_unseen and is_whole and takes_recurrent(*args):
                return recurrent(*args)
        return func(*args, **(kwargs or {}))


def casts_to_bf16() -> bool:
    """Whether a region that casts to bf16 on the CPU is here. Host only."""
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
