"""The names of `torch.amp`: a program changes its import, `from mezzo.amp import autocast, GradScaler`, and nothing else."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from torch.amp import is_autocast_available as is_autocast_available

from ..casting import autocast as autocast
from ..casting import custom_bwd as custom_bwd
from ..casting import custom_fwd as custom_fwd
from ..loss_scale import GradScaler as GradScaler

if not _TYPE_CHECKING:
    from .. import __getattr__ as __getattr__  # which says what to write for the names of apex.amp
