"""A region in which every op obeys the policy."""

from .cache import shadows as shadows
from .checkpoint import checkpoint_contexts as checkpoint_contexts
from .function import custom_bwd as custom_bwd
from .function import custom_fwd as custom_fwd
from .region import autocast as autocast
