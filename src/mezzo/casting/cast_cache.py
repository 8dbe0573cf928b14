"""Casts that are made once: a cache that lives as long as a region, and casts of weights that outlive it."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._torch import forward_ad_level, functorch_level, storage_id, tracing_state, version, view_base
from ..kernels import is_in_foreign_graph, stream_number
from ..stamp import Stamp

_hooked = False


def watch_optimizers() -> None:
    """Make every optimizer step count as a write, once for the process. Writes: torch's global optimizer post-step hooks.

    Fused kernels change weights without a new version (torch 2.13: `_fused_sgd_`, `_fused_adamw_`), which no cache
    could see. The hook is torch's own, and is set when the first cache is made, not on import.
    """
    global _hooked  # noqa: PLW0603  # one hook a process
    if not _hooked:
        register_optimizer_step_post_hook(_count_as_write)
        _hooked = True


def _count_as_write(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Move the versions of the weights of which a cast is kept."""
    held = set() if getattr(optimizer, "moves_versions", False) else weight_casts.storages()
    for reference in _caches.valuerefs():  # a list: other threads enter regions meanwhile
        if (cache := reference()) is not None:
            held |= cache.storages()
    if held:
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch.autograd.graph.increment_version([p for p in params if storage_id(p) in held])


_RECENT_ACTIVATIONS = 2
"""How many activation casts are kept: one activation usually feeds several ops in a row (query, key, value)."""


@dataclass(slots=True)
class _Cast:
    source: Stamp
    copy: Tensor
    thread: int | None = None  # the only one that used it; None for several. Streams keep order on an accelerator: 0


def is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one, and so likely to be cast again. Syncs: no."""
    return isinstance(tensor, Parameter) or isinstance(view_base(tensor), Parameter)


def _cacheable(tensor: Tensor) -> bool:
    """Whether a kept cast can be told from a stale one, and handed out again, in what is running now."""
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_inference()
        and functorch_level() is None
        and forward_ad_level() < 0
        and tracing_state() is None
    )


class _Connect(torch.autograd.Function):
    """Hands out a kept cast as if it had been made just now.

    Each use has its own way back to the source, so the gradients of several uses are summed in the source's dtype,
    as without a cache.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, cast: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.to(ctx.dtype), None


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A cast that may be saved for backward later, even if it is made in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.detach().to(dtype)


def _connected(source: Tensor, cast: Tensor) -> Tensor:
    if not (torch.is_grad_enabled() and source.requires_grad):
        return cast
    connected: Tensor = _Connect.apply(source, cast)  # type: ignore[no-untyped-call]  # torch's own
    return connected


