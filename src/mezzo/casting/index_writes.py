"""What is written or summed at indices takes the dtype of what it is written into: `buffer[index] = layer(x)` runs.

torch refuses two floating dtypes there, in a region too, and in some ops more that have no rule: products of vectors, `lerp`,
weighted bags of embeddings, products of sparse matrices, quantisation in training. Its dispatcher asks the kernels of this file, at the
keys of autocast where torch has none of its own, from the first region on: what torch answers by itself is not changed. Nor is it
for matrices in compressed layouts (CSR, CSC) on a CPU, whose 16-bit products, without a kernel there, are made in fp32. The fused layer of
`nn.TransformerEncoder`, of which torch casts some products of nested tensors and not the others, runs in 16 bit there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from .._torch import dynamo_skip_frame, without_autocast
from ..formats import LOW_DTYPES, MIXED_DTYPES
from ..policy import DISPATCH_KEYS, registered

_WRITES = ("index_copy.default", "masked_scatter.default", "put.default", "index_put.default", "scatter.src")
_SUMS = ("index_add.default", "index_reduce.default", "scatter_add.default", "scatter_reduce.two")
_SOURCE = {"masked_scatter": 2, "put": 2, "index_put": 2}
"""Where an op has what is written, if not behind dimension and index."""
_library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]  # torch's own


def _op(called: str) -> Any:
    name, _, overload = called.partition(".")
    return getattr(getattr(torch.ops.aten, name), overload or "default")


def _as_one(at: int, in_place: bool, is_sum: bool, *given: Any) -> tuple[Any, ...]:
    """Return the arguments of an op that writes the one `at` a place into the first, both in one dtype. Syncs: no.

    That is the wider one, or in place the target's, where a sum loses nothing by that.
    """
    target, source = given[0], given[at]
    is_mixed = isinstance(source, Tensor) and source.dtype is not target.dtype
    if not is_mixed or not {target.dtype, source.dtype} <= {*MIXED_DTYPES}:
        return given
    widest = torch.promote_types(target.dtype, source.dtype)
    sums = is_sum or given[at + 1 :] == (True,)
    if not in_place:
        target, source = target.to(widest), source.to(widest)
    elif not sums or widest is target.dtype:
        source = source.to(target.dtype)
    return target, *given[1:at], source, *given[at + 1 :]


def _weights_as_table(table: Tensor, *given: Any) -> tuple[Any, ...]:
    """Return the arguments of a bag of embeddings, its weights of samples in the dtype of the table. Syncs: no."""
    weights = given[5] if len(given) > 5 else None
    if isinstance(weights, Tensor) and table.dtype in MIXED_DTYPES and weights.dtype in MIXED_DTYPES:
        given = (*given[:5], weights.to(table.dtype), *given[6:])
    return table, *given


def _widened(*given: Any) -> tuple[Any, ...]:
    return tuple(t.float() if isinstance(t, Tensor) and t.dtype in LOW_DTYPES else t for t in given)


def _promoted(*given: Any) -> tuple[Any, ...]:
    """Return arguments in the widest of their dtypes, where 16 bit meets fp32 or the other 16 bit. Syncs: no."""
    dtypes = {t.dtype for t in given if isinstance(t, Tensor) and t.dtype in MIXED_DTYPES}
    return _widened(*given) if len(dtypes) > 1 else given


def _as_target(target: Tensor, *given: Any) -> tuple[Any, ...]:
    """Return the arguments of an op that writes its first one, the others in fp32 where that is. Syncs: no."""
    return (target, *_widened(*given)) if target.dtype is torch.float32 else (target, *given)


def _parts(*given: Any) -> tuple[Any, ...]:
    """Return the parts of complex numbers in fp32; two of fp16, which torch has complex numbers of, as they are. Syncs: no."""
    return given if all(t.dtype is torch.float16 for t in given) else _widened(*given)


_FITTED: dict[str, Callable[..., tuple[Any, ...]]] = {
    "embedding_bag.padding_idx": _weights_as_table,
    "fused_moving_avg_obs_fake_quant.default": _widened,
    "complex.default": _parts,
    **dict.fromkeys(
        (
            "lerp.Tensor", "lerp.Scalar", "dot.default", "vdot.default", "inner.default", "tensordot.default", "mv.default",
            "addmv.default", "addr.default", "bilinear.default", "_sparse_mm.default", "_sparse_mm.reduce", "_sparse_addmm.default", "sparse_sampled_addmm.default", "cross.default", "linalg_cross.default", "_weight_norm.default", "isclose.default", "allclose.default",
        ),
        _promoted,
    ),
    **dict.fromkeys(
        ("lerp_.Tensor", "lerp_.Scalar", "addmm_.default", "addmv_.default", "addbmm_.default", "baddbmm_.default"), _as_target
    ),
}  # fmt: skip
"""Ops without a rule that two dtypes, or 16 bit, end in an error, and how their arguments are made to fit."""


def _fitting_kernel(op: Any, fit: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
    @dynamo_skip_frame
    def run(*given: Any, **named: Any) -> Any:
        with without_autocast():
            return op(*(fit(*given) if _is_here_to_stay() else given), **named)

    return run


def _product_kernel(op: Any, torchs: Any) -> Callable[..., Any]:
    """Return a kernel that takes 16 bit in fp32, rounded once, and leaves the rest to torch's."""

    @dynamo_skip_frame
    def run(keys: torch.DispatchKeySet, *given: Any, out: Tensor | None = None, **named: Any) -> Any:
        dtypes = {t.dtype for t in given if isinstance(t, Tensor)}
        written = {} if out is None else {"out": out}
        if len(dtypes) > 1 or not dtypes <= set(LOW_DTYPES):
            return torchs.call_boxed(keys, *given, **named, **written)
        if out is None:
            return op(*_widened(*given), **named).to(dtypes.pop())
        return out.copy_(op(*_widened(*given), **named, out=torch.empty_like(out, dtype=torch.float32)))

    return run


