"""How weights are stored between steps, and the way from there to fp32 and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..policy import Master
from .ops.rounding import EndToEnd, compensate, random_bits, random_key, restore, stochastic_round
from .ops.split import join, split

CHUNK_NUMEL = 2**18
"""Elements in a chunk: in fp64 2 MiB, which stays in a core's cache; on an accelerator enough for a launch."""
AUX_STATE: dict[Master, str] = {"split": "remainder", "fp32": "master", "kahan": "compensation"}
"""What each master mode keeps beside the weight; the names of the entries in an optimizer's state."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WEIGHT_STREAM, MOMENT_STREAM = 0, 1
"""Streams of random bits, so that a weight and its moments do not share bits."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Weights:
    """Weights of one dtype and device that keep small updates in one way.

    Attributes:
        mode: the master mode; "none" for weights of fp32 or fp64, which are their own master.
        values: what the model reads; any shapes, one dtype.
        aux: beside each, in its shape: int16 remainders, fp32 masters or compensations in the weights' dtype;
            empty for modes that keep nothing.
        seeds: of the random bits of each, in [0, 2**32); any where nothing is rounded stochastically.
        offsets: of each, the index of its first element in the whole tensor of which it is a part, for the random bits; empty
            if each is whole.
        param_names: what errors call each; empty for its number.
        places: where the elements belong of a single weight that is many, laid end to end; None where each is a weight of its own.
    """

    mode: Master
    values: Sequence[Tensor]
    aux: Sequence[Tensor]
    seeds: Sequence[int]
    offsets: Sequence[int] = ()
    param_names: Sequence[str] = ()
    places: EndToEnd | None = None

    def param_name(self, index: int) -> str:
        """Return what errors call a weight."""
        return self.param_names[index] if self.param_names else f"parameter {index}"

    def offset(self, index: int) -> int:
        """Return the index of a weight's first element in the whole of which it is a part; 0 if it is one itself."""
        return self.offsets[index] if self.offsets else 0

    def master(self, index: int) -> Tensor:
        """Return a weight's master, as `read_master` has it. Syncs: no."""
        return read_master(self.mode, self.values[index], self.aux[index] if self.aux else None)

    def random_bits(self, index: int, step: Tensor, stream: int) -> Tensor:
        """Return the random bits of a weight's elements in a step, for the weight itself or, by another stream, its moments. Syncs: no.

        Its shape, int64, in [0, 2**32). `step` has shape (): steps taken, the one under way included; (n,) for many end to end.
        """
        like = self.values[index]
        if self.places is not None:
            return random_bits(random_key(self.places.seeds, step, stream), like, self.places)
        return random_bits(random_key(self.seeds[index], step, stream), like, self.offset(index))


def aux_dtype(mode: Master, weight: torch.dtype) -> torch.dtype | None:
    """Return the dtype of what a master mode keeps beside weights of a dtype; None for modes that keep nothing. Host only."""
    dtypes: dict[Master, torch.dtype] = {"split": torch.int16, "fp32": torch.float32, "kahan": weight}
    return dtypes.get(mode)


def read_master(mode: Master, value: Tensor, aux: Tensor | None) -> Tensor:
    """Return the master of one weight, fp32 (fp64 for an fp64 weight), in fresh memory unless the weight is its own. Syncs: no.

    The weight is what counts: where its aux state, None for modes that keep nothing, no longer rounds to it, because somebody wrote the
    weight since the last step, the master is the weight.
    """
    if aux is None:
        return value.to(torch.promote_types(value.dtype, torch.float32))
    if mode == "split":
        return join(value, aux)
    if mode == "kahan":
        return restore(value, aux)
    return torch.where(aux.to(value.dtype) == value, aux, value.to(torch.float32))


