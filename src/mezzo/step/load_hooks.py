"""Weights loaded into a prepared model, which are the ones its masters go on from."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch import has_hooks, version
from ..errors import CheckpointError, listed
from ..formats import LOW_DTYPES, overflowing
from ..optim import keeps_masters, local_optimizer, parameters


class LoadHooks:
    """Hooks around `load_state_dict` of a model, of a module around it and of its parts, by which masters follow.

    Masters that were loaded first, with an optimizer's state, stay where they round to the 16-bit weights loaded after it.

    Attributes:
        has_loaded: whether something was loaded, into optimizers too, since the other ranks heard of it.
    """

    def __init__(self, model: nn.Module, optimizers: tuple[Optimizer, ...]) -> None:
        self._optimizers, self.has_loaded = optimizers, False
        self._loaded: tuple[nn.Module | None, dict[str, Any]] = None, {}
        self._root = weakref.ref(model)
        self._restored: dict[Tensor, int] = {}
        self._is_off = False
        self._on = ExitStack()
        for one in {o for o in (*optimizers, *map(local_optimizer, optimizers)) if has_hooks(o, "load_state_dict")}:
            note = Inert(_note_load, weakref.ref(self), weakref.ref(one))
            self._on.callback(one.register_load_state_dict_post_hook(note).remove)
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.follow_parts()

    def follow_parts(self) -> None:
        """Put the hooks on the parts that the model has now and that have none. Host only."""
        for part in [] if (root := self._root()) is None else {*root.modules()}.difference(self._hooked):
            self._hooked.add(part)
            if isinstance(part, torch.jit.ScriptModule):  # which takes no hooks
                continue
            self._on.callback(part.register_load_state_dict_pre_hook(Inert(self._before)).remove)  # type: ignore[no-untyped-call]
            self._on.callback(part.register_load_state_dict_post_hook(Inert(self._after)).remove)  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Take the hooks off again."""
        self._on.close()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave masters alone inside the block, which loads them itself."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False
            self._restored.clear()

    def _before(self, module: nn.Module, state: Mapping[str, Any], prefix: str, *_: object) -> None:
        if prefix and module is not self._root():  # a part of what is being loaded
            return
        own = dict(module.named_parameters())
        loaded = {name: state[prefix + name] for name in own if prefix + name in state}
        self._loaded = module, loaded
        low = [(n, v) for n, v in loaded.items() if own[n].dtype is torch.float16 and isinstance(v, Tensor)]
        if over := overflowing(torch.float16, low):
            raise CheckpointError(
                f"this model stores weights in fp16, whose largest number is 65504, and {listed(over)} would be inf there. "
                "Load them before mezzo.prepare, under a policy that keeps them in fp32 or bf16. Nothing of the model was changed."
            )
        for p in [p for p, seen in self._restored.items() if version(p) != seen]:
            del self._restored[p]

    @torch.no_grad()
    def _after(self, module: nn.Module, _: object) -> None:
        whole, loaded = self._loaded
        if module is not whole:
            return
        self._loaded = None, {}
        self.has_loaded = True
        restored, self._restored = self._restored, {}
        if self._is_off:
            return
        keepers = [one for one in map(local_optimizer, self._optimizers) if keeps_masters(one)]
        owners = {p: one for one in keepers for p in parameters(one)}
        for name, p in module.named_parameters():
            value, owner = loaded.get(name), owners.get(p)
            if owner is None or not isinstance(value, Tensor) or value.shape != p.shape or p.dtype not in LOW_DTYPES:
                continue
            wide = value.to(p.device, torch.float32)
            if p in restored and value.dtype in LOW_DTYPES:
                master = owner.master(p)
                wide = torch.where(master.to(p.dtype) == p, master, wide)
            owner.set_masters_({p: wide})


def _note_load(hooks: weakref.ref[LoadHooks], owner: weakref.ref[Optimizer], _: object) -> None:
    alive, optimizer = hooks(), owner()
    if alive is not None and optimizer is not None:
        alive.has_loaded = True
        if keeps_masters(optimizer):
            alive._restored.update((p, version(p)) for p in parameters(optimizer))


class Inert(partial[None]):
    """A hook that does nothing in a copy or a pickle of what it is on, which nobody looks at."""

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_ignore,)


def _ignore(*_: object) -> None: ...
