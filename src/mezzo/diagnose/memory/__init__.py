"""What training will occupy."""

from .memory_estimate import MemoryReport as MemoryReport
from .memory_estimate import memory as memory
from .memory_estimate import size as size
