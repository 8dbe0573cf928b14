"""Turns torch's bare dtype mismatch into a sentence that names op, module, arguments and the rule that fixes it."""

from __future__ import annotations

import ast
import itertools
import linecache
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dis import get_instructions
from inspect import CO_OPTIMIZED
from traceback import walk_stack
from types import FrameType, ModuleType, TracebackType
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.nn import Module

from .._torch import own_buffers, own_modules, own_parameters
from ..errors import first_line
from ..formats import LOW_DTYPES, describe
from ..policy import OpRow, Rule, known_ops, op_table

_MISMATCH = re.compile(
    r"(expected|expect) .*(scalar type|m1 and m2|mat1 and mat2|self and mat2|same dtype|dtype|(Half|BFloat16|Float|Double)\b)"
    r"|(must|should|to) (have|be) the same|same (data )?(dtype|type)|(dtypes?|should) (mis)?match|did not match"
    r"|different dtypes|Promotion for|Found dtype|Type promoting not supported|all inputs must share|autocast::prioritize",
    re.IGNORECASE,
)
_NO_KERNEL = re.compile(
    r"not implemented for '(Half|BFloat16)'|Low precision dtypes not supported|Unsupported dtype (Half|BFloat16)"
    r"|could not create a primitive|(?<!same dtype, )but got (Half|BFloat16)\b|tensor with .* dimensions of float"
)
_TOO_LARGE = re.compile(r"cannot be converted to type .*(Half|BFloat16).* without overflow")
_SIMPLEX = re.compile(
    r"^Expected (parameter|value argument) .*Simplex\(\)(?!.*\bnan\b).*dtype=torch\.b?float16", re.DOTALL
)
_LOW = re.compile(r"\b(Half|BFloat16)\b")
_ADVICE = (
    (
        _TOO_LARGE,
        (
            "The number does not fit: fp16 holds at most 65504, bf16 3.39e38, a little less than fp32. Write torch.finfo(x.dtype).min "
            "or .max of the tensor that is filled, or x.float(); where the line is a library's, module:NAME=fp32 in the policy."
        ),
    ),
    (
        # not among what a kernel would have taken
        re.compile(r"([Gg]ot|found|scalar type|[Ii]nput type|!=)[^.]*\b[Dd]ouble\b"),
        "Cast what is fp64 to fp32, x.float(): no rule casts fp64, as in torch; model.float() does for weights.",
    ),
    (
        re.compile("autocast::prioritize"),
        "Here torch promotes nothing but fp32 and the region's own dtype: write x.to(torch.get_autocast_dtype(x.device.type)) for the other.",
    ),
)
"""What to write instead, whatever op it was."""
_OF_A_NORM = "No kernel takes its input, weights and statistics in these dtypes: write model.float(), before mezzo.prepare where the model is prepared."
_OF_A_CUSTOM_OP = "GeneratedBackwardFor_"  # torch.library.register_autograd names it so
_ROOT = "the root"
_IN_FP32 = (
    "In 16 bit the sum of probabilities is not 1 within the 1e-6 that it asks for: hand it logits=x.float(), inside of "
    "`with torch.autocast(x.device.type, enabled=False):`."
)
_DISTRIBUTIONS = os.path.join("torch", "distributions")
_NO_NUMPY = re.compile(r"Got unsupported ScalarType \w+$")
_RELAYS_OF_TORCH = (
    "_tensor.py nn/modules/module.py overrides.py _ops.py autograd/function.py utils/_contextlib.py _dynamo".split()
)
_RELAYS = (
    os.path.join(os.path.dirname(os.path.dirname(__file__)), ""),  # mezzo itself
    *[os.path.join(os.path.dirname(torch.__file__), os.path.normpath(file)) for file in _RELAYS_OF_TORCH],
)
"""Files whose frames only pass on what somebody else called."""
_DTYPE = re.compile(r"dtype|data type|scalar type|Half|BFloat16|Float|primitive", re.IGNORECASE)
_INTEGER = re.compile(r"\b(Long|Int|Byte|Bool)\b")  # an index or a class that is no integer, whatever a region casts
_OPERATORS = {
    ast.MatMult: "matmul", ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow",
    ast.Mod: "remainder", ast.FloorDiv: "floor_divide",
}  # fmt: skip


def is_mismatch(error: BaseException) -> TypeGuard[RuntimeError]:
    """Whether an error of torch is about dtypes that do not fit, or that no kernel takes, or a number too large for one."""
    text = str(error)
    if not isinstance(error, RuntimeError) or _DTYPE.search(text) is None or _INTEGER.search(text):
        return False
    return any(words.search(text) for words in (_MISMATCH, _NO_KERNEL, _TOO_LARGE))


