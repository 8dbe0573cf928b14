"""The step of stochastic gradient descent with momentum."""

from .operands import SGDRule as SGDRule
from .operands import sgd_scalars as sgd_scalars
