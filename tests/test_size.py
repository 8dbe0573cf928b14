"""How many lines the library has, of which kind and in which folder: `python tests/test_size.py` prints it. What raises a ceiling is written in decision 0215."""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import pytest

SRC = Path(__file__).parents[1] / "src" / "mezzo"
KINDS = ("code", "docstring", "comment", "blank")
FILES_AT_MOST, LINES_AT_MOST = 256, 48_784
LONGER = {"_torch.py": 604}
"""Files that may have more than 400 lines: all private names of torch stand in one."""
_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


@functools.cache
def sources() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(SRC.rglob("*.py"))}


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def strings_alone(nodes: Iterable[ast.AST]) -> set[int]:
    """The lines of strings that are statements: docstrings of modules, classes, functions and names."""
    alone = [n for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    return {
        line for n in alone if isinstance(n.value.value, str) for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)
    }  # fmt: skip


def kinds_of(source: str) -> Counter[str]:
    """Count lines by kind; a line of code with a comment behind it is code, an empty line of a docstring is docstring."""
    docs = strings_alone(ast.walk(parsed(source)))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    found: Counter[str] = Counter()
    for number, line in enumerate(source.splitlines(), 1):
        text = "code" if number in code else "comment" if line.strip() else "blank"
        found["docstring" if number in docs else text] += 1
    return found


def function_lengths(source: str) -> list[int]:
    """Lines of each function, its docstring left out."""
    found = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docs = strings_alone(node.body[:1])
            found.append((node.end_lineno or node.lineno) - node.lineno + 1 - len(docs))
    return found


def table() -> str:
    rooms: dict[str, list[Counter[str]]] = {}
    for path, source in sources().items():
        top = path.relative_to(SRC).parts
        rooms.setdefault(top[0] if len(top) > 1 else "(alone)", []).append(kinds_of(source))
    rows = [(room, len(found), sum(found, Counter[str]())) for room, found in rooms.items()]
    rows.append(("all", sum(row[1] for row in rows), sum((row[2] for row in rows), Counter[str]())))
    lines = [f"{'room':14}{'files':>7}" + "".join(f"{kind:>11}" for kind in KINDS) + f"{'lines':>9}"]
    for room, files, found in rows:
        lines.append(f"{room:14}{files:7}" + "".join(f"{found[kind]:11}" for kind in KINDS) + f"{found.total():9}")
    lengths = [length for source in sources().values() for length in function_lengths(source)]
    return "\n".join([*lines, f"{len(lengths)} functions, median {median(lengths):g} lines without docstring"])


def test_lines_are_told_by_their_kind() -> None:
    source = (
        '"""What."""\n\n# why\nx = """a\n\nb"""  # note\n\n\ndef f():\n    """Do.\n\n    More.\n    """\n    return x\n'
    )
    assert kinds_of(source) == {"docstring": 5, "blank": 3, "comment": 1, "code": 5}
    assert function_lengths(source) == [2]


def test_the_library_is_no_larger_than_it_was() -> None:
    lines = sum(len(source.splitlines()) for source in sources().values())
    assert len(sources()) <= FILES_AT_MOST and lines <= LINES_AT_MOST, (len(sources()), lines)


def test_no_file_is_long() -> None:
    long = {path: lines for path, source in sources().items() if (lines := len(source.splitlines())) > 400}
    assert [path for path, lines in long.items() if lines > LONGER.get(path.name, 400)] == []


def test_no_test_file_is_long() -> None:
    found = {
        path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in Path(__file__).parent.rglob("*.py")
    }
    assert [name for name, lines in found.items() if lines > 400] == []


@pytest.mark.slow
def test_half_of_the_functions_have_at_most_ten_lines() -> None:
    assert median(length for source in sources().values() for length in function_lengths(source)) <= 10


if __name__ == "__main__":
    print(table())
