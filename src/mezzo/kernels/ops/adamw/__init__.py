"""The AdamW step."""

from .rule import AdamWRule as AdamWRule
from .rule import adamw_scalars as adamw_scalars
