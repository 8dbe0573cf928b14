"""One object to save: weights, optimizer state with masters, loss scale, counters, policy; and the way back."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..binding import innermost, uncompiled
from ..distributed import reshard_
from ..errors import CheckpointError, PolicyError, StepError, did_you_mean, is_out_of_memory, listed, shown
from ..formats import LOW_DTYPES, SMALLEST, dtype_name, extremes, is_count, is_number, overflowing, parse_dtype
from ..kernels import AUX_STATE, read_master
from ..loss_scale import LossScale
from ..optim import (
    HOW,
    OWN_OPTIONS,
    SQUARES,
    MasterWeights,
    check_mapping,
    check_saved,
    check_tensor,
    keeps_masters,
    local_optimizer,
    mode_of_state,
    parameters,
    refuse,
    torchs_entries,
)
from ..policy import Policy, ScalingConfig
from .guard import Counters
from .ranks import master_of
from .release import remember_run

FORMAT = 1
"""Version of the layout; a later one is refused."""

_KEYS = ("format", "policy", "declared", "model", "optimizers", "outside", "scaling", "counters")


def save_run(policy: Policy, loss_scale: LossScale, counters: Counters) -> dict[str, Any]:
    """Return what a run knows beside weights and optimizers. Syncs: yes, for the loss scale."""
    return {
        "format": FORMAT,
        "policy": policy.to_dict(),
        "scaling": None if policy.scaling is None else dataclasses.asdict(loss_scale.numbers()),
        "counters": dataclasses.asdict(counters),
    }


def save_weights(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Any]:
    """Return weights, and optimizer states with masters. Tensors are those of the run, not copies. Syncs: no."""
    inner = innermost(model)
    return {
        "declared": {name: dtype_name(p.dtype) for name, p in inner.named_parameters()},
        "model": inner.state_dict(),
        "optimizers": [_state_of(optimizer) for optimizer in optimizers],
    }


def outside(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return what is trained and no parameter of the model, as a temperature: by the numbers of its optimizer and its own there. Syncs: no."""
    reshard_(innermost(model))
    known = {*innermost(model).parameters()}
    trained = [(f"{i}.{n}", p) for i, one in enumerate(optimizers) for n, p in enumerate(parameters(one))]
    return {key: p.detach() for key, p in trained if p not in known}


def _state_of(optimizer: Optimizer) -> dict[str, Any]:
    try:
        saved = optimizer.state_dict()
    except KeyError as error:
        if not (lost := [p for p in optimizer.state.keys() - {*parameters(optimizer)} if isinstance(p, Tensor)]):
            raise
        why = f"that has state of {len(lost)} parameters which are in none of its groups any more. Delete it, as in del optimizer.state[parameter], and save again."
        if isinstance(optimizer, MasterWeights) and not {*lost}.isdisjoint(optimizer.masters.fp32_params.values()):
            why = "in the middle of its step, as by a signal's handler. Have the handler set a flag, and save where amp.step() has returned."
        raise CheckpointError(f"amp.state_dict() was asked of a {type(optimizer).__name__} {why}") from error
    except RuntimeError as error:
        if not hasattr(optimizer, "consolidate_state_dict"):
            raise
        raise CheckpointError(
            f"amp.state_dict() was asked of a {type(optimizer).__name__}, whose state lies in parts on the ranks. Call "
            "optimizer.consolidate_state_dict(to=0) on every rank, then amp.state_dict() on rank 0 alone; "
            "amp.state_dict(weights=False) needs none of it."
        ) from error
    inner = local_optimizer(optimizer)
    own = inner.state if inner is not optimizer and keeps_masters(inner) else {}
    steps = {p: saved["state"].get(key, {}).get("step") for key, p in enumerate(parameters(optimizer)) if p in own}
    if any("step" in own[p] and own[p]["step"] != step for p, step in steps.items()):
        raise CheckpointError(
            f"amp.state_dict() was asked of a {type(optimizer).__name__}, whose state was put together before its last step. Call "
            "optimizer.consolidate_state_dict(to=0) on every rank again, then amp.state_dict() on rank 0."
        )
    return saved


