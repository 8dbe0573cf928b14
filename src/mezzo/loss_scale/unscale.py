"""Dividing gradients by the loss scale, and finding inf and NaN among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from .._torch import foreach_mul_, foreach_norm, foreach_unscale_, neg_view, sparse_values
from ..errors import MasterError, OperandError
from ..formats import describe, is_number, number_of
from ..kernels import factor_for, move

if TYPE_CHECKING:  # importing DTensor costs start-up time that runs without shards need not pay
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

_KERNEL_DTYPES = (torch.float16, torch.float32, torch.float64)
"""What torch's fused check-and-unscale takes on every device; bf16 only on the CPU (pytorch issue 127176)."""


class _Group(NamedTuple):
    """What gradients must share to be handled in one pass.

    `mesh` and `placements` are those of a DTensor, else None: a finding in one shard is a finding in all.
    """

    device: torch.device
    dtype: torch.dtype
    mesh: DeviceMesh | None
    placements: tuple[Placement, ...] | None


@torch.no_grad()
def unscale_(grads: Iterable[Tensor], scale: Tensor | float) -> Tensor:
    """Divide gradients by the loss scale and report whether any was non-finite.

    Args:
        grads: gradients of any shapes: dense, sparse or sharded (DTensor); fp32, fp64, bf16 or complex; any devices.
        scale: the scale of the loss they came from, shape (), fp32; the number 1 leaves them as they are.

    Returns:
        Shape (), fp32, on the device of `scale` (of the first gradient for a number): 1 if any element was inf
        or NaN before dividing, or if the scale has no usable reciprocal; else 0. A finding in a shard is shared
        by every rank of its mesh.

    Raises:
        MasterError: fp16 gradients; dividing them in fp16 would flush what scaling saved. None is changed.
        OperandError: something else than floating tensors and the number that a scale is. None is changed.

    Writes: every tensor in `grads`, one pass per device and dtype.
    Syncs: no; one all-reduce per mesh for sharded gradients.
    Source: Micikevicius et al. 2018, section 3.2. For a power of two the fp32 reciprocal is exact.

    >>> g = [torch.tensor([2.0])]; float(unscale_(g, torch.tensor(2.0))), g[0].item()
    (0.0, 1.0)
    """
    grads = _checked("unscale_", grads)
    scale = scale if isinstance(scale, Tensor) else number_of(scale)
    if (isinstance(scale, Tensor) and (scale.numel() != 1 or scale.is_complex() or scale.is_meta)) or not (
        isinstance(scale, Tensor | float) or is_number(scale)
    ):
        raise OperandError(f"unscale_ was given {describe(scale)} for scale; give a number, or a tensor of one.")
    if not isinstance(scale, Tensor):
        if scale == 1.0:
            return has_nonfinite(grads)
        home = real_values(grads[0]).device if grads else torch.device("cpu")
        scale = torch.full((), scale, dtype=torch.float32, device=home)
    scale = scale.detach().to(torch.float32)
    return divide_(grads, scale.reciprocal(), is_unusable(scale))


@torch.no_grad()
def divide_(grads: Iterable[Tensor], inverse: Tensor, found: Tensor, *, allow_fp16: bool = False) -> Tensor:
    """Multiply gradients by the reciprocal of the loss scale, shape (), fp32, and return what `unscale_` does; 1 too if something was `found` already.

    Writes: every tensor in `grads`. Syncs: no.
    """
    groups = _grouped(grads)
    half = [part for group, parts in groups.items() if group.dtype is torch.float16 for part in parts]
    if half and not allow_fp16:
        raise MasterError(
            f"unscale_() got {len(half)} fp16 gradients (the first: {describe(half[0])}), and dividing them in fp16 "
            "flushes small ones to zero. Divide an fp32 copy, or keep the weights in fp32."
        )
    return _combined(groups, lambda group, parts: _divide_(group, parts, inverse), found)


