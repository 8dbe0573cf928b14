"""The step of stochastic gradient descent with momentum."""

from .rule import SGDRule as SGDRule
from .rule import sgd_scalars as sgd_scalars
