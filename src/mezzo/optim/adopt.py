"""Giving masters to an optimizer that was made without: torch's own are stepped by mezzo's kernels from then on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .._torch import follow_class_step
from ..errors import as_flag
from ..formats import LOW_DTYPES
from ..kernels import AUX_STATE
from ..loss_scale import parameters
from ..policy import Policy, PolicyLike, as_policy
from .adamw import Adam, AdamW
from .base import MasterOptimizer, hook_steps
from .checks import check_bools
from .master_weights import MasterWeights
from .optimizer_state import OWN_OPTIONS, HasMasters, mode_of, own_state, take_master_
from .saved_state import check_saved
from .sgd import SGD


class AdoptedAdamW(AdamW, torch.optim.AdamW):
    """A torch.optim.AdamW that `adopt` took over."""

    saves_own_options = False


class AdoptedAdam(Adam, torch.optim.Adam):
    """A torch.optim.Adam that `adopt` took over."""

    saves_own_options = False


class AdoptedSGD(SGD, torch.optim.SGD):
    """A torch.optim.SGD that `adopt` took over."""

    saves_own_options = False


_ADOPTED: dict[type[torch.optim.Optimizer], type[MasterOptimizer]] = {
    torch.optim.AdamW: AdoptedAdamW,
    torch.optim.Adam: AdoptedAdam,
    torch.optim.SGD: AdoptedSGD,
}
for _plain, _adopted in _ADOPTED.items():  # messages say the class that the user wrote; pickle goes by the other name
    _adopted.__name__ = _plain.__name__
_FROM_POLICY = "master_from_policy"
"""Option of a group of mezzo's whose master mode `adopt` chose."""
_PLAIN = {adopted: plain for plain, adopted in _ADOPTED.items()}


def keeps_masters(optimizer: torch.optim.Optimizer) -> TypeGuard[HasMasters]:
    """Whether an optimizer is one of mezzo's, which read scale, clipping and skipping and leave gradients alone."""
    return isinstance(optimizer, HasMasters)


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that steps on this rank: of a ZeroRedundancyOptimizer the one of its part, else itself."""
    is_divided = type(optimizer).__name__ == "ZeroRedundancyOptimizer"
    inner = getattr(optimizer, "optim", optimizer) if is_divided else optimizer
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def load_divided_(optimizer: Any, state_dict: Mapping[str, Any]) -> None:
    """Give the part of a ZeroRedundancyOptimizer what was saved of its parameters, and the whole the options; it would copy all in the weights' dtype.

    Raises: CheckpointError. Writes: as `KeepsMasters.load_state_dict`. Syncs: yes.
    """
    inner, saved = local_optimizer(optimizer), state_dict
    check_saved(f"state of {type(optimizer).__name__}", saved, optimizer)
    names = [key for group in saved["param_groups"] for key in group["params"]]
    keys = dict(zip(parameters(optimizer), names, strict=True))
    own = [[keys[p] for p in group["params"]] for group in inner.param_groups]
    groups = [{**group, "params": part} for group, part in zip(saved["param_groups"], own, strict=True)]
    state = {key: kept for key, kept in saved["state"].items() if any(key in part for part in own)}
    inner.load_state_dict({**saved, "state": state, "param_groups": groups})
    for whole, group in zip(optimizer.param_groups, inner.param_groups, strict=True):
        elsewhere = [p for p in whole["params"] if not any(p is one for one in group["params"])]
        for p in elsewhere:  # its owner writes it likewise
            take_master_(p, saved["state"].get(keys[p], {}), mode_of(p, group))
    pairs = zip(inner.param_groups, saved["param_groups"], strict=True)
    options = [{**now, "params": group["params"]} for now, group in pairs]
    super(type(optimizer), optimizer).load_state_dict({"state": {}, "param_groups": options})


def wrapped_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that computes the update: the one that `MasterWeights` was put around, else itself."""
    return optimizer.inner if isinstance(optimizer, MasterWeights) else optimizer