@torch.no_grad()
def has_nonfinite(grads: Iterable[Tensor]) -> Tensor:
    """Return 1 if any element of gradients as `unscale_` takes them, or in fp16, is inf or NaN, else 0: shape (), fp32, on the device of the first.

    Writes: no value; torch's kernel puts each back in its place, which version counters show. Syncs: no; one all-reduce per mesh for sharded gradients.
    """
    return _combined(_grouped(_checked("has_nonfinite", grads)), _search, None)


def _checked(call: str, grads: Iterable[Tensor]) -> list[Tensor]:
    try:
        known = list(grads)
    except TypeError:
        known = [cast(Tensor, grads)]
    for grad in known:
        if not isinstance(grad, Tensor) or not (grad.is_floating_point() or grad.is_complex()):
            raise OperandError(f"{call} was given {describe(grad)} for a gradient; give a list of floating tensors.")
    return known


def is_unusable(scale: Tensor) -> Tensor:
    """Return 1 if a scale has no finite reciprocal (0, inf, NaN or next to 0), else 0; both shape (), fp32. Syncs: no."""
    product = scale * scale.reciprocal()
    return (product - product).ne(0.0).to(torch.float32)  # inf and NaN minus themselves are NaN


def _grouped(grads: Iterable[Tensor]) -> dict[_Group, list[Tensor]]:
    groups: dict[_Group, list[Tensor]] = {}
    last, parts = None, []
    for grad in grads:
        part = real_values(grad)
        group: tuple[Any, ...] = (part.device, part.dtype, None, None)
        if hasattr(grad, "device_mesh"):
            group = (*group[:2], grad.device_mesh, cast("DTensor", grad).placements)
        if group != last:  # neighbours mostly share a group
            parts = groups.setdefault(_Group(*group), [])
            last = group
        parts.append(part)
    return groups


def real_values(grad: Tensor) -> Tensor:
    """Return the dense real tensor that stores the values of a gradient, or of this rank's shard of it; of one that torch conjugates or negates late, as it lies.

    Duplicate indices of an uncoalesced sparse gradient need no merging first: dividing is linear, and where their
    sum overflows only while scaled, dividing before summing is the better result. Syncs: no.
    """
    if hasattr(grad, "to_local"):
        grad = cast("DTensor", grad).to_local()
    if grad.layout is torch.sparse_coo:
        grad = sparse_values(grad)
    elif grad.layout is not torch.strided:
        grad = grad.values().detach()
    if grad.is_complex():
        grad = torch.view_as_real(grad.conj() if grad.is_conj() else grad)
    return neg_view(grad) if grad.is_neg() else grad


def _combined(
    groups: dict[_Group, list[Tensor]], find: Callable[[_Group, list[Tensor]], Tensor], found: Tensor | None
) -> Tensor:
    for group, parts in groups.items():
        here = find(group, parts)
        if group.placements is not None:
            here = _shared(here, group)
        if found is not None:
            here = torch.maximum(found, move(here, found.device))
        found = here
    return torch.zeros(()) if found is None else found


def _search(group: _Group, parts: list[Tensor]) -> Tensor:
    if _kernel_takes(group):
        return _divide_(group, parts, torch.ones((), device=group.device))
    parts = [part for part in parts if part.numel()]
    if not parts:
        return torch.zeros((), device=group.device)
    largest = torch.stack(foreach_norm(parts, math.inf))
    return largest.isfinite().all().logical_not().to(torch.float32)


def _divide_(group: _Group, parts: list[Tensor], inverse: Tensor) -> Tensor:
    if _kernel_takes(group):
        found = torch.zeros((), dtype=torch.float32, device=group.device)
        foreach_unscale_(parts, found, move(inverse, group.device))
        return found
    found = _search(group, parts)
    foreach_mul_(parts, factor_for(inverse, group.device, group.dtype))
    return found


def _kernel_takes(group: _Group) -> bool:
    return group.dtype in _KERNEL_DTYPES or (group.dtype is torch.bfloat16 and group.device.type == "cpu")


def _shared(found: Tensor, group: _Group) -> Tensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate

    assert group.placements is not None
    spread = [p if isinstance(p, Replicate) else Partial("max") for p in group.placements]
    return DTensor.from_local(found, group.mesh, spread, run_check=False).full_tensor()
