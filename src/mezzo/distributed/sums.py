"""Sums over micro-batches of sharded models, which torch keeps: refused where their dtype is not the policy's."""

from __future__ import annotations

import torch
from torch import nn

from .._torch import drop_unreduced_grad_, fsdp_param_groups, holds_unreduced_grad
from ..errors import DistributedError, PolicyError
from ..formats import LOW_DTYPES, dtype_name
from ..policy import Policy
from .fsdp import sharded_modules
from .wrapper import Wrapper


class ShardWrapper(Wrapper):
    """A model whose weights lie in parts on the ranks.

    Args:
        model: sharded.
        policy: with its compute dtype decided.
    """

    compares_models = True

    def __init__(self, model: nn.Module, policy: Policy) -> None:
        self._model, self._policy = model, policy

    def check_backward(self) -> None:
        """Refuse to sum in 16 bit what the policy accumulates in fp32. Raises: PolicyError."""
        check_sums(self._model, self._policy)

    def check_step(self) -> None:
        """Refuse a step on gradients that were never averaged. Raises: DistributedError."""
        check_averaged(self._model)

    def drop(self) -> None:
        """Drop gradients that wait where no optimizer sees them. Writes: gradients."""
        drop_waiting(self._model)


def check_storage(model: nn.Module, policy: Policy) -> None:
    """Refuse fp32 gradients for 16-bit shards, which torch gives gradients of their own dtype.

    Raises:
        PolicyError: the policy asks for them.
    """
    low = [name for name, p in model.named_parameters() if p.dtype in LOW_DTYPES and p.requires_grad]
    if low and policy.grads is torch.float32:
        raise PolicyError(
            f"the policy declares grads=fp32, and torch gives the {len(low)} sharded parameters that are stored in 16 bit "
            f"({low[0]}, ...) gradients of their own dtype. Leave grads out, and sum micro-batches in {dtype_name(policy.reduce)} "
            "before they are rounded: model.set_requires_gradient_sync(False) for all but the last of a step."
        )


def check_sums(model: nn.Module, policy: Policy) -> None:
    """Refuse to sum in 16 bit what the policy accumulates in fp32; called before each backward pass.

    Raises:
        PolicyError: a module holds its gradients back, in a 16-bit `reduce` dtype, and its weights are fp32.
    """
    if policy.reduce not in LOW_DTYPES:
        return
    for name, module in sharded_modules(model).items():
        for group in fsdp_param_groups(module):
            stored = {param.sharded_param.dtype for param in group.fsdp_params}
            if not group.reduce_grads and torch.float32 in stored:
                raise PolicyError(
                    f"set_requires_gradient_sync(False) was called on '{name or 'the root'}', whose weights are fp32, and torch "
                    f"sums gradients that wait in the dtype of what is sent, reduce={dtype_name(policy.reduce)}. Average every "
                    "micro-batch, which is then summed in fp32, or write reduce=fp32 in the policy."
                )


def check_averaged(model: nn.Module) -> None:
    """Refuse a step on gradients that were never averaged.

    Raises:
        DistributedError: every backward pass of the step held them back.
    """
    for name, module in sharded_modules(model).items():
        if any(holds_unreduced_grad(param) for group in fsdp_param_groups(module) for param in group.fsdp_params):
            raise DistributedError(
                f"step() was called while gradients of '{name or 'the root'}' wait on their own rank: every backward of this step "
                "ran under set_requires_gradient_sync(False). Write set_requires_gradient_sync(True) before the last one."
            )


def drop_waiting(model: nn.Module) -> None:
    """Drop gradients that a module holds back, which torch keeps where no optimizer sees them. Writes: they."""
    for module in sharded_modules(model).values():
        for group in fsdp_param_groups(module):
            for param in group.fsdp_params:
                drop_unreduced_grad_(param)
