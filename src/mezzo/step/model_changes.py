"""What a model and its optimizers have now: the names of parameters, and whether modules, groups or layers came or changed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch import own_modules
from ..optim import parameters


class ModelChanges:
    """Compares a model with what it was when somebody last looked. Host only, a few microseconds.

    Args:
        model: the root.
        optimizers: of it.
        with_frozen: whether a parameter that is unfrozen is a change, since it is stored in another dtype then.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], with_frozen: bool) -> None:
        self._model = model
        self._optimizers = optimizers
        self._with_frozen = with_frozen
        self.look()

    def look(self) -> None:
        """Take everything as it is now."""
        self._registries = [own_modules(module) for module in self._model.modules()]
        self._children = self._all_children()
        self._sizes = self._all_sizes()
        self._frozen = [p for p in self._model.parameters() if not p.requires_grad] if self._with_frozen else []

    def are_there(self) -> bool:
        """Whether anything is not as it was."""
        return (
            self._all_children() != self._children
            or self._all_sizes() != self._sizes
            or any([p.requires_grad for p in self._frozen])
        )

    def _all_children(self) -> list[nn.Module | None]:
        return [child for registry in self._registries if registry for child in registry.values()]

    def _all_sizes(self) -> list[int]:
        return [len(group["params"]) for optimizer in self._optimizers for group in optimizer.param_groups]


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
