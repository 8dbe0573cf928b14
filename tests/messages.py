"""How the message of an error is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

import pytest

P = ParamSpec("P")


def message_of(kind: type[Exception], call: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> str:
    """Return the message of the error that a call raises."""
    with pytest.raises(kind) as caught:
        call(*args, **kwargs)
    return str(caught.value)
