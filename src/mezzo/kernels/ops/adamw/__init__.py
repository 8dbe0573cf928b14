"""The AdamW step."""

from .operands import AdamWRule as AdamWRule
from .operands import Moments as Moments
from .operands import adamw_scalars as adamw_scalars
