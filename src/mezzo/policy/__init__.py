"""What each op, module, weight and gradient should run in: pure data."""

from .answer import Change as Change
from .answer import PolicyDiff as PolicyDiff
from .answer import Reason as Reason
from .answer import Why as Why
from .grammar import as_policy as as_policy
from .parts import GuardConfig as GuardConfig
from .parts import ModuleRule as ModuleRule
from .parts import OpRules as OpRules
from .parts import ScalingConfig as ScalingConfig
from .policy import Master as Master
from .policy import Policy as Policy
from .presets import PRESETS as PRESETS
from .rule import FP32_RULES as FP32_RULES
from .rule import Rule as Rule
