"""Which module is running, and what its parameters, buffers and inputs are called."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import current_thread, get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from .._torch import dispatch_modes, local_tensor, storage_id, unwrapped
from ..binding import bound_of, innermost, named_tensors, uncompiled
from ..distributed import living
from ..errors import ConfigError, kind_of


def check_model(call: str, model: object) -> None:
    """Refuse what is no model. Host only. Raises: ConfigError: it is none; a stepper has one."""
    if not isinstance(model, nn.Module):
        has_one = isinstance(getattr(model, "model", None), nn.Module)
        own = f", which is amp.model for amp = {type(model).__name__}" if has_one else ""
        raise ConfigError(f"{call} was given {kind_of(model)} for model; give the nn.Module{own}.")


def _call_arguments(args: tuple[Any, ...]) -> Any:
    """Return the arguments of the call that runs a global pre-hook; torch hands such a hook no named ones."""
    named = sys._getframe(2).f_locals.get("kwargs") or {}
    return {**dict(enumerate(args)), **named}


@dataclass(frozen=True, slots=True)
class Place:
    """Where the program stands among modules: class name of the outermost, empty outside; name below it; class names from there to the innermost."""

    root: str = ""
    module: str = ""
    classes: tuple[str, ...] = ()

    @property
    def held_by(self) -> str:
        """Name of the innermost module of the program's own: a loss made in a forward has none, a parametrisation is its layer's."""
        return re.split(r"(?:^|\.)(?:<|parametrizations(?:\.|$))", self.module)[0]


_WALKS = 8
"""Walks over the objects of the process in one trace: a program that makes modules as it runs would cause one for each."""


def _prepared_around(module: nn.Module) -> nn.Module:
    """Return the prepared model that a module called by itself is a part of, whose names rules match; else the module."""
    bound = bound_of(module)
    stepper = bound.binding.owner() if bound is not None and bound.binding.owner is not None else None
    root = module if stepper is None else innermost(stepper.model)
    return root if any(part is module for part in root.modules()) else module


def _around(module: nn.Module, living: Sequence[nn.Module]) -> nn.Module:
    """Return the outermost living module that a module is a part of beside others; the module where there is none. Host only."""
    outermost, seen = module, set[int]()
    while True:
        seen.add(id(module))  # modules may hold each other
        holders = [
            one for one in living
            if id(one) not in seen and any(part is module for part in one.__dict__.get("_modules", {}).values())
        ]  # fmt: skip
        if not holders:
            return outermost
        module = max(holders, key=_count)
        is_model = type(module) not in (nn.ModuleList, nn.ModuleDict) and _count(module) > _count(outermost) + 1
        outermost = module if is_model else outermost


def _count(module: nn.Module) -> int:
    """Return how many modules and parameters a module holds, itself counted. Host only."""
    return sum(1 for _ in module.modules()) + sum(1 for _ in module.parameters())


class ModuleStack:
    """The modules whose forward is running, kept by torch's two global forward hooks while installed.

    Args:
        model: its submodules are named relative to it wherever they are called from; None names each
            module relative to the outermost one that is called.
        on_root: called with each outermost module before it runs.
        on_output: called with (module, place, output) after each module's forward.

    Attributes:
        roots: the outermost modules that were met.
        inputs: tensors that the one that runs was given, by what they are called.
        elsewhere: names of other threads that ran modules with gradients on.
    """

    def __init__(
        self,
        model: nn.Module | None,
        on_root: Callable[[nn.Module], None],
        on_output: Callable[[nn.Module, Place, Any], None],
    ) -> None:
        self._names: dict[int, tuple[str, str]] = {}
        self._alone: set[type] = set()
        self._living: list[weakref.ref[nn.Module]] = []
        self._walks = 0
        self._model = model
        self._on_root, self._on_output = on_root, on_output
        self._stack: list[tuple[nn.Module, Place]] = []
        self._parameters: dict[int, tuple[Tensor, str]] = {}
        self.roots: list[nn.Module] = []
        self.inputs: list[tuple[str, Tensor]] = []
        self.elsewhere: set[str] = set()
        if model is not None:
            self._learn(model)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow modules in this thread inside the block. Writes: torch's global module hooks, until its end."""
        self._thread = get_ident()
        with ExitStack() as ended:
            ended.callback(self.inputs.clear)
            ended.callback(self._stack.clear)
            ended.callback(module_hooks.register_module_forward_pre_hook(self._before).remove)
            ended.callback(module_hooks.register_module_forward_hook(self._after, always_call=True).remove)
            yield

    @property
    def place(self) -> Place:
        """Where the program stands now."""
        return self._stack[-1][1] if self._stack else Place()

    def _learn(self, root: nn.Module) -> None:
        """Name a root's modules. The root is held, so that ids stay its own."""
        cls = type(getattr(root, "_orig_mod", root)).__name__
        parts = dict(root.named_modules())
        ids = {id(part) for part in parts.values()}
        inner = [known for known in self.roots if known is not self._model and id(known) in ids]
        renamed = {id(part) for known in inner for part in known.modules()}
        for name, module in parts.items():
            if id(module) in renamed or id(module) not in self._names:
                self._names[id(module)] = cls, uncompiled(name)
        self.roots.append(root)
        for name, parameter in root.named_parameters():
            self._parameters.setdefault(id(parameter), (parameter, uncompiled(name)))

    def _place_of(self, module: nn.Module) -> Place:
        above, cls = self.place, type(module).__name__
        if id(module) not in self._names and not self._stack:
            self._learn(self._model_of(module))
        root, name = self._names.get(id(module), (above.root, f"{above.module}.<{cls}>".lstrip(".")))
        return Place(root, name, (*above.classes, cls))

    def _model_of(self, module: nn.Module) -> nn.Module:
        """Return what a module that is called by itself is a part of; the module where it is a part of nothing."""
        root = _prepared_around(module)
        if root is module and type(module) not in self._alone:
            is_new = all(known() is not module for known in self._living)  # made since the last walk
            if is_new and self._walks < _WALKS:
                self._living, self._walks = [weakref.ref(found) for found in living(nn.Module)], self._walks + 1
            root = _around(module, [one for known in self._living if (one := known()) is not None])
            if root is module and _count(module) == 1:  # a loss may be made anew in each step
                self._alone.add(type(module))
        return root

    @property
    def is_elsewhere(self) -> bool:
        """Whether another thread runs, in which no mode is on: hooks are called there, and no op is seen."""
        return get_ident() != self._thread and not dispatch_modes()

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.is_elsewhere:
            if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
                self.elsewhere.add(current_thread().name)
            return
        place = self._place_of(module)
        if not self._stack:
            given = named_tensors(_call_arguments(args), "")
            self.inputs[:] = [(f"input {name} of {place.root}", unwrapped(t)) for name, t in given]
            self._on_root(module)
        self._stack.append((module, place))

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        while self._stack and not self.is_elsewhere:
            top, place = self._stack.pop()
            if top is module:
                self._on_output(module, place, output)
                return

    @property
    def is_outside(self) -> bool:
        """Whether no module's forward is running."""
        return not self._stack

    def parameters(self, *, only_trained: bool = False) -> dict[int, str]:
        """Return the names of the parameters that roots hold now, or of those that are to have gradients, by their ids. Host only."""
        held = (pair for root in reversed(self.roots) for pair in root.named_parameters())
        return {id(p): uncompiled(name) for name, p in held if p.requires_grad or not only_trained}

    def parameter_name(self, parameter: Tensor) -> str:
        """Return a parameter's name in the first root that holds it; empty if none does. Syncs: no."""
        return self._parameters.get(id(parameter), (parameter, ""))[1]

    def name_of(self, tensor: Tensor) -> str:
        """Return what a tensor's memory is called: parameter, buffer or input; empty if none of them. Syncs: no."""
        key = storage_id(tensor)
        for root in self.roots:
            for kind, named in (("parameter", root.named_parameters()), ("buffer", root.named_buffers())):
                for name, held in named:
                    local = local_tensor(unwrapped(held))
                    if local.layout is torch.strided and storage_id(local) == key:
                        return f"{kind} {uncompiled(name)}"
        inputs = ((name, held) for name, held in self.inputs if held.layout is torch.strided)
        return next((name for name, held in inputs if storage_id(held) == key), "")
