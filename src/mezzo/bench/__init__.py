"""Measured side by side: one harness, one file a workload."""

from .harness import measure as measure
from .measurement import Measurement as Measurement
from .measurement import Result as Result
from .measurement import load as load
from .run_plan import Plan as Plan
from .workload import WORKLOADS as WORKLOADS
from .workload import Workload as Workload
from .workload import find_workload as find_workload
