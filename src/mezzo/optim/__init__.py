"""Optimizers whose weights are 16 bit and whose updates are fp32."""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from ..loss_scale import parameters as parameters
from .adamw import Adam as Adam
from .adamw import AdamW as AdamW
from .adopt import adopt as adopt
from .adopt import keeps_masters as keeps_masters
from .adopt import local_optimizer as local_optimizer
from .adopt import masters_around as masters_around
from .adopt import release as release
from .adopt import stepped_optimizer as stepped_optimizer
from .adopt import wrapped_optimizer as wrapped_optimizer
from .base import MasterOptimizer as MasterOptimizer
from .base import is_hooked as is_hooked
from .checks import HOW as HOW
from .checks import check_finite as check_finite
from .master_store import check_whole as check_whole
from .master_weights import MasterWeights as MasterWeights
from .optimizer_state import OWN_OPTIONS as OWN_OPTIONS
from .optimizer_state import mode_of_state as mode_of_state
from .optimizer_state import take_loaded_masters_ as take_loaded_masters_
from .saved_state import MOMENTS as MOMENTS
from .saved_state import SQUARES as SQUARES
from .saved_state import check_mapping as check_mapping
from .saved_state import check_saved as check_saved
from .saved_state import check_tensor as check_tensor
from .saved_state import refuse as refuse
from .saved_state import torchs_entries as torchs_entries
from .sgd import SGD as SGD

if not _TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Say what to write for the optimizers of other libraries."""
        from .. import _absent

        raise _absent(__name__, name, ("Adam", "AdamW", "MasterWeights", "SGD", "adopt"))
