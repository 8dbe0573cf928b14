"""What a policy answers when it is asked: why a precision is chosen, and how two policies differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EngineName = Literal["dispatcher", "mode"]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One difference between two policies.

    Attributes:
        what: the field, "op rule" or "module rule".
        left: as it is spelled in the first policy; empty where that has nothing.
        right: as it is spelled in the second.
    """

    what: str
    left: str
    right: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyDiff:
    """The differences between two policies; false if they are equal.

    Attributes:
        left: text of the first.
        right: text of the second.
        changes: fields first, then op rules and module rules in their order.
    """

    left: str
    right: str
    changes: tuple[Change, ...]

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        if not self.changes:
            return f"no difference: {self.left}"
        rows = [(change.what, change.left or "-", change.right or "-") for change in self.changes]
        what, left = (max(len(row[i]) for row in rows) for i in (0, 1))
        lines = [f"{row[0]:<{what}}  {row[1]:<{left}}  {row[2]}" for row in rows]
        return "\n".join([f"left:  {self.left}", f"right: {self.right}", *lines])


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
