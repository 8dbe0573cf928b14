"""A model and a batch named on the command line, and what the tools say about them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ...errors import ConfigError, DataError, did_you_mean
from ...policy import PolicyLike
from ...report import Block, Document, Heading, Report
from ..compare import compare
from ..explain import explain
from ..lint import lint
from ..trial import LossFn

_FORM = "package.module:function or file.py:function"


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What a function named on the command line returned.

    Attributes:
        model: the model.
        batch: as in `mezzo.diagnose.lint`.
        loss_fn: computes the loss from (model, batch); None for the default.
    """

    model: nn.Module
    batch: Any
    loss_fn: LossFn | None


def named_function(text: str) -> Callable[[], Any]:
    """Return the function that a text names.

    Args:
        text: "package.module:function" or "file.py:function".

    Raises:
        ConfigError: a text of another form, or a function that does not exist.
        DataError: a module or file that does not exist.

    Writes: what importing the module writes.
    """
    place, colon, name = text.rpartition(":")
    if not (colon and place and name):
        raise ConfigError(f"--model {text!r} names no function; write {_FORM}.")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    function: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ConfigError(f"{place} has no function {name!r}.{did_you_mean(name, known)}")
    return function


def load_subject(text: str) -> Subject:
    """Call the function that a text names and take what it returns.

    Args:
        text: as in `named_function`. The function takes nothing and returns (model, batch) or (model, batch, loss_fn).

    Returns:
        The model, the batch, and the loss.

    Raises:
        ConfigError: as `named_function`, and a function that returns something else.
        DataError: as `named_function`.

    Writes: what importing the module and calling the function write.
    """
    found = named_function(text)()
    if isinstance(found, tuple) and len(found) in (2, 3) and isinstance(found[0], nn.Module):
        return Subject(model=found[0], batch=found[1], loss_fn=found[2] if len(found) == 3 else None)
    raise ConfigError(f"{text} returned {type(found).__name__}; return (model, batch) or (model, batch, loss_fn).")


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise DataError(f"no file at {str(path)!r}; give {_FORM}.")
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


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckUp(Report):
    """What several tools say about one model.

    Attributes:
        subject: as it was named.
        reports: of the tools.
    """

    subject: str
    reports: tuple[Report, ...]

    def document(self) -> Document:
        """Return the layouts one after the other, each under a heading of its own."""
        documents = [report.document() for report in self.reports]
        blocks: list[Block] = []
        for d in documents:
            blocks.append(Heading(text=f"{d.title}: {d.verdict}", tone="plain" if d.is_good else "bad"))
            blocks += d.blocks
        bad = [d for d in documents if not d.is_good]
        answer = "Not enough seen" if all(d.is_unseen for d in bad) else "To look at"
        verdict = f"{answer}: {', '.join(d.title for d in bad)}." if bad else "Nothing to change."
        return Document(title=f"mezzo doctor of {self.subject}", verdict=verdict, is_good=not bad, blocks=tuple(blocks))


def check_up(name: str, policy: PolicyLike, *, budget_s: float = 0.5) -> CheckUp:
    """Look at a model under a policy with every tool that needs no training loop.

    Args:
        name: as in `load_subject`.
        policy: a policy or its text.
        budget_s: seconds of timing for each of fp32 and the policy.

    Returns:
        The reports of lint, explain and compare.

    Raises:
        ConfigError, DataError: as `load_subject`.
        PolicyError: the policy does not fit the model.

    Syncs: yes.
    """
    subject = load_subject(name)
    reports: tuple[Report, ...] = (
        lint(subject.model, subject.batch, subject.loss_fn, policy),
        explain(subject.model, subject.batch, policy, loss_fn=subject.loss_fn, budget_s=budget_s),
        compare(subject.model, subject.batch, subject.loss_fn, policy),
    )
    return CheckUp(subject=name, reports=reports)
