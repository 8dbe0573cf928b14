"""The fields of a policy as a frozen value, and what they hold: loss scale, guard, rules for modules and for ops."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal, TypeVar, cast

import torch

from ..errors import FormatError, PolicyError, did_you_mean, shown
from ..formats import FP8, LOW_DTYPES, SMALLEST, as_device, dtype_name, is_number, native_support, parse_dtype
from .kinds import Rule, by_name, check_kinds
from .table import TableName, known_ops

Master = Literal["none", "split", "fp32", "kahan", "stochastic"]
"""How 16-bit weights keep updates that are smaller than their own spacing."""
OnOverflow = Literal["skip", "retry", "demote"]
"""What a step with non-finite gradients does next."""
CacheName = Literal["region", "persistent"]
MODULE_RULES = (Rule.LOW, Rule.FP32, Rule.FP32_LOW_OUT)
"""The op rules that a whole module can be given."""


def check(condition: bool, message: str) -> None:
    """Raise a `PolicyError` with the message unless the condition holds."""
    if not condition:
        raise PolicyError(message)


def named_dtype(word: str) -> torch.dtype | None:
    """Return the dtype that a word names; None where it names none."""
    try:
        return parse_dtype(word)
    except FormatError:
        return None


def check_known(what: str, word: str, known: Collection[str]) -> None:
    """Raise a `PolicyError` that names the nearest known word unless the word is one of them."""
    check(isinstance(word, str), f"the {what} {shown(word)} must be text.")
    if word not in known:
        raise PolicyError(f"unknown {what} {word!r}.{did_you_mean(word, known)}")


@by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingConfig:
    """How the loss scale moves. Defaults are torch's, with a floor that torch lacks.

    Attributes:
        init_scale: first scale.
        growth_factor: multiplier after `growth_interval` clean steps in a row; 1 never grows.
        backoff_factor: multiplier after a non-finite step; in (0, 1).
        growth_interval: clean steps before the scale grows; > 0.
        min_scale: floor; at the floor a non-finite step is an error.
        max_scale: ceiling of growth; None: as far as fp32 goes.
        hysteresis: non-finite steps in a row that are tolerated before the scale backs off; 1 backs off at once.
        dynamic: false keeps the scale at `init_scale`; non-finite steps are skipped all the same.

    Raises:
        PolicyError: a value of the wrong type or outside its range.

    Source: Micikevicius et al. 2018, section 3.2; defaults of torch.amp.GradScaler.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float | None = None
    hysteresis: int = 1
    dynamic: bool = True

    @classmethod
    def fixed(cls, scale: float) -> ScalingConfig:
        """Return the settings of a scale that never moves, and has no floor to reach."""
        return cls(init_scale=scale, min_scale=0.0, dynamic=False)

    def __post_init__(self) -> None:
        check_kinds(self)
        in_fp32 = " in fp32, which holds the loss scale" if 0 < self.init_scale < math.inf else ""
        check(
            is_number(self.init_scale, SMALLEST), f"init_scale={self.init_scale} must be finite and positive{in_fp32}."
        )
        check(1.0 <= self.growth_factor < math.inf, f"growth_factor={self.growth_factor} must be finite and >= 1.0.")
        check(0.0 < self.backoff_factor < 1.0, f"backoff_factor={self.backoff_factor} must be in (0, 1).")
        check(self.growth_interval > 0, f"growth_interval={self.growth_interval} must be > 0.")
        check(self.min_scale >= 0.0, f"min_scale={self.min_scale} must be >= 0.")
        check(self.hysteresis >= 1, f"hysteresis={self.hysteresis} must be >= 1.")
        top = math.inf if self.max_scale is None else self.max_scale
        check(top > 0, f"max_scale={self.max_scale} must be > 0.")
        check(not self.dynamic or self.min_scale <= self.init_scale <= top,
              f"init_scale={self.init_scale} must lie in [min_scale={self.min_scale}, max_scale={self.max_scale}].")  # fmt: skip


