"""What weights are stored in: the policy's dtype for weights that feed low ops, with the masters they need."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .. import random_state
from .._torch import apply_to_tensors_, own_parameters
from ..distributed import class_names, precision_of
from ..errors import MasterError, PolicyError, first_line, listed
from ..formats import LOW_DTYPES, dtype_name, overflowing
from ..kernels import is_dtensor, overlaps, span_of
from ..optim import (
    MasterOptimizer,
    MasterWeights,
    check_whole,
    keeps_masters,
    local_optimizer,
    parameters,
    wrapped_optimizer,
)  # fmt: skip
from ..policy import FP32_RULES, ModuleRule, Policy, Rule, is_matmul_like, write_module_rule
from .forward import bound_of


def check_floats(model: nn.Module, policy: Policy) -> None:
    """Refuse, by a PolicyError, a model whose weights no region would cast, or that has no weights yet.

    Low ops were asked for and weights are fp64 (a single number widens nothing), which regions leave alone, with no rule that keeps them out of 16 bit; or lazy modules have not run; or the model lies on the meta device.
    """
    params = list(model.parameters())
    if params and params[0].is_meta:
        raise PolicyError(
            "the model lies on the meta device, where nothing has values, so a policy has nothing to store and no op to cast. Write "
            "model.to_empty(device=...) and load or reset its weights before mezzo.prepare."
        )
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise PolicyError(
            f"{len(lazy)} parameters and buffers of lazy modules have no shape yet ({listed(lazy)}), so a policy cannot "
            "decide about them. Run one forward, as in model(batch), before mezzo.prepare."
        )
    doubles = [name for name, p in model.named_parameters() if policy.is_low and p.dtype is torch.float64 and p.ndim]
    modules = dict(model.named_modules())
    if wide := [n for n in doubles if precision_of(policy, n.rpartition(".")[0], modules) not in FP32_RULES]:
        part = wide[0].rpartition(".")[0]
        kept = part and write_module_rule(ModuleRule(pattern=part, precision=Rule.FP32))
        raise PolicyError(
            f"{len(wide)} of {len(params)} parameters are fp64 ({listed(wide)}), which is never cast, so their ops would "
            f"not run in {dtype_name(policy.compute) if policy.compute else '16 bit'}. "
            f"Write model.float() before prepare, or policy='fp32'{part and f', or {kept!r} for a part that is to stay fp64'}."
        )


def check_optimizers(optimizers: Sequence[Optimizer], policy: Policy, names: Mapping[Tensor, str]) -> None:
    """Refuse 16-bit trainable weights without masters, and optimizers that contradict the policy. Host only.

    Raises:
        MasterError: trainable weights are or will be 16 bit, and their optimizer keeps nothing beside them.
        PolicyError: master mode or moment dtype of an optimizer differ from the policy's; or weights of inference mode.
    """
    for optimizer in map(local_optimizer, optimizers):
        trainable = [p for p in parameters(optimizer) if p.requires_grad]
        if frozen := [names[p] for p in trainable if torch.is_inference_mode_enabled() or p.is_inference()]:
            raise PolicyError(
                f"{len(frozen)} of {len(trainable)} trainable parameters ({listed(frozen)}) are or would be stored as torch.inference_mode() "
                "makes tensors, which no step may write. Make the model and prepare it outside of that block."
            )
        if keeps_masters(optimizer):
            _check_masters(optimizer, policy)
            continue
        kind = type(optimizer).__name__
        if low := {names[p]: p.dtype for p in trainable if p.dtype in LOW_DTYPES}:
            masters = "fp16-master" if torch.float16 in low.values() else "bf16-master"
            raise MasterError(
                f"{len(low)} of {len(trainable)} trainable parameters are 16 bit ({listed(list(low))}), and "
                f"policy={policy!s} keeps no masters of them: updates smaller than half their spacing vanish. "
                f"Write policy='{masters}', or model.float() before prepare, to keep trainable weights in fp32."
            )
        if policy.params in LOW_DTYPES:
            # `adopt` gives masters to all but the parts of what a ZeroRedundancyOptimizer divides.
            raise MasterError(
                f"the policy stores weights in {dtype_name(policy.params)} with master={policy.master}, and ZeroRedundancyOptimizer "
                f"divides {kind}, which keeps no masters. Write ZeroRedundancyOptimizer(..., optimizer_class=mezzo.optim."
                f"{kind if kind in ('Adam', 'SGD') else 'AdamW'}, master='{policy.master}'), or keep weights in fp32 (params=fp32)."
            )
        if policy.state is not torch.float32:
            raise PolicyError(
                f"the policy declares state={dtype_name(policy.state)}, and {kind} stores moments in "
                f"the dtype of the weights. Write mezzo.optim.AdamW(..., state_dtype={policy.state}), or state=fp32 in the policy."
            )


def _check_masters(optimizer: Optimizer, policy: Policy) -> None:
    if isinstance(optimizer, MasterWeights):
        for p in parameters(optimizer):
            if p.dtype in LOW_DTYPES or policy.params in LOW_DTYPES:
                check_whole(p)
    for group in optimizer.param_groups:
        if isinstance(optimizer, MasterWeights):
            option, mode, moments = "mode", optimizer.masters.mode, torch.float32
        else:
            option, mode, moments = "master", group["master"], group["state_dtype"]
        if policy.params in LOW_DTYPES and mode != policy.master:
            raise PolicyError(
                f"the policy declares master={policy.master}, and the optimizer was made with {option}='{mode}'. "
                f"Write {option}='{policy.master}' in the optimizer, or master={mode} in the policy."
            )
        if moments is not policy.state:
            given, declared = dtype_name(moments), dtype_name(policy.state)
            raise PolicyError(
                f"the policy declares state={declared}, and the optimizer stores moments in {given}. "
                f"Write state={given} in the policy, or mezzo.optim.AdamW(..., state_dtype={policy.state})."
            )


def convert_(
    model: nn.Module, optimizers: Sequence[Optimizer], policy: Policy, *, is_replicated: bool = False
) -> list[str]:
    """Store weights of a bound model as the policy says; return the names of parameters that were converted.

    Weights that feed low ops go to `params`: of linear and convolution layers, attention, embeddings and, on a CPU, LSTMs outside
    fp32 rules, those that are trainable, or all if there is no optimizer; not of embeddings with sparse gradients. 16-bit weights of modules under an fp32 rule go to
    fp32, since that is what their ops meet, as does what is trained in fp16 under split masters, which are of bf16, and all where a policy without 16 bit follows one with it. Everything else stays as it is. Optimizers get the fp32 values as masters.

    Raises:
        PolicyError: 16-bit storage for ops that run in fp32, or another dtype for parameters that
            DistributedDataParallel (`is_replicated`) or ZeroRedundancyOptimizer holds already, or whose memory another tensor of the model shows;
            or values beyond fp16.

    Writes: the storage of parameters, which keep their identity, and their `grad_dtype` with it; masters. Syncs: for fp16.
    """
    targets = storage_targets(model, policy, optimizers)
    changed = {name: p for name, p in model.named_parameters() if p in targets and p.dtype is not targets[p]}
    _refuse_unstorable(model, optimizers, policy, targets, changed, is_replicated=is_replicated)
    owners = {p: optimizer for optimizer in map(local_optimizer, optimizers) for p in parameters(optimizer)}
    has_own_grad_dtype = [p for p in changed.values() if p.grad_dtype is p.dtype]
    sharded: dict[Tensor, Tensor] = {p: p.detach() for p in changed.values() if is_dtensor(p)}
    if sharded:
        # By way of their modules, which tell the sharding about it.
        to: dict[Tensor, torch.dtype] = {p: targets[p] for p in changed.values()}
        apply_to_tensors_(model, lambda tensor: tensor.to(to[tensor]) if tensor in to else tensor)
    for p in changed.values():
        # One after the other, so that of the fp32 weights no more than one is held beside what replaces them.
        master, optimizer = sharded.pop(p) if p in sharded else p.detach(), owners.get(p)
        if master.dtype in LOW_DTYPES and optimizer is not None and keeps_masters(optimizer):
            master = optimizer.master(p).detach()
        if p.dtype is not targets[p]:
            _store_one_(p, master.to(targets[p]))
        if optimizer is not None and keeps_masters(optimizer) and targets[p] in LOW_DTYPES:
            optimizer.set_masters_({p: master.to(torch.float32)})
    for p in has_own_grad_dtype:
        if p.grad_dtype is not p.dtype:  # it was written down once, and then follows no more
            p.grad_dtype = p.dtype
    return list(changed)


def _refuse_unstorable(
    model: nn.Module, optimizers: Sequence[Optimizer], policy: Policy, targets: Mapping[Tensor, torch.dtype],
    changed: Mapping[str, Tensor], *, is_replicated: bool,
) -> None:  # fmt: skip
    """Refuse, as `convert_` says, to store what is to be `changed` in its target dtype."""
    having = [one for one in map(local_optimizer, optimizers) if keeps_masters(one)]
    trained = {p: one for one in having for p in parameters(one) if p.requires_grad}
    low = [p for p in trained if targets.get(p, p.dtype) in LOW_DTYPES]
    if low and policy.params not in LOW_DTYPES:
        names = [name for name, p in model.named_parameters() if any(p is one for one in low)]
        raise PolicyError(
            f"{len(low)} of {len(trained)} trainable parameters ({listed(names)}) are 16 bit, with master={trained[low[0]].aux_state(low[0])[0]}, "
            f"and policy={policy!s} stores weights in fp32, without masters. Write policy='{dtype_name(low[0].dtype)}-master', or, if a stepper before "
            "stored them so, call its release() while it is there."
        )
    if policy.params in LOW_DTYPES and not policy.is_low:
        raise PolicyError(
            f"params={dtype_name(policy.params)} with compute=fp32 stores weights that no op could take. Write compute={dtype_name(policy.params)}, or params=fp32."
        )
    if changed and is_replicated:
        # A new dtype takes away the hooks by which gradients are averaged, and torch does not say so (2.13).
        raise PolicyError(
            f"{len(changed)} parameters ({listed(list(changed))}) would be stored anew, and DistributedDataParallel took hold "
            "of them as they are. Write amp = mezzo.prepare(model, optimizer, policy) first, then ddp = DistributedDataParallel(amp.model)."
        )
    if changed and any(getattr(one, "parameters_as_bucket_view", False) for one in optimizers):
        raise PolicyError(
            f"{len(changed)} parameters ({listed(list(changed))}) would be stored anew, and ZeroRedundancyOptimizer took hold of them as "
            f"they are. Leave parameters_as_bucket_view out, or keep weights in fp32 (params=fp32)."
        )
    if changed:
        _check_apart(model, changed, policy, is_trained=bool(optimizers))
    narrowed = [(name, p) for name, p in changed.items() if targets[p] is torch.float16]
    if over := overflowing(torch.float16, narrowed):
        name = over[0].rpartition(" ")[0].rpartition(".")[0]
        rule = f"{write_module_rule(ModuleRule(pattern=name, precision=Rule.FP32))!r}" if name else "params=fp32"
        raise PolicyError(
            f"the policy stores weights in fp16, whose largest number is 65504, and {listed(over)} would be inf there. "
            f"Write {rule} in the policy for such a module, or take bf16-master, whose range is that of fp32."
        )


def _check_apart(model: nn.Module, changed: Mapping[str, Tensor], policy: Policy, *, is_trained: bool) -> None:
    """Refuse weights whose memory another tensor of the model shows, or another process may, which would be left with the values of before."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    plain = [(name, tensor) for name, tensor in tensors if type(tensor.detach()) is Tensor and _has_memory(tensor)]
    shared = [name for name, p in plain if name in changed and p.device.type == "cpu" and p.is_shared()]  # type: ignore[no-untyped-call]  # torch's own
    if shared and is_trained:
        raise PolicyError(
            f"{len(shared)} parameters ({listed(shared)}) lie in memory that processes share, and policy={policy!s} would store them anew "
            f"in {dtype_name(policy.params)}, where the others do not see them move. Write model.share_memory() after mezzo.prepare, in "
            "the process that starts the others, or keep weights in fp32 (params=fp32)."
        )
    spans = [(*span_of(tensor), name) for name, tensor in plain]
    trained = {name for name, p in plain if is_trained and p.requires_grad}
    itself = [
        ("its own other elements", n)
        for (a, b, n), (_, p) in zip(spans, plain, strict=True)
        if n in trained and b - a < p.nbytes
    ]
    for last, name in (*itself, *overlaps(spans)):
        if name in changed or last in changed:
            raise PolicyError(
                f"{name} lies in the memory of {last}, and policy={policy!s} would store {name if name in changed else last} anew in "
                f"{dtype_name(policy.params)}, so that each went on with values of its own. Write .clone() where one is made of the "
                "other, compute it in forward, or keep weights in fp32 (params=fp32)."
            )


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0 and not (tensor.is_meta or tensor.is_nested)


