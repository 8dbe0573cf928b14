"""Measured side by side: one harness, and workloads that know nothing of it."""

from .hardware import DeviceReport as DeviceReport
from .hardware import advice as advice
from .hardware import describe_machine as describe_machine
from .hardware import measure_device as measure_device
from .hardware import short_name as short_name
from .harness import Progress as Progress
from .harness import measure as measure
from .harness import run_tests as run_tests
from .measurement import Measurement as Measurement
from .measurement import Result as Result
from .measurement import load as load
from .results_table import header as header
from .results_table import label as label
from .results_table import machine_name as machine_name
from .results_table import print_result as print_result
from .results_table import row as row
from .results_table import save_chart as save_chart
from .results_table import text_table as text_table
from .workload import WORKLOADS as WORKLOADS
from .workload import Plan as Plan
from .workload import Workload as Workload
from .workload import default_device as default_device
from .workload import find_workload as find_workload
from .workload import parse_device as parse_device
from .workloads.bert import Reviews as Reviews
from .workloads.recipe import Recipe as Recipe
