"""The door to the kernels: everything a step reads or writes, checked against its weight before a byte is written."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._torch import has_no_memory
from ..errors import OperandError
from ..formats import LOW_DTYPES, describe, dtype_name
from ..policy import Master
from ..read_only import read_only
from .dtensor import PLAIN, as_plain
from .ops.gradients import ScaledGradients
from .weights import AUX_STATE, Weights, aux_dtype

T = TypeVar("T")
FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What kernels read and write; enum Format of formats.h and constants of tiles.py."""
MODES = {"none": 0, "split": 1, "fp32": 2, "kahan": 3, "stochastic": 4}
"""enum Mode of masters.h and constants of tiles.py."""
_FLOATS = (*FORMATS, torch.float64)
_KNOWN = 1 << 16
_ADVICE = {
    "gradient": "Call zero_grad() and backward() again after a weight was replaced.",
    "weight": "Give the optimizer parameters that own their memory, and keep them in the dtype that they had then.",
}
_STATE_ADVICE = "Load the state dict of these parameters in their order, or delete optimizer.state[parameter]."


@dataclass(frozen=True, slots=True, eq=False)
class Operand:
    """One tensor of a step as a kernel meets it, the name of its parameter, and its own: "weight", "gradient", or that in the optimizer's state."""

    owner: str
    name: str
    tensor: Tensor

    def refuse(self, weight: Tensor, reason: str) -> OperandError:
        """Return the error that says why this operand does not fit its weight. Host only."""
        what = f"its {self.name} is {describe(self.tensor)},"
        if self.name == "weight":
            what, reason = "it" if reason.startswith("and ") else "it is", reason.removeprefix("and ")
        advice = _ADVICE.get(self.name, _STATE_ADVICE)
        return OperandError(f"{self.owner} {describe(weight)} cannot be stepped: {what} {reason}. {advice}")


@dataclass(kw_only=True, slots=True, eq=False)
class Layout:
    """Where weights, their aux state and their moments lie, checked; it holds as long as they stay there.

    Attributes:
        unwalkable: indices of the weights that no kernel can walk, left to the reference.
        numels: elements of each weight.
        sizes: elements of each that a kernel walks: 0 for `unwalkable`.
        values: addresses of the weights.
        aux: addresses of their aux state; empty where there is none.
        moments: addresses of each list of moments.
        moment_dtype: of the moments that a kernel walks.
        seeds: of each weight's random bits.
        offsets: index of each weight's first element in the whole of which it is a part, for the random bits.
        spans: first and last address of everything that a step writes.
        storages: addresses of the storages that a step writes to.
        checked: addresses of gradients that were looked at before.
        struct: what a backend made of the rest for its kernel; None before it did.
    """

    unwalkable: Sequence[int]
    numels: array[int]
    sizes: array[int]
    values: array[int]
    aux: array[int]
    moments: Sequence[array[int]]
    moment_dtype: torch.dtype
    seeds: array[int]
    offsets: array[int]
    spans: Sequence[tuple[int, int, Operand]]
    storages: frozenset[int]
    checked: set[int] = field(default_factory=set)
    struct: Any = None


@read_only
class Operands:
    """What one step reads and writes: the only thing a kernel takes. `operands` checks and makes it.

    Attributes:
        moments: running means of each by name, in the shapes of the weights.
        grads: as many, in the same shapes.
        layout: where weights and moments lie; None while torch.compile traces, which knows no addresses.
        grad_addresses: where the gradients lie; None where there is nothing for a kernel to walk.
        grad_formats: what each of them is stored in, as in `FORMATS`.
    """

    weights: Weights
    moments: Mapping[str, Sequence[Tensor]]
    grads: ScaledGradients
    layout: Layout | None = None
    grad_addresses: array[int] | None = None
    grad_formats: array[int] | None = None

    @property
    def unwalkable(self) -> Sequence[int]:
        """Indices of the weights that no kernel can walk; none while torch.compile traces."""
        return () if self.layout is None else self.layout.unwalkable


