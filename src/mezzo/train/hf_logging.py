"""What the transformers library prints while it loads and saves: nothing of its own on ranks but the first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ConfigError


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the library's progress bars off standard error while inside, and on ranks but the first its log as well.

    Raises:
        ConfigError: the library is not installed.

    Writes: switches of the library, and sets them back.
    """
    try:
        from transformers.utils import logging
    except ImportError:
        raise ConfigError("this needs the transformers package; pip install 'mezzo[text]'.") from None
    was_on, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers' own
    if int(os.environ.get("RANK", "0")) > 0:
        logging.set_verbosity(50)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if was_on:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # transformers' own