def masters_around(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the `MasterWeights` that stands around an optimizer, as of a stepper that is gone; itself if none does."""
    holder = getattr(vars(optimizer).get("load_state_dict"), "__self__", None)
    return holder if isinstance(holder, MasterWeights) else optimizer


def stepped_optimizer(
    optimizer: torch.optim.Optimizer, known: Sequence[torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    """Return which of those that are stepped stands for an optimizer: itself, or the masters around it; itself if none does."""
    return next((one for one in known if wrapped_optimizer(one) is optimizer), optimizer)


def adopt(optimizer: torch.optim.Optimizer, policy: PolicyLike, *, is_dense: bool = True) -> torch.optim.Optimizer:
    """Return the optimizer that keeps masters as a policy says.

    Torch's AdamW, Adam and SGD stay the objects they are, with their groups, state, hooks and schedulers: their class
    becomes one of mezzo's that is also their own. Those of mezzo that were made without `master` take the policy's. Any
    other optimizer, subclasses of torch's and ones whose `step` was replaced among them, gets `MasterWeights` around it.

    Args:
        optimizer: its weights not yet in 16 bit.
        policy: with 16-bit `params`, or 16-bit `grads`; for any other nothing is done.
        is_dense: whether no gradient is sparse; mezzo's kernels take dense ones.

    Returns:
        The optimizer to step from now on.

    Raises:
        ConfigError: an option that mezzo's kernels cannot honour, or a master mode that `MasterWeights` has not.

    Writes: the class of the optimizer, options of its groups, the dtype of its state. Syncs: no.
    """
    policy, inner = as_policy(policy), local_optimizer(optimizer)
    if inner is not optimizer and isinstance(inner, MasterOptimizer):
        kind = type(optimizer)
        optimizer.__class__ = type(kind.__name__, (kind,), {"load_state_dict": load_divided_})
    if isinstance(optimizer, MasterWeights) or not {policy.params, policy.grads} & set(LOW_DTYPES):
        return optimizer
    if isinstance(inner, MasterOptimizer) and policy.params in LOW_DTYPES:
        # the outer groups' options become those of its part in each step
        _choose_master(inner, policy, *optimizer.param_groups)
    # a ZeroRedundancyOptimizer sends whole weights after the step of each rank's part
    if isinstance(inner, MasterOptimizer) or inner is not optimizer:
        return optimizer
    if as_flag("adopt", "is_dense", is_dense) and type(optimizer) in _ADOPTED and follow_class_step(optimizer):
        _take_over(optimizer, policy)
        return optimizer
    return MasterWeights(optimizer, policy.master) if policy.params in LOW_DTYPES else optimizer  # type: ignore[arg-type]  # "none" goes with fp32 params


def release(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that was given to `adopt`, as torch made it: moments stay, torch's in the dtype of the weights, masters are dropped.

    Args:
        optimizer: what `adopt` returned, its weights stored in fp32 again; any other is returned as it is.

    Writes: what `adopt` writes. Syncs: no.
    """
    if isinstance(optimizer, MasterWeights):
        return optimizer.unwrap()
    inner = local_optimizer(optimizer)
    if not isinstance(inner, MasterOptimizer):
        return optimizer
    if inner is not optimizer:
        optimizer.__class__ = type(optimizer).__bases__[0]
    plain = _PLAIN.get(type(inner))
    for p, entry in [(p, held) for p, held in inner.state.items() if isinstance(p, Tensor)]:
        for name in (*AUX_STATE.values(), *(["step"] if isinstance(inner, AdoptedSGD) else [])):
            entry.pop(name, None)
        moments = {} if plain is None else {name: moment.to(p.dtype) for name, moment in entry.items()}
        entry.update(moments | {name: held.clone() for name, held in entry.items() if name == "step"})
    inner._forget()  # else what is kept of its steps holds their masters
    for options in (inner.defaults, *inner.param_groups, *optimizer.param_groups):
        if plain is not None:
            for name in OWN_OPTIONS:
                options.pop(name, None)
        elif options.pop(_FROM_POLICY, False):
            options["master"] = None
    if plain is not None:
        blank = object.__new__(type(inner))
        blank._forget()  # has what mezzo keeps on an optimizer, and nothing else
        for name in vars(blank):
            delattr(inner, name)
        inner.__class__ = plain  # type: ignore[assignment]  # what it was
        follow_class_step(inner)
    return optimizer


def _choose_master(optimizer: MasterOptimizer, policy: Policy, *around: dict[str, Any]) -> None:
    for options in (optimizer.defaults, *optimizer.param_groups, *around):
        if options["master"] is None:
            options.update({"master": policy.master, _FROM_POLICY: True})


def _take_over(optimizer: torch.optim.Optimizer, policy: Policy) -> None:
    for group in optimizer.param_groups:
        check_bools(optimizer, group)
    own: dict[str, Any] = {"master": policy.master, "state_dtype": policy.state, "rounding_seed": 0, "backend": "auto"}
    for options in (optimizer.defaults, *optimizer.param_groups):
        options.update(own)
    optimizer.__class__ = _ADOPTED[type(optimizer)]
    assert isinstance(optimizer, MasterOptimizer)
    hook_steps(type(optimizer))
    optimizer._forget()
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p in optimizer.state:
                optimizer.state[p] = own_state(p, optimizer.state[p], optimizer.moment_names(group), group)
