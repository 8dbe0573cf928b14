"""Every private name of torch that mezzo uses, once: what it is for, and what would stand still without it.

All were checked on torch 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0; what a version lacks is said where it is used. A new torch that moves one of them fails `tests/test__torch.py`, which
names it; nothing else in mezzo touches a name of torch that begins with an underscore.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import _GeneratorContextManager
from operator import attrgetter, methodcaller
from traceback import walk_stack
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._ops import HigherOrderOperator as HigherOrderOperator  # noqa: PLC0414  # exported
from torch._ops import OpOverload as OpOverload  # noqa: PLC0414  # exported
from torch.amp import autocast_mode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.autograd import (  # type: ignore[attr-defined]  # torch keeps them out of its list
    _get_sequence_nr,
    _profiler_enabled,
)
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _pytree as pytree
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket as GradBucket  # noqa: PLC0414  # exported
    from torch.distributed import ProcessGroup
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.nn.parallel import DistributedDataParallel

# --- tensors ---------------------------------------------------------------------------------------------------------


version: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was written in place. Without it no stale cast and no edited gradient is noticed."""


def storage_id(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage while it lives; views share it. Host only."""
    return int(tensor.untyped_storage()._cdata)


def view_base(tensor: Tensor) -> Tensor | None:
    """Return the tensor that this one is a view of; None if it is none. Without it slices of weights are cast anew. Host only."""
    return tensor._base if tensor._is_view() else None


def local_tensor(tensor: Tensor) -> Tensor:
    """Return what lies here of a DTensor, without the autograd of `to_local`; a plain tensor is its own part.

    Without it the optimizers look at every sharded tensor anew in every step. Host only.
    """
    return getattr(tensor, "_local_tensor", tensor)


def constant_factor(product: Tensor) -> Tensor | None:
    """Return the tensor without graph that a number was multiplied by last; None if there is none.

    Without it a loss that a GradScaler scaled is not told from any other. Host only.
    """
    node: Any = product.grad_fn
    if node is None or node.name() != "MulBackward0" or product.numel() != 1:
        return None
    factor = node._saved_other
    is_tensor = isinstance(factor, Tensor) and not factor.requires_grad and factor.numel() == 1
    return factor if is_tensor else None


sparse_values: Callable[[Tensor], Tensor] = methodcaller("_values")
"""The values of a sparse tensor, to be written; `.values()` wants it coalesced and refuses to be written."""
sparse_indices: Callable[[Tensor], Tensor] = methodcaller("_indices")
"""The indices of one that may not be coalesced, to be counted."""

# --- multi-tensor ops: one launch for many tensors, where a loop would need one each --------------------------------

foreach_norm = torch._foreach_norm


def has_foreach_norm(device: torch.device) -> bool:
    """Say whether a kind of device has a kernel of its own for the norms of many tensors; else torch takes one by one. Host only."""
    if device.type in ("cpu", "meta", "cuda"):
        return device.type == "cuda"  # whether this build of torch has CUDA's or not
    key = torch._C._dispatch_key_for_device(device.type)
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("aten::_foreach_norm.Scalar", key))


foreach_mul_, foreach_mul, foreach_copy_ = torch._foreach_mul_, torch._foreach_mul, torch._foreach_copy_
foreach_add_, foreach_sub_ = torch._foreach_add_, torch._foreach_sub_
neg_view = torch._neg_view
foreach_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
"""What torch.amp's scaler divides with: bit-equality with it depends on this."""
update_scale_ = torch._amp_update_scale_
"""What torch.amp's scaler moves its scale with, in one launch; without it a step of fp16 takes some twenty more."""

fused_adam_, fused_adamw_, fused_sgd_ = torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_
"""What torch's optimizers run with `fused=True`, for fp32 weights, and where mezzo has no kernel: one launch in place of some thirty a weight."""
fused_devices: Callable[[], list[str]] = _get_fused_kernels_supported_devices
"""The kinds of device that have these."""

# --- modules --------------------------------------------------------------------------------------------------------

NormBase = _NormBase
"""The batch norms: their kernel writes statistics without moving the version."""


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters registered on a module itself, by name, None included."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers registered on a module itself, by name, to be read and assigned; of a scripted one to be read. Host only."""
    return module._buffers if isinstance(module._buffers, dict) else dict(module._buffers.items())


def buffers_at(places: Iterable[tuple[nn.Module, str]]) -> list[Tensor | None]:
    """Return the buffers that are registered now under names on modules; None where none is. Host only."""
    try:
        return [module._buffers.get(name) for module, name in places]
    except AttributeError:  # of a scripted module
        return [own_buffers(module).get(name) for module, name in places]


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the children registered on a module itself, by name: one that was replaced is seen there."""
    return module._modules


def apply_to_tensors_(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace the tensors of a module and its children, as `module.to` does. Writes: the module. Syncs: as the function does."""
    module._apply(function)  # type: ignore[no-untyped-call]  # torch's own


def replaces_tensors(original: type[nn.Module], convert: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Return for a subclass the method behind `half`, `to` and their like: `convert`, given the module, what torch does, and its arguments. Host only."""

    def _apply(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return convert(self, functools.partial(original._apply, self), *args, **kwargs)

    return {"_apply": _apply}


# --- optimizers -----------------------------------------------------------------------------------------------------

global_pre_hooks = _global_optimizer_pre_hooks
global_post_hooks = _global_optimizer_post_hooks
"""Hooks on the steps of all optimizers: anybody's may count steps, which then must really happen."""


def has_hooks(optimizer: Optimizer, call: Literal["step", "load_state_dict"]) -> bool:
    """Whether an optimizer has torch's hooks around a call: one that skips `super().__init__()` has none, or those around steps alone."""
    return hasattr(optimizer, f"_optimizer_{call}_post_hooks")


step_hooks: Callable[[Optimizer], tuple[Mapping[int, Any], Mapping[int, Any]]] = attrgetter(
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
)
"""The hooks that run before and after the steps of one optimizer."""
gradient_hooks: Callable[[Tensor], tuple[Mapping[int, Any] | None, Mapping[int, Any] | None]] = attrgetter(
    "_backward_hooks", "_post_accumulate_grad_hooks"
)
"""The hooks that see the gradient of a tensor, where there are any."""


def profiled_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer's step with torch's own wrapper: hooks, and a name in profiles."""
    found: Callable[..., Any] = Optimizer.profile_hook_step(step)
    return found


STEP_WRAPPER = profiled_step(lambda optimizer: None).__code__
"""The code of that wrapper, by which a step is known that has it and no other around it."""


profiler_enabled: Callable[[], bool] = _profiler_enabled
"""Whether anybody takes a profile now."""


def follow_class_step(optimizer: Optimizer) -> bool:
    """Have `optimizer.step` be that of its class, whatever that becomes, where a scheduler put a counter around it.

    Without it a scheduler that was made before `prepare` keeps torch's own step alive. Returns False if somebody else replaced
    `step`, which then stays.
    """
    step = vars(optimizer).get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return False
    held = weakref.ref(optimizer)

    def counted(*args: Any, **kwargs: Any) -> Any:
        found: Any = held()
        found._opt_called = True
        return type(found).step(found, *args, **kwargs)

    if step is not None:
        counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # what a scheduler looks for
        optimizer.step = counted  # type: ignore[method-assign]
    return True


def count_step(optimizer: Any) -> bool:
    """Count a step taken without `optimizer.step`, for schedulers that watch it; False where more than they stands around it. Host only."""
    step = vars(optimizer).get("step")
    if hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is type(optimizer).step:
        optimizer._opt_called, step = True, None
    return step is None


def is_fused(optimizer: Optimizer) -> bool:
    """Whether an optimizer reads `grad_scale` and `found_inf` itself: torch's protocol of fused optimizers."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


ScalerStage = OptState
new_optimizer_state = _refresh_per_optimizer_state
"""What torch.amp.GradScaler keeps for an optimizer in one iteration; subclasses of it read this."""

# --- where we are ---------------------------------------------------------------------------------------------------


@functools.cache
def _asks_for_capture(kind: str) -> Callable[[], bool] | None:
    return getattr(torch.get_device_module(kind), "is_current_stream_capturing", None)


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched on a device goes into a graph that is captured, instead of running. Syncs: no."""
    if (kind := device.type) in ("cpu", "meta"):
        return False
    ask = _asks_for_capture(kind)
    if ask is None or device.index in (None, torch.accelerator.current_device_index()):
        return ask is not None and bool(ask())
    with torch.accelerator.device_index(device.index):  # torch asks for the current one
        return bool(ask())


def stream_id(device: torch.device) -> int:
    """Return the number of the stream that an accelerator's work goes to: in a fifth of the time of `torch.accelerator.current_stream`. Host only."""
    stream: int = torch._C._accelerator_getStream(-1 if device.index is None else device.index).stream_id
    return stream


def is_graphed(forward: object) -> bool:
    """Whether `torch.cuda.make_graphed_callables`, or Transformer Engine's, made a module's forward: it replays a graph. Host only."""
    return "make_graphed_callables.<locals>." in getattr(forward, "__qualname__", "")


def new_graph(device: torch.device) -> Any:
    """Return an empty graph of a device: CUDA's own, or the one that torch has for any accelerator since 2.13.

    Raises: NotImplementedError: torch has none for it. Syncs: no.
    """
    if device.type == "cuda":
        return torch.cuda.CUDAGraph()
    kind: Any = getattr(torch.accelerator, "Graph", None)
    try:
        return kind(capture_error_mode=_CAPTURE_MODE)
    except (TypeError, RuntimeError) as failure:
        raise NotImplementedError(f"torch {torch.__version__} captures no graphs on {device.type}") from failure


_CAPTURE_MODE = "thread_local"
"""What other threads do is no part of a capture: a loader's pins the next batch, which torch's default, "global", takes for an error."""


def begin_capture(graph: Any) -> None:
    """Have what is launched go into a graph of `new_graph`. Syncs: no."""
    graph.capture_begin(**({"capture_error_mode": _CAPTURE_MODE} if isinstance(graph, torch.cuda.CUDAGraph) else {}))


graph_task_id = torch._C._current_graph_task_id
"""The number of the running backward pass; -1 outside."""
autograd_node = torch._C._current_autograd_node
"""The node that a backward pass runs just now; None outside."""
num_function_modes = torch._C._len_torch_function_stack
function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
push_function_mode: Callable[[Any], None] = _push_mode
pop_function_mode: Callable[[], Any] = _pop_mode
"""Without these a region of the function mode cannot be left while another one is inside it."""
safe_softmax = torch._safe_softmax
"""Softmax of attention: a row of -inf gives zeros."""
functorch_level = peek_interpreter_stack
"""The innermost vmap, grad or jvp; None outside. A cached cast must not outlive it."""
is_batched_gradient = torch._C._functorch.is_legacy_batchedtensor
"""Whether a gradient is one of `torch.autograd.grad(is_grads_batched=True)`, of which `functorch_level` knows nothing."""
tracing_state = torch._C._get_tracing_state
"""The running torch.jit.trace; None outside."""


def forward_ad_level() -> int:
    """Return the level of forward-mode differentiation; -1 outside."""
    return torch.autograd.forward_ad._current_level


def has_amx() -> bool:
    """Whether this CPU multiplies 16-bit tiles."""
    return bool(torch.cpu._is_amx_tile_supported())


def has_fast_kernels(dtype: torch.dtype) -> bool:
    """Whether oneDNN is there and takes a 16-bit dtype on this CPU. It may emulate bf16."""
    name = "_is_mkldnn_bf16_supported" if dtype is torch.bfloat16 else "_is_mkldnn_fp16_supported"
    return bool(torch._C._has_mkldnn and getattr(torch.ops.mkldnn, name, lambda: False)())


def is_unwatched() -> bool:
    """Whether nothing is at work that wants to see each op of torch: a compiler, functorch, a tracer, a dispatch mode. Host only."""
    return not (
        torch.compiler.is_compiling()
        or num_dispatch_modes()
        or functorch_level() is not None
        or tracing_state() is not None
        or forward_ad_level() >= 0
    )


flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The CPU's kernel as it is behind `scaled_dot_product_attention`: the log-sum-exp that its gradients need is not public."""
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
math_attention = torch.ops.aten._scaled_dot_product_attention_math
"""Attention of ops that can be differentiated twice."""


autograd_engine: Any = torch.autograd.Variable._execution_engine


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the running backward pass ends. Without it no scaler can tell which pass made a gradient."""
    autograd_engine.queue_callback(callback)


saved_tensors_hooks: Callable[[], Any] = functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
"""The innermost hooks on saved tensors, None without: a checkpoint of torch has some, or runs without gradients."""


# --- the compiler ---------------------------------------------------------------------------------------------------


_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
frame_callback = eval_frame.get_eval_frame_callback  # what compiles frames that are entered; None outside of a compiler
Function = TypeVar("Function", bound=Callable[..., Any])


def constant_when_compiled(function: Function) -> Function:
    """Do what `torch.compiler.assume_constant_result` does, without importing the compiler with the package. Else a region breaks the graph."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the mark torch._dynamo looks for
    return function


def dynamo_skip_frame(function: Function) -> Function:
    """Keep the compiler from compiling a function, and what it calls, by itself; inside a larger one it is traced.

    Where the model breaks the graph inside a region, torch.compile runs the frame with the region as it is and goes on
    to compile every Python function that is called in it, `__enter__` among them. What such a graph writes into torch's
    state is put back when it ends (torch 2.13), so the region would be left again before the model ran, and the model
    would run in fp32 without a word. Writes: a mark on the function's code. Does not import the compiler.
    """
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP)
    return function


_TRACES_REGIONS = hasattr(autocast_mode, "_UnmanagedAutocast")
_SKIP_ALONE = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)