def store_(model: nn.Module, values: Mapping[Tensor, Tensor]) -> None:
    """Give parameters other tensors to be stored in, of any dtype; sharded ones by way of their modules.

    Writes: the storage of parameters, which keep their identity. Syncs: no.
    """
    if any(is_dtensor(p) for p in values):
        apply_to_tensors_(model, lambda tensor: values.get(tensor, tensor))
    for p, value in values.items():
        if not is_dtensor(p):
            _store_one_(p, value)


def _store_one_(p: Tensor, value: Tensor) -> None:
    """Give a parameter another tensor to be stored in; of the kind that it is itself, in inference mode or outside, else it could be read no more."""
    with torch.inference_mode(p.is_inference()):
        p.data = value if value.is_inference() is p.is_inference() else value.clone()


def storage_targets(model: nn.Module, policy: Policy, optimizers: Sequence[Optimizer]) -> dict[Tensor, torch.dtype]:
    """Return the dtype that a policy stores parameters of a bound model in, for those it decides about.

    Without optimizers those are all that feed low ops; else the ones that are trained, since a weight that no
    optimizer has yet would lose what its master must know. Host only.
    """
    trained = {p for optimizer in optimizers for p in parameters(optimizer)}
    targets: dict[Tensor, torch.dtype] = {}
    fp32: set[Tensor] = set()
    for module in model.modules():
        bound = bound_of(module)
        precision = None if bound is None else bound.own if bound.own is not None else bound.around
        names = class_names(module)
        stores_low = policy.params in LOW_DTYPES and not (is_sparse(module) or _is_spectral(module))
        if "LinearCrossEntropyLoss" in names and getattr(module, "options", None) is not None:
            fp32.update(module.parameters())  # in chunks it writes to buffers of its input's dtype, past every cast
        for p in own_parameters(module).values():
            if p is None or not p.is_floating_point():
                continue
            is_trained = p in trained and p.requires_grad
            is_chosen = not optimizers or (is_trained and p.layout is torch.strided and not p.is_nested)
            feeds_low = is_matmul_like(names) or _is_lstm_on_cpu(module, p)
            cannot_split = policy.master == "split" and p.dtype is torch.float16 and is_trained
            if bound is not None and bound.binding.widens and p.dtype in LOW_DTYPES:
                targets[p] = torch.float32
            elif precision in FP32_RULES:
                fp32.add(p)
                if cannot_split or (precision is Rule.FP32 and p.dtype in LOW_DTYPES):
                    targets[p] = torch.float32
            elif stores_low and feeds_low and is_chosen:
                targets.setdefault(p, policy.params)
            elif cannot_split:
                targets.setdefault(p, torch.float32)
    return {p: dtype for p, dtype in targets.items() if dtype is torch.float32 or p not in fp32}


