"""One pass over the gradients before a step: their norm, and whether any is inf or NaN."""

from .check import GradientCheck as GradientCheck
from .check import norm_and_finite as norm_and_finite
