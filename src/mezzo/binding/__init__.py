"""A policy made part of a model, so that it holds wherever and however its modules are called."""

from .bind import bind as bind
from .bind import innermost as innermost
from .bind import is_activation as is_activation
from .bind import is_prepared as is_prepared
from .bind import rebind as rebind
from .bind import remember_modules as remember_modules
from .bind import unbind as unbind
from .bind import uncompiled as uncompiled
from .bind import unshare_activations_ as unshare_activations_
from .bind import warn_of_replaced as warn_of_replaced
from .forward import AfterForward as AfterForward
from .forward import BeforeForward as BeforeForward
from .forward import Binding as Binding
from .forward import bound_of as bound_of
from .module_rules import named_tensors as named_tensors
from .module_rules import with_missing_kernels as with_missing_kernels
from .storage import check_floats as check_floats
from .storage import check_optimizers as check_optimizers
from .storage import convert_ as convert_
from .storage import is_sparse as is_sparse
from .storage import set_grad_dtype_ as set_grad_dtype_
from .storage import storage_targets as storage_targets
from .storage import store_ as store_
