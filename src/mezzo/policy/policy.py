"""The policy: what precision everything has, as one frozen value that reads, writes and explains itself."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from types import MappingProxyType

import torch
from typing_extensions import Self  # which torch brings

from ..errors import PolicyError, listed, shown
from ..formats import as_device, dtype_name
from .diff import PolicyDiff, diff
from .fields import CacheName, PolicyFields, names_of
from .kinds import by_name
from .presets import PRESET_FIELDS
from .spelling import write_module_rule
from .text import parse, to_html, written
from .toml import from_document, load, save, to_document
from .why import EngineChoice, Why, why, why_engine


@by_name
@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Policy(PolicyFields):
    """What precision everything has: ops, modules, weights, gradients, moments, reductions, output.

    `str(policy)` is the short text that `Policy.parse` turns back into it.

    Attributes:
        compute: dtype of low ops; fp32 switches casting off; None lets the device decide (`resolve`).
        params: storage dtype of trainable weights that feed low ops.
        master: how 16-bit `params` keep small updates.
        grads: dtype gradients are accumulated in over micro-batches; None: the dtype of the weight.
        reduce: dtype in which gradients are reduced between ranks; fp8 sends blocks with a scale each, and what rounding took away a step
            later.
        state: dtype of optimizer moments.
        output: dtype of what leaves the model, or a module of it that is called by itself; None leaves it.
        loss: dtype the loss must have when it reaches backward; fp16 has a loss scale that moves begin at 32768 at most.
        ops: op table and edits; a table's name is accepted for short.
        modules: ordered module rules; a later rule wins.
        scaling: how the loss scale moves; None: no loss scaling.
        guard: what the step does about inf and NaN.

    Raises:
        PolicyError: a value that does not exist or contradicts another.
    """

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the policy that a text describes: a preset, then edits; a later edit wins.

        Args:
            text: "fp16, *.norm*=fp32, op:cumsum=low, output=fp32, scaling.init_scale=1024".

        Raises:
            PolicyError: an unknown word, with its position and the nearest valid spelling, or a contradiction.

        >>> Policy.parse("bf16, output=fp32").output
        torch.float32
        """
        return cls._of(parse(text))

    @classmethod
    def _of(cls, fields: PolicyFields) -> Self:
        return cls(**{name: getattr(fields, name) for name in fields.__dataclass_fields__})

    def __str__(self) -> str:
        return str(written(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}.parse({str(self)!r})"

    def _repr_html_(self) -> str:
        return to_html(self)

    def to_dict(self) -> dict[str, object]:
        """Return the policy as str, int, float, bool, list and dict, as a checkpoint or a TOML file holds it."""
        return to_document(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, object]) -> Self:
        """Return the policy that `to_dict` wrote. Keys left out have the defaults of `Policy`.

        With a key "preset" they have that preset's values, and rules and tables add to its own, as edits do in a text.

        Raises:
            PolicyError: an unknown key or a value that does not fit, by its key.
        """
        return cls._of(from_document(document))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to a TOML file. A crash leaves the old file or the new one, never a part.

        Raises:
            PolicyError: no path of a file in a folder that is there.

        Writes: the file, and one beside it that is renamed.
        """
        save(self, path, f"mezzo policy: {self}")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a policy from a TOML file.

        Raises:
            PolicyError: no such file, not TOML, an unknown key or a value that does not fit, by file and key.
        """
        return cls._of(load(path))

    def diff(self, other: PolicyLike) -> PolicyDiff:
        """Return what differs from another policy; false if nothing does, readable when printed."""
        return diff(self, as_policy(other))

    def check_modules(self, modules: Iterable[tuple[str, Sequence[str]]]) -> None:
        """Refuse, by a PolicyError, a model in which a required module rule matches nothing; `modules`: name and class names of each."""
        try:
            known = [(names_of((fqn,))[0], names_of(class_names)) for fqn, class_names in modules]
        except (TypeError, ValueError):
            raise PolicyError(
                f"check_modules was given {shown(modules)}; give (name, class names) of each module."
            ) from None
        for rule in self.modules:
            if rule.required and not any(rule.matches(*module) for module in known):
                text = write_module_rule(rule)
                raise PolicyError(
                    f"module rule '{text}': no module of the model has a name or class that matches '{rule.pattern}'."
                    f"{_nearest(rule.pattern, known)} A rule that may match nothing is written '?{text}'."
                )

    def why_engine(self, device_type: str, cache: CacheName = "region") -> EngineChoice:
        """Return which engine a region of this policy runs on, and why: see `policy.why_engine`. Syncs: no."""
        return why_engine(self, device_type, cache)

    def why(
        self,
        module: str | None,
        op: str | None = None,
        device: torch.device | str = "cpu",
        class_name: str | Sequence[str] = (),
    ) -> Why:
        """Say which rule decides the precision of a module, or of an op in it; readable when printed.

        Args:
            module: fully qualified name; None for code outside every module that has a rule, or, with a class_name, for any module of it.
            op: an op's name; None asks about the module itself.
            device: where it runs; op tables differ by device.
            class_name: the module's class, or the names of its class and the classes above it.

        Raises:
            PolicyError: unknown op, or what is no name.
            FormatError: no such device.

        Syncs: no; a policy whose compute is auto starts CUDA for a CUDA device that is there.
        """
        return why(self, module, op, as_device(device), class_name)