def dynamo_count_apart(function: Function) -> Function:
    """Give a function that is made again and again a code of its own: the compiler gives up one that it compiled eight times."""
    function.__code__ = function.__code__.replace()
    return function


def dynamo_skip_alone(function: Function) -> Function:
    """Keep the compiler from compiling a function by itself, but not what it calls; inside a larger one it is traced. Writes: a mark on its code."""
    eval_frame.set_code_exec_strategy(function.__code__, _SKIP_ALONE)
    return function


def dynamo_disable(function: Function) -> Function:
    """Do what `torch.compiler.disable` does, without importing the compiler: the function runs as it is, and breaks the graph around it."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # the mark torch._dynamo looks for
    return dynamo_skip_frame(function)


def dynamo_pass_through(function: Function) -> Function:
    """Skip alone what calls the forwards of all models, since a code that was compiled eight times is given up; torch 2.11 traces none in its region."""
    return dynamo_skip_alone(function if _TRACES_REGIONS else dynamo_disable(function))


if TYPE_CHECKING:
    UnmanagedAutocast = torch.autocast
else:
    UnmanagedAutocast = autocast_mode._UnmanagedAutocast if _TRACES_REGIONS else object
"""The torch.autocast that the compiler traces as any other class, where of torch.autocast itself it reads four values.