def _wide_kernel(op: Any, torchs: Any) -> Callable[..., Any]:
    """Return a kernel that takes 16 bit, also beside fp32, in fp32, and leaves the rest to torch's. Syncs: no."""

    @dynamo_skip_frame
    def run(keys: torch.DispatchKeySet, *given: Any) -> Any:
        is_low = any(isinstance(t, Tensor) and t.dtype in LOW_DTYPES for t in given)
        return op(*_widened(*given)) if is_low else torchs.call_boxed(keys, *given)

    return run


def _nested_kernel(op: Any, torchs: Any) -> Callable[..., Any]:
    """Return a kernel that takes all tensors in the dtype of the region it is in, without casts of its parts. Syncs: no."""

    @dynamo_skip_frame
    def run(keys: torch.DispatchKeySet, *given: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            low = torch.get_autocast_dtype("cpu")
            given = tuple(t.to(low) if isinstance(t, Tensor) and t.dtype in MIXED_DTYPES else t for t in given)
        with without_autocast():
            return torchs.call_boxed(keys, *given)

    return run


_ON_CPU = (
    *[(called, "SparseCsrCPU", _product_kernel) for called in ("mm", "addmm", "addmv.out")],
    *[(called, "SparseCPU", _product_kernel) for called in ("add.Tensor", "sub.Tensor")],
    ("_dirichlet_grad", "CPU", _wide_kernel),
    ("_transformer_encoder_layer_fwd", "NestedTensorCPU", _nested_kernel),
)
"""Products of a compressed matrix, of which all others, and their gradients, are made; sums of sparse matrices; the slope of a draw; the layer of an encoder that is given padding in evaluation."""


@lru_cache
def _take_layouts() -> None:
    """Give a CPU kernels that take 16 bit in layouts in which torch's do not, or not in a region. Writes: torch's dispatcher. Host only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch's kernel is replaced: it is called for what it takes
        for called, key, kernel in _ON_CPU:
            torchs = torch.library.get_kernel(f"aten::{called}", key)
            _library.impl(called, kernel(_op(called), torchs), key, with_keyset=True)


def _is_here_to_stay() -> bool:
    """Whether what runs now runs in this process: an exported program finds no kernel of mezzo's elsewhere."""
    return not torch.compiler.is_exporting()


@lru_cache
def take_index_writes(device_type: str) -> None:
    """Have regions on a device take what is written or summed at indices in another floating dtype.

    Exactly where the target is the wider one. A narrower target takes what is written, rounded, as `copy_` does, and
    refuses sums, as torch does; out of place both are widened, as torch's own rule for such ops has it. Weights of samples
    take the dtype of their table of embeddings; products of sparse matrices and quantisation in training run in fp32. Products of
    vectors, `lerp` and comparisons take the widest of their dtypes, and in place that of an fp32 target.

    Writes: torch's dispatcher, at its keys of autocast, once for a device. Host only.
    """
    if device_type == "cpu":
        _take_layouts()
    if (key := DISPATCH_KEYS.get(device_type)) is None:
        return
    torchs, fitted = registered(device_type), dict(_FITTED)
    for written in (*_WRITES, *_SUMS):
        name, overload = written.split(".")
        for in_place, called in enumerate((name, f"{name}_")):
            fitted[f"{called}.{overload}"] = partial(_as_one, _SOURCE.get(name, 3), bool(in_place), written in _SUMS)
    for called, fit in fitted.items():
        if called.split(".")[0] not in torchs:
            op = _op(called)
            _library.impl(op, _fitting_kernel(op, fit), key)
