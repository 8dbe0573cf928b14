"""Which of the two engines carries a policy out on a device, and why."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ..errors import listed
from .fields import CacheName, OpRules, PolicyFields
from .op_rule import Rule
from .table import ALIASES, op_table

EngineName = Literal["dispatcher", "mode"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """The engine of a region on one device.

    Attributes:
        engine: "dispatcher", torch's own autocast in C++, or "mode", the complete interceptor.
        reason: why.
    """

    engine: EngineName
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

    Syncs: no.
    """
    if cache == "persistent":
        return EngineChoice(engine="mode", reason="cache='persistent' keeps casts beyond the region")
    differing = _differing(policy.op_rules, device_type)
    if not differing:
        return EngineChoice(engine="dispatcher", reason=f"every op has the rule torch gives it on {device_type}")
    return EngineChoice(
        engine="mode",
        reason=f"{len(differing)} ops have another rule than torch's on {device_type}: {listed(differing, 4)}",
    )


@lru_cache
def _differing(ops: OpRules, device_type: str) -> tuple[str, ...]:
    wanted, have = _rules(ops, device_type), _rules(OpRules(), device_type)
    return tuple(sorted(op for op in wanted.keys() | have.keys() if wanted.get(op) != have.get(op)))


def _rules(ops: OpRules, device_type: str) -> dict[str, Rule]:
    rules = {op: row.rule for op, row in op_table(ops.table, device_type).items()}
    rules |= {ALIASES.get(op, op): rule for op, rule in ops.edits}
    return {op: rule for op, rule in rules.items() if rule is not Rule.AS_IS}
