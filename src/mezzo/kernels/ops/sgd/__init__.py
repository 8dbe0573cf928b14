"""The step of stochastic gradient descent with momentum."""

from .reference import SGDRule as SGDRule
from .reference import sgd_scalars as sgd_scalars