def _is_lstm_on_cpu(module: nn.Module, p: Tensor) -> bool:
    """Whether oneDNN's kernel reads a weight as it is stored: it has no projections, and CUDA's wants all weights in one piece of memory."""
    return isinstance(module, nn.LSTM) and not module.proj_size and p.device.type == "cpu" and not is_dtensor(p)


def is_sparse(module: nn.Module) -> bool:
    """Whether the gradients of a module's weights are sparse: torch sums their rows in the dtype of the weight, fp16 not at all.

    An fp32 weight takes no more memory than one of 16 bit with a master, so it stays fp32.
    """
    return bool(getattr(module, "sparse", False))


def _is_spectral(module: nn.Module) -> bool:
    """Whether torch.nn.utils.spectral_norm multiplies a weight with fp32 vectors of its own, outside of all rules."""
    names = [name.removesuffix("_orig") for name in own_parameters(module) if name.endswith("_orig")]
    return any(hasattr(module, f"{name}_u") for name in names)


def set_grad_dtype_(optimizers: Sequence[Optimizer], policy: Policy) -> None:
    """Have gradients accumulate in the policy's dtype; PolicyError if an optimizer cannot step on them. Writes: `grad_dtype` of trainable floating parameters."""
    if policy.grads is None:
        return
    for optimizer in optimizers:
        _check_takes(optimizer, policy.grads)
        for p in parameters(optimizer):
            if p.requires_grad and p.is_floating_point():
                p.grad_dtype = policy.grads


