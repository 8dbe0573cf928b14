"""Comparing what must be equal on all ranks: when they meet what they were prepared with, in each step what it is, later their numbers and weights.

Two numbers a quantity in the healthy case, a table when they differ.
"""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NoReturn

import torch
from torch import Tensor

from ..errors import DistributedError
from ..kernels import local, shard_at, sum_of_bits, values
from .group import Group, name_ranks
from .wrapper import Wrapper

_log = logging.getLogger("mezzo.distributed")

Number = Tensor | float | int
"""A host number or a tensor of shape ()."""
_PIECE = 1 << 14
"""Elements of a parameter that are compared in one step."""
_MIXER = -0x61C8864680B583EB
"""Odd: 2^64 over the golden ratio. A product by it carries each bit of a sum into its upper ones (Knuth, volume 3, section 6.4)."""
_BITS = 16
"""Of a digest, each sent as a number of its own: a sum over ranks that is neither 0 nor their number shows a difference, exactly."""


def checksum(tensor: Tensor) -> Tensor:
    """Return the sum of the bits of a tensor of any kind as whole numbers; equal bits give equal sums. Shape (), int64. Syncs: no."""
    return sum_of_bits(values(tensor))


def audit(
    group: Group, num_steps: int, numbers: Mapping[str, Number], params: Mapping[str, Tensor],
    why_apart: Callable[[], str],
) -> None:  # fmt: skip
    """Compare numbers, by what a message calls them, and tensors, whole or in parts of which several ranks have copies, by name, over the ranks.

    Ranks that differ are a DistributedError on all, since all see the same comparison; `why_apart` says why parameters may differ, and what
    to do. Syncs: yes.
    """
    sums, shards = _checksums(map(local, params.values())), [shard_at(p) for p in params.values()]
    counts = [torch.tensor(number) for number in (num_steps, len(sums))]
    sent = torch.cat([torch.stack([*map(_bits_of, numbers.values()), *counts]), _totals(sums, shards)])
    differing = group.differing(sent)
    names = [*numbers, "the number of steps", "the number of parameters"]
    for column, name in enumerate(names):
        if differing[column]:
            own = _gathered(group, sent[column].view(1)).flatten()
            own = own.view(torch.float64) if column < len(numbers) else own
            shown = [f"{number:g}" if isinstance(number, float) else str(number) for number in own.tolist()]
            hint = "Load the same checkpoint, and call step() the same number of times, on all."
            _refuse(group, num_steps - 1, f"{name} is", shown, hint)
    if any(differing):
        own = torch.stack([torch.tensor([index for _, index, _ in shards]), sums], dim=1)
        _refuse_params(group, num_steps - 1, list(params), _gathered(group, own), why_apart())


def _refuse_params(group: Group, step: int, names: Sequence[str], rows: Tensor, why_apart: str) -> NoReturn:
    """Refuse parameters of which each rank holds a part, with its index and checksum: shape (ranks, parameters, 2), int64."""
    by_param = zip(names, rows.transpose(0, 1).tolist(), strict=True)
    parts = ((name, ranks, _differing_part(ranks)) for name, ranks in by_param)
    apart = [found for found in parts if found[-1] is not None]
    first, ranks, part = apart[0]
    more = f" (one of {len(apart)} that differ)" if len(apart) > 1 else ""
    shown = [f"{found & 0xFFFFFFFFFFFFFFFF:016x}" if index == part else "" for index, found in ranks]
    _refuse(group, step, f"the checksum of parameter '{first}'{more} is", shown, why_apart)


def _gathered(group: Group, own: Tensor) -> Tensor:
    return torch.stack([row.cpu() for row in group.gather(group.to_device(own))])


def _checksums(tensors: Iterable[Tensor]) -> Tensor:
    sums = [checksum(tensor) for tensor in tensors]
    return torch.stack([s.to(sums[0].device) for s in sums]).cpu() if sums else torch.zeros(0, dtype=torch.int64)


