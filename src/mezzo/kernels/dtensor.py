"""What lies on this rank of a tensor that is sharded over several: a step's arithmetic knows plain tensors only."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from .._torch import is_batched_gradient, local_shape_and_offset
from ..errors import ConfigError
from ..formats import describe

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that lie whole on this rank; any other may not."""


def is_wrapped(gradient: Tensor) -> bool:
    """Whether a gradient is of a class, or of a batch of gradients, that torch's ops take and no kernel. Host only."""
    return type(gradient) not in PLAIN or is_batched_gradient(gradient)


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, whole or in parts. Does not import what defines them. Host only."""
    if type(tensor) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def any_dtensor(tensors: Iterable[Tensor]) -> bool:
    """Whether any of many tensors is a DTensor; a plain one costs no call. Host only."""
    return any([type(tensor) not in PLAIN and is_dtensor(tensor) for tensor in tensors])


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that lies on this rank, to be read and written; a plain tensor is its own part.

    Syncs: no; a part that is still on its way from other ranks is waited for on its device.
    """
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def as_plain(tensor: Tensor) -> Tensor:
    """Return a tensor that a kernel may read: itself, or a copy of one of another class, which may have no memory of its own. Syncs: no."""
    if type(tensor) in PLAIN or tensor.layout is not torch.strided:
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    copy.copy_(tensor.detach())  # returns one of their class
    return copy


def local_tensors(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the `local` part of each tensor; the same list where all are plain. Syncs: as `local`."""
    return [local(tensor) for tensor in tensors] if any_dtensor(tensors) else tensors


def like_dtensor(part: Tensor, like: Tensor) -> Tensor:
    """Return a part as what `like` is: a tensor sharded in the same way, or the part itself. Syncs: no."""
    if not is_dtensor(like):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def num_shards(tensor: Tensor) -> int:
    """Return in how many different parts a tensor lies; 1 if each rank has all of it. Host only."""
    if not is_dtensor(tensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def shard_at(tensor: Tensor) -> tuple[tuple[bool, ...], int, int]:
    """Return in which dimensions of its mesh a tensor is cut, which part lies here, and of how many; ((), 0, 1) of one that is no DTensor. Host only."""
    if not is_dtensor(tensor):
        return (), 0, 1
    index, count, mesh = 0, 1, tensor.device_mesh
    cut = tuple(not placement.is_replicate() for placement in tensor.placements)
    for is_cut, size, here in zip(cut, mesh.shape, mesh.get_coordinate() or (), strict=True):
        if is_cut:
            index, count = index * size + here, count * size
    return cut, index, count


def global_offset(tensor: Tensor) -> int:
    """Return the index in the whole tensor, counted row by row, of the first element that lies here; a ConfigError where they do not follow each other. Host only."""
    if not is_dtensor(tensor):
        return 0
    shape, offsets = local_shape_and_offset(tensor)
    cut = [dim for dim, (here, whole) in enumerate(zip(shape, tensor.shape, strict=True)) if here != whole]
    if cut and (len(cut) > 1 or math.prod(tensor.shape[: cut[0]]) > 1) and math.prod(shape) > 0:
        raise ConfigError(
            f"stochastic rounding was asked for {describe(tensor)}, which is cut in dimension {cut[0]}: its random bits could not "
            "be the same on any number of ranks. Shard dimension 0, or keep masters and moments in fp32 or split."
        )
    return sum(offset * math.prod(tensor.shape[dim + 1 :]) for dim, offset in enumerate(offsets))
