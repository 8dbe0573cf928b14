"""A bf16 weight and an int16 remainder that together are an fp32 master."""

from .reference import join as join
from .reference import split as split
