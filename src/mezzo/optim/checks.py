"""What an optimizer refuses when it is built, and of what is set on it later."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from torch import Tensor

from ..errors import ConfigError, MasterError, MezzoError, did_you_mean, first_line, kind_of, listed, shown
from ..formats import LARGEST, LOW_DTYPES, describe, dtype_name, is_number, is_one_of, number_of
from ..kernels import registry
from ..loss_scale import param_names
from ..policy import Master

STATE_DTYPES = (torch.float32, torch.bfloat16)
_NUMBERS = ("lr", "weight_decay", "eps", "momentum", "dampening")
HOW = ("fused", "foreach", "capturable", "differentiable")
"""Options that say how a step is computed, on the devices of the run: torch takes them from the checkpoint, and a fused optimizer then breaks."""
_FLAGS = (*HOW, "amsgrad", "nesterov", "maximize", "decoupled_weight_decay")
_READ = (*_NUMBERS, "betas", "amsgrad", "nesterov", "maximize", "master", "state_dtype", "rounding_seed", "backend")


def check_range(name: str, value: Any, *, low: float = 0, below: float = math.inf) -> None:
    """Refuse what is no finite number in [low, below): a ConfigError. Syncs: for a tensor, once."""
    if not is_number(number := number_of(value), max(low, -LARGEST)) or number >= below:
        raise ConfigError(f"{name}={shown(value)} must be in {'(' if low < 0 else '['}{low}, {below}).")


def check_betas(betas: Any) -> None:
    """Refuse what is not two decays in [0, 1): a ConfigError."""
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ConfigError(f"betas={shown(betas)} must be two numbers in [0, 1).")
    for index, beta in enumerate(betas):
        check_range(f"betas[{index}]", beta, below=1.0)


def check_rate(lr: float | Tensor) -> None:
    """Refuse a learning rate that is negative, or a tensor of several: a ConfigError. Syncs: for a tensor, once."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ConfigError(f"lr is a tensor of {lr.numel()} elements; write one of 1, or a group for each rate.")
    check_range("lr", lr)


