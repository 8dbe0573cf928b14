"""Which line of whose code an op was called from."""

from __future__ import annotations

import ast
import enum
import linecache
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from itertools import islice, takewhile
from pathlib import Path
from traceback import walk_stack
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.optim import optimizer as optimizer_hooks

from .records import Frame


class Owner(enum.Enum):
    """Whose code a file is."""

    TORCH = "torch"
    MEZZO = "mezzo"
    STDLIB = "stdlib"
    LIBRARY = "library"
    """An installed package, mezzo's own applications among them."""
    USER = "user"


_TORCH = str(Path(torch.__file__).parent)
_MEZZO = Path(__file__).parents[1]
_TRACER = str(Path(__file__).parent)
_STDLIB = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_ENGINE = Path(torch.autograd.graph.__file__).name, "_engine_run_backward"
_CALLS_HOOKS = "torch/autograd/graph.py", "torch/autograd/function.py"
_FETCH = "torch/utils/data/_utils/fetch.py"
_REPLAY = str(_MEZZO / "step" / "replay.py"), "_again"
_CHECKPOINT = torch.utils.checkpoint.__file__
_RELAYS = ("__torch_function__", "__torch_dispatch__")


@cache
def owner(filename: str) -> Owner:
    """Say whose code a file is, from where it lies.

    The user's code is what is neither torch, mezzo, the standard library nor an installed package.
    """
    if filename.startswith("<frozen"):
        return Owner.STDLIB
    if filename.startswith(_TORCH):
        return Owner.TORCH
    path = Path(filename)
    if _MEZZO in path.parents:
        inside = path.relative_to(_MEZZO).parts[0]
        return Owner.LIBRARY if inside in ("train", "bench") else Owner.MEZZO
    if "site-packages" in path.parts or "dist-packages" in path.parts:
        return Owner.LIBRARY
    return Owner.STDLIB if filename.startswith(_STDLIB) else Owner.USER


def _frame(frame: FrameType) -> Frame:
    code = frame.f_code
    return Frame(file=code.co_filename, line=frame.f_lineno, function=code.co_name)


def _stack(ending: str = "") -> Iterator[FrameType]:
    """Yield the frames on the Python stack above the one that asks, innermost first, of files whose paths end so."""
    return (f for f, _ in walk_stack(sys._getframe(2)) if f.f_code.co_filename.endswith(ending))


class Location(NamedTuple):
    """Where the running op was called from.

    Attributes:
        user: nearest frame of the user's code; inside backward only what backward itself called. A mode or tensor
            class of the user's that passes an op on is not what called it, unless nothing else did.
        library: nearest frame of an installed package when that is nearer than `user`.
        is_recompute: the op is part of a checkpoint's second forward.
    """

    user: Frame | None
    library: Frame | None
    is_recompute: bool


def locate(in_backward: bool) -> Location:
    """Walk the Python stack outwards from the running op to the nearest frames of the user's code and of a library, and return them.

    In a batch that is run again by a step, the user's line is that which called the model the first time.

    Args:
        in_backward: an autograd node is running, so the walk ends where the engine was entered: what called
            `backward()` did not call this op, and a worker thread's stack ends there by itself.
    """
    user = library = relay = None
    is_recompute = False
    for frame in _stack():
        filename = frame.f_code.co_filename
        kind = owner(filename)
        if kind is Owner.USER and frame.f_code.co_name in _RELAYS:
            relay = relay or _frame(frame)
        elif kind is Owner.USER:
            user = user or _frame(frame)
        elif kind is Owner.LIBRARY:
            library = library or (None if user else _frame(frame))
        elif kind is Owner.TORCH:
            if in_backward and frame.f_code.co_name == _ENGINE[1] and filename.endswith(_ENGINE[0]):
                break
            is_recompute = is_recompute or (in_backward and filename == _CHECKPOINT)
        elif (filename, frame.f_code.co_name) == _REPLAY:  # what took the step did not call this op
            user = user or relay or _first_caller(frame.f_locals.get("call"))
            break
        if user and not in_backward:
            break
    return Location(user or relay, library, is_recompute)


def _first_caller(call: Any) -> Frame | None:
    """Return the line of the user's that called the model when the batch ran first; None where that is not known."""
    lines = () if call is None else call.stack
    return next((Frame(file=f, line=n, function=name) for f, n, name in lines if owner(f) is Owner.USER), None)


def is_called_from(ending: str) -> bool:
    """Say whether a file whose path ends so is on the Python stack."""
    return any(_stack(ending))


