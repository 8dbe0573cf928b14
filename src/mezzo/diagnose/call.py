"""One op as it ran: its arguments as they were before, and what came out."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from .measure import results
from .opfacts import OpFacts, arguments


class Call:
    """One op as it ran.

    Attributes:
        func: the op.
        facts: its schema.
        args: positional arguments; copies stand in for what the op wrote.
        kwargs: named arguments, likewise.
        inputs: the floating tensors it read, by name, values before.
        out: the floating tensors it returned or wrote.
    """

    __slots__ = ("_originals", "args", "facts", "func", "inputs", "kwargs", "out")

    def __init__(
        self, func: OpOverload[Any, Any], facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.func, self.facts = func, facts
        self._originals: dict[int, Tensor] = {}
        self.args = tuple(self._kept(n, a) for n, a in zip(facts.arguments, args, strict=False))
        self.kwargs = {n: self._kept(n, a) for n, a in kwargs.items()}
        named = arguments(facts, self.args, self.kwargs)
        self.inputs = [(n, t) for n, t in named if not (facts.overwrites and n.split("[")[0] in facts.writes)]
        self.out: list[Tensor] = []

    def _kept(self, name: str, value: Any) -> Any:
        """Return an argument, copied if the op is about to write it and its old value counts."""
        if name not in self.facts.writes or self.facts.overwrites:
            return value

        def copy(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            kept = item.clone()
            self._originals[id(kept)] = item
            return kept

        return tree_map(copy, value)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op on the program's own arguments. Writes: what the op writes."""
        out = self.func(*args, **kwargs)
        self.out = results(self.facts, args, kwargs, out)
        return out

    def original(self, tensor: Tensor) -> Tensor:
        """Return the program's tensor that a copied argument stands for."""
        return self._originals.get(id(tensor), tensor)
