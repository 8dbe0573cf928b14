"""Prepare: a policy bound to a model and its optimizers, in one call."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import cast, get_args

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .._torch import fused_devices, has_hooks, is_fused
from ..allocator import suggest_keep_memory
from ..binding import (
    check_floats,
    check_optimizers,
    convert_,
    innermost,
    is_activation,
    is_prepared,
    is_sparse,
    remember_modules,
    set_grad_dtype_,
    unshare_activations_,
    with_missing_kernels,
)
from ..binding.bind import bind
from ..distributed import disconnect, refuse_flat, reshard_
from ..errors import StepError, did_you_mean, kind_of, shown
from ..formats import LOW_DTYPES, is_one_of
from ..optim import adopt, local_optimizer, masters_around, parameters, take_loaded_masters_, wrapped_optimizer
from ..policy import FP32_RULES, CacheName, Policy, PolicyLike, as_policy, write_module_rule
from .engine import Engine
from .foreign import OF_PREPARE
from .leftovers import refuse_repeated, refuse_strangers
from .load_hooks import LoadHooks
from .recovery import check_demotion
from .release import let_go, original, remember_attributes, remember_weights
from .report import ParameterNames
from .result import Skip
from .stepper import Stepper, answers_misfits
from .strangers import warn_of_earlier
from .update import is_owned

_log = logging.getLogger("mezzo.step")


@answers_misfits("mezzo.prepare()", OF_PREPARE)
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
        optimizer: one, several, or None for inference. For a policy with 16-bit weights torch's AdamW, Adam and SGD stay
            the objects they are and are stepped by mezzo's kernels; those of mezzo.optim take the policy's masters, and
            any other gets masters around it: `amp.optimizers` has what is stepped.
        policy: a policy, its text, a .toml path, a dict of its fields, or the dtype to compute in. "auto" takes bf16 or
            fp16 where the device has units for it.
        skip: with several optimizers, whether bad gradients of one make all skip ("together"), or that one.
        cache: "persistent" keeps 16-bit copies of fp32 weights between forwards: for inference, frozen weights,
            and many micro-batches in a step.

    Returns:
        The stepper; its `model` is the model.

    Raises:
        PolicyError: the policy cannot be bound to this model or contradicts the optimizer.
        StepError: something else than a model and optimizers; an unknown `skip` or `cache`; model or optimizer are prepared already, or the optimizer has no hooks of torch's base class.
        MasterError: trainable weights are, or by the policy become, 16 bit, and the optimizer keeps no masters.

    Writes: class and forward of each module; the storage of weights, where the policy gives them another dtype. If it
        raises, whatever raised, model and optimizers are what they were; so the old weights are held until it returns.
    Syncs: for weights that go to fp16, and for 16-bit ones where an average of the model is in reach.

    >>> model = nn.Linear(4, 1)
    >>> amp = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), policy="bf16")
    >>> amp.backward(model(torch.ones(2, 4)).square().mean())
    >>> bool(amp.step())
    True
    """
    given = optimizers_of("prepare", model, optimizer)
    _check_word("skip", skip, get_args(Skip))
    _check_word("cache", cache, get_args(CacheName))
    optimizers = [_inner_optimizer(one) for one in given]
    chosen = _checked(model, optimizers, policy, skip)
    undo = ExitStack()
    try:  # whatever raises, Ctrl-C too, everything is put back, the last first; no line of this comes after it
        return _prepared(model, optimizers, chosen, skip, cache, undo)
    except BaseException:
        undo.close()
        raise


def _checked(model: nn.Module, optimizers: Sequence[Optimizer], policy: PolicyLike, skip: Skip) -> Policy:
    """Return the policy, decided for the model's device, after a look at all that `prepare` refuses before it changes anything."""
    inner = innermost(model)
    _refuse_prepared(inner, optimizers)
    if optimizers:
        refuse_flat(model)
        reshard_(inner)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    asked = as_policy(policy)
    idle = [write_module_rule(rule) for rule in asked.modules if rule.precision not in FP32_RULES]
    if idle and asked.compute is torch.float32:
        _log.warning(
            "policy '%s': compute=fp32 switches casting off, and so %s does nothing. Write 'bf16, *=fp32, %s' for fp32 in "
            "every other module.", asked, " and ".join(idle), ", ".join(idle),
        )  # fmt: skip
    chosen = with_missing_kernels(asked.resolve(device), inner, device.type)
    check_demotion(chosen)
    check_floats(inner, chosen)
    refuse_repeated(model, optimizers)
    refuse_strangers(model, optimizers)
    _check_shared(optimizers, skip)
    return chosen


