"""One run of a model for the sake of looking at it: under a policy, and without a trace left in the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..policy import Policy
from ..step.prepare import prepare
from ..trace import tensors_in

LossFn = Callable[[nn.Module, Any], Tensor]


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter, the CPU if it has none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def call(model: nn.Module, batch: Any) -> Any:
    """Call a model on a batch: a dict is named arguments, a tuple or list positional ones, all else one argument."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def loss_of(model: nn.Module, batch: Any, loss_fn: LossFn | None) -> Tensor:
    """Return the loss: `loss_fn`'s, else the sum of the mean squares of every floating output, in fp32.

    Syncs: as the model does.
    """
    if loss_fn is not None:
        return loss_fn(model, batch)
    outputs = [t for _, t in tensors_in(call(model, batch), "output") if t.is_floating_point()]
    return torch.stack([t.float().square().mean() for t in outputs]).sum() if outputs else torch.zeros(())


def scale_of(policy: Policy | None, device: torch.device) -> float:
    """Return the loss scale a policy starts with, 1 without one."""
    scaling = None if policy is None else policy.resolve(device).scaling
    return 1.0 if scaling is None else scaling.init_scale


@contextmanager
def bind_copy(model: nn.Module, policy: Policy | None) -> Iterator[nn.Module]:
    """Yield the model bound to a policy: a prepared copy, or the model itself where there is no policy.

    Raises:
        PolicyError: the policy does not fit the model.
    """
    if policy is None:
        yield model
        return
    bound = copy.deepcopy(model)
    prepare(bound, None, policy)
    yield bound
