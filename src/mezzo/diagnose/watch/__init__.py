"""A run, sampled while it trains."""

from .watch_report import WatchReport as WatchReport
from .watcher import Watch as Watch
from .watcher import watch as watch
