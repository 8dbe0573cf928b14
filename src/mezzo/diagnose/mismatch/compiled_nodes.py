"""A compiled model, op by op: the graph the compiler was given, compiled with every result as an output."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from ..._torch import compile_backend, tree_map
from ...trace import Frame
from .observed_run import ROUNDINGS, jittered, relative_error

_LINE = re.compile(r'File "(.+)", line (\d+), in (\S+)')


@dataclass(frozen=True, slots=True)
class CompiledNode:
    """One op of a compiled graph.

    Attributes:
        op: the function that was called.
        module: where it stands, by name.
        frame: its line.
        local: error over result, as lengths, against eager torch on the values it was given.
        bound: what rounding explains of it.
    """

    op: str
    module: str
    frame: Frame | None
    local: float
    bound: float


def _module(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(list(stack.values())), ("", None))[0] if stack else ""
    return (
        re.sub(r"^L\['\w+'\]\.?(_orig_mod\.?)?", "", path)
        .replace("._modules", "")
        .replace("['", ".")
        .replace("']", "")
        .strip(".")
    )


def _frame(node: Node) -> Frame | None:
    found = _LINE.findall(node.meta.get("stack_trace") or "")
    return Frame(file=found[-1][0], line=int(found[-1][1]), function=found[-1][2]) if found else None


def _name(node: Node) -> str:
    return (node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))).strip(
        "_"
    )


def _is_shown(node: Node) -> bool:
    value = node.meta.get("example_value")
    return node.op.startswith("call_") and isinstance(value, Tensor) and value.is_floating_point()


def _near(tensor: Any, eps: float, generator: torch.Generator) -> Any:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return tensor
    return jittered(tensor, eps, generator).to(tensor.dtype)


class _Judge(torch.fx.Interpreter):
    """Runs a graph eagerly, each op on the values that compiled code made, and compares their results."""

    def __init__(self, graph: GraphModule, compiled: dict[Node, Tensor]) -> None:
        super().__init__(graph)
        self._compiled = compiled
        self._generator = torch.Generator().manual_seed(0)
        self.found: list[CompiledNode] = []

    def run_node(self, n: Node) -> Any:
        """Run one node; its compiled result takes the place of the eager one."""
        eager = super().run_node(n)
        got = self._compiled.get(n)
        if got is None or not isinstance(eager, Tensor) or eager.shape != got.shape:
            return eager
        eps = torch.finfo(eager.dtype).eps
        local = relative_error(got, eager)
        bound = 8 * eps if local <= 8 * eps else self._bound(n, eager, eps)
        self.found.append(CompiledNode(_name(n), _module(n), _frame(n), local, bound))
        return got

    def _bound(self, node: Node, eager: Tensor, eps: float) -> float:
        """Return the error that rounding explains; inf for an op that draws."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        run: Callable[..., Any] = getattr(self, node.op)
        if not torch.equal(run(node.target, args, kwargs).nan_to_num(), eager.nan_to_num()):
            return math.inf
        args, kwargs = tree_map(lambda v: _near(v, eps, self._generator), (args, kwargs))
        return ROUNDINGS * (eps + relative_error(run(node.target, args, kwargs), eager))


def wrong_nodes(model: nn.Module, run: Callable[[nn.Module], object]) -> list[CompiledNode]:
    """Compile what `torch.compile` returned once more, every result an output, and return the ops further off than rounding explains.

    Syncs: yes.
    """
    backend, original = compile_backend(model)
    found: list[CompiledNode] = []

    def probing(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        shown = [node for node in graph.graph.nodes if _is_shown(node)]
        eager = GraphModule(graph, graph.graph)
        wide = torch.fx.Graph()
        copies: dict[Node, Node] = {}
        returned = wide.graph_copy(graph.graph, copies)
        wide.output((returned, *(copies[node] for node in shown)))
        compiled = backend(GraphModule(graph, wide), list(inputs))

        def call(*args: Any) -> Any:
            results, *values = compiled(*args)
            judge = _Judge(eager, dict(zip(shown, (v.detach() for v in values), strict=True)))
            with torch.no_grad():
                judge.run(*args)
            found.extend(node for node in judge.found if node.local > node.bound)
            return results

        return call

    compiled_again: Any = torch.compile(original, backend=probing)
    run(compiled_again)
    return found
