"""Fully sharded data parallelism: shards, gathers and waiting gradients of a model as a policy wants them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import (
    default_group,
    drop_unreduced_grads_,
    fsdp_param_groups,
    fsdp_precision,
    unreduced_grads,
    wrap_replicas,
)
from ..errors import DistributedError, PolicyError, check_given, first_line, listed
from ..formats import FP8, LOW_DTYPES, dtype_name
from ..kernels import is_dtensor
from ..policy import Policy, PolicyLike, as_policy, names_around
from .group import Group, all_gather_rows, is_distributed
from .rank_consistency import digest, refuse_setup
from .shard_plan import ParamDtypes, ShardGroup, ShardPlan, param_dtypes, plan_shards, precision_of
from .wide_sum import ShardCollective, WideReduceScatter, WideReplicas
from .wrapper import UNKNOWN, Wrapper, holding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy


def fully_shard(
    model: nn.Module,
    policy: PolicyLike,
    *,
    units: Iterable[nn.Module] = (),
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    offload_policy: OffloadPolicy | None = None,
) -> ShardPlan:
    """Shard a model over ranks with torch's `fully_shard`, so that its gathers and reductions follow a policy.

    Weights of linear and convolution layers are gathered in the dtype of their ops; norms, embeddings and
    everything under an fp32 rule are gathered as they are stored, in groups of their own. Make the optimizer after
    this, then call `mezzo.prepare` with the same policy.

    Args:
        model: the root; its parameters are replaced by sharded ones.
        policy: a policy or its text.
        units: modules to gather as a whole, such as the layers of a transformer; none inside another.
        mesh: of ranks; left out, all of them. Two dimensions replicate over the first and shard over the second.
        reshard_after_forward: as in torch.
        offload_policy: as in torch; `CPUOffloadPolicy()` keeps shards, gradients and optimizer state on the CPU.

    Returns:
        What was done; readable when printed.

    Raises:
        PolicyError: the policy wants weights that share a module, or a tie between units, to be gathered differently; or torch refuses a part
            when others are sharded already, which then stay so.
        DistributedError: the ranks shard by different policies or in different units. Raised on all of them, whose models are as they were.

    Writes: parameters and classes of the modules. Syncs: with the slowest rank.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import OffloadPolicy, fully_shard

    check_given("fully_shard", "model", model, nn.Module, "a model", PolicyError)
    if mesh is not None:
        check_given("fully_shard", "mesh", mesh, DeviceMesh, "a DeviceMesh", PolicyError)
    chosen = as_policy(policy)
    _check_reduce(chosen)
    home = next((p.device for p in model.parameters()), torch.device("cpu"))
    chosen = chosen.resolve(home)
    plan = plan_shards(model, chosen, units)
    _compare(home, mesh, chosen, plan)
    modules = dict(model.named_modules())
    for done, group in enumerate(plan.groups):
        members = [modules[name] for name in group.modules]
        with _naming_sharded(plan.groups[:done], group):
            fully_shard(
                members if len(members) > 1 else members[0],
                mesh=mesh,
                reshard_after_forward=reshard_after_forward,
                mp_policy=_mixed_precision(group.param_dtypes, plan.reduce),
                offload_policy=OffloadPolicy() if offload_policy is None else offload_policy,
            )
        if home.type == "cpu":  # where the host waits
            members[0].set_custom_all_gather(WatchedGather())
        if plan.reduce in LOW_DTYPES:
            members[0].set_custom_reduce_scatter(WideReduceScatter())
            for params in fsdp_param_groups(members[0]):
                wrap_replicas(params, WideReplicas)
    return plan


