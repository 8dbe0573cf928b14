"""Optimizers whose weights are 16 bit and whose updates are fp32."""

from .adamw import AdamW as AdamW
from .sgd import SGD as SGD