def _prepared(
    model: nn.Module, given: Sequence[Optimizer], policy: Policy, skip: Skip, cache: CacheName, undo: ExitStack
) -> Stepper:
    """Bind the policy and make the stepper. Writes: as `prepare`; `undo`, which takes it back."""
    inner = innermost(model)
    undo.callback(remember_modules(inner))
    unshare_activations_(inner)
    undo.callback(remember_attributes(inner, given))
    was, optimizers = original(inner, given), list[Optimizer]()
    sparse = {p for module in inner.modules() if is_sparse(module) for p in module.parameters(recurse=False)}
    for one in given:
        known = masters_around(one) if policy.params in LOW_DTYPES else one
        if local_optimizer(one) is known:
            take_loaded_masters_(known, undo)
        optimizers.append(adopt(known, policy, is_dense=sparse.isdisjoint(parameters(one))))
        undo.callback(let_go, optimizers[-1], one)
    undo.callback(remember_weights(inner, was))
    check_optimizers(optimizers, policy, ParameterNames(model, optimizers))
    binding = bind(inner, policy, cache)
    is_replicated = any(isinstance(part, DistributedDataParallel) for part in model.modules())
    converted = convert_(inner, optimizers, policy, is_replicated=is_replicated)
    set_grad_dtype_(optimizers, policy)
    load_hooks = LoadHooks(inner, tuple(optimizers))
    undo.callback(load_hooks.remove)
    undo.callback(disconnect, inner)
    stepper = Stepper(Engine(model, optimizers, binding, was, load_hooks, skip))
    stored = f"; {len(converted)} of its parameters now have another dtype: amp.report() shows which"
    _log.info("prepared %s: %s%s", type(model).__name__, policy, stored if converted else "")
    if optimizers:
        _advise(inner, optimizers, policy)
    return stepper


def _advise(model: nn.Module, optimizers: Sequence[Optimizer], policy: Policy) -> None:
    """Say in the log what makes the steps of a model cheaper, or wrong: averages made of it before."""
    if policy.params in LOW_DTYPES:
        warn_of_earlier(model, policy.params)
    kind = next((p.device.type for p in model.parameters()), "cpu")
    if kind == "cpu":
        suggest_keep_memory()
    elif kind in fused_devices():
        _suggest_fused(optimizers, kind)


def _suggest_fused(optimizers: Sequence[Optimizer], kind: str) -> None:
    """Say in the log what the steps of an optimizer cost that torch could fuse; one that reads the flags itself leaves a step out by itself."""
    for inner in map(wrapped_optimizer, optimizers):
        if "fused" in inner.defaults and not is_fused(inner):
            name = type(inner).__name__
            _log.info(
                "%s is not fused, so weights and state are copied in each step on %s, to be put back where it must be left out; write "
                "torch.optim.%s(..., fused=True), which takes neither the time nor the memory (docs/gpu.md)", name, kind, name,
            )  # fmt: skip


def optimizers_of(call: str, model: object, optimizer: object) -> list[Optimizer]:
    """Return what a call was given as optimizers, after a look at the kinds of both; a StepError if the model is none, or one of the optimizers."""
    if not isinstance(model, nn.Module):
        hint = "Write nn.ModuleList([...]) for several models, nn.ParameterList([...]) for weights that are in none."
        raise StepError(
            f"{call}(model, optimizer, policy) takes an nn.Module as its model, and got {kind_of(model)}. "
            + ("The model comes first." if isinstance(model, Optimizer) else hint)
        )
    if optimizer is None:
        return []
    optimizers: list[Optimizer] = []
    are_some = isinstance(optimizer, Iterable) and not isinstance(optimizer, Mapping) and not hasattr(optimizer, "ndim")
    for one in cast(Iterable[object], optimizer) if are_some else [optimizer]:
        if not isinstance(one, Optimizer):
            raise StepError(
                f"{call}(model, optimizer, policy) takes an optimizer that was made, or a list of them, and got {kind_of(one)}. "
                "Write torch.optim.AdamW(model.parameters(), lr=...), or None for inference."
            )
        if one in optimizers:
            raise StepError(
                f"{call} was given the same {type(one).__name__} twice, and would take each step twice. Leave one out."
            )
        optimizers.append(one)
    return optimizers


def _check_word(name: str, word: object, known: Sequence[str]) -> None:
    if not is_one_of(word, known):
        raise StepError(f"prepare({name}={shown(word)}): unknown.{did_you_mean(word, known)}")


def _inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside wrappers that only pass calls on, such as Accelerate's; a StepError if none inside has torch's hooks."""
    inner = optimizer
    while not has_hooks(inner, "step"):
        wrapped = getattr(inner, "optimizer", None)
        if not isinstance(wrapped, Optimizer):
            raise StepError(
                f"{type(optimizer).__name__} has no hooks of torch.optim.Optimizer, because its __init__ does not call "
                "super().__init__(params, defaults), so its steps could not be guarded. Add that call, or hand over the "
                "optimizer that it wraps."
            )
        inner = wrapped
    return inner


def _refuse_prepared(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    named = model.named_modules()
    modules = [n or type(m).__name__ for n, m in named if is_prepared(m) and not (n and is_activation(m))]
    found = modules[:1] + [type(optimizer).__name__ for optimizer in optimizers if is_owned(optimizer)][:1]
    if found:
        raise StepError(
            f"{' and '.join(found)} {'are' if len(found) > 1 else 'is'} prepared already, and a second stepper would take "
            "steps behind the first one's back. Go on with the stepper that there is, or call amp.release() on it first. For two models that "
            "share parts write mezzo.prepare(nn.ModuleList([a, b]), [optimizer_a, optimizer_b], policy), and amp.step(optimizer=optimizer_a)."
        )


def _check_shared(optimizers: Sequence[Optimizer], skip: Skip) -> None:
    if skip == "together":
        return
    params = [p for optimizer in optimizers for p in parameters(optimizer)]
    if len(set(params)) < len(params):
        raise StepError(
            "skip='independent' was asked for optimizers that share parameters, so one could step where the other "
            "skips. Write skip='together'."
        )
