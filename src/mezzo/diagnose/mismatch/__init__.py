"""Two runs that should agree and do not: the first op where they part, and whether it is rounding or a fault."""

from .mismatch import mismatch as mismatch
from .mismatch_report import MismatchReport as MismatchReport
