"""Comparing what must be equal on all ranks: two numbers a quantity in the healthy case, a table when they differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from ..errors import DistributedError
from ..kernels.chunks import chunks
from .group import Group, spell

Number = Tensor | float | int
"""A host number or a tensor of shape ()."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits as whole numbers; equal bits give equal sums. Shape (), int64. Syncs: no."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    whole = _BITS[values.element_size()]
    # torch widens what it sums to int64 beforehand: chunk by chunk that takes no memory to speak of.
    sums = [chunk.contiguous().view(whole).sum(dtype=torch.int64) for (chunk,) in chunks(values)]
    return torch.stack(sums).sum()


def audit(
    group: Group,
    step: int,
    numbers: Mapping[str, Number],
    params: Mapping[str, Tensor],
    why_apart: Callable[[], str],
) -> None:
    """Compare numbers and tensors over the ranks.

    Args:
        group: the ranks.
        step: which, for messages.
        numbers: by what they are called in a message.
        params: tensors that each rank has a whole copy of, by name.
        why_apart: says why parameters may differ, and what to do.

    Raises:
        DistributedError: ranks differ. Raised on all of them, since all see the same comparison.

    Syncs: yes.
    """
    sums = _checksums(params)
    # Odd factors are invertible modulo 2^64, so a change in one tensor always shows.
    whole = (sums * (2 * torch.arange(len(sums)) + 1)).sum()
    values = torch.stack([*map(_bits_of, numbers.values()), torch.tensor(step), torch.tensor(len(sums)), whole])
    differing = group.differing(values)
    if not any(differing):
        return
    names = [*numbers, "the number of steps", "the number of parameters"]
    table = torch.stack([row.cpu() for row in group.gather(group.to_device(values))])
    for column, name in enumerate(names):
        if differing[column]:
            shown = [_number(bits, column < len(numbers)) for bits in table[:, column].tolist()]
            _refuse(
                group,
                step,
                f"{name} is",
                shown,
                "Load the same checkpoint, and call step() the same number of times, on all.",
            )
    rows = torch.stack([row.cpu() for row in group.gather(group.to_device(sums))])
    apart = (rows != rows[0]).any(dim=0)
    first = int(apart.nonzero()[0])
    more = f" (one of {int(apart.sum())} that differ)" if int(apart.sum()) > 1 else ""
    what = f"the checksum of parameter '{list(params)[first]}'{more} is"
    _refuse(group, step, what, [f"{row & 0xFFFFFFFF:08x}" for row in rows[:, first].tolist()], why_apart())


def _checksums(params: Mapping[str, Tensor]) -> Tensor:
    sums = [checksum(tensor) for tensor in params.values()]
    return (
        torch.stack([total.to(sums[0].device) for total in sums]).cpu() if sums else torch.zeros(0, dtype=torch.int64)
    )


def _bits_of(number: Number) -> Tensor:
    value = number.detach().cpu() if isinstance(number, Tensor) else torch.tensor(number)
    return value.reshape(()).to(torch.float64).view(torch.int64)


def _number(bits: int, is_float: bool) -> str:
    return f"{torch.tensor(bits).view(torch.float64).item():g}" if is_float else str(bits)


def _refuse(group: Group, step: int, what: str, shown: Sequence[str], hint: str) -> NoReturn:
    raise DistributedError(f"ranks disagree after step {step}: {what} {sides(group, shown)}. {hint}")


def sides(group: Group, shown: Sequence[str]) -> str:
    """Return in words which ranks stand against which: what each shows, in the order of the group."""
    found: dict[str, list[int]] = {}
    for rank, value in zip(group.ranks, shown, strict=True):
        found.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {spell(ranks)}" for value, ranks in found.items())
