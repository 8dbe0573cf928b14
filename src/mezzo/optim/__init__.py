"""Optimizers whose weights are 16 bit and whose updates are fp32."""

from .adamw import Adam as Adam
from .adamw import AdamW as AdamW
from .adopt import adopt as adopt
from .adopt import release as release
from .base import MasterOptimizer as MasterOptimizer
from .master_store import check_whole as check_whole
from .master_weights import MasterWeights as MasterWeights
from .master_weights import keeps_masters as keeps_masters
from .master_weights import local_optimizer as local_optimizer
from .master_weights import parameters as parameters
from .sgd import SGD as SGD
