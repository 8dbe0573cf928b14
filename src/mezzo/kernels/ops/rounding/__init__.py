"""Rounding to 16 bit without losing what lies below the last place: stochastically, or with compensation."""

from .reference import EndToEnd as EndToEnd
from .reference import compensate as compensate
from .reference import mix as mix
from .reference import random_bits as random_bits
from .reference import random_key as random_key
from .reference import restore as restore
from .reference import stochastic_round as stochastic_round
