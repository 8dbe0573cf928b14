"""What runs in which precision, and whether it pays."""

from .explanation import Explanation as Explanation
from .explanation import explain as explain
