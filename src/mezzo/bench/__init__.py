"""Measured side by side: one harness, one file a workload."""

from .harness import measure as measure
from .plan import Plan as Plan
from .result import Measurement as Measurement
from .result import Result as Result
from .result import load as load
from .workload import WORKLOADS as WORKLOADS
from .workload import Workload as Workload
from .workload import find_workload as find_workload