@by_name
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
        PolicyError: a value of the wrong type or outside its range.
    """

    enabled: bool = True
    on_overflow: OnOverflow = "skip"
    patience: int = 25
    restore_buffers: bool = True
    check_every: int = 1000

    def __post_init__(self) -> None:
        check_kinds(self)
        check(self.patience > 0, f"patience={self.patience} must be > 0.")
        check(self.check_every >= 0, f"check_every={self.check_every} must be >= 0.")


@by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleRule:
    """A rule for every module that a pattern names.

    Attributes:
        pattern: glob over the module's fully qualified name ("encoder.layer.*.norm"), or a class name ("LayerNorm").
        precision: `Rule.LOW`, `Rule.FP32`, `Rule.FP32_LOW_OUT`, or a dtype to compute in (fp32 is `Rule.FP32`).
        required: a required pattern that matches no module is an error; presets carry optional ones.

    Raises:
        PolicyError: empty or unprintable pattern, or a precision a module cannot have.
    """

    pattern: str
    precision: Rule | torch.dtype
    required: bool = True

    def __post_init__(self) -> None:
        check(isinstance(self.pattern, str) and bool(self.pattern),
              f"a module rule needs a pattern, a name glob or a class name; got {shown(self.pattern)}.")  # fmt: skip
        check(self.pattern.isprintable(),
              f"the pattern {self.pattern!r} has a line break or another unprintable character; write '?' for it.")  # fmt: skip
        if self.precision is torch.float32:
            object.__setattr__(self, "precision", Rule.FP32)
        given = self.precision if isinstance(self.precision, Rule | str) else shown(self.precision)
        text = f"module rule '{self.pattern}={given}'"
        check(not isinstance(self.precision, str), f"{text}: '{given}' is text; write a Rule or a torch dtype.")
        check(isinstance(self.precision, Rule | torch.dtype) and self.precision in (*MODULE_RULES, *LOW_DTYPES),
              f"{text}: a module takes one of low, fp32, fp32_low_out, fp16, bf16.")  # fmt: skip
        check(isinstance(self.required, bool), f"required={shown(self.required)} must be true or false.")

    def matches(self, fqn: str, class_names: Iterable[str] = ()) -> bool:
        """Whether the pattern names a module, by its qualified name, "" of the root, or a class of its `__mro__`; upper and lower case differ."""
        names = class_names if isinstance(class_names, tuple) else names_of(class_names)
        try:
            return any(fnmatchcase(name, self.pattern) for name in (fqn, *names))
        except TypeError:
            check(isinstance(fqn, str), f"fqn={shown(fqn)} must be the full name of a module.")
            names_of(names)
            raise


def names_of(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return one name, or several, as a tuple; a PolicyError for what is neither."""
    try:
        found = (names,) if isinstance(names, str) else tuple(names)
    except TypeError:
        found = (cast(str, names),)
    check(all(isinstance(name, str) for name in found), f"class_name={shown(names)} must be the name of a class, or several.")  # fmt: skip
    return found


@by_name
@dataclass(frozen=True, kw_only=True, slots=True)
class OpRules:
    """Which op table is in force, and the edits to it.

    Attributes:
        table: "torch", exactly what the installed torch does, or "mezzo", one repaired table for every device.
        edits: (op name, rule) pairs; a later pair wins.

    Raises:
        PolicyError: unknown table or op, or a rule that is none.
    """

    table: TableName = "torch"
    edits: tuple[tuple[str, Rule], ...] = ()

    def __post_init__(self) -> None:
        check_kinds(self)
        check(isinstance(self.edits, tuple) and all(isinstance(edit, tuple) and len(edit) == 2 for edit in self.edits),
              f"edits={shown(self.edits)} must be a tuple of (op, Rule).")  # fmt: skip
        for op, rule in self.edits:
            check_op(op)
            check(
                isinstance(rule, Rule),
                f"op rule '{op}={rule if isinstance(rule, str) else shown(rule)}': {shown(rule)} is not a Rule: {', '.join(map(str, Rule))}.",
            )


def check_op(op: str) -> None:
    """Raise a `PolicyError` that names the nearest op unless a policy may have a rule for the op."""
    own = isinstance(op, str) and "::" in op
    check(not own, f"unknown op {shown(op)}: rules are for torch's ops. An op of your own is cast in every region by what "
          f"torch.library.register_autocast({shown(op)}, device, dtype) says.")  # fmt: skip
    check_known("op", op, known_ops())


