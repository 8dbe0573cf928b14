"""The door for a saved optimizer state: all of it is read, and named if it does not fit, before a bit is written."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import CheckpointError, first_line, is_out_of_memory, listed, shown
from ..formats import LOW_DTYPES, describe, dtype_name, extremes, is_number, number_of
from ..kernels import AUX_STATE, aux_dtype, local, misplaced
from ..loss_scale import parameters
from ..policy import Master
from .checks import HOW, is_seed

MOMENTS = frozenset("exp_avg exp_avg_sq max_exp_avg_sq exp_inf momentum_buffer square_avg grad_avg acc_delta".split())
"""State of torch's optimizers that a step turns into weights; what others keep may start at inf."""
SQUARES = frozenset("exp_avg_sq max_exp_avg_sq exp_inf square_avg acc_delta sum".split())
"""State whose root a step divides by."""
_OF_MASTERS = frozenset((*AUX_STATE.values(), "rounding_step"))
"""State that torch's optimizers do not have."""
_COUNTS = frozenset(("step", "mu_product", "eta", "mu"))
"""State of torch's optimizers that is one number a parameter."""
AUX_MODES: dict[str, Master] = {name: mode for mode, name in AUX_STATE.items()}
"""The master mode that keeps each aux state, by its name."""
_UPDATE = ("betas", "momentum", "dampening", "alpha", "rho", "etas", "lr_decay", "lambd", "beta2_decay", "history_size")
"""Options of torch's optimizers that say whose update it is."""
_NONE_YET = "momentum_buffer"
"""What torch's SGD saves as None before its first step with momentum."""


def check_saved(part: str, saved: Any, optimizer: Optimizer) -> None:
    """Refuse a state that an optimizer could not load as a whole, or not step with afterwards.

    Raises:
        CheckpointError: names the part, what it has, and what it must have.

    Syncs: for counts and rates on an accelerator.
    """
    check_mapping(part, saved)
    groups, params = saved.get("param_groups"), parameters(optimizer)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if not isinstance(groups, Sequence) or not all(isinstance(g, Mapping) and _has_params(g) for g in groups):
        refuse(part, f"has no param_groups with params, and {type(optimizer).__name__} has {len(sizes)} groups")
    if (found := [len(group["params"]) for group in groups]) != sizes:
        refuse(
            f"{part}.param_groups",
            f"hold a different number of parameter groups or params: {len(found)} groups with {found} params, and this optimizer's have {sizes}",
        )
    for index, (group, given) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        own_only = [name for name in _UPDATE if name in group and name not in given]
        saved_only = [name for name in _UPDATE if name in given and name not in group]
        if own_only and saved_only:
            refuse(
                f"{part}.param_groups[{index}]",
                f"is of another kind of optimizer: it has {listed(saved_only)}, and {type(optimizer).__name__} has {listed(own_only)}",
            )
        for name, own in {"rounding_seed": 0, **group}.items():
            if name in given and (wanted := _wanted(name, own, given[name])):
                refuse(f"{part}.param_groups[{index}]['{name}']", f"is {_brief(given[name])}, and must be {wanted}")
    check_mapping(f"{part}.state", saved.get("state"))
    owners = dict(zip(chain.from_iterable(group["params"] for group in groups), params, strict=True))
    inner = getattr(optimizer, "inner", optimizer)  # whose state it is
    for key, entry in saved["state"].items():
        where = f"{part}.state[{shown(key)}]"
        if key in owners:
            check_mapping(where, entry)
            _check_entry(where, entry, owners[key], inner)
        elif isinstance(key, int) and key not in optimizer.state:  # any other is a key of the optimizer's own
            refuse(where, f"belongs to none of the {len(params)} parameters")
    for group in groups:
        entries = {key: saved["state"][key] for key in group["params"] if saved["state"].get(key)}
        dims = {key: min(max(owners[key].dim(), 1), 2) for key in entries}
        if _is_known(optimizer):
            _check_alike(part, entries)
        _check_torch(part, group, entries, dims, inner)