def store_master(mode: Master, master: Tensor, dtype: torch.dtype, bits: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the weight in `dtype` that stands for a master, fp32 or fp64, and its aux state, None for modes that keep nothing. Syncs: no.

    Mode "stochastic" rounds by the random `bits` of each element; without them to nearest there too.
    """
    if mode == "split":
        return split(master)
    if mode == "kahan":
        return compensate(master, dtype)
    if mode == "stochastic" and bits is not None:
        return stochastic_round(master, dtype, bits), None
    return master.to(dtype), master if mode == "fp32" else None


def chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of the same chunks of tensors of one shape, in the order of their memory; the whole where that differs or has gaps. Syncs: no."""
    first = tensors[0].detach()
    alike = all([tensor.stride() == first.stride() for tensor in tensors])
    if first.numel() <= CHUNK_NUMEL or not alike or not bool(torch.ops.aten.is_non_overlapping_and_dense(first)):
        yield tuple([tensor.detach() for tensor in tensors])
        return
    flat = [tensor.detach().as_strided((first.numel(),), (1,)) for tensor in tensors]
    yield from zip(*[torch.split(tensor, CHUNK_NUMEL) for tensor in flat], strict=True)


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a dense real tensor's bits in words of 8 bytes, however it lies: another after almost any change.

    Nothing is copied where it is contiguous: to sum narrower numbers torch widens all of them first, to 8 bytes each. Shape (),
    int64. Syncs: no.
    """
    dense, width = tensor.detach().resolve_neg().contiguous(), 8 // tensor.element_size()
    flat = dense.as_strided((dense.numel(),), (1,))  # one element has any stride
    flat = flat.clone() if flat.storage_offset() % width else flat  # a view of words begins at a word
    end = len(flat) // width * width
    rest = flat[end:].view(_BITS[flat.element_size()]).sum(dtype=torch.int64)
    return flat[:end].view(torch.int64).sum() + rest


def give_master_(mode: Master, weight: Tensor, master: Tensor) -> Tensor | None:
    """Have a weight stand for a master of its shape and device, in memory that is there; return its aux state, None for modes that keep nothing.

    The master is taken in fp32, or what is wider in the weight. Writes: `weight`. Syncs: no.
    """
    dtype, master = aux_dtype(mode, weight.dtype), master.to(torch.promote_types(weight.dtype, torch.float32))
    aux = None if dtype is None else torch.empty_like(master, dtype=dtype)
    for chunk, value, *aux_parts in chunks(master, weight, *([] if aux is None else [aux])):
        found = store_master(mode, chunk, weight.dtype, None)
        for target, source in zip((value, *aux_parts), found, strict=False):
            if source is not None:
                target.copy_(source)
    return aux


def write_(target: Tensor, value: Tensor, skip: Tensor | None) -> None:
    """Write a value, unless `skip`, shape () or (1,) and bool, says that the step is blocked: then the target keeps every bit. Writes: `target`. Syncs: no."""
    target.copy_(value if skip is None else torch.where(skip.reshape(()), target, value))


def write_master_(weights: Weights, index: int, master: Tensor, step: Tensor, skip: Tensor | None) -> None:
    """Store a new master as weight and its aux state, unless the step is blocked as in `write_`; `step` as in `Weights.random_bits`.

    Writes: the weight and its aux state. Syncs: no.
    """
    value = weights.values[index]
    bits = weights.random_bits(index, step, WEIGHT_STREAM) if weights.mode == "stochastic" else None
    weight, aux = store_master(weights.mode, master, value.dtype, bits)
    write_(value, weight, skip)
    if aux is not None:
        write_(weights.aux[index], aux, skip)


def store_means_(
    targets: tuple[Tensor, ...], means: tuple[Tensor, ...], weights: Weights, index: int, step: Tensor, skip: Tensor | None
) -> None:  # fmt: skip
    """Write one or two running means, rounding bf16 ones stochastically, each by its own 16 of 32 random bits.

    A running mean moves by (1 - beta) of itself, 0.1 % for beta 0.999; bf16 spacing is 0.4 to 0.8 %. Rounded to nearest it
    would rise with large gradients and never fall again.

    Writes: `targets`, unless `skip`, shape () and bool, says no. Syncs: no.
    """
    if all(target.dtype is not torch.bfloat16 for target in targets):
        for target, mean in zip(targets, means, strict=True):
            write_(target, mean, skip)
        return
    bits = weights.random_bits(index, step, MOMENT_STREAM)
    for number, (target, mean) in enumerate(zip(targets, means, strict=True)):
        is_rounded, own = target.dtype is torch.bfloat16, bits >> (16 * number)
        write_(target, stochastic_round(mean.to(torch.float32), target.dtype, own) if is_rounded else mean, skip)
