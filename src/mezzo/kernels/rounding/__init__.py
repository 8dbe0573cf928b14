"""Rounding to 16 bit without losing what lies below the last place: by chance, or with compensation."""

from .reference import compensate as compensate
from .reference import mix as mix
from .reference import noise as noise
from .reference import noise_key as noise_key
from .reference import restore as restore
from .reference import round_by_chance as round_by_chance
