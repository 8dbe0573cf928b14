"""Whether a model's name leads anywhere, found out at once: the hub's own client retries for a minute."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

PATIENCE_S = 2.0


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
