"""What ranks compare when they meet: what they were prepared with, before one of them can wait for another in vain."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from ..errors import DistributedError
from .group import Group
from .rank_consistency import checksum, sides
from .wrapper import Wrapper

_log = logging.getLogger("mezzo.distributed")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankSetup:
    """What one rank was prepared with.

    Attributes:
        policy: its text, the compute dtype decided.
        model: a line for each module and parameter.
        optimizers: a line for each optimizer.
        masters: of 16-bit parameters, what lies beside them.
        moments: tensors in the optimizers' state that are equal on all ranks, in one order.
    """

    policy: str
    model: Sequence[str]
    optimizers: Sequence[str]
    masters: Mapping[Tensor, Tensor]
    moments: Sequence[Tensor]


def handshake(group: Group, own: RankSetup, wrapper: Wrapper) -> bool:
    """Compare declarations, and write the first rank's masters over those of the others where its weights were.

    Returns:
        Whether the ranks hold different models.

    Raises:
        DistributedError: ranks were prepared differently. Raised on all of them.

    Writes: masters beside parameters that the wrapper copied from the first rank. Syncs: yes.
    """
    masters = wrapper.copied(own.masters)
    texts = {"policy": [own.policy], "optimizer": own.optimizers, "model": own.model}
    sums = [_sum(masters), _sum(own.moments if wrapper.compares_models else ())]
    values = torch.stack([*(_digest(lines) for lines in texts.values()), torch.tensor(len(masters)), *sums])
    policy, optimizer, model, count, master, moment = group.differing(values)
    if policy:
        _refuse(group, "the policy is", [f"'{own.policy}'"], "Prepare with one policy on all ranks.")
    if wrapper.compares_models:
        if model:
            _refuse(group, "the model has", own.model, "Build the same model on all ranks.")
        if optimizer or count:
            _refuse(group, "the optimizer is", own.optimizers, "Make the same optimizers on all ranks.")
        if moment:
            raise DistributedError(
                "ranks cannot train together: what their optimizers know of earlier steps differs. Load the same checkpoint on "
                "all ranks, not on the first alone."
            )
        if master:
            for tensor in masters:
                group.broadcast_(tensor)
            _log.info(
                "the ranks started with different masters; all have the first rank's now, as they have its weights"
            )
    return bool(model)


def _digest(lines: Iterable[str]) -> Tensor:
    found = hashlib.sha256("\0".join(lines).encode("utf-8", "surrogatepass")).digest()[
        :7
    ]  # one bit of eight is the sign's
    return torch.tensor(int.from_bytes(found, "big"))


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    sums = [checksum(tensor).cpu() for tensor in tensors]
    return (torch.stack(sums) * (2 * torch.arange(len(sums)) + 1)).sum() if sums else torch.tensor(0)


def _refuse(group: Group, what: str, lines: Sequence[str], hint: str) -> None:
    """Raise what tells the ranks apart: the first line that is not the same on all."""
    found = [text.split("\n") for text in group.gather_text("\n".join(lines))]
    apart = next((row for row in zip_longest(*found, fillvalue="nothing more") if len(set(row)) > 1), None)
    if apart is not None:
        raise DistributedError(f"ranks cannot train together: {what} {sides(group, apart)}. {hint}")