def check(state: Mapping[str, Any], num_optimizers: int) -> dict[str, Any]:
    """Return a checkpoint with every key, that of a run without mezzo, and one without weights ("model": None), too.

    Raises: CheckpointError: not a checkpoint, one of a later version, or one with other optimizers.
    """
    given: Mapping[str, Any] = state if isinstance(state, Mapping) else {}
    version = given.get("format", FORMAT)
    if type(version) is not int or version < 1:
        raise CheckpointError(
            f"the checkpoint has format {shown(version)}, and no version of mezzo writes it: it is damaged. Load another one."
        )
    if version > FORMAT:
        raise CheckpointError(
            f"the checkpoint has format {version}, and this version reads up to {FORMAT}. Update mezzo to read it."
        )
    unknown = [key for key in given if key not in (*_KEYS, "optimizer")]
    if unknown and "format" in given:
        raise CheckpointError(f"the checkpoint has an unknown key {unknown[0]!r}.{did_you_mean(unknown[0], _KEYS)}")
    lost = [key for key in ("format", "policy", "scaling", "counters") if key not in given]
    if 0 < len(lost) < 4:
        raise CheckpointError(
            f"the checkpoint has no {' and no '.join(map(repr, lost))}, which amp.state_dict() writes with every run. Load a whole one; of a "
            "run without mezzo the keys are 'model' and 'optimizer'. Nothing was loaded."
        )
    lacks_weights = "format" in given and not {"model", "optimizers"} & given.keys()
    if "model" not in given and not lacks_weights:
        weights = "For weights alone write model.load_state_dict(weights)."
        if "_growth_tracker" in given:  # a scaler of torch's
            weights = "Write a GradScaler's beside weights: {'model': ..., 'optimizer': ..., 'scaler': scaler_state}."
        keys = list(given) if given is state else type(state).__name__
        raise CheckpointError(
            f"load_state_dict was given {keys}, and a checkpoint has the keys {', '.join(_KEYS)}. {weights}"
        )
    saved = state.get("optimizers", [state["optimizer"]] if "optimizer" in state else [])
    if not isinstance(saved, (list, tuple)):
        raise CheckpointError(f"the checkpoint's optimizers are {type(saved).__name__}, and must be a list.")
    if len(saved) != num_optimizers and not lacks_weights:
        raise CheckpointError(
            f"the checkpoint has the state of {len(saved)} optimizers, and this run has {num_optimizers}. Prepare the "
            "model with the optimizers it was saved with."
        )
    scaling = state.get("scaling")
    if "format" not in given and isinstance(scaler := given.get("scaler"), Mapping) and "scale" in scaler:  # of torch's
        scaling = {"scale": scaler["scale"], "growth_tracker": scaler.get("_growth_tracker", 0)}
    return {**dict.fromkeys(_KEYS), **state, "optimizers": saved, "scaling": scaling}


def load_(
    model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any], policy: Policy, undo: ExitStack
) -> tuple[str, ...]:
    """Check everything, then load weights and optimizer states; see `load_weights_`. A CheckpointError: nothing was changed, or `undo` puts it back."""
    inner = innermost(model)
    weights = unwrapped(state["model"], inner)
    _check_saved_numbers(state, policy)
    beside, saved = outside(inner, optimizers), state["outside"]
    if saved is not None:
        _check_weights("outside", saved, beside)
    if weights is None:
        return tuple(_load_outside_(beside, saved))
    _check_weights("model", weights, inner.state_dict())
    for index, (optimizer, entry) in enumerate(zip(optimizers, state["optimizers"], strict=True)):
        check_saved(f"optimizers[{index}]", entry, optimizer)
    undo.callback(remember_run(inner, optimizers))
    for optimizer, entry in zip(optimizers, state["optimizers"], strict=True):
        if not keeps_masters(local_optimizer(optimizer)):
            _load_plain(optimizer, entry)
    loaded = load_weights_(inner, optimizers, {**state, "model": weights})
    bad = _not_finite(inner, optimizers, weights, state["optimizers"])
    return (*_load_outside_(beside, saved), *loaded, *bad)


def _not_finite(
    model: nn.Module, optimizers: Sequence[Optimizer], weights: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield a sentence where trained weights, or squares of gradients, were saved with inf or NaN: a run may go on beside them. Syncs: yes."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
    held = [(name, weights.get(name)) for name in names.values()]
    for optimizer, entry in zip(optimizers, entries, strict=True):
        states = [(names.get(p, "a parameter"), entry["state"].get(i, {})) for i, p in enumerate(parameters(optimizer))]
        held += [(f"{key} of {name}", state[key]) for name, state in states for key in sorted(SQUARES & state.keys())]
    if found := [n for n, v in held if isinstance(v, Tensor) and not all(map(math.isfinite, extremes(v)))]:
        yield f"{listed(found)} {'was' if len(found) == 1 else 'were'} saved with inf or NaN"


def _load_outside_(beside: Mapping[str, Tensor], saved: Mapping[str, Tensor] | None) -> Iterator[str]:
    """Load what is trained beside the model. Yields a sentence where it was not saved. Writes: the tensors of `beside`."""
    if saved is None and beside:
        yield f"{len(beside)} trained parameters that are not the model's were not saved: they stay what they are"
    for key, value in (saved or {}).items():
        beside[key].copy_(value)


def _load_plain(optimizer: Optimizer, entry: Mapping[str, Any]) -> None:
    try:
        optimizer.load_state_dict(_for_plain(optimizer, entry))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{type(optimizer).__name__}.load_state_dict refuses what was saved: {error} Nothing was loaded."
        ) from error


