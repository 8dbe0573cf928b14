"""Arithmetic on live tensors: what a tensor holds, and what an op would have given in a wider format."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import random_state
from .._torch import local_tensor, tree_leaves, tree_map, without_autocast
from ..formats import dtype_name, widest
from .ops import FACTORIZATIONS, SOFTMAX_LIKE, Call, Given, is_collective, is_plain, results
from .records import TensorFacts, Wide

_WIDE = (torch.float32, torch.float64)


def _readable(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def amax(tensor: Tensor) -> float:
    """Return the largest magnitude, NaN or inf if the tensor holds one. One pass. Syncs: yes."""
    if tensor.numel() == 0:
        return 0.0
    tensor = _readable(tensor.detach())
    if not tensor.is_contiguous():  # in the order of memory reductions are thirty times faster
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    least, largest = torch.aminmax(tensor)
    return float(torch.maximum(largest, -least))


def is_finite(tensor: Tensor) -> bool:
    """Say whether every element is finite. Syncs: yes."""
    return math.isfinite(amax(tensor))


def finite(tensor: Tensor) -> Tensor:
    """Return whether each element is finite, in formats of 8 bit too, of which torch's function takes some. Syncs: no."""
    return _readable(tensor).isfinite()


def any_nan(tensors: Iterable[Tensor]) -> bool:
    """Say whether any element of any tensor is NaN. Syncs: yes."""
    return any(bool(_readable(t).isnan().any()) for t in tensors)


def spaced(tensor: Tensor, count: int) -> Tensor:
    """Return at most `count` evenly spaced values of a tensor, or of what lies here of it; a view where its memory allows. Syncs: no."""
    flat = local_tensor(tensor).reshape(-1)
    return flat[:: max(1, -(-flat.numel() // count))]


def exponent_fields(values: Tensor) -> Tensor:
    """Return the exponent field of each fp32 value: 0 for zeros and subnormals, 255 for inf and NaN. Syncs: no."""
    return (values.contiguous().view(torch.int32) >> 23) & 255


def tensor_facts(name: str, tensor: Tensor) -> TensorFacts:
    """Count what a report says about a tensor. Syncs: yes."""
    values = _readable(tensor.detach())
    top = amax(values)
    is_sound = math.isfinite(top)
    return TensorFacts(
        name=name,
        dtype=dtype_name(tensor.dtype),
        shape=tuple(tensor.shape),
        device=str(tensor.device),
        amax=top if is_sound else amax(values.nan_to_num(0.0, 0.0, 0.0)),
        nan=0 if is_sound else int(values.isnan().sum()),
        posinf=0 if is_sound else int(values.isposinf().sum()),
        neginf=0 if is_sound else int(values.isneginf().sum()),
        zeros=values.numel() - int(values.count_nonzero()),
    )


def share_off(tensor: Tensor, wide: Tensor) -> float:
    """Return how far a tensor lies from another, as a share of that one's norm; 0 where that is 0 or not finite. Syncs: yes."""
    off = float((tensor.detach().to(wide.dtype) - wide).norm()) if 0 < (top := float(wide.norm())) < math.inf else 0.0
    return off / top if 0 < off < math.inf else 0.0


def length(tensor: Tensor) -> float:
    """Return the L2 norm, computed in fp64 where the device has it. Syncs: yes."""
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=widest(tensor.device))) if tensor.numel() else 0.0


def rms(tensor: Tensor, *, is_finite: bool = False) -> float:
    """Return the root mean square of the finite values, computed in fp64 where the device has it. Syncs: yes."""
    if tensor.numel() == 0:
        return 0.0
    values = _readable(tensor.detach())
    values = values if is_finite else values.nan_to_num(0.0, 0.0, 0.0)
    return length(values) / math.sqrt(tensor.numel())


_IDS = (torch.int64, torch.int32, torch.bool)


def rerun(call: Call, given: Given | None = None) -> list[Tensor]:
    """Run an op again, on copies of what it writes, with the values it was given or with others in their place.

    Returns:
        Its floating results, NaN where it says that they do not exist, and the floating arguments it wrote.

    Raises: RuntimeError, NotImplementedError: the op has no kernel for these dtypes. Syncs: as the op does.
    """
    (args, kwargs), out = _again(call, given or call.given)
    found = results(call.facts, args, kwargs, out)
    has_failed = call.facts.name in FACTORIZATIONS and bool(out[-1].any())
    return [torch.full_like(t, math.nan) for t in found] if has_failed else found


def _again(call: Call, given: Given) -> tuple[Given, Any]:
    """Run an op on copies of what it writes; return what it was given, with these, and what it returned."""
    facts, (args, kwargs) = call.facts, given
    if is_collective(facts.kernel):
        raise NotImplementedError(f"{facts.kernel} waits for other ranks, and is not run again.")
    named = zip(facts.arguments, args, strict=False)
    args = tuple(tree_map(_clone, a) if name in facts.writes else a for name, a in named)
    kwargs = {name: tree_map(_clone, a) if name in facts.writes else a for name, a in kwargs.items()}
    with torch.no_grad(), without_autocast(), random_state.kept() if facts.draws else nullcontext():
        return (args, kwargs), call.func(*args, **kwargs)


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _widened(given: Given, dtype: torch.dtype) -> Given:
    """Return an op's arguments with every narrower floating tensor, and every floating dtype named, widened."""

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtype) if value.is_floating_point() and value.dtype != torch.float64 else value
        is_format = isinstance(value, torch.dtype) and value.is_floating_point and value != torch.float64
        return dtype if is_format else value

    found: Given = tree_map(widen, given)
    return found