def check_options(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Refuse, by a ConfigError, options that somebody set, since the optimizer was made, to what no update can use. Host only.

    One that is gone, a rate, decay, eps, momentum or beta that is no finite number, or what `_check_own` refuses; tensors are not looked into, but for betas on the CPU.
    """
    kind = type(optimizer).__name__
    if gone := [name for name in _READ if name in optimizer.defaults and name not in group]:
        raise ConfigError(f"a group of {kind} has no {gone[0]} any more: set it, as in group['{gone[0]}'] = ...")
    _check_own(group)
    check_bools(optimizer, group)
    for name in _NUMBERS:
        if not (is_number(value := group.get(name, 0.0)) or isinstance(value, (Tensor, bool))):
            raise ConfigError(f"a group of {kind} has {name}={shown(value)}: write a finite number.")
    betas = group.get("betas", (0.0, 0.0))
    if not (isinstance(betas, Sequence) and len(betas) == 2 and all(map(_is_beta, betas))):
        raise ConfigError(f"a group of {kind} has betas={shown(betas)}: write two finite numbers in [0, 1).")


def check_finite(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> None:
    """Refuse inf and NaN among the options of any optimizer, which it would write into its weights, and what ends its step halfway. Host only.

    Raises:
        ConfigError: a rate, decay, eps, momentum or beta is, or is no number where the optimizer was made with one; tensors are its own matter.
    """
    for name in [name for name in (*_NUMBERS, "betas") if name in group]:
        given, made = group[name], optimizer.defaults.get(name)
        values, was = (one if isinstance(one, (list, tuple)) else (one,) for one in (given, made))
        is_known = all(isinstance(one, float | int) for one in was)
        if (is_known and len(values) != len(was)) or any(_is_unfit(one, is_known) for one in values):
            raise ConfigError(
                f"a group of {type(optimizer).__name__} has {name}={shown(given)}: write a finite number."
            )


def _is_unfit(value: Any, must_be_number: bool) -> bool:
    number = value if isinstance(value, Tensor) else number_of(value)
    if isinstance(number, float):
        return not math.isfinite(number)
    return must_be_number and not (isinstance(number, Tensor) or is_number(number) or isinstance(number, bool))


def can_be_kept(group: Mapping[str, Any]) -> bool:
    """Whether a group's options are what they are until another value is set: no lists or tensors, the rate apart. Host only."""
    betas = group.get("betas", ())
    others = [value for name, value in group.items() if name not in ("params", "param_names", "lr", "betas")]
    return type(betas) is tuple and all(isinstance(value, _PLAIN) for value in (*others, *betas))


_PLAIN = (float, int, str, type(None), torch.dtype)


def _is_beta(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_cpu or _is_beta(number_of(value))
    return is_number(value, 0) and value < 1


def check_count(label: str, step: object) -> None:
    """Refuse a step count that is no number: a ConfigError. Host only."""
    if not isinstance(step, float | int) and not (isinstance(step, Tensor) and step.numel() == 1):
        raise ConfigError(f"the state of {label} has step={describe(step)}: it counts steps, so write one number.")


def check_bools(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> None:
    """Refuse, by a ConfigError, a flag that says neither yes nor no, and differentiable=True. Syncs: for a tensor, once."""
    kind = type(optimizer).__name__
    for name in _FLAGS:
        given = options.get(name)
        if not (given is None or isinstance(given, bool) or is_one_of(number_of(given), (False, True, 0, 1))):
            raise ConfigError(f"{kind} was given {name}={shown(given)}; give True or False.")
        if given and name == "differentiable":
            raise ConfigError(
                f"differentiable=True was asked of mezzo.optim.{kind}: rounding to 16 bit has no gradient. Write torch.optim.{kind} with fp32 parameters."
            )


def check_closure(optimizer: torch.optim.Optimizer, closure: object) -> None:
    """Refuse a closure that cannot be called: a ConfigError. Host only."""
    if not (closure is None or callable(closure)):
        raise ConfigError(
            f"{type(optimizer).__name__}.step was given {kind_of(closure)} for closure; give a function that returns the loss."
        )


@contextmanager
def taking_params(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Say what parameters an optimizer takes, in a ConfigError, where torch refuses some inside the block; a group that is refused after it came goes again."""
    groups = getattr(optimizer, "param_groups", [])
    num_groups = len(groups)
    try:
        yield
    except MezzoError:
        del groups[num_groups:]
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as why:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot take the parameters it was given: {first_line(why)}. "
            "Give tensors that are leaves, (name, tensor) pairs, or dicts of them under 'params'."
        ) from why


def check_dense(optimizer: torch.optim.Optimizer, param: Tensor, grad: Tensor) -> None:
    """Refuse a sparse gradient: a ConfigError. Host only."""
    if grad.layout is not torch.strided:
        raise ConfigError(
            f"{type(optimizer).__name__} was given a sparse gradient for {describe(param)}: its update is dense. "
            "Write sparse=False in the embedding, or torch.optim.SparseAdam for its parameters."
        )


def is_seed(seed: object) -> bool:
    """Whether a seed of stochastic rounding is a whole number. Syncs: for a tensor, once."""
    try:
        operator.index(seed)  # type: ignore[arg-type]  # what is none raises
    except (TypeError, ValueError, RuntimeError):
        return False
    return True


def check_seed(seed: object) -> None:
    """Refuse a seed of stochastic rounding that is no whole number: a ConfigError."""
    if not is_seed(seed):
        raise ConfigError(f"rounding_seed={shown(seed)} must be a whole number.")


def check_masters(group: Mapping[str, Any]) -> None:
    """Refuse, by a MasterError, 16-bit trainable parameters without a master mode that exists for them; a ConfigError as `_check_own`."""
    _check_own(group)
    named = zip(param_names([group]), group["params"], strict=True)
    trainable = [(name, p) for name, p in named if p.requires_grad]
    low = [f"{name} {describe(p)}" for name, p in trainable if p.dtype in LOW_DTYPES]
    if low and group["master"] in (None, "none"):
        raise MasterError(
            f"{len(low)} of {len(trainable)} trainable parameters are 16 bit ({listed(low, 5)}) and master='none' keeps "
            "nothing beside them: an update smaller than half their spacing, 0.2 to 0.4 % of a bf16 weight, vanishes. "
            "Write master='split' (bf16) or 'fp32' (exact), or 'kahan' (almost exact); or master='stochastic' "
            "(no extra memory, exact on average); or keep trainable parameters in fp32."
        )
    fp16 = [f"{name} {describe(p)}" for name, p in trainable if p.dtype is torch.float16]
    if fp16 and group["master"] == "split":
        raise MasterError(
            f"master='split' was asked for {len(fp16)} fp16 parameters ({listed(fp16, 5)}): 16 more bits make an fp32 value "
            "of a bf16 weight, but not of an fp16 one, whose exponent is another. Write master='fp32', or params in bf16."
        )


def _check_own(group: Mapping[str, Any]) -> None:
    """Refuse, by a ConfigError, a master mode, moment dtype, backend or seed that no optimizer has."""
    if not is_one_of(master := group["master"], (None, *get_args(Master))):
        raise ConfigError(f"unknown master mode {shown(master)}.{did_you_mean(master, get_args(Master))}")
    if not is_one_of(group["state_dtype"], STATE_DTYPES):
        kept = group["state_dtype"]
        given = dtype_name(kept) if isinstance(kept, torch.dtype) else shown(kept)
        raise ConfigError(f"state_dtype={given} cannot hold moments; write torch.float32 or torch.bfloat16.")
    if not is_one_of(group["backend"], get_args(registry.Backend)):
        known = get_args(registry.Backend)
        raise ConfigError(f"unknown backend {shown(group['backend'])}.{did_you_mean(group['backend'], known)}")
    check_seed(group["rounding_seed"])
