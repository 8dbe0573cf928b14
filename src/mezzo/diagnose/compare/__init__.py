"""How far a step is from fp32, module by module, and the rules that bring it nearer."""

from .compare_report import CompareReport as CompareReport
from .comparison import compare as compare
