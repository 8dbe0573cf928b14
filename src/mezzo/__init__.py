"""Mixed precision for PyTorch that you can see, steer and trust."""

from .casting import autocast as autocast
from .policy import Policy as Policy
from .policy import Rule as Rule
from .policy import ScalingConfig as ScalingConfig

__version__ = "0.1.0"
