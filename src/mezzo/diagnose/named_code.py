"""Code that a command line names: the text of a script, and a function of a module or file."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tokenize
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import ConfigError, DataError, check_given, did_you_mean, first_line
from .trial import why_not_called

_FORM = "package.module:function or file.py:function"


def check_text(path: Path) -> None:
    """Refuse with a `DataError` a file that is not the text of a program, however wrong that may be."""
    try:
        with tokenize.open(path) as file:
            why = "it holds NUL characters" if "\0" in file.read() else ""
    except (OSError, SyntaxError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or first_line(error)
    if why:
        raise DataError(f"the file {str(path)!r} cannot be read: {why}. Give the path of a Python file.")


def named_function(text: str) -> Callable[[], Any]:
    """Return the function that "package.module:function" or "file.py:function" names.

    Raises:
        ConfigError: a text of another form, or a function that does not exist, or needs arguments.
        DataError: a module or file that does not exist.

    Writes: what importing the module writes.
    """
    check_given("named_function", "text", text, str, f"text: {_FORM}")
    place, colon, name = text.rpartition(":")
    if not (colon and place and name):
        raise ConfigError(f"--model {text!r} names no function; write {_FORM}.")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    function: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(f"{place} has no function {name!r}.{did_you_mean(name, known)}")
    if why := why_not_called(function):
        raise ConfigError(f"{text} is called without arguments, and cannot be: {why}. Give them defaults.")
    return function


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise DataError(f"no file at {str(path)!r}; give {_FORM}.")
    check_text(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise DataError(f"no module {name!r} on the Python path; give {_FORM}.") from error
    finally:
        sys.path.pop(0)