_Fields = TypeVar("_Fields", bound="PolicyFields")


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyFields:
    """The fields of a `Policy`, which says what each means, and what follows from them alone.

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
        if isinstance(self.ops, str):
            object.__setattr__(self, "ops", OpRules(table=self.ops))
        check_kinds(self)
        check(isinstance(self.ops, OpRules), f"ops={shown(self.ops)} must be OpRules, or the name of an op table.")
        check(isinstance(self.modules, tuple) and all(isinstance(rule, ModuleRule) for rule in self.modules),
              f"modules={shown(self.modules)} must be a tuple of ModuleRule.")  # fmt: skip
        check(self.scaling is None or isinstance(self.scaling, ScalingConfig),
              f"scaling={shown(self.scaling)} must be a ScalingConfig or None.")  # fmt: skip
        check(isinstance(self.guard, GuardConfig), f"guard={shown(self.guard)} must be a GuardConfig.")
        if self.loss is torch.float16 and self.scaling is not None and self.scaling.dynamic:
            # The gradient of the loss is the scale, and fp16 holds no power of two above this.
            first = max(32768.0, self.scaling.min_scale)
            if self.scaling.init_scale >= 65536.0 > first:
                object.__setattr__(self, "scaling", replace(self.scaling, init_scale=first))
        check(self.state is not torch.float16, "state=fp16 cannot hold moments; write state=bf16 or state=fp32.")
        if self.params in LOW_DTYPES:
            is_fp16 = self.params is torch.float16
            check(self.master != "none",
                  f"params={dtype_name(self.params)} with master=none loses small updates; "
                  f"write master={'' if is_fp16 else 'split, '}fp32, kahan or stochastic, or params=fp32.")  # fmt: skip
            check(not (is_fp16 and self.master == "split"),
                  "params=fp16 with master=split would be no fp32 value, whose exponent fp16 has not; write master=fp32, "
                  "kahan or stochastic, or params=bf16.")  # fmt: skip
        else:
            check(
                self.master == "none", f"master={self.master} needs 16-bit params; write params=bf16, or master=none."
            )
        check(not (self.reduce is FP8 and self.scaling is not None and self.scaling.dynamic),
              "reduce=fp8 sends in one step what rounding took away in the one before, which a loss scale that moves would make "
              "wrong; write scaling=none, as bf16 needs it, or reduce=bf16.")  # fmt: skip

    @property
    def op_rules(self) -> OpRules:
        """The op rules as a value, however they were written."""
        assert isinstance(self.ops, OpRules)
        return self.ops

    @property
    def is_low(self) -> bool:
        """Whether any op may run in 16 bit."""
        return self.compute is not torch.float32

    def replace(self: _Fields, **changes: object) -> _Fields:
        """Return a copy with some fields changed.

        Raises:
            PolicyError: unknown field, or the result contradicts itself.
        """
        for name in changes:
            check_known("policy field", name, self.__dataclass_fields__)
        return replace(self, **changes)  # type: ignore[arg-type]  # names are checked above

    def resolve(self: _Fields, device: torch.device | str) -> _Fields:
        """Return the policy with `compute` decided for a device.

        bf16 where the device has units for it, else fp16 with loss scaling where it has those, else fp32.
        A policy that names its compute dtype is returned as it is.

        Raises:
            FormatError: no such device.

        Syncs: no; starts CUDA for a CUDA device.
        """
        device = as_device(device)
        if self.compute is not None:
            return self
        if native_support(device, torch.bfloat16).native:
            return replace(self, compute=torch.bfloat16)
        if native_support(device, torch.float16).native:
            return replace(self, compute=torch.float16, scaling=self.scaling or ScalingConfig())
        return replace(self, compute=torch.float32)

    def module_rule(self, fqn: str, class_names: Sequence[str] = ()) -> ModuleRule | None:
        """Return the rule a module has itself: the last that `matches` it, or None."""
        classes = names_of(class_names)
        return next((rule for rule in reversed(self.modules) if rule.matches(fqn, classes)), None)
