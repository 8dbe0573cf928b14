"""What each op, module, weight and gradient should run in: pure data."""

from .policy import GuardConfig as GuardConfig
from .policy import Master as Master
from .policy import ModuleRule as ModuleRule
from .policy import OpRules as OpRules
from .policy import Policy as Policy
from .policy import ScalingConfig as ScalingConfig
from .rule import Rule as Rule