@contextmanager
def _naming_sharded(done: Sequence[ShardGroup], group: ShardGroup) -> Iterator[None]:
    """Have an error of the block, in which torch shards a group, say which are sharded already, by a PolicyError where some are."""
    try:
        yield
    except Exception as error:
        if not done:
            raise
        names = listed([name or "the root" for one in done for name in one.modules])
        raise PolicyError(
            f"torch's fully_shard refused '{group.modules[0] or 'the root'}': {first_line(error)}. By then {names} "
            "had been sharded, which cannot be taken back: change what it names, make the model anew, and call fully_shard again."
        ) from error


def _compare(home: torch.device, mesh: DeviceMesh | None, policy: Policy, plan: ShardPlan) -> None:
    group = Group(None if mesh is None else _group_of_mesh(mesh), home=None if home.type in ("cpu", "meta") else home)
    lines = [f"the policy '{policy}'", *str(plan).split("\n")]
    if any(group.differing(digest(lines)[None])):
        hint = "Call fully_shard with one policy, model and units on all ranks."
        refuse_setup(group, "fully_shard goes by", lines, hint)


class WatchedGather(ShardCollective):
    """In place of the gathering of shards; its error names the rank that is lost."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather as torch does. Raises: DistributedError: a rank is lost. Writes: `output_tensor`. Syncs: as torch's."""
        with Group(group).watching():
            work: dist.Work | None = all_gather_rows(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


def _check_reduce(policy: Policy) -> None:
    if policy.reduce is FP8:
        raise PolicyError(
            "the policy declares reduce=fp8, and gradients of shards are reduced by torch, which has no blocks with scales. Write reduce=bf16, or wrap the model in DistributedDataParallel."
        )


def _mixed_precision(param_dtypes: ParamDtypes, reduce: torch.dtype) -> MixedPrecisionPolicy:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # Casting inputs and outputs is the region's business.
    param_dtype = None if param_dtypes.unsharded is param_dtypes.stored else param_dtypes.unsharded
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce, cast_forward_inputs=False)


def sharded_modules(model: nn.Module) -> dict[str, FSDPModule]:
    """Return the modules that torch's `fully_shard` was applied to, by name; none if it was not."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return {}
    return {name: module for name, module in model.named_modules() if isinstance(module, fsdp.FSDPModule)}


def reshard_(model: nn.Module) -> None:
    """Put weights that a forward left gathered, as an evaluation does, back into the shards that optimizers know. Host only."""
    for module in sharded_modules(model).values():
        module.reshard()


_OWN_ALONE = "would check and clip the gradients of its own part alone."


def refuse_flat(model: nn.Module, *, looks_around: bool = False) -> None:
    """Refuse, by a PolicyError, to train weights that torch divides among ranks and shows as plain tensors; looked for around a model too, it takes a while."""
    if any(hasattr(p, "_st_info") for p in model.parameters()):  # of torch.distributed.tensor.parallel.ddp
        raise PolicyError(
            "the model is parallel by tensors, and was made ready for DistributedDataParallel, which takes their parts for whole weights: "
            f"each rank {_OWN_ALONE} Write mezzo.distributed.fully_shard(model, policy, mesh=mesh['dp']) around the parallel model in its place, then make the optimizer, then prepare."
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not is_distributed():
        return
    flat = fsdp.FullyShardedDataParallel
    if any(isinstance(module, flat) for module in model.modules()) or (looks_around and holding(model, flat)):
        raise PolicyError(
            f"the model is divided by FullyShardedDataParallel, and each rank {_OWN_ALONE} "
            "Write mezzo.distributed.fully_shard(model, policy, units=...) in its place, then make the optimizer, then prepare."
        )


def check_sharded(model: nn.Module, policy: Policy) -> None:
    """Refuse, by a PolicyError, a sharding whose own mixed precision is not that of a policy, its compute dtype decided, or differs within a group."""
    modules = dict(model.named_modules())
    sharded = sharded_modules(model)
    reduced: list[tuple[str, torch.dtype]] = []
    if sharded:
        _check_reduce(policy)
    for name in sharded:
        given: MixedPrecisionPolicy = fsdp_precision(sharded[name])
        for fqn in [fqn for fqn in modules if _unit_of(fqn, sharded) == name]:
            precision = precision_of(policy, fqn, modules)
            for param in modules[fqn].parameters(recurse=False):
                if param.is_floating_point():
                    wanted = param_dtypes(policy, precision, modules[fqn], param)
                    _check_gather(policy, given, fqn, wanted)
                    reduced.append((fqn or "the root", given.reduce_dtype or given.param_dtype or wanted.stored))
        _check_output(policy, given, name)
    _check_reduction(policy, reduced)
    _check_uniform(model, sharded)


def reduced_dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype in which each group of a sharded model reduces its gradients, by the module it belongs to."""
    found = {}
    for name, module in sharded_modules(model).items():
        given: MixedPrecisionPolicy = fsdp_precision(module)
        stored = next((p.dtype for p in model.get_submodule(name).parameters()), torch.float32)
        found[name or "the root"] = given.reduce_dtype or given.param_dtype or stored
    return found


