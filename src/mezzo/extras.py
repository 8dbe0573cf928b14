"""Packages that only some commands and reports need, and the extra of mezzo that installs each."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from .errors import ConfigError

EXTRAS = {
    "rich": "cli", "tyro": "cli", "matplotlib": "plots", "jinja2": "report", "transformers": "text", "sklearn": "text",
    "snownlp": "text", "tensorboard": "trackers", "wandb": "trackers",
}  # fmt: skip
"""The extra of each package, by the name it is imported by."""


def is_there(package: str) -> bool:
    """Whether a package can be imported. Does not import it."""
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def check_installed(what: str, packages: Iterable[str]) -> None:
    """Raise a ConfigError, which begins with `what` and names the extras to install, if any of the packages is missing."""
    missing = [package for package in packages if not is_there(package)]
    if missing:
        extras = ",".join(sorted({EXTRAS[package] for package in missing}))
        noun = "package" if len(missing) == 1 else "packages"
        raise ConfigError(f"{what} needs the {noun} {' and '.join(missing)}: pip install 'mezzo[{extras}]'.")
