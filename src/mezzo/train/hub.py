"""The transformers library kept quiet, and whether a model's name leads anywhere: the hub's own client retries for a minute."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from ..errors import ConfigError

PATIENCE_S = 2.0


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


def check_reachable(name: str) -> None:
    """Refuse a name that no folder has, and no model in the cache, where the hub cannot be asked.

    Args:
        name: path of a folder, or name of a model on the hub.

    Raises:
        OSError: it leads nowhere.
    """
    if Path(name).is_dir():
        return
    if name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1:
        raise OSError("there is no such folder.")
    if not _is_cached(name) and not _answers():
        raise OSError("there is no such folder, no model of that name in the cache, and the hub cannot be reached.")


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def _answers() -> bool:
    """Whether the hub takes connections; behind a proxy that is not asked."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    if getproxies():
        return True
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        with socket.create_connection((host.hostname or "", host.port or 443), timeout=PATIENCE_S):
            return True
    except OSError:
        return False
