"""Which op, which layer, why, and the edit that fixes it."""

from ..report import Report as Report
from ..trace import Finding as Finding
from ..trace import Trace as Trace
from ..trace import TraceReport as TraceReport
from ..trace import trace as trace
from .compare_report import CompareReport as CompareReport
from .comparison import compare as compare
from .doctor import ScriptRun as ScriptRun
from .doctor import check_up as check_up
from .doctor import named_function as named_function
from .doctor import trace_script as trace_script
from .explain import Explanation as Explanation
from .explain import explain as explain
from .lint import LintReport as LintReport
from .lint import lint as lint
from .memory import MemoryReport as MemoryReport
from .memory import memory as memory
from .mismatch_report import MismatchReport as MismatchReport
from .recorder import Recorder as Recorder
from .recorder import record as record
from .replayer import ReplayedStep as ReplayedStep
from .replayer import replay as replay
from .two_runs import mismatch as mismatch
from .watch import Watch as Watch
from .watch import watch as watch
from .watch_report import WatchReport as WatchReport
