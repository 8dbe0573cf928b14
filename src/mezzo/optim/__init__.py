"""Optimizers whose weights are 16 bit and whose updates are fp32."""

from .adamw import Adam as Adam
from .adamw import AdamW as AdamW
from .adopt import adopt as adopt
from .adopt import release as release
from .master_weights import MasterWeights as MasterWeights
from .sgd import SGD as SGD
