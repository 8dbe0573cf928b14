"""One optimizer step that cannot silently go wrong."""

from .capture import CapturedStep as CapturedStep
from .load_hooks import Inert as Inert
from .prepare import prepare as prepare
from .result import StepResult as StepResult
from .stepper import Stepper as Stepper
from .stepper import answers_misfits as answers_misfits
from .update import NO_BOUND as NO_BOUND
from .update import is_bound as is_bound
from .update import needs_closure as needs_closure