def still_stepping(
    begun: list[torch.optim.Optimizer], starting: torch.optim.Optimizer | None = None
) -> list[torch.optim.Optimizer]:
    """Return those optimizers whose step, begun before that of the one that is starting, is on the Python stack: an error ended others. Host only."""
    stack = [f.f_locals.get("self") for f in _stack(optimizer_hooks.__file__)]
    return [o for o in begun if sum(o is one for one in stack) > (o is starting)]


def leave_step(stepping: list[torch.optim.Optimizer], optimizer: torch.optim.Optimizer) -> bool:
    """Take a step that ended off the list; say whether it was in none, as that of a subclass's base is in its own, and seen from its start."""
    is_known = optimizer in stepping
    while is_known and stepping.pop() is not optimizer:
        pass
    return is_known and not stepping


def is_backward_root() -> bool:
    """Say whether autograd is asking for ones to start a backward with."""
    return any(frame.f_code.co_name == "_make_grads" for frame in islice(_stack(), 9))


def functions_of(file: str) -> set[str]:
    """Return the names of the functions of a file that are on the Python stack."""
    return {f.f_code.co_name for f in _stack(file)}


def is_handed_by_autograd(tensor: Tensor) -> bool:
    """Say whether a tensor is an argument of the function that autograd calls: a hook, or the backward of the program's own. Host only."""
    inside = takewhile(lambda f: not f.f_code.co_filename.endswith(_CALLS_HOOKS), _stack())
    own = [f for f in inside if owner(f.f_code.co_filename) in (Owner.USER, Owner.LIBRARY)][-1:]
    names = ((f, name) for f in own for name in f.f_code.co_varnames[: f.f_code.co_argcount + 1])  # and *grads
    given = [f.f_locals.get(name) for f, name in names]
    return any(g is tensor for one in given for g in (one if isinstance(one, tuple) else (one,)))


def argument_of(ending: str, *names: str) -> float | None:
    """Return the first of some numbers that a function on the Python stack, of a file whose path ends so, was given; None if none was."""
    return next((float(f.f_locals[name]) for f in _stack(ending) for name in names if name in f.f_locals), None)


def sample_line() -> Frame | None:
    """Return the line by which the dataset of the running DataLoader hands out a sample; None where that is not the user's."""
    dataset = next((getattr(f.f_locals.get("self"), "dataset", None) for f in _stack(_FETCH)), None)
    while dataset is not None:
        for name in ("__getitem__", "__iter__"):
            code = getattr(getattr(type(dataset), name, None), "__code__", None)
            if code is not None and owner(code.co_filename) is Owner.USER:
                return Frame(file=code.co_filename, line=_last_handed_out(code), function=name)
        dataset = getattr(dataset, "dataset", None)  # of a subset
    return None


def _last_handed_out(code: CodeType) -> int:
    """Return the line of the last yield of a function, or of its last return."""
    own = {line for _, _, line in code.co_lines()}
    tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    ends = [n for n in ast.walk(tree) if isinstance(n, (ast.Yield, ast.YieldFrom, ast.Return)) and n.lineno in own]
    return max(((not isinstance(n, ast.Return), n.lineno) for n in ends), default=(False, code.co_firstlineno))[1]


def caller() -> tuple[Owner, str]:
    """Say whose code called the running op, and for which function where a mode of mezzo's made it of another.

    Frames of torch and of the tracer are passed over, and modes that only hand on what was called.
    """
    func, found, made_for = None, Owner.USER, ""
    for frame in _stack():
        file, is_relay = frame.f_code.co_filename, frame.f_code.co_name == _RELAYS[0]
        own, given = owner(file), frame.f_locals.get("func") if is_relay else None
        if file.startswith(_TRACER):
            func = func or given
        elif own is Owner.MEZZO and given is not None and given is func:
            found, made_for = Owner.USER, ""
        elif own is Owner.MEZZO:
            found, made_for = own, made_for or getattr(given, "__name__", "")
        elif own not in (Owner.TORCH, Owner.STDLIB):
            return (found, made_for) if found is Owner.MEZZO else (own, "")
    return found, made_for


def source_line(frame: Frame) -> str:
    """Return the text of the line a frame points at, stripped; empty where the source is not at hand."""
    return linecache.getline(frame.file, frame.line).strip()


def line_pairs(frame: Frame | None, library: Frame | None) -> list[tuple[str, str]]:
    """Return for a report the line to look at and, where that is another, the nearest one of a library, with their text."""
    lines = {"line": frame, "library": library if library != frame else None}
    return [(name, f"{f}   {source_line(f)}") for name, f in lines.items() if f is not None]


def short_line(frame: Frame | None) -> str:
    """Return a line as a table has room for it: the file's name and the number; empty for None."""
    return "" if frame is None else f"{Path(frame.file).name}:{frame.line}"
