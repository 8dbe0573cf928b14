"""The AdamW step."""

from .reference import AdamWRule as AdamWRule
from .reference import adamw_scalars as adamw_scalars