class WeightCastCache:
    """16-bit copies of weights that outlive a region (`cache="persistent"`).

    A cast is allocated once and refreshed in place after its weight changed: writing into memory that exists is
    several times faster than into fresh pages. One that several threads used is replaced instead, since they may be reading it.
    It is keyed on where the weight lies and on its version, so tied weights and views share it, and it goes when its weight goes.

    A write through `.data` leaves no trace in the version, so once a region a row of a CPU weight is compared with its
    cast, another row each time: an edit of the whole weight is noticed at once, one of a single row when its turn
    comes. On an accelerator that would wait for the device: call `clear` after such a write.

    Slices of a weight have casts of their own, the latest ones, in no more bytes than the weight's. On an accelerator each
    stream has its own too: nobody waits for the one that made a cast, or that reads it.

    Attributes:
        generation: how often casts were dropped.
    """

    def __init__(self) -> None:
        self._turn, self.generation = 0, 0
        self._casts: dict[tuple[object, ...], _Cast] = {}  # another thread or the collector changes it: iterate a copy
        self._refreshing = threading.Lock()

    def cast(self, weight: Tensor, dtype: torch.dtype, is_first: bool = True) -> Tensor:
        """Return the kept cast of a weight, or a view of one, connected to the graph when gradients are on.

        With `is_first` the region uses the weight for the first time. Writes: the kept cast, where the weight has changed since. Syncs: no.
        """
        return _connected(weight, self._fresh(weight, dtype, is_first))

    def _fresh(self, weight: Tensor, dtype: torch.dtype, is_first: bool) -> Tensor:
        owner = weight if isinstance(weight, Parameter) else view_base(weight)
        assert owner is not None
        stream = stream_number(weight.device)
        key = (id(owner), weight.storage_offset(), tuple(weight.shape), weight.stride(), stream, dtype)
        thread = threading.get_ident() if weight.is_cpu else 0
        found = self._casts.get(key)
        if found is None or not found.source.is_of(owner) or found.source.storage != storage_id(weight):
            gone = weakref.ref(owner, lambda _: self._casts.pop(key, None))
            seen = Stamp(gone, version(weight), storage_id(weight))  # before the cast, during which it may be written
            found = self._casts[key] = _Cast(seen, _copy(weight, dtype), thread)
            self._drop_old_slices(owner, dtype)
        if found.thread not in (thread, None):
            with self._refreshing:  # until whoever writes it is done
                found.thread = None
        seen = found.source
        if seen.version != version(weight) or (is_first and self._is_stale(weight, found.copy)):
            with self._refreshing:
                found = self._refreshed(self._casts.get(key, found), seen, weight, thread)
                self._casts[key] = found
        return found.copy

    def _refreshed(self, found: _Cast, seen: Stamp, weight: Tensor, thread: int) -> _Cast:
        """Return a cast written anew, or that of another thread which did since it was seen to be old: its graph may hold it already."""
        now = version(weight)
        if found.source is not seen and found.source.version == now:
            found.thread = thread if found.thread == thread else None
        elif found.thread == thread:
            with torch.inference_mode(False), torch.no_grad():
                found.copy.copy_(weight)
            found.source = seen._replace(version=now)
        else:
            return _Cast(seen._replace(version=now), _copy(weight, found.copy.dtype), thread)
        return found

    def _is_stale(self, weight: Tensor, copy: Tensor) -> bool:
        if weight.device.type != "cpu" or weight.numel() == 0:
            return False
        self._turn = turn = self._turn + 1  # other threads move it on meanwhile
        row, kept = weight.detach(), copy
        if weight.dim() > 1:
            row, kept = row[turn % len(weight)], kept[turn % len(weight)]
        return not torch.equal(row.to(kept.dtype), kept)

    def _drop_old_slices(self, owner: Tensor, dtype: torch.dtype) -> None:
        casts, whole = self._casts.copy(), tuple(owner.shape)
        slices = [key for key in casts if key[0] == id(owner) and key[2] != whole and key[-1] is dtype]
        room = owner.numel() * dtype.itemsize
        for key in reversed(slices):
            room -= casts[key].copy.nbytes
            if room < 0:
                self._casts.pop(key, None)

    def storages(self) -> set[int | None]:
        """Return the storages of the weights that have a cast here."""
        return {cast.source.storage for cast in tuple(self._casts.values())}

    def drop(self, tensor: Tensor) -> None:
        """Forget the casts of a tensor's storage. Host only."""
        storage, self.generation = storage_id(tensor), self.generation + 1
        self._casts = {key: cast for key, cast in self._casts.copy().items() if cast.source.storage != storage}

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Return each weight that lives with each of its casts. Host only."""
        held = [(cast.source.tensor(), cast.copy) for cast in tuple(self._casts.values())]
        return [(owner, copy) for owner, copy in held if owner is not None]

    def nbytes(self) -> int:
        """Return the bytes that all casts hold. Syncs: no."""
        return sum(cast.copy.nbytes for cast in tuple(self._casts.values()))

    def clear(self) -> None:
        """Drop every cast; each weight is cast anew at its next use."""
        self.generation += 1
        self._casts.clear()


weight_casts = WeightCastCache()
"""The kept casts of this process: a weight has one in each dtype, whichever region uses it."""


def kept_casts(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the kept casts of an accelerator's weights as the region casts them just here, connected to the graph; themselves where none does.

    Writes: the kept casts, where there is none or a weight has changed since. Syncs: no.
    """
    device = weight.device
    if not torch.is_autocast_enabled(device.type) or is_in_foreign_graph(device):
        return weight, bias
    low = torch.get_autocast_dtype(device.type)
    return _kept(weight, low), None if bias is None else _kept(bias, low)