ALIKE = 0.5
"""Likeness of two words, of 1 for the same, from which one may be meant by the other."""


def _nearest(pattern: str, modules: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Name the module whose full name, last name or class is most like the pattern without its glob signs, or the first few."""
    core = pattern.strip("*?.").casefold()
    there = [f"'{fqn}' ({class_names[0]})" for fqn, class_names in modules if fqn and class_names]
    best, nearest = ALIKE, f" It has {listed(there)}." if there else ""
    for fqn, class_names in modules:
        own_class = class_names[0] if class_names else ""
        for word in (fqn, fqn.rpartition(".")[2], own_class):
            score = SequenceMatcher(None, core, word.casefold()).ratio()
            if score > best:
                best, nearest = score, f" The nearest is '{fqn}'" + (f" ({own_class})." if own_class else ".")
    return nearest


PRESETS: Mapping[str, Policy] = MappingProxyType({name: Policy._of(fields) for name, fields in PRESET_FIELDS.items()})
"""The named policies that every policy text starts from."""
PolicyLike = Policy | str | os.PathLike[str] | Mapping[str, object] | torch.dtype
"""What is taken for a policy: one, its text, the path of a .toml file, its plain form, or the dtype of low ops."""


def as_policy(value: PolicyLike) -> Policy:
    """Return the policy that is meant.

    Args:
        value: a policy, its text, a path that ends in ".toml", what `Policy.from_dict` takes, or a dtype: the
            preset that computes in it.

    Raises:
        PolicyError: none of these, or it cannot be read.
    """
    if isinstance(value, Policy):
        return value
    if isinstance(value, torch.dtype):
        return _read(dtype_name(value))
    if isinstance(value, os.PathLike) or (isinstance(value, str) and value.strip().endswith(".toml")):
        return Policy.load(value)
    if isinstance(value, str):
        try:
            return _read(value)
        except PolicyError:
            if kind := _kind_of_path(value):
                text = "a policy is a text such as 'bf16, output=fp32' or the path of a .toml file"
                raise PolicyError(f"{shown(value)} is {kind}, and {text}.") from None
            raise
    if isinstance(value, Mapping):
        return Policy.from_dict(value)
    got = repr(value) if value is None or isinstance(value, (int, float)) else type(value).__name__  # a batch is long
    raise PolicyError(
        f"a policy is a Policy, a text such as 'bf16, output=fp32', a .toml path, a dict of its fields or a dtype; got {got}."
    )


def _kind_of_path(text: str) -> str:
    """Say what a path stands for that is none of a policy; nothing of a text that is no path."""
    if os.path.exists(text):
        return "a folder" if os.path.isdir(text) else "a file whose name does not end in .toml"
    return "a path where nothing is" if os.sep in text and "=" not in text else ""


@functools.cache
def _read(text: str) -> Policy:
    """Read a text once: a region in a loop is given it at every step."""
    return Policy.parse(text)