def _foreign_fix(error: BaseException) -> str | None:
    """Return what to write where torch.distributions refused 16-bit probabilities, whose rounded sum is not 1, or numpy a dtype that it lacks."""
    if isinstance(error, TypeError) and _NO_NUMPY.search(str(error)):
        return "numpy has no such dtype: write x.float().numpy(), or x.float() in what reads it."
    return _IN_FP32 if isinstance(error, ValueError) and _SIMPLEX.search(str(error)) else None


def _fix(error: BaseException, op: str | None, values: Iterable[object], *, casts: bool = True) -> str:
    said = str(error)
    if "all inputs must share" in said:  # and which dtypes came is not said
        said += f"; got {', '.join(str(t.dtype) for t in _flat(values))}".replace("torch.float64", "Double")
    fitting = [advice for words, advice in _ADVICE if words.search(said)]
    if fitting or op in ("batch_norm", "instance_norm"):
        return [*fitting, _OF_A_NORM][0]
    if op is not None and (op.endswith("_") or op == "__setitem__"):
        wide = "make that as wide, target.to(source.dtype), or " if op.endswith(("_add_", "_reduce_")) else ""
        return f"An op in place keeps the dtype of what it writes into: {wide}cast what is written, source.to(target.dtype)."
    is_missing = _NO_KERNEL.search(said) is not None
    if op not in known_ops() or not casts:
        return f"Cast its inputs{' to fp32, x.float()' if is_missing else ' to one dtype, x.to(other.dtype)'}."
    if is_missing:
        return f"Write op:{op}=fp32 in the policy: it has no 16-bit kernel here."
    row = op_table("torch", "cpu").get(op)
    if row is not None and row.rule is Rule.LOW and _LOW.search(said):
        return (
            f"A region casts {op} always, so none was on around this call: cast there too, x.to(weight.dtype), or keep the weights of "
            "the module that is called there in fp32 by a rule of the policy, module:NAME=fp32."
        )
    return f"Write op:{op}=promote (or =low, =fp32) in the policy so that its inputs agree."


def module_path(frames: Sequence[FrameType]) -> str | None:
    """Return the qualified name of the innermost module whose forward is running, by frames from the outermost to the innermost: that is the root."""
    running = [frame.f_locals["self"] for frame in frames if isinstance(frame.f_locals.get("self"), Module)]
    if not running:
        return None
    inner = running[-1]
    name = next((name for root in running for name, module in root.named_modules() if module is inner), "")
    return f"{name or _ROOT} ({type(inner).__name__})"


def _frames_of(traceback: TracebackType) -> list[tuple[FrameType, int, int]]:
    """Return all frames with line and instruction, from the outermost on, also those in which the error has not arrived yet."""
    outside = list(walk_stack(traceback.tb_frame))[:0:-1]
    found = [(frame, line, frame.f_lasti) for frame, line in outside]
    inside: TracebackType | None = traceback
    while inside is not None:
        found.append((inside.tb_frame, inside.tb_lineno, inside.tb_lasti))
        inside = inside.tb_next
    return found


def _calling(frames: Sequence[tuple[FrameType, int, int]]) -> Sequence[tuple[FrameType, int, int]]:
    """Return frames up to the line that called the op, without what of mezzo's and torch's only passes calls on."""
    last = next((i for i in reversed(range(len(frames))) if not frames[i][0].f_code.co_filename.startswith(_RELAYS)), 0)
    return frames[: last + 1]


