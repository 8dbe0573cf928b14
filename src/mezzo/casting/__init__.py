"""A region in which every op obeys the policy."""

from .attention import AttentionMode as AttentionMode
from .attention import RecurrentMode as RecurrentMode
from .attention import casts_to_bf16 as casts_to_bf16
from .attention import has_own_attention as has_own_attention
from .attention import is_attention as is_attention
from .attention import is_large as is_large
from .attention import run_attention as run_attention
from .cast_cache import cast_key as cast_key
from .cast_cache import kept_casts as kept_casts
from .cast_cache import weight_casts as weight_casts
from .frame import bind_recompute as bind_recompute
from .function import custom_bwd as custom_bwd
from .function import custom_fwd as custom_fwd
from .mode import CastMode as CastMode
from .products import ProductWatch as ProductWatch
from .products import count_products as count_products
from .provenance import backward_message as backward_message
from .provenance import traceback_message as traceback_message
from .provenance import variables_of as variables_of
from .region import autocast as autocast
from .region import checkpoint_contexts as checkpoint_contexts
from .region import runs_later as runs_later
from .tracing import ExportedModel as ExportedModel
from .tracing import is_in_exported_model as is_in_exported_model
