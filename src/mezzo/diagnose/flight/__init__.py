"""A flight recorder: the last steps of a run as data, and any of them run again in another process."""

from .recorder import Recorder as Recorder
from .recorder import record as record
from .replayer import ReplayedStep as ReplayedStep
from .replayer import replay as replay
