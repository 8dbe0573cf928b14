"""The loss scale: the rule by which it moves, dividing by it, and the scaler for a training loop of your own."""

from .accumulation import AccumulationState as AccumulationState
from .accumulation import Flag as Flag
from .accumulation import GradVersions as GradVersions
from .accumulation import ask_before_steps as ask_before_steps
from .accumulation import ask_watchers as ask_watchers
from .accumulation import check_loss as check_loss
from .accumulation import either as either
from .accumulation import grads_by_id as grads_by_id
from .accumulation import host_decides as host_decides
from .accumulation import is_bad as is_bad
from .accumulation import num_watchers as num_watchers
from .accumulation import stamps_of as stamps_of
from .accumulation import without as without
from .fused import StepScaling as StepScaling
from .fused import handing as handing
from .fused import param_names as param_names
from .fused import parameters as parameters
from .messages import say_hooked as say_hooked
from .scaler import GradScaler as GradScaler
from .state import LossScale as LossScale
from .state import can_move_in_place as can_move_in_place
from .state import move_ as move_
from .state import next_state as next_state
from .unscale import assign_grad_ as assign_grad_
from .unscale import real_values as real_values
