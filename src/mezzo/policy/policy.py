"""The policy: what precision everything has, as one frozen value."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from ..formats import LOW_DTYPES, dtype_name, native_support
from .answer import EngineChoice, PolicyDiff, Why
from .parts import CacheName, GuardConfig, ModuleRule, OpRules, ScalingConfig, TableName, check, check_known
from .spelling import check_kinds

Master = Literal["none", "split", "fp32", "kahan", "stochastic"]
"""How 16-bit weights keep updates that are smaller than their own spacing."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Policy:
    """What precision everything has: ops, modules, weights, gradients, moments, traffic, output.

    `str(policy)` is the short text that `Policy.parse` turns back into it.

    Attributes:
        compute: dtype of low ops; fp32 switches casting off; None lets the device decide (`resolve`).
        params: storage dtype of trainable weights that feed low ops.
        master: how 16-bit `params` keep small updates.
        grads: dtype gradients are accumulated in over micro-batches; None: the dtype of the weight.
        reduce: dtype of gradient traffic between ranks.
        state: dtype of optimizer moments.
        output: dtype of the root module's floating outputs; None leaves them.
        loss: dtype the loss must have when it reaches backward.
        ops: op table and edits; a table's name is accepted for short.
        modules: ordered module rules; a later rule wins.
        scaling: how the loss scale moves; None: no loss scaling.
        guard: what the step does about inf and NaN.

    Raises:
        PolicyError: a value that does not exist or contradicts another.
    """

    compute: torch.dtype | None = torch.float32
    params: torch.dtype = torch.float32
    master: Master = "none"
    grads: torch.dtype | None = None
    reduce: torch.dtype = torch.float32
    state: torch.dtype = torch.float32
    output: torch.dtype | None = None
    loss: torch.dtype = torch.float32
    ops: OpRules | TableName = field(default_factory=OpRules)
    modules: tuple[ModuleRule, ...] = ()
    scaling: ScalingConfig | None = None
    guard: GuardConfig = field(default_factory=GuardConfig)

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        if isinstance(self.ops, str):
            object.__setattr__(self, "ops", OpRules(table=self.ops))
        check_kinds(self)
        self._check_parts()
        if self.params in LOW_DTYPES:
            check(self.master != "none",
                  f"params={dtype_name(self.params)} with master=none loses small updates; "
                  "write master=split, fp32, kahan or stochastic, or params=fp32.")  # fmt: skip
        else:
            check(
                self.master == "none", f"master={self.master} needs 16-bit params; write params=bf16, or master=none."
            )

    def _check_parts(self) -> None:
        check(isinstance(self.ops, OpRules), f"ops={self.ops!r} must be OpRules, or the name of an op table.")
        check(isinstance(self.modules, tuple) and all(isinstance(rule, ModuleRule) for rule in self.modules),
              f"modules={self.modules!r} must be a tuple of ModuleRule.")  # fmt: skip
        check(self.scaling is None or isinstance(self.scaling, ScalingConfig),
              f"scaling={self.scaling!r} must be a ScalingConfig or None.")  # fmt: skip
        check(isinstance(self.guard, GuardConfig), f"guard={self.guard!r} must be a GuardConfig.")

    @property
    def op_rules(self) -> OpRules:
        """The op rules as a value, however they were written."""
        assert isinstance(self.ops, OpRules)
        return self.ops

    @property
    def is_low(self) -> bool:
        """Whether any op may run in 16 bit."""
        return self.compute is not torch.float32

    def replace(self, **changes: object) -> Policy:
        """Return a copy with some fields changed.

        Raises:
            PolicyError: unknown field, or the result contradicts itself.
        """
        for name in changes:
            check_known("policy field", name, self.__dataclass_fields__)
        return replace(self, **changes)  # type: ignore[arg-type]  # names are checked above

    def resolve(self, device: torch.device | str) -> Policy:
        """Return the policy with `compute` decided for a device.

        bf16 where the device has units for it, else fp16 with loss scaling where it has those, else fp32.
        A policy that names its compute dtype is returned as it is.

        Syncs: no; starts CUDA for a CUDA device.
        """
        if self.compute is not None:
            return self
        if native_support(device, torch.bfloat16).native:
            return replace(self, compute=torch.bfloat16)
        if native_support(device, torch.float16).native:
            return replace(self, compute=torch.float16, scaling=self.scaling or ScalingConfig())
        return replace(self, compute=torch.float32)

    @staticmethod
    def parse(text: str) -> Policy:
        """Return the policy that a text describes: a preset, then edits; a later edit wins.

        Args:
            text: "fp16, *.norm*=fp32, op:cumsum=low, output=fp32, scaling.init_scale=1024".

        Raises:
            PolicyError: an unknown word, with its position and the nearest valid spelling, or a contradiction.

        >>> Policy.parse("bf16, output=fp32").output
        torch.float32
        """
        from .grammar import parse

        return parse(text)

    def __str__(self) -> str:
        from .written import written

        return str(written(self))

    def __repr__(self) -> str:
        return f"Policy.parse({str(self)!r})"

    def to_dict(self) -> dict[str, object]:
        """Return the policy as str, int, float, bool, list and dict, as a checkpoint or a TOML file holds it."""
        from .document import to_document

        return to_document(self)

    @staticmethod
    def from_dict(document: Mapping[str, object]) -> Policy:
        """Return the policy that `to_dict` wrote. Keys left out have the defaults of `Policy`.

        Raises:
            PolicyError: an unknown key or a value that does not fit, by its key.
        """
        from .document import from_document

        return from_document(document)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the policy to a TOML file. A crash leaves the old file or the new one, never a part.

        Writes: the file, and one beside it that is renamed.
        """
        from .toml import save

        save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Policy:
        """Read a policy from a TOML file.

        Raises:
            PolicyError: no such file, not TOML, an unknown key or a value that does not fit, by file and key.
        """
        from .toml import load

        return load(path)

    def diff(self, other: Policy | str) -> PolicyDiff:
        """Return what differs from another policy; false if nothing does, readable when printed."""
        from .diff import diff
        from .grammar import as_policy

        return diff(self, as_policy(other))

    def module_rule(self, fqn: str, class_names: Sequence[str] = ()) -> ModuleRule | None:
        """Return the rule a module has itself: the last that matches its name or one of its classes, or None.

        Args:
            fqn: the module's fully qualified name; "" is the root.
            class_names: names of its class and the classes above it (`[c.__name__ for c in type(m).__mro__]`).
        """
        return next((rule for rule in reversed(self.modules) if rule.matches(fqn, class_names)), None)

    def check_modules(self, modules: Iterable[tuple[str, Sequence[str]]]) -> None:
        """Refuse a model in which a required module rule matches nothing.

        Args:
            modules: name and class names, as for `module_rule`, of every module.

        Raises:
            PolicyError: the pattern, and the nearest name or class that the model has.
        """
        from .coverage import check_modules

        check_modules(self, modules)

    def why_engine(self, device_type: str, cache: CacheName = "region") -> EngineChoice:
        """Return which engine a region of this policy runs on, and why: see `policy.engine.why_engine`. Syncs: no."""
        from .engine import why_engine

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
            module: fully qualified name; None for code outside every module that has a rule.
            op: an op's name; None asks about the module itself.
            device: where it runs; op tables differ by device.
            class_name: the module's class, or the names of its class and the classes above it.

        Raises:
            PolicyError: unknown op.

        Syncs: no; a policy whose compute is auto starts CUDA for a CUDA device that is there.
        """
        from .why import why

        return why(self, module, op, torch.device(device), class_name)
