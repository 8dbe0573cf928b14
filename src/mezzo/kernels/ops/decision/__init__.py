"""The decision of a step: from what was found, which optimizers skip and by how much gradients are clipped."""

from .reference import CLIP_EPS as CLIP_EPS
from .reference import decision_slots as decision_slots
from .reference import num_decided as num_decided
from .reference import pack_decision as pack_decision
