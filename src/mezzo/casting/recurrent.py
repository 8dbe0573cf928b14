"""LSTMs and GRUs on a CPU, by the kernel that is faster than torch's in bf16."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .._torch import function_modes
from ..kernels import recurrent, takes_recurrent
from .attention import AttentionMode


class RecurrentMode(TorchFunctionMode):
    """Have `torch.lstm` and `torch.gru` in a region on the CPU run as they are fastest in bf16.

    What mezzo's kernel is not for, packed sequences and projections among them, is left to torch and the region.

    Syncs: no.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run recurrent layers their own way, leave the rest alone."""
        if func in (torch.lstm, torch.gru) and _is_low_and_unwatched() and _is_whole(args) and takes_recurrent(*args):
            return recurrent(*args)
        return func(*args, **(kwargs or {}))


def casts_to_bf16() -> bool:
    """Whether a region that casts to bf16 on the CPU is here. Host only."""
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16


def _is_low_and_unwatched() -> bool:
    return casts_to_bf16() and all(isinstance(mode, AttentionMode) for mode in function_modes())


def _is_whole(args: tuple[Any, ...]) -> bool:
    """Whether arguments of `torch.lstm` or `torch.gru` are those for a tensor, not for a packed sequence."""
    return len(args) == 9 and isinstance(args[3], bool)
