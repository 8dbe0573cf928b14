"""Prepare: a policy bound to a model and its optimizers, in one call."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..binding.bind import bind, innermost
from ..binding.storage import check_floats, check_optimizers, convert_, set_grad_dtype_
from ..errors import StepError
from ..policy import CacheName, PolicyLike, as_policy
from .engine import name_parameters
from .optimizer_grads import Skip
from .recovery import check_demotion
from .stepper import Stepper

_log = logging.getLogger("mezzo.step")


def prepare(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    policy: PolicyLike = "auto",
    *,
    skip: Skip = "together",
    cache: CacheName = "region",
) -> Stepper:
    """Bind a policy to a model and take over the order of its training steps.

    The model keeps its identity: modules, parameter objects and state dict keys are those it had. From now on its
    forward, and that of each of its modules, runs in the policy's region wherever it is called: in other threads,
    under vmap and torch.compile, in activation recompute, in copies, in evaluation.

    Args:
        model: on the device it will run on; DistributedDataParallel goes around it afterwards.
        optimizer: one, several, or None for inference.
        policy: a policy, its text, a .toml path, a dict of its fields, or the dtype to compute in. "auto" takes bf16 or fp16 where the device has units for it.
        skip: with several optimizers, whether bad gradients of one make all skip ("together"), or that one.
        cache: "persistent" keeps 16-bit copies of fp32 weights between forwards: for inference, frozen weights,
            and many micro-batches in a step.

    Returns:
        The stepper; its `model` is the model.

    Raises:
        PolicyError: the policy cannot be bound to this model or contradicts the optimizer.
        MasterError: trainable weights are, or by the policy become, 16 bit, and the optimizer keeps no masters.

    Writes: class and forward of each module; the storage of weights, where the policy gives them another dtype.
    Syncs: no.

    >>> model = nn.Linear(4, 1)
    >>> amp = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16, output=fp32")
    >>> amp.backward(model(torch.ones(2, 4)).square().mean())
    >>> bool(amp.step())
    True
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    chosen = as_policy(policy)
    resolved = chosen.resolve(next((p.device for p in model.parameters()), torch.device("cpu")))
    check_demotion(resolved, None)
    names = name_parameters(model, optimizers)
    check_floats(model, resolved)
    check_optimizers(optimizers, resolved, names)
    _check_shared(optimizers, skip)
    inner = innermost(model)
    binding = bind(inner, resolved, cache)
    converted = convert_(inner, optimizers, resolved, is_replicated=isinstance(model, DistributedDataParallel))
    set_grad_dtype_(optimizers, resolved)
    _log.info("prepared %s: %s; %d parameters stored anew", type(model).__name__, resolved, len(converted))
    return Stepper(model, optimizers, resolved, binding, skip=skip)


def _check_shared(optimizers: Sequence[Optimizer], skip: Skip) -> None:
    if skip == "together":
        return
    params = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if len(set(params)) < len(params):
        raise StepError(
            "skip='independent' was asked for optimizers that share parameters, so one could step where the other "
            "skips. Write skip='together'."
        )