def operands(
    weights: Weights, moments: Mapping[str, Sequence[Tensor]], grads: ScaledGradients, layout: Layout | None = None
) -> Operands:
    """Return what a step reads and writes, checked; the layout of weights and moments, too, unless it was made before and nothing has moved.

    Moments and gradients may have any floating dtypes. Gradients that no kernel reads as they are, and those that share memory with what
    is written, are copied.

    Raises:
        OperandError: one that does not fit its weight in shape, dtype, device or layout, lies outside its storage, or
            shares memory with another.

    Syncs: no.
    """
    if layout is None:
        layout = layout_of(weights, moments)
        check_apart([layout])
    values = grads.values
    fits = array("q", map(Tensor.numel, values)) == layout.numels
    is_walked = any(layout.sizes)
    # equally many elements are enough for a kernel
    for index in layout.unwalkable if fits and is_walked else range(len(weights.values)):
        _check_gradient(weights, index, values[index])
    if not is_walked:
        return Operands(weights=weights, moments=moments, grads=grads, layout=layout)
    formats = _formats(values)
    own = FORMATS[weights.values[0].dtype]
    read_formats = set(FORMATS.values()) if own == 0 else {0, own}
    if weights.values[0].device.type != "cpu" and len(set(formats)) > 1:  # one launch reads one format
        read_formats = {0}
    are_walkable = all(map(Tensor.is_contiguous, values)) and not any(map(Tensor.is_neg, values))
    if not are_walkable or not read_formats.issuperset(formats):
        are_read = [code in read_formats for code in formats]
        values = [_as_walked(weights, index, grad, are_read[index]) for index, grad in enumerate(values)]
        formats = _formats(values)
    addresses = array("Q", map(Tensor.data_ptr, values))
    if not layout.checked.issuperset(addresses) and (copies := _copies(layout, weights, values, addresses)):
        values = [copies.get(index, grad) for index, grad in enumerate(values)]
        addresses = array("Q", map(Tensor.data_ptr, values))
    return Operands(
        weights=weights, moments=moments, grads=grads if values is grads.values else replace(grads, values=values),
        layout=layout, grad_addresses=addresses, grad_formats=formats,
    )  # fmt: skip


def _formats(grads: Sequence[Tensor]) -> array[int]:
    """Return what each gradient is stored in, -1 where no kernel reads it."""
    return array("i", [FORMATS.get(grad.dtype, -1) for grad in grads])


def _check_gradient(weights: Weights, index: int, grad: Tensor) -> None:
    weight = weights.values[index]
    reason = "of another shape" if grad.shape != weight.shape else ""
    reason = reason or ("" if grad.is_floating_point() else "of no floating dtype") or misplaced(grad, weight)
    if reason:
        raise Operand(weights.param_name(index), "gradient", grad).refuse(weight, reason)


def _as_walked(weights: Weights, index: int, grad: Tensor, is_read: bool) -> Tensor:
    if is_read and grad.is_contiguous() and not grad.is_neg():
        return grad
    _check_gradient(weights, index, grad)
    return (grad if is_read else grad.to(torch.float32)).resolve_neg().contiguous()


def _copies(layout: Layout, weights: Weights, grads: Sequence[Tensor], addresses: Sequence[int]) -> dict[int, Tensor]:
    """Check gradients at addresses that were not met before; return copies of those whose memory a step would write."""
    if len(layout.checked) > _KNOWN:
        layout.checked.clear()
    copies = {}
    for index in [index for index, address in enumerate(addresses) if address not in layout.checked]:
        grad = grads[index]
        if grad.shape != weights.values[index].shape or not is_readable(grad):
            _check_gradient(weights, index, grad)
        if grad.numel() and (addresses[index] == 0 or _memory(grad)[0] in layout.storages):
            copies[index] = grad.clone() if (plain := as_plain(grad)) is grad else plain
        elif addresses[index] != 0:  # where empty tensors lie, and freed ones
            layout.checked.add(addresses[index])
    return copies


