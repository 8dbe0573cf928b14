"""The policy: what precision everything has, as one frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch

from ..errors import PolicyError, did_you_mean
from ..formats import LOW_DTYPES, dtype_name, native_support
from .rule import Rule

Master = Literal["none", "split", "fp32", "kahan", "stochastic"]
"""How 16-bit weights keep updates that are smaller than their own spacing."""
OnOverflow = Literal["skip", "retry", "demote"]
"""What a step with non-finite gradients does next."""
TableName = Literal["torch", "mezzo"]
MODULE_RULES = (Rule.LOW, Rule.FP32, Rule.FP32_LOW_OUT)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise PolicyError(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingConfig:
    """How the loss scale moves. Defaults are torch's, with a floor that torch lacks.

    Attributes:
        init_scale: first scale.
        growth_factor: multiplier after `growth_interval` clean steps in a row; > 1.
        backoff_factor: multiplier after a non-finite step; in (0, 1).
        growth_interval: clean steps before the scale grows; > 0.
        min_scale: floor; at the floor a non-finite step is an error.
        max_scale: ceiling of growth, None for the largest power of two in fp32.
        hysteresis: non-finite steps in a row that are tolerated before the scale backs off; 1 backs off at once.

    Raises:
        PolicyError: a value outside its range.

    Source: Micikevicius et al. 2018, section 3.2; defaults of torch.amp.GradScaler.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float | None = None
    hysteresis: int = 1

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        _check(math.isfinite(self.init_scale) and self.init_scale > 0,
               f"init_scale={self.init_scale} must be finite and positive.")  # fmt: skip
        _check(self.growth_factor > 1.0, f"growth_factor={self.growth_factor} must be > 1.0.")
        _check(0.0 < self.backoff_factor < 1.0, f"backoff_factor={self.backoff_factor} must be in (0, 1).")
        _check(self.growth_interval > 0, f"growth_interval={self.growth_interval} must be > 0.")
        _check(self.min_scale >= 0.0, f"min_scale={self.min_scale} must be >= 0.")
        _check(self.hysteresis >= 1, f"hysteresis={self.hysteresis} must be >= 1.")
        top = math.inf if self.max_scale is None else self.max_scale
        _check(self.min_scale <= self.init_scale <= top,
               f"init_scale={self.init_scale} must lie in [min_scale={self.min_scale}, max_scale={self.max_scale}].")  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardConfig:
    """What the step does about inf and NaN.

    Attributes:
        enabled: check every step, for every dtype.
        on_overflow: "skip" drops the step, "retry" asks for the same batch again at the smaller scale,
            "demote" gives the offending module an fp32 rule.
        patience: skipped steps in a row before the step raises; > 0.
        restore_buffers: give buffers written by the forward of a skipped step their old values back.
        check_every: invariants are checked in the first 3 steps and every this many steps; 0 never.

    Raises:
        PolicyError: a value outside its range.
    """

    enabled: bool = True
    on_overflow: OnOverflow = "skip"
    patience: int = 25
    restore_buffers: bool = True
    check_every: int = 1000

    def __post_init__(self) -> None:
        """Refuse values outside their ranges."""
        _check(self.on_overflow in get_args(OnOverflow),
               f"on_overflow={self.on_overflow!r} is unknown.{did_you_mean(str(self.on_overflow), get_args(OnOverflow))}")  # fmt: skip
        _check(self.patience > 0, f"patience={self.patience} must be > 0.")
        _check(self.check_every >= 0, f"check_every={self.check_every} must be >= 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleRule:
    """A rule for every module that a pattern names.

    Attributes:
        pattern: glob over the module's fully qualified name ("encoder.layer.*.norm"), or a class name ("LayerNorm").
        precision: `Rule.LOW`, `Rule.FP32`, `Rule.FP32_LOW_OUT`, or a dtype to compute in.
        required: a required pattern that matches no module is an error; presets carry optional ones.

    Raises:
        PolicyError: empty pattern, or a precision a module cannot have.
    """

    pattern: str
    precision: Rule | torch.dtype
    required: bool = True

    def __post_init__(self) -> None:
        """Refuse what no module can be given."""
        _check(bool(self.pattern), "a module rule needs a pattern: a name glob or a class name.")
        known = self.precision in (*MODULE_RULES, *LOW_DTYPES) if not isinstance(self.precision, str) else False
        _check(known, f"module rule '{self.pattern}={self.precision}': a module takes one of "
                      "low, fp32, fp32_low_out, fp16, bf16.")  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class OpRules:
    """Which op table is in force, and the edits to it.

    Attributes:
        table: "torch", exactly what the installed torch does, or "mezzo", one repaired table for every device.
        edits: (op name, rule) pairs; a later pair wins.

    Raises:
        PolicyError: unknown table.
    """

    table: TableName = "torch"
    edits: tuple[tuple[str, Rule], ...] = ()

    def __post_init__(self) -> None:
        """Refuse tables that do not exist."""
        _check(self.table in get_args(TableName),
               f"unknown op table {self.table!r}.{did_you_mean(str(self.table), get_args(TableName))}")  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What precision everything has: ops, modules, weights, gradients, moments, traffic, output.

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
        _check(self.master in get_args(Master),
               f"unknown master mode {self.master!r}.{did_you_mean(str(self.master), get_args(Master))}")  # fmt: skip
        for name in ("compute", "params", "grads", "reduce", "state", "output", "loss"):
            dtype = getattr(self, name)
            legal = dtype is None or dtype is torch.float32 or dtype in LOW_DTYPES
            _check(legal, f"{name}={dtype} is not a dtype of mixed precision; write fp32, fp16 or bf16.")
        if self.params in LOW_DTYPES:
            _check(self.master != "none",
                   f"params={dtype_name(self.params)} with master=none loses small updates; "
                   "write master=split, fp32, kahan or stochastic, or params=fp32.")  # fmt: skip
        else:
            _check(
                self.master == "none",
                f"master={self.master} needs 16-bit params; write params=bf16, or master=none.",
            )

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
            _check(name in self.__dataclass_fields__,
                   f"a policy has no field {name!r}.{did_you_mean(name, self.__dataclass_fields__)}")  # fmt: skip
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
