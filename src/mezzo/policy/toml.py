"""Policies as TOML files that a person can edit."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

import tomli_w

from ..errors import PolicyError
from .document import from_document, to_document
from .policy import Policy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def save(policy: Policy, path: str | os.PathLike[str]) -> None:
    """Write a policy to a file; see `Policy.save`.

    Writes: a file beside the path, synced to disk, then renamed to it.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with aside.open("x", encoding="utf-8", newline="\n") as file:
            file.write(f"# mezzo policy: {policy}\n{tomli_w.dumps(to_document(policy))}")
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def load(path: str | os.PathLike[str]) -> Policy:
    """Read a policy from a file; see `Policy.load`."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise PolicyError(f"cannot read the policy file '{os.fspath(path)}': {error.strerror or error}.") from error
    except ValueError as error:  # both tomllib.TOMLDecodeError and UnicodeDecodeError
        raise PolicyError(f"the policy file '{os.fspath(path)}' is not TOML: {error}.") from error
    try:
        return from_document(document)
    except PolicyError as error:
        raise PolicyError(f"policy file '{os.fspath(path)}': {error}") from None
