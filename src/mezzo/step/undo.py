"""What a step has written, undone on the device where it must be skipped: the choice between old and new, and steps of optimizers that cannot leave one out.

torch's fused optimizers and mezzo's read `found_inf` themselves. For another one of torch, weights and state are copied, the step
is taken, and each is chosen between old and new where it lies. What only the host knows, such as a step count on the CPU or an
entry of the state that is new, is undone when the host reads the flags: before the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._torch import foreach_copy_
from ..kernels import local
from ..optim import MasterWeights, parameters, wrapped_optimizer

_PLAIN = (Tensor, float, int, str, tuple, type(None))
_MISSING = object()
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


def held_once(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor that its memory holds, where it was expanded, each once; any other tensor itself. Host only."""
    if not is_plain(tensor) or tensor.is_contiguous():
        return tensor
    return tensor[tuple([slice(0, None if stride else 1) for stride in tensor.stride()])]


def copies_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors, expanded as those are, made in as many launches as there are dtypes and devices, or one by one on the CPU. Syncs: no."""
    once = list(map(held_once, tensors))
    if any([one.shape != tensor.shape for one, tensor in zip(once, tensors, strict=True)]):
        return [copy.expand(tensor.shape) for copy, tensor in zip(copies_of(once), tensors, strict=True)]
    if all([tensor.is_cpu for tensor in tensors]):
        return [(tensor.detach() if tensor.requires_grad else tensor).clone() for tensor in tensors]
    plain = list(map(is_plain, tensors))
    copies = [torch.empty_like(x) if is_made else x.detach().clone() for x, is_made in zip(tensors, plain, strict=True)]
    for alike in _by_kind(compress(zip(copies, tensors, strict=True), plain)):  # without what requires gradients
        foreach_copy_([copy for copy, _ in alike], [tensor for _, tensor in alike])
    return copies


def can_be_undone(optimizer: Optimizer) -> bool:
    """Whether a step of an optimizer can be undone: one of torch's own whose state is tensors and plain values.

    Another one may not stand gradients that are not finite, or keep what it knows where nobody looks. Host only.
    """
    if isinstance(optimizer, MasterWeights) and optimizer.masters.mode == "stochastic":
        return False  # counts its steps on the device by itself
    inner = wrapped_optimizer(optimizer)
    if not f"{type(inner).__module__}.".startswith("torch.optim."):
        return False
    kinds = {p.device.type for p in parameters(inner)}
    own = {name: value for name, value in vars(inner).items() if name not in _base_names()}
    options = [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in inner.param_groups]
    records = (own, *options, *optimizer.state.values())
    return len(kinds) == 1 and all(isinstance(value, _PLAIN) for record in records for value in record.values())


@cache
def _base_names() -> frozenset[str]:
    """Return the attributes that any optimizer has, and what `MasterWeights` gives the one inside."""
    return frozenset((*vars(torch.optim.SGD([torch.zeros(1)])), "load_state_dict"))


class Attempt:
    """One step of one optimizer, for which `can_be_undone` holds, that is taken whatever was found; made before it.

    `params` are those with gradients; `skip`, shape (), on the device, is not 0 where the step must be undone. Syncs: no.
    """

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor], skip: Tensor) -> None:
        self._state, self._params, self._skip = optimizer.state, params, skip
        inner = wrapped_optimizer(optimizer)
        self._owners = [*inner.param_groups, vars(inner)]
        self._entries = {p: dict(optimizer.state[p]) for p in params if p in optimizer.state}
        self._options = [dict(owner) for owner in self._owners]
        held = [v for one in (*self._entries.values(), *self._options) for v in one.values() if isinstance(v, Tensor)]
        distinct = {id(tensor): local(tensor) for tensor in (*params, *held)}.values()
        kind = params[0].device.type
        self._tensors = [tensor for tensor in distinct if tensor.device.type == kind]
        self._copies = copies_of(self._tensors)
        self._on_host = [(tensor, tensor.clone()) for tensor in distinct if tensor.device.type != kind]

    def finish(self, has_failed: bool = False) -> Callable[[], None] | None:
        """Undo the step on the device if it must be skipped, or because it ended in an error; called right after it.

        Returns:
            What must be called once the host knows that it was skipped; nothing of the step is left then. None where the
            host has nothing to undo.

        Writes: weights and state. Syncs: no.
        """
        skip = torch.ones_like(self._skip) if has_failed else self._skip
        choose_(list(zip(self._copies, self._tensors, strict=True)), skip != 0)
        state, on_host = self._state, self._on_host
        entries = {p: state[p] for p in self._params if p in state}  # a wrapper may have made them anew
        new = {p: entry for p, entry in entries.items() if p not in self._entries}
        known = [(entry, self._entries[p]) for p, entry in entries.items() if p in self._entries]
        changed = _changed([*known, *zip(self._owners, self._options, strict=True)])
        if not changed and not new and not on_host:
            return None

        def undo() -> None:
            for record, name, value in changed:
                if value is _MISSING:
                    record.pop(name, None)
                else:
                    record[name] = value
            for p, entry in new.items():
                if state.get(p) is entry:
                    del state[p]
            for tensor, value in on_host:
                tensor.copy_(value)

        return undo


def _changed(records: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> list[tuple[dict[str, Any], str, Any]]:
    """Return what is another object now than before, as record, name and former value."""
    return [
        (now, name, before.get(name, _MISSING))
        for now, before in records
        for name in now.keys() | before.keys()
        if now.get(name, _MISSING) is not before.get(name, _MISSING)
    ]