torch 2.11 has none: there a region is no torch.autocast for `isinstance`.
"""
enter_autocast, exit_autocast = _enter_autocast, _exit_autocast
"""The nodes by which an exported graph knows a region. Without them torch.export drops it."""


def predispatch_recorder() -> Any:
    """Return the mode with which torch.export, not strict, records what happens above autocast; None outside."""
    if num_function_modes() == 0:
        return None
    from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

    return next((mode for mode in function_modes() if isinstance(mode, PreDispatchTorchFunctionMode)), None)


def add_graph_node(target: Callable[..., Any], *args: object) -> Any:
    """Add a call to the graph that the compiler is writing just now, and return its node: torch.export, strict."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output.create_node("call_function", target, args, {})


def on_trace_end(callback: Callable[[], None]) -> None:
    """Call a function when the compiler ends the graph that it is writing just now, whole or not."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    InstructionTranslator.current_tx().output.add_cleanup_hook(callback)


# --- op tables ------------------------------------------------------------------------------------------------------

_C: Any = torch._C
OP_NAMESPACES = (_C._VariableFunctions, _C._nn, _C._sparse, torch.linalg, torch.special, torch.fft, _C.TensorBase)
"""Where the callables behind aten's op names live."""
LOWRANK = torch._lowrank
UNSEEN = frozenset({"svd_lowrank", "pca_lowrank", "lobpcg"})  # show plain tensors to no function mode


