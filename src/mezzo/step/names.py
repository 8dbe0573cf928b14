"""Names of parameters, of those too that come after prepare."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from ..optim import parameters


class ParameterNames(dict[Tensor, str]):
    """The parameters of a model and its optimizers, each with its name.

    Args:
        model: its names count first.
        optimizers: of parameters that the model does not have, which get numbers.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self.refresh()

    def refresh(self) -> None:
        """Read the names anew. Host only."""
        self.clear()
        self.update({p: name for name, p in self._model.named_parameters()})
        for index, optimizer in enumerate(self._optimizers):
            for k, p in enumerate(parameters(optimizer)):
                self.setdefault(p, f"optimizer {index} parameter {k}")

    def __missing__(self, param: Tensor) -> str:
        self.refresh()
        return self.get(param, "a parameter")