def _unit_of(fqn: str, sharded: Container[str]) -> str | None:
    """Return the sharded module that gathers the weights of a module's own: itself, or the nearest around it; None where none does."""
    return next((name for name in (fqn, *names_around(fqn)) if name in sharded), None)


def _check_gather(policy: Policy, given: MixedPrecisionPolicy, fqn: str, wanted: ParamDtypes) -> None:
    unsharded = given.param_dtype or wanted.stored
    if unsharded not in wanted.may_gather:
        may = " or ".join(dtype_name(dtype) for dtype in wanted.may_gather)
        raise PolicyError(
            f"the sharding gathers the weights of '{fqn or 'the root'}' in {dtype_name(unsharded)}, and the policy "
            f"'{policy}' computes there in {may}: two mechanisms would cast them, each its own way. "
            "Write mezzo.distributed.fully_shard(model, policy, units=...), which makes a group of its own where dtypes differ."
        )


def _check_reduction(policy: Policy, reduced: Sequence[tuple[str, torch.dtype]]) -> None:
    agree = len({dtype for _, dtype in reduced}) == 1
    for place, dtype in reduced:
        if dtype is not policy.reduce:
            found = dtype_name(dtype)
            raise PolicyError(
                f"the policy declares reduce={dtype_name(policy.reduce)}, and the sharding reduces the gradients of '{place}' in {found}. "
                f"Write MixedPrecisionPolicy(reduce_dtype={policy.reduce}){f', or reduce={found} in the policy' if agree else ' for each unit'}."
            )


def _check_uniform(model: nn.Module, sharded: dict[str, FSDPModule]) -> None:
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    for group in (group for module in sharded.values() for group in fsdp_param_groups(module)):
        params = [param.sharded_param for param in group.fsdp_params if param.sharded_param.requires_grad]
        by_dtype: dict[torch.dtype, str] = {}
        for p in params:
            by_dtype.setdefault(p.dtype, names.get(p, "a parameter"))
        if len(by_dtype) > 1:
            found = " and ".join(f"'{name}' in {dtype_name(dtype)}" for dtype, name in by_dtype.items())
            raise PolicyError(
                f"the sharding gathers {found} together, and torch wants one dtype for all that is trained in a group. Write "
                "mezzo.distributed.fully_shard(model, policy, units=...), which makes a group of its own where dtypes differ."
            )


def _check_output(policy: Policy, given: MixedPrecisionPolicy, fqn: str) -> None:
    cast = given.output_dtype
    if cast is not None and (fqn or cast is not policy.output):
        raise PolicyError(
            f"the sharding casts outputs of '{fqn or 'the root'}' to {dtype_name(cast)}, which the policy '{policy}' does not "
            "say. Leave output_dtype out of MixedPrecisionPolicy, and write output=... in the policy for the root."
        )


_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
"""Made for parts of meshes with several dimensions, which have none, by the group of all ranks."""