def rerun_wide(call: Call, dtype: torch.dtype, given: Given | None = None) -> list[Tensor] | None:
    """Run an op again in a wider format, as `rerun` does; None where no kernel of that format exists. Syncs: as the op does."""
    try:
        args, kwargs = _widened(given or call.given, dtype)
        if call.facts.name in ("softmax", "log_softmax"):
            # half_to_float is legal for half inputs only
            args = tuple(False if a is True else a for a in args)
        return rerun(call, (args, kwargs))
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def whole_results(call: Call, values: dict[int, Tensor]) -> list[Tensor]:
    """Return the ids that an op gives in fp32 with some arguments exchanged, by their `id`; none where it cannot. Syncs: as the op does."""
    if call.facts.draws:
        return []
    given = _widened(call.given_with(values), torch.float32)
    try:
        return ids_in(_again(call, given)[1])
    except (RuntimeError, NotImplementedError, TypeError, IndexError):
        return []


def ids_in(value: Any) -> list[Tensor]:
    """Return the tensors of int64, int32 and bool in what an op was given or gave. Syncs: no."""
    found = [torch.tensor(value)] if isinstance(value, bool) else tree_leaves(value)  # of equal
    return [t for t in found if isinstance(t, Tensor) and t.dtype in _IDS and is_plain(t)]


def wide_results(call: Call, narrow: torch.dtype, given: Given | None = None) -> tuple[Wide, ...]:
    """Recompute an op in fp32, then in fp64 while the result is not finite; one entry a format tried. Syncs: yes.

    Formats no wider than `narrow`, the dtype of the result that went wrong, are left out.
    """
    tried = []
    for dtype in _WIDE:
        if dtype.itemsize <= narrow.itemsize:
            continue
        out = rerun_wide(call, dtype, given)
        if out is None:
            continue
        whole = all(is_finite(t) for t in out)
        tops = [amax(t.nan_to_num(0.0, 0.0, 0.0)) for t in out]
        tried.append(Wide(dtype=dtype_name(dtype), is_finite=whole, amax=max(tops, default=0.0), has_nan=any_nan(out)))
        if whole:
            break
    return tuple(tried)


def sanitised(value: Any) -> Any:
    """Return arguments with every non-finite element replaced by 1, which lies in every op's domain."""

    def repaired(item: Any) -> Any:
        if not isinstance(item, Tensor) or not item.is_floating_point() or item.dtype.itemsize == 1:
            return item
        if item.is_nested and item.layout is torch.strided:
            item = item.detach().clone()
            item.values().nan_to_num_(1.0, 1.0, 1.0)
            return item
        return item.nan_to_num(1.0, 1.0, 1.0)

    return tree_map(repaired, value)


def offending_values(inputs: list[tuple[str, Tensor]], bad: Tensor) -> tuple[tuple[str, float], ...]:
    """Return (name, value at the first non-finite element of a result) of inputs that broadcast to its shape. Syncs: yes."""
    if bool(finite(bad).all()):
        return ()
    index, found = first_bad(bad), []
    of_channels = (-1, *[1] * (bad.dim() - 2)) if "running_var" in dict(inputs) else ()
    for name, tensor in inputs:
        try:
            operand = tensor.view(of_channels) if of_channels and tensor.dim() == 1 else tensor
            found.append((name, float(operand.broadcast_to(bad.shape)[index])))
        except RuntimeError:
            continue
    return tuple(found)


def first_bad(bad: Tensor) -> tuple[int, ...]:
    """Return the index of the first non-finite element of a result. Syncs: yes."""
    where = (~finite(bad)).nonzero()
    return tuple(where[0].tolist()) if len(where) else ()


def divisors(call: Call) -> tuple[tuple[str, float], ...]:
    """Return the second operand where it is a whole number of Python's, or 0. Host only."""
    other = call.named.get("other")
    return (("other", float(other)),) if type(other) is int or (type(other) is float and other == 0) else ()


def full_rows(call: Call) -> int:
    """Count the rows of a softmax-like op in which every input is -inf. Syncs: yes."""
    if call.facts.name not in SOFTMAX_LIKE or not call.inputs:
        return 0
    scores = dict(call.inputs).get("attn_mask", call.inputs[0][1])
    dims = [a for a in call.args[1:2] if isinstance(a, int) and not isinstance(a, bool)]
    return int(scores.isneginf().all(dims[0] if dims else -1).sum())


def numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[float]:
    """Return the Python numbers among an op's arguments."""
    return [float(a) for a in tree_leaves((args, kwargs)) if isinstance(a, (int, float)) and not isinstance(a, bool)]


def mean_row(table: Tensor, picked: Tensor) -> Tensor:
    """Return the mean of a table's rows in fp32; of all its values where what is picked from it is no rows. Syncs: no."""
    is_of_rows = table.dim() > 1 and table.shape[-1:] == picked.shape[-1:]
    return table.detach().float().flatten(0, -2).mean(0) if is_of_rows else table.detach().float().mean()
