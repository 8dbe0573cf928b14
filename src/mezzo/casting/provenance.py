"""Turns torch's bare dtype mismatch into a sentence that names op, module, arguments and the rule that mends it."""

from __future__ import annotations

import ast
import linecache
import re
import textwrap
from collections.abc import Iterable, Sequence
from types import FrameType, TracebackType

from torch import Tensor
from torch.nn import Module

from .._torch import own_buffers, own_parameters
from ..formats import describe
from ..policy.table import Row

_MISMATCH = re.compile(
    r"expected (scalar type|m1 and m2|mat1 and mat2|self and mat2|tensors? to have the same dtype|dtype)"
    r"|(must|should|to) (have|be) the same (d?type|scalar type)|same dtype|dtype mismatch"
    r"|should be the same|not implemented for '(Half|BFloat16)'|Promotion for|Found dtype|same type",
    re.IGNORECASE,
)


def is_mismatch(error: BaseException) -> bool:
    """Whether an error of torch is about dtypes that do not fit."""
    return isinstance(error, RuntimeError) and _MISMATCH.search(str(error)) is not None


def module_path(frames: Sequence[FrameType]) -> str | None:
    """Return the qualified name of the innermost module whose forward is running, outermost module as the root.

    Args:
        frames: from the outermost to the innermost.
    """
    running = [frame.f_locals["self"] for frame in frames if isinstance(frame.f_locals.get("self"), Module)]
    if not running:
        return None
    root, inner = running[0], running[-1]
    name = next((name for name, module in root.named_modules() if module is inner), "")
    return f"{name or 'the root'} ({type(inner).__name__})"


def _frames_of(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    found = []
    while traceback is not None:
        found.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return found


def _stack(innermost: FrameType | None) -> list[FrameType]:
    found: list[FrameType] = []
    while innermost is not None:
        found.append(innermost)
        innermost = innermost.f_back
    return found[::-1]


def _evaluate(node: ast.expr, frame: FrameType) -> object:
    """Look up a name or an attribute chain without running code of the user's."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _evaluate(node.value, frame)
        if isinstance(owner, Module):
            return (
                own_parameters(owner).get(node.attr)
                if node.attr in own_parameters(owner)
                else own_buffers(owner).get(node.attr)
            )
    return None


def _tensors_on_line(frame: FrameType, line: int) -> list[tuple[str, Tensor]]:
    source = textwrap.dedent(linecache.getline(frame.f_code.co_filename, line)).strip()
    try:
        tree = ast.parse(source if not source.endswith(":") else source + " pass")
    except SyntaxError:
        return []
    found: dict[str, Tensor] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            value = _evaluate(node, frame)
            if isinstance(value, Tensor):
                found[ast.unparse(node)] = value
    return list(found.items())


def _flat(values: Iterable[object]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _flat(value)
    return found


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def mismatch_message(error: RuntimeError, op: str, row: Row | None, values: Iterable[object]) -> str | None:
    """Return the sentence for a mismatch met by a ruled or unruled op, None where the error is another.

    Args:
        error: what torch raised.
        op: name of the op.
        row: the rule that was in force, None for none.
        values: the op's arguments as it received them.

    Syncs: no.
    """
    if not is_mismatch(error):
        return None
    got = ", ".join(describe(t) for t in _flat(values))
    path = module_path(_stack(_caller()))
    rule = f"its rule is {row.rule}" if row is not None else "it has no rule, so its inputs came as they were"
    missing = "not implemented for" in str(error)
    mend = (
        f"op:{op}=fp32 in the policy: it has no 16-bit kernel here"
        if missing
        else (f"op:{op}=promote (or =low, =fp32) in the policy so that its inputs agree")
    )
    return f"{op} got {got}{f' in module {path}' if path else ''}; {rule}. torch says: {_first_line(error)}\n  Write {mend}."


def _caller() -> FrameType | None:
    import sys

    return sys._getframe(2)


def traceback_message(error: BaseException, traceback: TracebackType | None) -> str | None:
    """Return the sentence for a mismatch that torch's own engine raised inside a region, None for other errors.

    Op, module and arguments are read from the frames of the traceback: nothing was recorded while the region ran.

    Syncs: no.
    """
    if not is_mismatch(error) or traceback is None:
        return None
    frames = _frames_of(traceback)
    frame, line = frames[-1]
    path = module_path([f for f, _ in frames])
    where = f"{frame.f_code.co_filename}:{line}"
    source = linecache.getline(frame.f_code.co_filename, line).strip()
    got = ", ".join(f"{name} {describe(t)}" for name, t in _tensors_on_line(frame, line)) or "tensors of several dtypes"
    return (
        f"`{source}` ({where}){f' in module {path}' if path else ''} got {got}. "
        f"torch says: {_first_line(error)}\n"
        "  Cast one of them with .to(other.dtype), or write op:NAME=promote in the policy so that the op's inputs agree."
    )