def _group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return all ranks of a mesh; None are all there are. Syncs: with them, if no group is theirs yet."""
    if mesh.size() == dist.get_world_size():
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    known, ranks = _groups.setdefault(default_group(), {}), tuple(mesh.mesh.flatten().tolist())
    if ranks not in known:
        known[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return known[ranks]


def _holding_back(group: Any) -> str | None:
    """Return the call that has a group hold gradients back in the next backward pass; None is none."""
    if not group.reduce_grads:
        return "set_requires_gradient_sync(False)"
    is_replicated = hasattr(group.mesh_info, "replicate_process_group")
    return "set_requires_all_reduce(False)" if is_replicated and not group.all_reduce_grads else None


class ShardWrapper(Wrapper):
    """A model whose weights lie in parts on the ranks of a mesh: sharded, or parallel by tensors. The policy's compute dtype is decided."""

    compares_models = gathers = True

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        self._model, self._policy = model, policy
        meshes = [p.device_mesh for p in model.parameters() if is_dtensor(p)]
        self.process_group = _group_of_mesh(max(meshes, key=lambda mesh: mesh.size()))

    def check_backward(self) -> None:
        """Refuse, by a PolicyError, to sum gradients of fp32 weights that a module holds back in a `reduce` dtype of 16 bit."""
        for name, group in self._groups() if self._policy.reduce in LOW_DTYPES else ():
            stored = {param.sharded_param.dtype for param in group.fsdp_params}
            if (method := _holding_back(group)) and torch.float32 in stored:
                raise PolicyError(
                    f"{method} was called on '{name or 'the root'}', whose weights are fp32, and torch "
                    f"sums gradients that wait in the dtype of what is sent, reduce={dtype_name(self._policy.reduce)}. Average every "
                    "micro-batch, which is then summed in fp32, or write reduce=fp32 in the policy."
                )

    def check_step(self) -> None:
        """Refuse a step whose last backward passes held gradients back, which were never averaged. Raises: DistributedError."""
        for name, group in self._groups():
            if unreduced_grads(group):
                method = _holding_back(group) or "set_requires_gradient_sync(False)"
                raise DistributedError(
                    f"step() was called while gradients of '{name or 'the root'}' wait on their own rank: the last backward of this step "
                    f"ran under {method}. Write {method.replace('False', 'True')} before the last one."
                )

    def why_apart(self, stepped: Iterable[Tensor]) -> str:
        """Say why weights may differ after a step of some parameters, and what to do. Host only."""
        whole = [name for name, p in self._model.named_parameters() if p.requires_grad and not is_dtensor(p)]
        if not whole:
            return UNKNOWN
        return f"Nothing averages the gradients of {listed(whole)}, which lie outside of what is sharded. Call fully_shard on the model that holds them too."

    def drop(self) -> None:
        """Drop gradients that a module holds back, which torch keeps where no optimizer sees them. Writes: those gradients."""
        for _, group in self._groups():
            drop_unreduced_grads_(group)

    def _groups(self) -> Iterator[tuple[str, Any]]:
        modules = sharded_modules(self._model).items()
        return ((name, group) for name, module in modules for group in fsdp_param_groups(module))


def check_storage(model: nn.Module, policy: Policy) -> None:
    """Refuse, by a PolicyError, fp32 gradients for 16-bit shards, which torch gives gradients of their own dtype."""
    low = [name for name, p in model.named_parameters() if p.dtype in LOW_DTYPES and p.requires_grad]
    if low and policy.grads is torch.float32:
        raise PolicyError(
            f"the policy declares grads=fp32, and torch gives the {len(low)} sharded parameters that are stored in 16 bit "
            f"({low[0]}, ...) gradients of their own dtype. Leave grads out, and sum micro-batches in {dtype_name(policy.reduce)} "
            "before they are rounded: model.set_requires_gradient_sync(False) for all but the last of a step."
        )