def cast_key(weight: Tensor, bias: Tensor | None) -> tuple[object, ...] | None:
    """Return what two calls of `kept_casts` without gradients have in common that return the same; None where it must be asked. Host only."""
    device = weight.device
    if type(weight) is not Parameter or not _cacheable(weight) or is_in_foreign_graph(device):
        return None
    low = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    # Compared in this order: of equal numbers, the two references are one, or that of what is gone.
    own = (low, stream_number(device), weight_casts.generation, *_mark(weight))
    if bias is None:
        return own
    return None if type(bias) is not Parameter or bias.is_inference() else (*own, *_mark(bias))


def _mark(weight: Tensor) -> tuple[int, weakref.ref[Tensor], int, int]:
    return id(weight), weakref.ref(weight), storage_id(weight), version(weight)


def _kept(weight: Tensor, low: torch.dtype) -> Tensor:
    if weight.dtype is not torch.float32 or type(weight) is not Parameter or not _cacheable(weight):
        return weight
    watch_optimizers()
    return weight_casts.cast(weight, low, is_first=False)


_caches: weakref.WeakValueDictionary[int, RegionCache] = weakref.WeakValueDictionary()
"""The caches of the regions that are entered now."""


class RegionCache:
    """Casts of one region, each valid for one version of its source; those of weights may live beyond it in a store.

    Weights are kept until the region ends; of activations only the latest two, so that query, key and value share
    a cast and no memory is held for long. Every use has its own graph, so a cast made without gradients serves a pass
    that needs them, and gradients are summed in the dtype of the source.
    A tensor whose storage was handed out untracked (`.data`, `.numpy()`) is cast at every use from then on.
    """

    def __init__(self, store: WeightCastCache | None = None) -> None:
        watch_optimizers()
        self.store = store
        self._used: set[int] = set()
        self._weights: dict[tuple[int, torch.dtype], _Cast] = {}
        self._activations: OrderedDict[tuple[int, torch.dtype], _Cast] = OrderedDict()
        self._untracked: set[int] = set()
        _caches[id(self)] = self

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a floating tensor in another dtype, from the cache where that is right; connected to the graph when gradients are on. Syncs: no."""
        if not _cacheable(tensor):
            return tensor.to(dtype)
        storage = storage_id(tensor)
        if storage in self._untracked:
            return tensor.to(dtype)
        weight = is_weight(tensor)
        key = (id(tensor), dtype)
        if weight and self.store is not None:
            is_first = storage not in self._used
            self._used.add(storage)
            return self.store.cast(tensor, dtype, is_first)
        entries = self._weights if weight else self._activations
        entry = entries.get(key)
        if entry is not None and entry.source.is_current(tensor):
            return _connected(tensor, entry.copy)
        source = Stamp.of(tensor, with_storage=True)
        is_inference = torch.is_inference_mode_enabled()
        cast = _copy(tensor, dtype) if is_inference else tensor.to(dtype)
        entries[key] = _Cast(source, cast if is_inference else cast.detach())
        if not weight:
            self._activations.move_to_end(key)
            while len(self._activations) > _RECENT_ACTIVATIONS:
                self._activations.popitem(last=False)
        return cast

    def storages(self) -> set[int | None]:
        """Return the storages of the weights that have a cast here."""
        return {entry.source.storage for entry in tuple(self._weights.values())}

    def stop_tracking(self, tensor: Tensor) -> None:
        """Cast a tensor's storage at every use from now on: a write through `.data` leaves no version behind. Host only."""
        self._untracked.add(storage_id(tensor))
        if self.store is not None:
            self.store.drop(tensor)
