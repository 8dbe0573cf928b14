"""Which op, which layer, why, and the edit that mends it."""

from .compare_report import CompareReport as CompareReport
from .compare_run import compare as compare
from .explanation import Explanation as Explanation
from .explanation import explain as explain
from .findings import Finding as Finding
from .footprint import MemoryReport as MemoryReport
from .footprint import memory as memory
from .linter import LintReport as LintReport
from .linter import lint as lint
from .report import Report as Report
from .trace_report import TraceReport as TraceReport
from .tracer import Trace as Trace
from .tracer import trace as trace
from .watch_report import WatchReport as WatchReport
from .watcher import Watch as Watch
from .watcher import watch as watch
