"""Copies of many tensors, and the choice between each and what it became, in few launches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress

import torch
from torch import Tensor

from .._torch import foreach_copy_

_LARGE = 2**18
"""Elements from which on a tensor is worth a launch of its own, and too much to be copied once more."""
_CHOSEN = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
}  # fmt: skip
"""What torch compares, looks for inf in, and chooses between; of fp8, half complex and quantized numbers it copies whole tensors only."""


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is dense and here, of numbers that torch compares; not sparse, nested, quantized or on the meta device. Host only."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    return is_dense and tensor.dtype in _CHOSEN


@torch.no_grad()
def choose_(pairs: Sequence[tuple[Tensor, Tensor]], void: Tensor | bool) -> None:
    """Give the second tensor of each pair back what it was, the first, where `void` is true: small ones of a dtype and device in one choice.

    Those of a pair have one shape, dtype and device. Writes: the second ones. Syncs: no.
    """
    for alike in _by_kind(pairs):
        if not isinstance(void, Tensor):
            foreach_copy_([now for _, now in alike], [was for was, _ in alike])
            continue
        where = void.to(alike[0][1].device)
        small = [pair for pair in alike if pair[1].numel() < _LARGE]
        for was, now in alike:
            if now.numel() >= _LARGE:
                now.copy_(torch.where(where, was, now))
        if small:
            old, new = (torch.cat([tensor.reshape(-1) for tensor in tensors]) for tensors in zip(*small, strict=True))
            values = torch.split(torch.where(where, old, new), [now.numel() for _, now in small])
            given = [value.view(now.shape) for value, (_, now) in zip(values, small, strict=True)]
            foreach_copy_([now for _, now in small], given)


def _by_kind(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterable[list[tuple[Tensor, Tensor]]]:
    """Return pairs together whose second tensors have one dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
    for other, tensor in pairs:
        own = tensor.detach() if tensor.requires_grad else tensor
        kinds.setdefault((tensor.dtype, tensor.device), []).append((other, own))
    return kinds.values()


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors, made in as many launches as there are dtypes and devices, or one by one on the CPU. Syncs: no."""
    if all([tensor.is_cpu for tensor in tensors]):
        return [(tensor.detach() if tensor.requires_grad else tensor).clone() for tensor in tensors]
    plain = list(map(is_plain, tensors))
    copies = [torch.empty_like(x) if is_made else x.detach().clone() for x, is_made in zip(tensors, plain, strict=True)]
    for alike in _by_kind(compress(zip(copies, tensors, strict=True), plain)):  # without what requires gradients
        foreach_copy_([copy for copy, _ in alike], [tensor for _, tensor in alike])
    return copies