def layout_of(weights: Weights, moments: Mapping[str, Sequence[Tensor]]) -> Layout:
    """Return where weights, aux state and moments lie, after a look at each of them. Errors as `operands`, but for overlaps: see `check_apart`. Syncs: no."""
    rows = list(_rows(weights, moments))
    for row in rows:
        _check_row(row, weights)
    kinds = [{one.tensor.dtype for one in row if one.name in moments} for row in rows]
    dtype = next((one.tensor.dtype for row in rows for one in row if one.name in moments), torch.float32)
    # Weights that share memory are stepped one after the other, as by torch.
    plain = [(index, row[0].tensor) for index, row in enumerate(rows) if type(row[0].tensor) in PLAIN]
    shared = overlaps((*span_of(tensor), index) for index, tensor in plain)
    overlapping = {index for both in shared for index in both}
    walks = [
        index not in overlapping and kind <= {dtype} and dtype in (torch.float32, torch.bfloat16) and _is_walkable(row)
        for index, (row, kind) in enumerate(zip(rows, kinds, strict=True))
    ]
    numels = [row[0].tensor.numel() for row in rows]
    written = [one for row in rows for one in row if type(one.tensor) in PLAIN]
    lists = (weights.values, weights.aux, *moments.values())
    values, aux, *rest = [array("Q", map(Tensor.data_ptr, tensors) if any(walks) else ()) for tensors in lists]
    return Layout(
        unwalkable=[index for index, walk in enumerate(walks) if not walk],
        numels=array("q", numels),
        sizes=array("q", [numel if walk else 0 for numel, walk in zip(numels, walks, strict=True)]),
        values=values,
        aux=aux,
        moments=rest,
        moment_dtype=dtype,
        seeds=array("I", weights.seeds),
        offsets=array("I", [offset & 0xFFFFFFFF for offset in weights.offsets] or bytes(4 * len(rows))),
        spans=[(*span_of(one.tensor), one) for one in written if _is_dense(one.tensor)],
        storages=frozenset(_memory(one.tensor)[0] for one in written),
    )


def batch_of(tensors: Sequence[Tensor]) -> tuple[array[int], array[int], array[int]]:
    """Return sizes, addresses and formats of dense tensors that are only read; errors as `addresses_of`. Syncs: no."""
    addresses = array("Q", addresses_of(tensors))
    return array("q", map(Tensor.numel, tensors)), addresses, array("i", [FORMATS[x.dtype] for x in tensors])


def addresses_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the addresses of dense tensors; one whose storage was freed is an OperandError. Syncs: no."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    if 0 in addresses:
        for index, tensor in enumerate(tensors):
            has_none = tensor.numel() > 0 and addresses[index] == 0
            if reason := misplaced(tensor, tensor) or ("without memory of its own" if has_none else ""):
                raise Operand(f"gradient {index}", "gradient", tensor).refuse(tensor, reason)
    return addresses


def addresses_or_none(tensors: Sequence[Tensor | None]) -> list[int | None]:
    """Return the addresses of dense tensors, None for those that are not there; errors as `addresses_of`. Syncs: no."""
    there = iter(addresses_of([one for one in tensors if one is not None]))
    return [None if one is None else next(there) for one in tensors]