def _total(sums: Tensor) -> Tensor:
    """Return one number for many: odd factors are invertible modulo 2^64, so a change in one always shows."""
    return (sums * (2 * torch.arange(len(sums)) + 1)).sum()


def _totals(sums: Tensor, shards: Sequence[tuple[tuple[bool, ...], int, int]]) -> Tensor:
    """Return one number for each part of the tensors that are cut alike; for parts on other ranks the least of int64, which a maximum over ranks never takes."""
    totals = []
    for cut, count in sorted({((), 1), *((cut, count) for cut, _, count in shards)}):
        is_alike = [other == cut for other, _, _ in shards]
        here = next((index for other, index, _ in shards if other == cut), 0)
        totals.append(torch.full((count,), torch.iinfo(torch.int64).min))
        totals[-1][here] = _total(torch.where(torch.tensor(is_alike, dtype=torch.bool), sums, 0))
    return torch.cat(totals)


def _differing_part(ranks: Sequence[tuple[int, int]]) -> int | None:
    """Return the first part whose sums, given with its index by each rank, differ; None if none does."""
    found: dict[int, set[int]] = {}
    for index, total in ranks:
        found.setdefault(index, set()).add(total)
    return next((index for index, sums in found.items() if len(sums) > 1), None)


def _bits_of(number: Number) -> Tensor:
    value = number.detach().cpu() if isinstance(number, Tensor) else torch.tensor(number)
    return value.reshape(()).to(torch.float64).view(torch.int64)


def _refuse(group: Group, step: int, what: str, shown: Sequence[str], hint: str) -> NoReturn:
    raise DistributedError(f"ranks disagree after step {step}: {what} {sides(group, shown)}. {hint}")


def sides(group: Group, shown: Sequence[str]) -> str:
    """Return in words which ranks stand against which: what each shows, in the order of the group; "" is left out."""
    found: dict[str, list[int]] = {}
    for rank, value in zip(group.ranks, shown, strict=True):
        found.setdefault(value, []).append(rank)
    found.pop("", None)
    return "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in found.items())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankSetup:
    """What one rank was prepared with.

    Attributes:
        policy: its text, the compute dtype decided.
        model: a line for each module and parameter.
        optimizers: a line for each optimizer.
        masters: of 16-bit parameters, what lies beside them.
        moments: tensors in the optimizers' state that are equal on all ranks, in one order.
        is_stage: whether the model is a stage of a pipeline.
        replicas: ranks that DistributedDataParallel around the model joins.
    """

    policy: str
    model: Sequence[str]
    optimizers: Sequence[str]
    masters: Mapping[Tensor, Tensor]
    moments: Sequence[Tensor]
    is_stage: bool
    replicas: tuple[int, ...] = ()


def handshake(group: Group, own: RankSetup, wrapper: Wrapper, *, has_parts: bool) -> bool:
    """Compare declarations, and write the first rank's masters over those of the others where its weights were.

    Returns:
        Whether the ranks hold different models: they differ, or are parts, as one of them knows (`has_parts`) or as stages are.

    Raises:
        DistributedError: ranks were prepared differently. Raised on all of them.

    Writes: masters beside parameters that the wrapper copied from the first rank. Syncs: yes.
    """
    if own.is_stage and own.replicas and wrapper.compares_models:
        raise DistributedError(
            f"this model is a stage of a pipeline, and DistributedDataParallel around it joins {name_ranks(own.replicas)} alone: the "
            "norm would be that of the stage. Write amp.consensus = mezzo.distributed.RankConsensus(group), of the ranks of all stages, before the first backward."
        )
    masters = wrapper.copied(own.masters)
    texts = {"policy": [own.policy], "optimizer": own.optimizers, "model": own.model}
    sums = [_total(_checksums(each)) for each in (masters, own.moments if wrapper.compares_models else ())]
    has_parts = (has_parts or own.is_stage) and not wrapper.compares_models
    counts = [torch.tensor(number) for number in (len(masters), has_parts)]
    sent = torch.stack([*(digest(lines) for lines in texts.values()), *counts, *sums])
    policy, optimizer, model, count, some_have_parts, master, moment = group.differing(sent)
    if policy:
        refuse_setup(group, "the policy is", [f"'{own.policy}'"], "Prepare with one policy on all ranks.")
    if wrapper.compares_models:
        if model:
            refuse_setup(group, "the model has", own.model, "Build the same model on all ranks.")
        if optimizer or count:
            refuse_setup(group, "the optimizer is", own.optimizers, "Make the same optimizers on all ranks.")
        if moment:
            raise DistributedError(
                "ranks cannot train together: what their optimizers know of earlier steps differs. Load the same checkpoint on all ranks, not on the first alone."
            )
        if master:
            for tensor in masters:
                group.broadcast_(tensor)
            _log.info(
                "the ranks started with different masters; all have the first rank's now, as they have its weights"
            )
    return model or some_have_parts or has_parts