def _evaluate(node: ast.expr, frame: FrameType) -> object:
    """Look up a name or an attribute chain without running code of the user's."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _evaluate(node.value, frame)
        if isinstance(owner, ModuleType):
            return getattr(owner, node.attr, None)
        if isinstance(owner, Module):
            return {**own_parameters(owner), **own_buffers(owner), **own_modules(owner)}.get(node.attr)
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


def mismatch_message(error: RuntimeError, op: str, row: OpRow | None, values: Iterable[object]) -> str | None:
    """Return the sentence for a mismatch met by a ruled or unruled op, None where the error is another; of values as the op received them. Syncs: no."""
    if not is_mismatch(error):
        return None
    got = ", ".join(describe(t) for t in _flat(values))
    path = module_path([frame for frame, _ in walk_stack(sys._getframe())][::-1])
    rule = f"its rule is {row.rule}" if row is not None else "it has no rule, so its inputs came as they were"
    where = f" in module {path}" if path else ""
    return f"{op} got {got}{where}; {rule}. torch says: {first_line(error)}.\n  {_fix(error, op, values)}"


def traceback_message(error: BaseException, traceback: TracebackType | None, *, casts: bool) -> str | None:
    """Return the sentence for a mismatch that torch's own engine raised inside a region, None for other errors. Syncs: no.

    Op, module and arguments are read from the frames of the traceback: nothing was recorded while the region ran. Where it `casts` nothing, no
    rule of an op would help.
    """
    fix = _foreign_fix(error)
    if traceback is None or not (is_mismatch(error) or fix):
        return None
    frames = _frames_of(traceback)
    path = module_path([f for f, _, _ in frames])
    where = f"in module {path}" if path else ""
    if fix is None:
        calling = _calling(frames)
        ops = [_op_at(frame, instruction) for frame, _, instruction in frames[len(calling) - 1 :]]
        op = next((op for op in ops[::-1] if op in known_ops()), ops[0])
        fix = _fix(error, op, variables_of(calling[-1][0]).values(), casts=casts)
        name = "NAME" if path is None or path.startswith(_ROOT) else path.partition(" ")[0]
        return _sentence(error, calling, where, fix.replace("module:NAME", f"module:{name}"))
    inside = next((i for i, (f, _, _) in enumerate(frames) if _DISTRIBUTIONS in f.f_code.co_filename), None)
    return _sentence(error, _calling(frames[:inside]), where, fix)


def variables_of(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a running function, whose frame is left without the copy that `f_locals` keeps in it before Python 3.13: it outlives `del`.

    Python 3.13.0 and 3.13.1 crash (gh-128396) at one of a comprehension that a function inside of it reads too: what such functions read is left out there.
    """
    kept, code = frame.f_locals, frame.f_code
    if (3, 13) <= sys.version_info < (3, 13, 2) and code.co_flags & CO_OPTIMIZED:
        of_comprehensions = {one.argval for one in get_instructions(code) if one.opname == "LOAD_FAST_AND_CLEAR"}
        shared = of_comprehensions & {*code.co_cellvars}
        names = *code.co_varnames, *code.co_cellvars, *code.co_freevars
        return {name: kept[name] for name in names if name not in shared and name in kept}
    found = dict(kept)
    is_copy = sys.version_info < (3, 13) and code.co_flags & CO_OPTIMIZED
    if is_copy and sys.getrefcount(kept) == 3:  # else it is another's too
        kept.clear()
    return found


def backward_message(error: BaseException) -> str | None:
    """Return the sentence for a mismatch that the backward of a user's autograd.Function met, None for other errors. Syncs: no."""
    if error.__traceback__ is None or not is_mismatch(error):
        return None
    frames = _calling(_frames_of(error.__traceback__))
    variables = [value for frame, _, _ in frames for value in variables_of(frame).values()]
    contexts = [value for value in variables if isinstance(value, BackwardCFunction)]
    if not contexts:
        return None
    name = type(contexts[-1]).__name__.removesuffix("Backward")
    ways = f"{name}.forward (or setup_context, where it has one) with mezzo.custom_fwd and {name}.backward with mezzo.custom_bwd"
    fix = f"Decorate {ways}: it then runs in the region of forward."
    if name.startswith(_OF_A_CUSTOM_OP):
        low = next((t for _, t in _tensors_on_line(*frames[-1][:2]) if t.dtype in LOW_DTYPES), None)
        given = "device, dtype" if low is None else f"{low.device.type!r}, {low.dtype}"
        fix = f"Write torch.library.register_autocast(op, {given}) for this op: its inputs, and what it saves of them, are then cast before it runs."
        name = name.removeprefix(_OF_A_CUSTOM_OP).removesuffix("_default")
    return _sentence(error, frames, f"in the backward of {name}", fix)


def _sentence(error: BaseException, frames: Sequence[tuple[FrameType, int, int]], owner: str, fix: str) -> str:
    frame, line, _ = frames[-1]
    source = linecache.getline(frame.f_code.co_filename, line).strip()
    got = ", ".join(f"{name} {describe(t)}" for name, t in _tensors_on_line(frame, line))
    where = f"({frame.f_code.co_filename}:{line}){' ' * bool(owner)}{owner}"
    return f"`{source}` {where} {f'got {got}' if got else 'failed'}. torch says: {first_line(error)}.\n  {fix}"


def _op_at(frame: FrameType, instruction: int) -> str | None:
    """Return the name of the op that a frame was in, read from its source; None where that cannot be told."""
    positions = getattr(frame.f_code, "co_positions", None)  # Python 3.11
    if positions is None:
        return None
    first, last, start, end = next(itertools.islice(positions(), instruction // 2, None))
    if first is None or last is None:
        return None
    lines = [linecache.getline(frame.f_code.co_filename, number) for number in range(first, last + 1)]
    text = "".join([*lines[:-1], lines[-1].encode()[:end].decode()]).encode()[start:].decode()
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return None
    if isinstance(node, ast.Call):
        return "out_" if any(keyword.arg == "out" for keyword in node.keywords) else _callee(node.func, frame)
    if isinstance(node, ast.Subscript):
        return "__setitem__"
    return _OPERATORS.get(type(node.op)) if isinstance(node, ast.BinOp) else None


def _callee(node: ast.expr, frame: FrameType) -> str | None:
    called = _evaluate(node, frame)
    attribute = node.attr if isinstance(node, ast.Attribute) and not isinstance(called, Module) else None
    return getattr(called, "__name__", attribute)
