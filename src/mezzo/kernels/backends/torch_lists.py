"""What torch's own kernels take of a step: weights end to end as one flat tensor, fp32 masters and gradients as lists, a rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..._torch import foreach_copy_, foreach_mul
from ..device_numbers import move, table
from ..operands import Operands
from ..ops.rounding import EndToEnd
from ..weights import Weights, write_master_

MOST = 2**24
"""Elements that are laid end to end at once, each in some 100 bytes of scratch; a longer weight is taken alone."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """Some weights of a step, with their indices in it, and one flat weight: a copy of all, end to end."""

    operands: Operands
    indices: Sequence[int]
    flat: Weights

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return views of a flat tensor in the shapes of the weights. Host only."""
        values = self.operands.weights.values
        pieces = torch.split(flat, [value.numel() for value in values])
        return [piece.view(value.shape) for piece, value in zip(pieces, values, strict=True)]

    def store_(self) -> None:
        """Copy the flat weights to where they came from. Writes: weights and their aux state. Syncs: no."""
        weights = self.operands.weights
        for held, flat in ((weights.values, self.flat.values), (weights.aux, self.flat.aux)):
            if held:
                foreach_copy_(list(held), self.split(flat[0]))


def with_masters(
    reference: ModuleType, operands: Operands, rule: object, step: Tensor, *, can_fuse: bool = True
) -> Iterator[tuple[list[Tensor], Operands, list[Tensor]]]:
    """Yield the fp32 masters that torch's fused kernel steps, what belongs to them and their step counts; store them when the next are asked for.

    Weights that lie in pieces are stepped by the reference one by one; all by the reference, end to end, where moments are not fp32, or the fused kernel cannot take the rule.

    Writes: weights, their aux state, and moments where the reference steps, unless `found_inf` is set. Syncs: no.
    """
    moments = [one for held in operands.moments.values() for one in held]
    is_fused = can_fuse and all(one.dtype is torch.float32 for one in moments)
    scalars: Any = reference.scalars(step, rule) if operands.unwalkable or not is_fused else None
    if operands.unwalkable:
        reference.step_(operands, rule, scalars, step, operands.unwalkable)
    if is_fused:
        yield from _masters(operands, step)
    else:
        _step_end_to_end_(reference.step_, operands, rule, scalars, step)


def _step_end_to_end_(
    step_: Callable[..., None], operands: Operands, rule: object, scalars: Tensor, step: Tensor
) -> None:
    """Take the reference's step with weights laid end to end: in as many launches for a thousand of them as for one."""
    for part in parts(operands):
        given = part.operands
        moments = {name: [_flat(held)] for name, held in given.moments.items()}
        grads = replace(given.grads, values=[_flat(given.grads.values)])
        assert part.flat.places is not None
        each = scalars.t().index_select(1, part.flat.places.owner)
        step_(Operands(weights=part.flat, moments=moments, grads=grads), rule, each[None], step[None])
        part.store_()
        for name, (flat,) in moments.items():
            foreach_copy_(list(given.moments[name]), part.split(flat))


def _masters(operands: Operands, step: Tensor) -> Iterator[tuple[list[Tensor], Operands, list[Tensor]]]:
    """Yield what `with_masters` does. fp32 weights are their own masters; caches of casts see that weights were written."""
    counts, mode = step.unbind(), operands.weights.mode
    if mode == "none":
        indices = _walked(operands)
        given = _subset(operands, indices)
        yield list(given.weights.values), given, [counts[index] for index in indices]
        torch.autograd.graph.increment_version(list(given.weights.values))
        return
    for part in parts(operands, are_random=mode == "stochastic"):
        master = part.flat.master(0)
        yield part.split(master), part.operands, [counts[index] for index in part.indices]
        write_master_(part.flat, 0, master, step, operands.grads.skip)
        part.store_()


def parts(operands: Operands, *, are_random: bool = True) -> Iterator[Part]:
    """Yield the weights of a step that lie in one piece each, as many at once as have `MOST` elements. Syncs: no.

    With `are_random` something is rounded by random bits, or multiplied by numbers of its own weight.
    """
    for indices in _batches(operands):
        given, places = _subset(operands, indices), _places(operands.weights, indices) if are_random else None
        held, aux = given.weights.values, given.weights.aux
        flat = replace(given.weights, values=[_flat(held)], aux=[_flat(aux)] if aux else [], places=places)
        yield Part(operands=given, indices=indices, flat=flat)


def _walked(operands: Operands) -> list[int]:
    left_out = set(operands.unwalkable)
    return [index for index in range(len(operands.weights.values)) if index not in left_out]


def _batches(operands: Operands) -> Iterator[list[int]]:
    run: list[int] = []
    total = 0
    for index in _walked(operands):
        numel = operands.weights.values[index].numel()
        if run and total + numel > MOST:
            yield run
            run, total = [], 0
        run.append(index)
        total += numel
    if run:
        yield run


def _subset(operands: Operands, indices: Sequence[int]) -> Operands:
    own, grads = operands.weights, operands.grads
    if len(indices) == len(own.values):
        return operands
    aux = [own.aux[i] for i in indices] if own.aux else []
    weights = replace(own, values=[own.values[i] for i in indices], aux=aux)
    moments = {name: [held[i] for i in indices] for name, held in operands.moments.items()}
    return Operands(weights=weights, moments=moments, grads=replace(grads, values=[grads.values[i] for i in indices]))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _places(weights: Weights, indices: Sequence[int]) -> EndToEnd:
    """Return where the elements of some weights belong, end to end."""
    device, sizes = weights.values[0].device, [weights.values[index].numel() for index in indices]
    ends = list(accumulate(sizes))
    firsts = [weights.offset(i) - end + size for i, end, size in zip(indices, ends, sizes, strict=True)]
    of_each = table((*ends, *firsts, *indices), device).view(3, -1)
    index = torch.arange(ends[-1], dtype=torch.int64, device=device)
    ends_on, firsts_on, number = of_each.unbind()
    row = torch.bucketize(index, ends_on, right=True)
    index += firsts_on.index_select(0, row)
    return EndToEnd(seeds=table(tuple(weights.seeds), device), owner=number.index_select(0, row), index=index)


def true_grads(operands: Operands) -> list[Tensor]:
    """Return the gradients in fp32, unscaled and clipped; themselves where nothing is to be done. Syncs: no."""
    grads = list(operands.grads.values)
    if any(grad.dtype is not torch.float32 for grad in grads):
        wide = [torch.empty_like(grad, dtype=torch.float32) for grad in grads]
        foreach_copy_(wide, grads)
        grads = wide
    for factor in (operands.grads.inv_scale, operands.grads.clip_coef):
        if factor is not None:
            grads = list(foreach_mul(grads, factor.reshape(())))
    return grads


def rate_of(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """Return a learning rate as the kernels take it: a number, or a tensor of shape () on the device. Syncs: no."""
    if not isinstance(lr, Tensor) or lr.device.type == "cpu":
        return float(lr)
    return move(lr.detach().reshape(()), device)
