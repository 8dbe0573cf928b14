"""What `mezzo doctor` runs: a script under the tracer, or a model under every tool."""

from .script import ScriptRun as ScriptRun
from .script import trace_script as trace_script
from .subject import check_up as check_up
from .subject import named_function as named_function