def load_weights_(model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> Iterator[str]:
    """Load weights and the states of optimizers with masters, into other storage and master modes where they differ.

    Weights are rounded where the storage of the model, without wrappers, is narrower; masters start from the widest weights that were
    saved; plain optimizers have their states already. Yields a sentence for each kind of conversion.

    Writes: weights, buffers, optimizer states.
    """
    saved = state["model"]
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    before = {name: p.dtype for p, name in names.items()}
    model.load_state_dict(saved)
    if changed := [name for name, dtype in before.items() if name in saved and saved[name].dtype is not dtype]:
        was, now = dtype_name(saved[changed[0]].dtype), dtype_name(before[changed[0]])
        yield f"{len(changed)} parameters were stored in {was} and are now in {now}"
    for optimizer, entry in zip(optimizers, state["optimizers"], strict=True):
        params = parameters(optimizer)
        low = {index: names[p] for index, p in enumerate(params) if p.dtype in LOW_DTYPES and p in names}
        wide = {index: saved[name] for index, name in low.items() if saved[name].dtype is torch.float32}
        if keeps_masters(owner := local_optimizer(optimizer)):
            optimizer.load_state_dict(_with_masters(entry, wide))
            own = {*parameters(owner)}
            fresh = {params[index]: value for index, value in wide.items() if index not in entry["state"]}
            owner.set_masters_({p: value for p, value in fresh.items() if p in own})
        else:
            modes = _take_masters_(params, names, saved, entry)
            yield from (f"{count} {mode} masters became the fp32 weights" for mode, count in modes.items())


def unwrapped(saved: Any, model: nn.Module) -> Any:
    """Return weights under the model's own names, where DistributedDataParallel or torch.compile wrapped it, or parts of it, differently."""
    wanted = model.state_dict()
    if not isinstance(saved, Mapping) or saved.keys() == wanted.keys():
        return saved
    own = {uncompiled(name): name for name in wanted}
    bare = {name: uncompiled(str(name)) for name in saved}
    named = {own.get(short, own.get(short.removeprefix("module."), name)): saved[name] for name, short in bare.items()}
    return named if len(named) == len(saved) else saved


def _with_masters(entry: Mapping[str, Any], wide: Mapping[int, Tensor]) -> dict[str, Any]:
    """Return optimizer state in which weights that were saved in fp32 are masters, so that no bit of them is lost."""
    state = dict(entry["state"])
    for index, kept in entry["state"].items():
        if index in wide and not AUX_STATE.values() & kept.keys():
            state[index] = {**kept, AUX_STATE["fp32"]: wide[index]}
    return {**entry, "state": state}


@torch.no_grad()
def _take_masters_(
    params: Sequence[Tensor], names: Mapping[Tensor, str], saved: Mapping[str, Tensor], entry: Mapping[str, Any]
) -> Counter[str]:
    """Give fp32 parameters the masters that lie in a saved state; return how many of each mode."""
    modes: Counter[str] = Counter()
    for index, p in enumerate(params):
        kept = entry["state"].get(index, {})
        if mode := mode_of_state(kept):
            weight = saved[names[p]] if p in names else p.detach()
            p.copy_(read_master(mode, weight.to(p.device), kept[AUX_STATE[mode]].to(p.device)))
            modes[mode] += 1
    return modes


def _for_plain(optimizer: Optimizer, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return optimizer state as a torch optimizer knows it, which goes on computing steps in its own way, and writes what it is given."""
    groups = []
    for index, group in enumerate(entry["param_groups"]):
        now = optimizer.param_groups[index] if index < len(optimizer.param_groups) else {}
        kept = {name: value for name, value in group.items() if name not in OWN_OPTIONS}
        groups.append({**now, **kept, **{name: now[name] for name in HOW if name in now}})
    return {**entry, "state": torchs_entries(entry), "param_groups": groups}


def load_scale_(
    state: LossScale, saved: Mapping[str, Any] | None, config: ScalingConfig | None, undo: ExitStack
) -> Iterator[str]:
    """Give the loss scale its saved values; `undo` takes them back. Yields a sentence where they are not taken. Writes: `state`."""
    if config is None:
        if saved is not None:
            yield f"the saved loss scale {saved['scale']:g} is dropped: this policy does not scale"
        return
    if saved is None:
        yield f"no loss scale was saved: it starts at {float(state.scale):g}"
        return
    if not config.dynamic and saved["scale"] != config.init_scale:
        yield f"the saved loss scale {saved['scale']:g} is dropped: this policy's is fixed at {config.init_scale:g}"
        saved = {**saved, "scale": config.init_scale}
    with torch.no_grad():
        for name, value in saved.items():
            target = getattr(state, name)
            assert isinstance(target, Tensor)
            undo.callback(target.copy_, target.clone())
            target.fill_(value)


def compare_policies(saved: Mapping[str, Any] | None, policy: Policy) -> Iterator[str]:
    """Yield a sentence if the checkpoint was made under another policy, or under none."""
    if saved is None:
        yield "the checkpoint names no policy: it was made without mezzo"
        return
    if difference := Policy.from_dict(saved).diff(policy):
        yield f"the checkpoint was made under another policy (left: saved, right: this run's):\n{difference}"


@torch.no_grad()
def export(model: nn.Module, optimizers: Sequence[Optimizer], dtype: torch.dtype | str) -> dict[str, Tensor]:
    """Return the model's state dict with floating parameters, from their masters, in one dtype; buffers as they are.

    Fresh memory for every parameter. Syncs: as `master_of`; for fp16 and what is narrower.
    """
    dtype = parse_dtype(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(dtype, torch.dtype):
        raise StepError(f"export_weights({shown(dtype)}): write a floating dtype, as torch.float16, or its name.")
    if not dtype.is_floating_point:
        raise StepError(
            f"export_weights({dtype_name(dtype)}) would cut weights to whole numbers. Write a floating dtype, as torch.float16."
        )
    owners = {p: optimizer for optimizer in optimizers for p in parameters(optimizer)}
    weights: dict[str, Tensor] = {}
    over: list[str] = []
    for name, value in innermost(model).state_dict(keep_vars=True).items():
        if not isinstance(value, nn.Parameter) or not value.is_floating_point():
            weights[name] = value.detach() if isinstance(value, Tensor) else value
            continue
        wide = master_of(owners.get(value), value)
        over += overflowing(dtype, [(name, wide)])
        weights[name] = wide.to(dtype, copy=True)
    if over:
        raise StepError(
            f"export_weights({dtype_name(dtype)}) would lose {listed(over)}: the largest number of {dtype_name(dtype)} is "
            f"{torch.finfo(dtype).max:g}. Write torch.bfloat16 or torch.float32."
        )
    return weights


def _check_saved_numbers(state: Mapping[str, Any], policy: Policy) -> None:
    """Refuse a policy, loss scale or counters that no run could have saved, in a checkpoint with every key."""
    if (saved := state["policy"]) is not None:
        check_mapping("policy", saved)
        try:
            Policy.from_dict(saved)
        except PolicyError as error:
            refuse("policy", f"cannot be read: {error}")
    _check_numbers("scaling", state["scaling"], LossScale)
    counters = state["counters"]
    _check_numbers("counters", counters, Counters)
    for edit in (counters or {}).get("demoted", ()):
        try:
            Policy.parse(f"{policy}, {edit}")
        except PolicyError as error:
            refuse("counters.demoted", f"has {edit!r}: {error}")


def _check_weights(part: str, saved: Any, wanted: Mapping[str, Any]) -> None:
    check_mapping(part, saved)
    missing = [name for name in wanted if name not in saved]
    unknown = [str(name) for name in saved if name not in wanted]
    if missing or unknown:
        both = ("missing", missing), ("unknown", unknown)
        parts = [f"{word} {len(names)} ({listed(names)})" for word, names in both if names]
        refuse(part, f"has other names: {' and '.join(parts)}")
    for name, own in wanted.items():
        if isinstance(own, Tensor):
            check_tensor(f"{part}[{name!r}]", saved[name], own)


def _check_numbers(part: str, saved: Any, kind: type[LossScale] | type[Counters]) -> None:
    if saved is None:
        return
    check_mapping(part, saved)
    names = [field.name for field in dataclasses.fields(kind)]
    for name, value in saved.items():
        if name not in names:
            refuse(part, f"has an unknown number {name!r}.{did_you_mean(name, names)}")
        if name == "scale":
            if not is_number(value, SMALLEST):
                refuse(f"{part}.scale", f"is {shown(value)}, and must be a finite number above 0 in fp32")
        elif name == "demoted":
            if not isinstance(value, (list, tuple)) or not all(isinstance(edit, str) for edit in value):
                refuse(f"{part}.demoted", f"is {shown(value)}, and must be a list of policy edits")
        elif not is_count(value, bits=31):
            refuse(f"{part}.{name}", f"is {shown(value)}, and must be a whole number from 0 to 2**31 - 1")
    if kind is LossScale and "scale" not in saved:
        refuse(part, "has no scale")