def digest(lines: Iterable[str]) -> Tensor:
    """Return a whole number, equal where lines are. Shape (), int64. Host only."""
    found = hashlib.sha256("\0".join(lines).encode("utf-8", "surrogatepass")).digest()
    return torch.tensor(int.from_bytes(found[:7], "big"))  # one bit of eight is the sign's


def refuse_setup(group: Group, what: str, lines: Sequence[str], hint: str) -> None:
    """Raise what tells the ranks apart: the first line that is not the same on all."""
    found = [text.split("\n") for text in group.gather_text("\n".join(lines))]
    apart = next((row for row in zip_longest(*found, fillvalue="nothing more") if len(set(row)) > 1), None)
    if apart is not None:
        raise DistributedError(f"ranks cannot train together: {what} {sides(group, apart)}. {hint}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Signals:
    """What one rank tells the others.

    Attributes:
        is_loaded: something was loaded into weights or optimizers since the last step.
        is_written: weights were written since.
        lacks_scale: others made the gradients, and no loss of theirs took the loss scale here, as the last of several parts must.
        call: lines that say what the step is told to do.
        weights: what `digest_of_piece` says of the weights before the step; 0 where nobody looks.
    """

    is_loaded: bool = False
    is_written: bool = False
    lacks_scale: bool = False
    call: tuple[str, ...] = ()
    weights: Tensor = field(default_factory=lambda: torch.zeros(_BITS, dtype=torch.int64, device="cpu"))

    def numbers(self) -> tuple[float, ...]:
        """Return it as 0 and 1, as many on all ranks, to be summed. Host only."""
        digest = zlib.crc32("\n".join(self.call).encode())
        own = float(self.is_loaded), float(self.is_written), float(self.lacks_scale)
        return (*own, *(float(digest >> bit & 1) for bit in range(_BITS)))


def read_signals(sums: Sequence[float], num_ranks: int) -> tuple[bool, bool, bool]:
    """Return what sums of `Signals.numbers` over the ranks say: whether weights must be compared, whether the ranks are told different steps, whether none scaled its loss.

    What is loaded anywhere is compared; what all have written, as those do who clamp weights behind each step, is not. Host only.
    """
    loaded, written, unscaled, *digests = sums
    is_written, *bits = [0 < number < num_ranks for number in (written, *digests)]
    return loaded > 0 or is_written or any(bits[_BITS:]), any(bits[:_BITS]), unscaled == num_ranks


def digest_of_piece(params: Sequence[Tensor], turn: int) -> Tensor:
    """Return 0 and 1, from the bits of one piece of one parameter, the next in each turn; equal on ranks where those are.

    A write that no version counter sees, as one through `.data`, shows without reading all in each step. Shape (16,), int64. Syncs: no.
    """
    turn, index = divmod(turn, len(params))
    pieces = torch.split(values(params[index].detach()).flatten(), _PIECE)
    product = checksum(pieces[turn % len(pieces)]) * _MIXER
    return product.bitwise_right_shift(torch.arange(64 - _BITS, 64, device=product.device)).bitwise_and_(1)
