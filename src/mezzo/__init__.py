"""Mixed precision for PyTorch that you can see, steer and trust."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import cuda as cuda
from . import optim as optim
from .allocator import keep_memory as keep_memory
from .casting import autocast as autocast
from .casting import checkpoint_contexts as checkpoint_contexts
from .casting import custom_bwd as custom_bwd
from .casting import custom_fwd as custom_fwd
from .loss_scale import GradScaler as GradScaler
from .policy import Policy as Policy
from .policy import Rule as Rule
from .policy import ScalingConfig as ScalingConfig
from .step import Stepper as Stepper
from .step import StepResult as StepResult
from .step import prepare as prepare

__version__ = "0.1.0"

_LAZY = ("diagnose", "distributed", "integrations")
_RENAMED = {"dist": "distributed", "scaling": "loss_scale"}


if _TYPE_CHECKING:
    from . import diagnose as diagnose
    from . import distributed as distributed
    from . import integrations as integrations
    from .integrations.trackers import monitor as monitor
else:

    def __getattr__(name: str) -> object:
        """Import a folder when it is first asked for; `import mezzo` loads none of these."""
        if name in _LAZY:
            return _import_module(f"{__name__}.{name}")
        if name == "monitor":
            return _import_module(f"{__name__}.integrations.trackers").monitor
        if name in _RENAMED:
            raise AttributeError(f"mezzo.{name} is now called mezzo.{_RENAMED[name]}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
