"""One pass over the gradients before a step, and how the step itself reads them."""

from .check import GradientCheck as GradientCheck
from .check import norm_and_finite as norm_and_finite
from .scaled import ScaledGradients as ScaledGradients
