"""Which rule decides a precision, and which of the two engines carries a policy out on a device.

Precedence, strongest first: `compute=fp32`, which switches casting off, then a module rule that makes the module fp32
(its region is switched off inside), then the op rules (later edits over earlier ones, edits over the table), then the
dtype of the module rule, then `compute`.
A module without a rule of its own has that of the nearest module around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch

from ..errors import listed, shown
from ..formats import as_device, dtype_name
from .fields import CacheName, ModuleRule, OpRules, PolicyFields, check, check_known, check_op, names_of
from .kinds import FP32_RULES, Rule
from .spelling import spell, write_module_rule, write_op_rule
from .table import ALIASES, OpRow, names_of_op, op_table
from .text import Written, written


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """One thing written about a module or an op.

    Attributes:
        text: the rule as it is spelled in a policy: "*.norm*=fp32", "op:softmax=fp32", "compute=bf16".
        written: where: "preset bf16", "edit 2", "default", "torch table, cuda".
        why: the reason a table row gives; empty for what a person wrote.
    """

    text: str
    written: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.written})" + (f": {self.why}" if self.why else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Why:
    """Which rule decides a precision, and which rules it overrides.

    Attributes:
        asked: what was asked about: "softmax in encoder.norm on cpu".
        policy: the policy's text; its edits count from 1.
        precision: what comes out: "bf16", "fp32", "fp32, result bf16", "widest input".
        winner: the rule that decides.
        overrides: the rules it beats, strongest first.
    """

    asked: str
    policy: str
    precision: str
    winner: Reason
    overrides: tuple[Reason, ...]

    def __str__(self) -> str:
        lines = [f"{self.asked}: {self.precision}", f"  because {self.winner}"]
        lines += [f"  over {reason}" for reason in self.overrides]
        return "\n".join([*lines, f"  policy: {self.policy}"])


def why(
    policy: PolicyFields, module: str | None, op: str | None, device: torch.device, class_name: str | Sequence[str]
) -> Why:
    """Say which rule decides; see `Policy.why`."""
    check(module is None or isinstance(module, str),
          f"why was asked about the module {shown(module)}; write its full name, or None.")  # fmt: skip
    text = written(policy)
    names = names_of(class_name)
    rules = _module_rules(policy, module or "", names) if module is not None or names else []
    around = _module_rules(policy, names_around(module)[0], ()) if module else []
    scope = _Scope(policy=policy, text=text, compute=_compute(policy, device), rules=rules, around=around)
    if op is None:
        reasons, precision = scope.reasons(), scope.precision()
    else:
        check_op(op)
        reasons, precision = _op_reasons(scope, op, device)
    named = "the root module" if module == "" else module
    where = f"a module of class {names[0]}" if module is None and names else named
    place = " in ".join(word for word in (op, where) if word is not None)
    return Why(
        asked=f"{place or 'code outside modules with a rule'} on {device.type}",
        policy=str(text),
        precision=precision,
        winner=reasons[0],
        overrides=tuple(reasons[1:]),
    )


def _compute(policy: PolicyFields, device: torch.device) -> torch.dtype | None:
    """Return the compute dtype on a device, None where it is auto and the device is not there to be asked."""
    if policy.compute is None and device.type == "cuda" and not torch.cuda.is_available():
        return None
    return policy.resolve(device).compute


def _module_rules(policy: PolicyFields, module: str, names: tuple[str, ...]) -> list[tuple[int, ModuleRule]]:
    """Return the rules of a module and of those around it, each with its index, strongest first."""
    places = ((module, names), *((around, ()) for around in names_around(module)))
    rules = list(enumerate(policy.modules))[::-1]
    return list(dict.fromkeys((i, rule) for place in places for i, rule in rules if rule.matches(*place)))


def names_around(module: str) -> list[str]:
    """Return the names of the modules around one, inner first, the root "" last; none of the root. Host only."""
    parts = module.split(".") if module else []
    return [".".join(parts[:i]) for i in reversed(range(len(parts)))]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scope:
    """What holds at one place of the model before ops are looked at."""

    policy: PolicyFields
    text: Written
    compute: torch.dtype | None
    rules: list[tuple[int, ModuleRule]]
    around: list[tuple[int, ModuleRule]]

    @property
    def is_off(self) -> bool:
        """Whether nothing is cast, whatever a rule says."""
        return self.compute is torch.float32

    def dtype(self, *, around: bool = False) -> torch.dtype | None:
        """Return the dtype that low ops have here, or in the module around; None: the device decides."""
        rules = self.around if around else self.rules
        rule = rules[0][1].precision if rules and not self.is_off else Rule.LOW
        return rule if isinstance(rule, torch.dtype) else torch.float32 if rule in FP32_RULES else self.compute

    def precision(self) -> str:
        is_low_out = bool(self.rules) and self.rules[0][1].precision is Rule.FP32_LOW_OUT
        low = self.dtype(around=is_low_out)
        return f"fp32, result {_name(low)}" if is_low_out and low is not torch.float32 else _name(low)

    def reasons(self) -> list[Reason]:
        rules = [Reason(text=write_module_rule(r), written=self.text.where(("module", i))) for i, r in self.rules]
        field = f"compute={spell('compute', self.policy.compute)}"
        compute = Reason(text=field, written=self.text.where(("compute", 0)))
        return [compute, *rules] if self.is_off else [*rules, compute]


def _name(dtype: torch.dtype | None) -> str:
    return "decided by the device" if dtype is None else dtype_name(dtype)


def _op_reasons(scope: _Scope, op: str, device: torch.device) -> tuple[list[Reason], str]:
    rules, row = scope.policy.op_rules, op_table(scope.policy.op_rules.table, device.type).get(ALIASES.get(op, op))
    edits = [
        (rule, Reason(text=f"op:{write_op_rule(name, rule)}", written=scope.text.where(("op", i))))
        for i, (name, rule) in reversed(list(enumerate(rules.edits)))
        if ALIASES.get(name, name) == ALIASES.get(op, op)
    ]
    source = f"{rules.table} table, {device.type}"
    if row is not None:
        edits.append((row.rule, Reason(text=write_op_rule(row.op, row.rule), written=source, why=row.reason)))
    reasons = [reason for _, reason in edits]
    if scope.dtype() is torch.float32:
        return [scope.reasons()[0], *reasons], "fp32"
    if not edits:
        return [Reason(text=write_op_rule(op, Rule.AS_IS), written=source, why="the table has no row for it")], _AS_IS
    return reasons, _op_precision(edits[0][0], _name(scope.dtype()), row)


_AS_IS = "the dtype of its inputs"


def _op_precision(rule: Rule, low: str, row: OpRow | None) -> str:
    if rule is Rule.FORBID:
        return f"refused; write {row.instead}" if row is not None and row.instead else "refused"
    return {
        Rule.LOW: low,
        Rule.FP32: "fp32",
        Rule.FP32_LOW_OUT: f"fp32, result {low}",
        Rule.PROMOTE: "the widest dtype among its inputs",
        Rule.AS_IS: _AS_IS,
    }[rule]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """The engine of a region on one device.

    Attributes:
        engine: "dispatcher", torch's own autocast in C++, or "mode", the complete interceptor.
        reason: why.
    """

    engine: Literal["dispatcher", "mode"]
    reason: str

    def __str__(self) -> str:
        return f"{self.engine}: {self.reason}"


def why_engine(policy: PolicyFields, device_type: str, cache: CacheName = "region") -> EngineChoice:
    """Choose the engine for a policy on a device.

    torch's dispatcher carries the policy out where the table with its edits gives every op the rule that the
    installed dispatcher gives it; everything else needs the function mode.

    Args:
        policy: its `ops` decide.
        device_type: cpu, cuda, mps, xpu, or another device torch can autocast on.
        cache: "persistent" needs the function mode, since torch's own cache ends with the region.

    Raises:
        FormatError: no such device.
        PolicyError: no such cache.

    Syncs: no.
    """
    device_type = as_device(device_type).type
    check_known("cache", cache, get_args(CacheName))
    if cache == "persistent":
        return EngineChoice(engine="mode", reason="cache='persistent' keeps casts beyond the region")
    differing = _differing(policy.op_rules, device_type)
    if not differing:
        return EngineChoice(engine="dispatcher", reason=f"every op has the rule torch gives it on {device_type}")
    reason = f"{len(differing)} ops have another rule than torch's on {device_type}: {listed(differing, 4)}"
    return EngineChoice(engine="mode", reason=reason)


@lru_cache
def _differing(ops: OpRules, device_type: str) -> tuple[str, ...]:
    wanted, have = _rules(ops, device_type), _rules(OpRules(), device_type)
    return tuple(sorted(op for op in wanted.keys() | have.keys() if wanted.get(op) != have.get(op)))


def _rules(ops: OpRules, device_type: str) -> dict[str, Rule]:
    rules = {op: row.rule for op, row in op_table(ops.table, device_type).items()}
    rules |= {name: rule for op, rule in ops.edits for name in names_of_op(op)}
    return {op: rule for op, rule in rules.items() if rule is not Rule.AS_IS}