def _check_takes(optimizer: Optimizer, grads: torch.dtype) -> None:
    cls = type(wrapped_optimizer(local_optimizer(optimizer)))
    for group in () if grads is torch.float32 or issubclass(cls, MasterOptimizer) else optimizer.param_groups:
        for device in {p.device for p in group["params"] if p.requires_grad and p.dtype is torch.float32}:
            fault = _fault(cls, group, device, grads)
            if fault is not None and _fault(cls, group, device, torch.float32) is None:
                raise PolicyError(
                    f"the policy declares grads={dtype_name(grads)}, and {cls.__name__} {fault}. "
                    "Leave grads out of the policy: gradients then have the dtype of their weights."
                )


def _fault(cls: type[Optimizer], group: Mapping[str, Any], device: torch.device, grads: torch.dtype) -> str | None:
    """Return what an optimizer does wrong with gradients of a dtype, as steps of a small weight show; None for nothing."""
    known, step = inspect.signature(cls.__init__).parameters, inspect.unwrap(cls.step)  # past hooks of every optimizer
    closure = [lambda: torch.zeros(())][: len(inspect.signature(step).parameters) - 1]
    weight = nn.Parameter(torch.ones(2, 2, device=device))
    weight.grad_dtype, weight.grad = grads, torch.ones(2, 2, dtype=grads, device=device)
    try:
        small: Any = cls([weight], **{k: v for k, v in group.items() if k in known and k != "params"})
        with random_state.kept(), torch.no_grad():
            for _ in range(2):
                step(small, *closure)
    except Exception as error:
        return f"cannot step on them beside fp32 weights: {first_line(error)}"
    state = [k for k, v in small.state[weight].items() if isinstance(v, Tensor) and v.dtype in LOW_DTYPES]
    return f"would keep {listed(state)} in {dtype_name(grads)} too, where it declares state=fp32" if state else None
