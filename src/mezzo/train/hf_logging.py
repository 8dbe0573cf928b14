"""Manners with the transformers library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigError


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the library's own progress bars off standard error while inside. Writes: a switch of it, and sets it back.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        from transformers.utils import logging
    except ImportError:
        raise ConfigError("this needs the transformers package; pip install 'mezzo[text]'.") from None
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers' own
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # transformers' own
