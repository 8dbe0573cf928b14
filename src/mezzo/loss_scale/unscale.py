"""Dividing gradients by the loss scale, and finding inf and NaN among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._torch import foreach_mul_, foreach_norm, foreach_unscale_, neg_view, sparse_values
from ..errors import MasterError
from ..formats import describe
from ..kernels import factor_for, is_dtensor, local, move

_KERNEL_DTYPES = (torch.float16, torch.float32, torch.float64)
"""What torch's fused check-and-unscale takes on every device; bf16 only on the CPU (pytorch issue 127176)."""


class _Group(NamedTuple):
    """What gradients must share to be handled in one pass.

    `mesh` and `placements` are those of a DTensor, else None: a finding in one shard is a finding in all.
    """

    device: torch.device
    dtype: torch.dtype
    mesh: Any = None
    placements: tuple[Any, ...] | None = None


@torch.no_grad()
def divide_(grads: Iterable[Tensor], inverse: Tensor, found: Tensor, *, allow_fp16: bool = False) -> Tensor:
    """Multiply gradients by the reciprocal of the loss scale, and return whether any was non-finite before.

    Args:
        grads: of any shapes: dense, sparse or sharded (DTensor); fp32, fp64, bf16 or complex; any devices.
        inverse: shape (), fp32. For a power of two it is exact.
        found: 1 if something was found already, else 0; shape (), fp32.
        allow_fp16: whether fp16 gradients may be divided, of which small ones flush to 0.

    Returns:
        Shape (), fp32, on the device of `found`: 1 if any element was inf or NaN or something was found already, else 0. A
        finding in a shard is shared by every rank of its mesh.

    Raises:
        MasterError: fp16 gradients that are not allowed. None is changed.

    Writes: every tensor in `grads`, one pass per device and dtype. Syncs: no; one all-reduce per mesh for sharded gradients.
    Source: Micikevicius et al. 2018, section 3.2.
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
    """Return 1 if any element of gradients as `divide_` takes them is inf or NaN, else 0: shape (), fp32, on the device of the first.

    Writes: no value; torch's kernel puts each back in its place, which version counters show. Syncs: no; one all-reduce per mesh for sharded gradients.
    """
    return _combined(_grouped(grads), _search, None)


def is_unusable(scale: Tensor) -> Tensor:
    """Return 1 if a scale has no finite reciprocal (0, inf, NaN or next to 0), else 0; both shape (), fp32. Syncs: no."""
    product = scale * scale.reciprocal()
    return (product - product).ne(0.0).to(torch.float32)  # inf and NaN minus themselves are NaN


def _grouped(grads: Iterable[Tensor]) -> dict[_Group, list[Tensor]]:
    groups: dict[tuple[Any, ...], list[Tensor]] = {}
    for grad in grads:
        part = real_values(grad)
        spread = (grad.device_mesh, grad.placements) if is_dtensor(grad) else ()
        groups.setdefault((part.device, part.dtype, *spread), []).append(part)
    return {_Group(*key): parts for key, parts in groups.items()}


def real_values(grad: Tensor) -> Tensor:
    """Return the dense real tensor that stores the values of a gradient, or of this rank's shard of it; of one that torch conjugates or negates late, as it lies.

    Duplicate indices of an uncoalesced sparse gradient need no merging first: dividing is linear, and where their
    sum overflows only while scaled, dividing before summing is the better result. Syncs: no.
    """
    grad = grad if type(grad) is Tensor else local(grad)
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


def assign_grad_(param: Tensor, grad: Tensor | None, dtype: torch.dtype) -> None:
    """Assign a gradient of a dtype that torch may refuse beside the one that gradients of the parameter have now. Writes: `.grad`, `grad_dtype`. Host only."""
    if param.grad_dtype not in (dtype, None):
        param.grad, param.grad_dtype = None, dtype
    param.grad = grad