def ops_with_kernel(dispatch_key: str) -> Iterator[str]:
    """Yield the aten ops that have a kernel at a dispatch key: torch's own autocast lists are read from there."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = torch._C._dispatch_get_all_op_names()
    return (name for name in names if name.startswith("aten::") and has_kernel(name, dispatch_key))


# --- distributed ----------------------------------------------------------------------------------------------------


def default_group() -> ProcessGroup:
    """Return the process group that collectives use when none is named."""
    return torch.distributed.distributed_c10d._get_default_group()


def group_store(group: ProcessGroup) -> Any:
    """Return the store that a group's ranks met at: a rank that is gone cannot be asked by a collective."""
    return torch.distributed.distributed_c10d._get_process_group_store(group)


def local_shape_and_offset(tensor: Any) -> tuple[Sequence[int], Sequence[int]]:
    """Return shape and offset of this rank's part of a DTensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)


def active_ddp() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel wrapper whose forward runs just now."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel._active_ddp_module


def is_pipeline_dry_run() -> bool:
    """Whether a pipeline stage is finding out shapes by a loss of uninitialised memory (2.13; older torch runs no loss there).

    Without it that loss may be NaN, and void the first step.
    """
    return any(frame.f_code.co_name == "_backward_metadata_inference" for frame, _ in walk_stack(sys._getframe()))


is_joining: Callable[[Any], bool] = attrgetter("_join_config.enable")
"""Whether a wrapper or a ZeroRedundancyOptimizer runs inside `with ddp.join():` or `with Join([...]):`. Without it such a run ends in a collective that nobody answers."""
comm_hooks: Callable[[DistributedDataParallel], Sequence[tuple[Callable[..., Any], Any]]] = attrgetter("_comm_hooks")
"""The communication hooks that somebody registered on a wrapper."""
delayed_params: Callable[[DistributedDataParallel], Sequence[Tensor]] = attrgetter("_delay_all_reduce_params")
"""The parameters whose gradients a wrapper sums apart, `delay_all_reduce_named_params`."""


def fsdp_precision(module: Any) -> MixedPrecisionPolicy:
    """Return the precision that `fully_shard` was given for a module."""
    return module._get_fsdp_state()._mp_policy  # type: ignore[no-any-return]


def fsdp_param_groups(module: Any) -> list[FSDPParamGroup]:
    """Return the parameter groups that one `fully_shard` made of a module."""
    state = module._get_fsdp_state()
    found = getattr(state, "_fsdp_param_groups", None)
    return [one for one in [state._fsdp_param_group] if one] if found is None else list(found)  # None on torch 2.11


def wrap_replicas(group: FSDPParamGroup, wrap: Callable[[ProcessGroup], ProcessGroup]) -> None:
    """Have `fully_shard` reduce over more than two replicas of a mesh with two dimensions by another group.

    Without it sums over them are rounded after each addition; the one addition of two is rounded once in any case.
    Writes: the record of the mesh, which is this group's own.
    """
    mesh: Any = group.mesh_info
    if hasattr(mesh, "replicate_process_group") and mesh.replicate_process_group.size() > 2:
        mesh.replicate_process_group = wrap(mesh.replicate_process_group)


def unreduced_grads(group: Any) -> list[Tensor]:
    """Return the gradients of one group, and their sums over shards, that `fully_shard` keeps from the optimizer. Host only."""
    held = [group._partial_reduce_output, *(param.unsharded_accumulated_grad for param in group.fsdp_params)]
    held += [param._unsharded_param.grad for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
    return [*filter(torch.is_tensor, held)]


def drop_unreduced_grads_(group: Any) -> None:
    """Drop what `fully_shard` holds back of one group. Writes: its state."""
    group._partial_reduce_output = None
    for param in group.fsdp_params:
        if hasattr(param, "_unsharded_param"):  # there once it was gathered
            param._unsharded_param.grad = None
        if param.unsharded_accumulated_grad is not None:  # from torch 2.15 on it is the gradient above, and read-only
            param.unsharded_accumulated_grad = None


# --- nested values --------------------------------------------------------------------------------------------------

tree_map = pytree.tree_map
tree_map_only = pytree.tree_map_only
TREE_NODES = pytree.SUPPORTED_NODES
tree_flatten = pytree.tree_flatten
tree_leaves = pytree.tree_leaves
"""Nests of tensors in models' arguments and outputs, registered classes included."""

