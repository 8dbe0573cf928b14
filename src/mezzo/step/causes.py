"""Why a step has no gradients to work with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import listed
from ..optim.master_weights import parameters


def why_no_gradients(model: nn.Module, optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]) -> str:
    """Return the sentence that says which of the causes it is: nothing trainable, strangers, or out of reach."""
    params = [p for optimizer in optimizers for p in parameters(optimizer)]
    known = set(model.parameters())
    trainable = [p for p in params if p.requires_grad]
    if not trainable:
        return (
            f"step() found no gradients: all {len(params)} parameters of the optimizer are frozen (requires_grad=False). "
            "Unfreeze some, or give the optimizer the trainable ones."
        )
    strangers = [p for p in trainable if p not in known]
    if len(strangers) == len(trainable):
        return (
            f"step() found no gradients: none of the optimizer's {len(trainable)} trainable parameters belongs to the "
            "prepared model; the model was copied or replaced after the optimizer was made. "
            "Make the optimizer from model.parameters() of the prepared model."
        )
    reached = [p for p in known if p.grad is not None]
    if reached:
        return (
            f"step() found no gradients: the loss reaches {len(reached)} parameters of the model, but none of the "
            f"optimizer's {len(trainable)} ({listed([names[p] for p in trainable])}). "
            "Step the optimizer whose parameters this loss trains, or check where the graph is cut."
        )
    return (
        f"step() found no gradients: those that backward(loss) left on the optimizer's {len(trainable)} parameters were "
        "dropped before step(). Call amp.zero_grad() after step(), or before the first backward(loss)."
    )
