"""Optimizers whose weights are 16 bit and whose updates are fp32."""

from .adamw import AdamW as AdamW
from .master_weights import MasterWeights as MasterWeights
from .sgd import SGD as SGD