# --- tracing: without these no op is seen, or none is placed ----------------------------------------------------------

next_node_number: Callable[[], int] = _get_sequence_nr
"""The number autograd gives its next node; a backward op is placed by it."""
dispatch_modes: Callable[[], list[Any]] = _get_current_dispatch_mode_stack
num_dispatch_modes = torch._C._len_torch_dispatch_stack
without_autocast = torch._C._DisableAutocast
without_function_modes = torch._C.DisableTorchFunction
STEPPED_IN_BACKWARD = "_in_backward_optimizers"  # what torch.distributed.optim puts on parameters
without_dispatch_modes: Callable[[], _GeneratorContextManager[Any]] = _disable_current_modes
"""No mode sees an op. Without them kernels are tried on tensors without memory, and count as failing from then on."""


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """A mode that sees every op. Torch wraps those of others so that the first op imports the compiler, for two seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def node_number(node: Any) -> int:
    """Return the number of an autograd node, which is that of the op that made it."""
    return int(node._sequence_nr())


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the tensor behind the wrappers of vmap, grad and jvp. Without it a hook cannot read what they run. Host only."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def has_no_memory(tensor: Tensor) -> bool:
    """Say whether a tensor is one of forward mode's zeros, which have a shape and no values; reading one crashes. Host only."""
    return tensor._is_zerotensor()


def is_compiler_loaded() -> bool:
    """Say whether the compiler was imported; asking torch about compilation would import it, for two seconds."""
    return "torch._dynamo" in sys.modules


def compile_backend(compiled: Any) -> tuple[Callable[..., Any], nn.Module]:
    """Return the backend and the model behind what `torch.compile` made of it. Without it no compiled op can be named."""
    from torch._dynamo.eval_frame import innermost_backend

    return innermost_backend(compiled.dynamo_ctx.callback), compiled._orig_mod


def is_compiled(model: object) -> bool:
    """Say whether `torch.compile` made a module. Without importing the compiler, which takes two seconds."""
    return hasattr(model, "_orig_mod") and hasattr(model, "dynamo_ctx")