def each_entry(saved: Mapping[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[Any, Any]:
    """Return a saved state with that of each parameter changed; what an optimizer keeps under keys of its own stays. Host only."""
    keys = {key for group in saved["param_groups"] for key in group["params"]}
    return {key: change(entry) if key in keys else entry for key, entry in saved["state"].items()}


def torchs_entries(saved: Mapping[str, Any]) -> dict[Any, Any]:
    """Return a saved state as torch's optimizers know it, in memory that a step may write: they go on in what they load. Syncs: no."""
    return each_entry(saved, lambda entry: {k: _in_own_memory(v) for k, v in entry.items() if k not in _OF_MASTERS})


def _in_own_memory(value: Any) -> Any:
    if isinstance(value, Tensor):  # several elements may be one in memory
        is_expanded = value.layout is torch.strided and 0 in value.stride()
        return value.detach().clone(**{"memory_format": torch.contiguous_format} if is_expanded else {})
    return {k: _in_own_memory(v) for k, v in value.items()} if type(value) is dict else copy.deepcopy(value)


_WHOLE = "Take a whole checkpoint of amp.state_dict(), of such a model and such optimizers."
_FIRST_LOADED = "Load model and optimizer first, then call mezzo.prepare, which makes it anew."


def refuse(part: str, what: str, instead: str = _WHOLE) -> NoReturn:
    """Raise the sentence about a part of a checkpoint that does not fit."""
    raise CheckpointError(f"the checkpoint's {part} {what}. Nothing was loaded. {instead}")


def check_mapping(part: str, value: Any) -> None:
    """Refuse what is no dict."""
    if not isinstance(value, Mapping):
        refuse(part, f"is {type(value).__name__}, and must be a dict")


def check_tensor(part: str, value: Any, own: Tensor, *, may_be_sparse: bool = False) -> None:
    """Refuse what is no tensor with values, of the shape of another, nor of its layout unless it `may_be_sparse`. Syncs: no."""
    if not isinstance(value, Tensor):
        refuse(part, f"is {_brief(value)}, and must be a tensor of shape {list(own.shape)}")
    if value.is_nested is not own.is_nested or value.is_quantized is not own.is_quantized:
        refuse(part, f"is {_brief(value)}, and {_brief(own)} is wanted")
    if value.shape != own.shape:
        refuse(part, f"has shape {list(value.shape)}, and {list(own.shape)} is wanted")
    is_laid_out = value.layout is own.layout or (may_be_sparse and value.is_sparse)
    if not is_laid_out or (value.is_meta and not own.is_meta):
        refuse(part, f"is a tensor of {value.layout} on {value.device}, and must be one of {own.layout} with values")
    if reason := value.layout is torch.strided and misplaced(value, value):
        refuse(part, f"is {describe(value)}, {reason}")


def _has_params(group: Mapping[str, Any]) -> bool:
    params = group.get("params")
    return isinstance(params, (list, tuple)) and all(isinstance(p, int | str) for p in params)


def _brief(value: object) -> str:
    if not isinstance(value, Tensor) or value.is_nested:
        return "a nested tensor" if isinstance(value, Tensor) else shown(value)
    return f"a {'quantized ' if value.is_quantized else ''}tensor of shape {list(value.shape)}"


def _is_number(value: object, *bounds: float) -> bool:
    return is_number(number_of(value) if isinstance(value, Tensor) else value, *bounds)


def _wanted(name: str, own: object, value: object) -> str:
    """Return what an option must be, if what was saved is none: what it is now tells."""
    if name == "rounding_seed":
        return "" if is_seed(value) else "a whole number"
    if isinstance(own, bool):
        return "" if value is None or isinstance(value, bool) else "True or False"
    if _is_number(own, -math.inf, math.inf):
        is_finite = _is_number(value) or (type(value) is type(own) is float and value == own)
        return "" if is_finite else "a number" if not isinstance(value, float) else "a finite number"
    if isinstance(own, (list, tuple)) and own and all(map(_is_number, own)):
        is_alike = isinstance(value, (list, tuple)) and len(value) == len(own) and all(map(_is_number, value))
        return "" if is_alike else f"{len(own)} numbers"
    if own is None:
        fits = value is None or isinstance(value, bool | str | torch.dtype) or is_number(value, -math.inf, math.inf)
        return "" if fits else "None, a flag or a number"
    return ""


def _check_entry(part: str, entry: Mapping[str, Any], param: Tensor, optimizer: Optimizer) -> None:
    own, is_known = optimizer.state.get(param, {}), _is_known(optimizer)
    adds_up = is_torchs(optimizer) and isinstance(optimizer, torch.optim.SGD)  # gradients, which may be sparse
    for name, value in entry.items():
        now, where = own.get(name), f"{part}[{name!r}]"
        if (is_known and name in _COUNTS) or name == "rounding_step":
            if not _is_number(value, 0):
                refuse(where, f"is {_brief(value)}, and must be a finite number from 0")
        elif name in AUX_MODES:
            check_tensor(where, value, param)
            if value.is_floating_point() is (name == AUX_STATE["split"]):
                refuse(where, f"is {value.dtype}: steps of torch's optimizers do not keep it", _FIRST_LOADED)
            low = value if value.dtype in LOW_DTYPES else param
            wanted = aux_dtype(AUX_MODES[name], low.dtype) or low.dtype
            if value.dtype is not wanted and not (wanted is torch.int16 and _is_widened(value)):
                refuse(where, f"is {describe(value)}, and must be {dtype_name(wanted)}")
        elif is_known and name in MOMENTS:
            if value is not None or name != _NONE_YET:
                check_tensor(where, value, param, may_be_sparse=adds_up and name == _NONE_YET)
            if value is not None and value.is_complex() is not param.is_complex():
                refuse(where, f"is {value.dtype}, and the parameter {param.dtype}")
        elif isinstance(now, Tensor) and now.dim() > 0:
            check_tensor(where, value, now)
        if is_known and name in MOMENTS | SQUARES and isinstance(value, Tensor) and (bad := _why_bad(name, value)):
            refuse(where, f"holds {bad}, of which the next step makes inf or NaN in the weights")


def _is_widened(value: Tensor) -> bool:
    """Whether these are remainders of shards as they are saved: int32 that hold int16. Syncs: yes."""
    here = local(value)
    return here.dtype is torch.int32 and torch.equal(here.to(torch.int16).to(torch.int32), here)


def _why_bad(name: str, value: Tensor) -> str:
    """Return what a moment holds and no step can use; empty for none. An inf in a square only keeps its weight where it is. Syncs: yes."""
    least, largest = extremes(value)
    if math.isnan(least):
        return "NaN"
    if name in SQUARES:
        return "numbers below 0" if least < 0 and not value.is_complex() else ""
    return "inf" if math.inf in (-least, largest) else ""


def _check_alike(part: str, entries: Mapping[Any, Mapping[str, Any]]) -> None:
    """Refuse a parameter whose state lacks what that of others in its group has."""
    known = {name for entry in entries.values() for name in entry} & (MOMENTS | _COUNTS | {"sum"})
    for key, entry in entries.items():
        if known & entry.keys() and (missing := sorted(known - entry.keys())):
            refuse(f"{part}.state[{key!r}]", f"has no {missing[0]}, which others of its group have")


def _is_known(optimizer: Optimizer) -> bool:
    """Whether what the optimizer keeps is what torch's own keep by these names: it, or the one in a wrapper, is torch's or mezzo's."""
    kinds = [kind for kind in type(getattr(optimizer, "inner", optimizer)).__mro__ if kind is not Optimizer]
    return any(kind.__module__.startswith(("torch.", "mezzo.")) for kind in kinds)


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether one of torch's optimizers takes the step, in a wrapper or by itself."""
    return f"{type(getattr(optimizer, 'inner', optimizer)).__module__}.".startswith("torch.optim.")


def _check_torch(
    part: str, group: Mapping[str, Any], entries: Mapping[Any, Mapping[str, Any]], dims: Mapping[Any, int], optimizer: Optimizer
) -> None:  # fmt: skip
    """Refuse what one of torch's optimizers would stumble over in its next step, as steps of small weights show: ranges are those that its constructor knows."""
    kind: Any = type(optimizer)
    if not is_torchs(optimizer):
        return
    options = inspect.signature(kind).parameters.keys() & group.keys() - {"params", "lr", "nesterov", *HOW}
    small = {dim: torch.zeros((1,) * dim, dtype=torch.float32, device="cpu") for dim in {*dims.values()} or {2}}
    what = f"do not fit {kind.__name__}"
    try:
        probe = kind([*small.values()], lr=1e-3, **{name: group[name] for name in options})
        if isinstance(probe, torch.optim.LBFGS):  # asks for a closure
            return
        what = f"and state hold numbers that a step of {kind.__name__} cannot compute with"
        for param in small.values():
            zeros = torch.zeros_like(param)
            param.grad = zeros.to_sparse() if kind is torch.optim.SparseAdam else zeros
        probe.param_groups[0]["lr"] = number_of(group.get("lr", 1e-3))
        step = torch.no_grad()(partial(inspect.unwrap(kind.step), probe))  # unwrapped: hooks see no step of the run
        step()
        for counts in {tuple((k, number_of(e[k])) for k in sorted(_COUNTS & e.keys())) for e in entries.values()}:
            for param in small.values():
                probe.state[param].update(
                    (name, torch.tensor(float(count), dtype=torch.float32, device="cpu")) for name, count in counts
                )
            step()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        refuse(f"{part}.param_groups", f"{what}: {first_line(error)}")
    for key, entry in entries.items():
        made = probe.state[small[dims[key]]]
        missing = [name for name in made if entry.get(name) is None]
        if 0 < len(missing) < len(made):
            refuse(f"{part}.state[{key!r}]", f"has no {missing[0]}, which a step of {kind.__name__} reads")