def check_read(op: str, name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Refuse with an OperandError a tensor that a kernel of the CPU only reads, unless it is what an op takes it for. Host only."""
    if tensor.shape == shape and tensor.dtype is dtype and is_readable(tensor):
        return
    reason = "" if type(tensor) in PLAIN and tensor.is_cpu else "and no plain tensor of the CPU"
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype is not dtype:
        reason = f"not {dtype_name(dtype)}{tuple(shape)}"
    if reason := reason or misplaced(tensor, tensor) or ("and negated when it is read" if tensor.is_neg() else ""):
        raise OperandError(
            f"gradients of {op} cannot be computed: its {name} is {describe(tensor)}, {reason}. Have hooks on saved tensors give back what they were given."
        )


def is_readable(tensor: Tensor) -> bool:
    """Whether a kernel of the CPU may walk a tensor from its address on: plain, without gaps, inside its storage, its sign not changed late. Host only."""
    if type(tensor) not in PLAIN or not tensor.is_cpu:
        return False
    try:
        if not tensor.is_contiguous() or tensor.is_neg():
            return False
        held = tensor.untyped_storage().nbytes()
    except RuntimeError:  # a sparse one, or a transform's that outlived it, has none
        return False
    return (tensor.storage_offset() + tensor.numel()) * tensor.element_size() <= held


def check_apart(layouts: Iterable[Layout]) -> None:
    """Refuse tensors of which one step would write the same memory twice, but for weights that are one another: an OperandError."""
    for last, one in overlaps(span for layout in layouts for span in layout.spans):
        if not one.name == last.name == "weight":
            raise one.refuse(one.tensor, f"in the memory of {last.name} of {last.owner}")


def overlaps(spans: Iterable[tuple[int, int, T]]) -> Iterator[tuple[T, T]]:
    """Yield what begins inside the memory of something else, after that; given addresses from `span_of`. Host only."""
    end, last = 0, None
    for start, stop, one in sorted(spans, key=lambda span: span[:2]):
        if start < min(end, stop) and last is not None:
            yield last, one
        if stop > end:
            end, last = stop, one


def check_shape(owner: str, name: str, tensor: Tensor, weight: Tensor) -> None:
    """Refuse with an OperandError an operand `name` of parameter `owner` that has not its weight's shape. Host only."""
    if tensor.shape != weight.shape:
        raise Operand(owner, name, tensor).refuse(weight, "of another shape")


def check_memory(owner: str, name: str, tensor: Tensor, weight: Tensor) -> None:
    """Refuse with an OperandError an operand `name` of parameter `owner` whose storage was freed or cut. Host only."""
    if tensor.layout is torch.strided and (reason := misplaced(tensor, tensor)):
        raise Operand(owner, name, tensor).refuse(weight, reason)


def _rows(weights: Weights, moments: Mapping[str, Sequence[Tensor]]) -> Iterator[list[Operand]]:
    """Yield everything that a step writes, for each weight: itself, its aux state, its moments."""
    named = {AUX_STATE[weights.mode]: weights.aux, **moments} if weights.mode in AUX_STATE else moments
    for index, value in enumerate(weights.values):
        owner = weights.param_name(index)
        yield [Operand(owner, "weight", value), *(Operand(owner, name, held[index]) for name, held in named.items())]


def _check_row(row: Sequence[Operand], weights: Weights) -> None:
    weight = row[0].tensor
    for one in row:
        dtypes = _dtypes(one.name, weights.mode, weight.dtype)
        if one.tensor.shape != weight.shape:
            raise one.refuse(weight, "of another shape")
        if one.tensor.dtype not in dtypes:
            wanted = " or ".join(map(dtype_name, dtypes))
            raise one.refuse(weight, f"and has to be {wanted} with master={weights.mode}")
        if reason := misplaced(one.tensor, weight):
            raise one.refuse(weight, reason)
        if any(stride == 0 and size > 1 for size, stride in zip(one.tensor.shape, one.tensor.stride(), strict=True)):
            raise one.refuse(weight, "expanded: several of its elements are one in memory")


def _dtypes(name: str, mode: Master, weight: torch.dtype) -> tuple[torch.dtype, ...]:
    if name == "weight":
        low: tuple[torch.dtype, ...] = (torch.bfloat16,) if mode == "split" else tuple(LOW_DTYPES)
        return (torch.float32, torch.float64) if mode == "none" else low
    return (aux_dtype(mode, weight) or weight,) if name == AUX_STATE.get(mode) else _FLOATS


def misplaced(tensor: Tensor, weight: Tensor) -> str:
    """Return why a tensor cannot be read beside its weight; empty if it can. Host only."""
    if tensor.device != weight.device:
        return "on another device"
    if tensor.layout is not torch.strided:
        return "not strided"
    if has_no_memory(tensor):
        return "and zeros without memory, of which a hook is to return the clone()"
    if type(tensor) in PLAIN and (there := _memory(tensor)[1]) < span_of(tensor, 0)[1]:
        return f"and ends beyond its storage of {there} bytes"
    return ""


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor's storage begins, and its bytes."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


_HANDLES = frozenset({"mps"})
"""Devices whose addresses are handles of buffers, plus an offset: no bytes lie between one and the next."""
_FAR = 48
"""So many bits are more than any buffer's bytes."""


def span_of(tensor: Tensor, storage: int | None = None) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and beyond its last one, its storage lying where it does. Host only."""
    begin = tensor.data_ptr() if storage is None else storage + int(tensor.storage_offset()) * tensor.element_size()
    if storage is None and tensor.device.type in _HANDLES:
        begin += tensor.untyped_storage().data_ptr() << _FAR
    if tensor.numel() == 0:
        return begin, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + int(reach + 1) * tensor.element_size()


def _is_dense(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and tensor.data_ptr() != 0 and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _is_walkable(row: Sequence[Operand]) -> bool:
    tensors = [one.tensor for one in row]
    are_whole = all(type(t) in PLAIN and t.is_contiguous() and not t.is_neg() for t in tensors)
    return are_whole and tensors[0].dtype in FORMATS
