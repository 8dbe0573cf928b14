"""`mismatch`: two runs that should agree, side by side, and the first op where they do not."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from .. import random_state
from .._torch import compile_backend, is_compiled, tree_map
from ..errors import ConfigError, listed
from ..formats import widened
from ..trace import Frame, floating, preserve_state
from .divergence import first_divergence, place_of
from .mismatch_report import MismatchFinding, MismatchReport, OpPlace, OutputGap
from .observed_run import ROUNDINGS, ObservingMode, Run, jittered, relative_error
from .trial import LossFn, call, check_trial, loss_of

Runnable = nn.Module | Callable[..., Any]
_ALIKE = 8.0
"""A compiled run may be so many times further from fp64 than the eager one; beyond that each of its ops is looked at."""
_LINE = re.compile(r'File "(.+)", line (\d+), in (\S+)')


def _callable(run: Runnable, name: str) -> Any:
    if isinstance(run, torch.export.ExportedProgram):
        return run.module()
    if not callable(run):
        raise ConfigError(
            f"mismatch was given {type(run).__name__} for {name}; give a model, what torch.compile or torch.export returned, or a function of the batch."
        )
    return run


@contextmanager
def _preserved(run: Any) -> Iterator[None]:
    """Give back random state and, of a model, its buffers and gradients."""
    grad = torch.is_grad_enabled()
    with preserve_state(run) if isinstance(run, nn.Module) else random_state.kept(), torch.set_grad_enabled(grad):
        yield


def _trainable(run: Any) -> dict[str, Tensor]:
    """Return the parameters whose gradients are compared, in the order in which backward comes to them."""
    if not isinstance(run, nn.Module):
        raise ConfigError(
            f"mismatch was given a loss_fn and {type(run).__name__}; gradients are those of parameters, so give two models."
        )
    named = [(name.removeprefix("_orig_mod."), p) for name, p in run.named_parameters() if p.requires_grad]
    return dict(reversed(named))


def _compared(run: Any, batch: Any, loss_fn: LossFn | None) -> Callable[[], Any]:
    """Return what runs something once, for what is compared of it: outputs, or loss and gradients of parameters."""
    if loss_fn is None:
        return lambda: call(run, batch)
    parameters = list(_trainable(run).values())
    # made before anything is watched: a gradient that no op makes is 0, and no op of the run
    nothing = [torch.zeros_like(p) for p in parameters]

    def step() -> list[Tensor]:
        with torch.enable_grad():
            loss = loss_of(run, batch, loss_fn)
            grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [loss, *(zero if grad is None else grad for grad, zero in zip(grads, nothing, strict=True))]

    return step


def _names(a: Any, b: Any, loss_fn: LossFn | None, count: int) -> list[str]:
    if loss_fn is None:
        return [f"output {i}" for i in range(count)]
    ours, theirs = _trainable(a), _trainable(b)
    odd = sorted(ours.keys() ^ theirs.keys())
    if odd:
        raise ConfigError(
            f"mismatch compares the gradients of parameters of the same name, and only one of a and b has {listed(odd)} to train."
        )
    return ["loss", *(f"gradient of {name}" for name in ours)]


def _observe(run: Any, batch: Any, loss_fn: LossFn | None, other: dict[str, Tensor]) -> Run:
    """Run something once, op by op, compiled models too; `other` are the leaves of the run it is held against. Syncs: at every op."""
    mode = ObservingMode(run if isinstance(run, nn.Module) else None, other)
    with _preserved(run):
        step = _compared(run, batch, loss_fn)
        with mode.watching():
            output = step()
        return mode.run_of(output)


def _check_shapes(a: Run, b: Run) -> None:
    ours, theirs = ([tuple(t.shape) for t in run.outputs] for run in (a, b))
    if ours != theirs or not ours:
        raise ConfigError(
            f"mismatch compares what a and b return, and a returns floating tensors of shapes {ours}, b of {theirs}. Give functions that "
            "return the same tensors, for example lambda batch: model(batch).logits."
        )


def _first_off(observed: Run, output: list[Tensor], is_step: bool) -> tuple[int, float, float] | None:
    """Return the first compared tensor that compiling moved by more than rounding: its index, its error, what rounding explains."""
    forward = [op.total for op in observed.ops if op.site.phase == "forward"]
    for i, (eager, compiled) in enumerate(zip(observed.outputs, output, strict=True)):
        maker = observed.makers[i]
        is_gradient = is_step and i > 0 and maker is not None
        rounding = observed.ops[maker].total if is_gradient and maker is not None else max(forward, default=0.0)
        bound = _ALIKE * (rounding + torch.finfo(eager.dtype).eps)
        if (error := relative_error(compiled, eager)) > bound:
            return i, error, bound
    return None


@dataclass(frozen=True, slots=True)
class CompiledNode:
    """One op of a compiled graph, the module where it stands, and its line.

    `local` is its error over its result, as lengths, against eager torch on the values it was given; `bound` what rounding explains of it.
    """

    op: str
    module: str
    frame: Frame | None
    local: float
    bound: float


def _module_of(node: Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = [*stack.values()][-1][0] if stack else ""
    below = re.sub(r"^L\['\w+'\]\.?(_orig_mod\.?)?", "", path).replace("._modules", "")
    return below.replace("['", ".").replace("']", "").strip(".")


def _line_of(node: Node) -> Frame | None:
    found = _LINE.findall(node.meta.get("stack_trace") or "")
    return Frame(file=found[-1][0], line=int(found[-1][1]), function=found[-1][2]) if found else None


def _op_of(node: Node) -> str:
    target = node.target
    return (target if isinstance(target, str) else getattr(target, "__name__", str(target))).strip("_")


def _is_compared(node: Node) -> bool:
    value = node.meta.get("example_value")
    return node.op.startswith("call_") and isinstance(value, Tensor) and value.is_floating_point()


def _jittered(tensor: Any, eps: float, generator: torch.Generator) -> Any:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return tensor
    return jittered(tensor, eps, generator).to(tensor.dtype)


class _EagerCheck(torch.fx.Interpreter):
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
        self.found.append(CompiledNode(_op_of(n), _module_of(n), _line_of(n), local, bound))
        return got

    def _bound(self, node: Node, eager: Tensor, eps: float) -> float:
        """Return the error that rounding explains; inf for an op that draws."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        run: Callable[..., Any] = getattr(self, node.op)
        if not torch.equal(run(node.target, args, kwargs).nan_to_num(), eager.nan_to_num()):
            return math.inf
        args, kwargs = tree_map(lambda v: _jittered(v, eps, self._generator), (args, kwargs))
        return ROUNDINGS * (eps + relative_error(run(node.target, args, kwargs), eager))


def wrong_nodes(model: nn.Module, run: Callable[[nn.Module], object]) -> list[CompiledNode]:
    """Compile what `torch.compile` returned once more, every result an output, and return the ops further off than rounding explains. Syncs: yes."""
    backend, original = compile_backend(model)
    found: list[CompiledNode] = []

    def probing(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        shown = [node for node in graph.graph.nodes if _is_compared(node)]
        eager = GraphModule(graph, graph.graph)
        wide = torch.fx.Graph()
        copies: dict[Node, Node] = {}
        returned = wide.graph_copy(graph.graph, copies)
        wide.output((returned, *(copies[node] for node in shown)))
        compiled = backend(GraphModule(graph, wide), list(inputs))

        def call(*args: Any) -> Any:
            results, *values = compiled(*args)
            check = _EagerCheck(eager, dict(zip(shown, (v.detach() for v in values), strict=True)))
            with torch.no_grad():
                check.run(*args)
            found.extend(node for node in check.found if node.local > node.bound)
            return results

        return call

    compiled_again: Any = torch.compile(original, backend=probing)
    run(compiled_again)
    return found


def _compiled_finding(
    run: Any, batch: Any, loss_fn: LossFn | None, observed: Run, output: list[Tensor], names: list[str], side: str
) -> MismatchFinding | None:
    """Return the op that a compiler got wrong; None where the compiled run is about as near to fp64 as the eager one."""
    off = _first_off(observed, output, loss_fn is not None)
    if off is None:
        return None
    with _preserved(run):
        found = wrong_nodes(run, lambda model: call(model, batch) if loss_fn is None else loss_fn(model, batch))
    index, error, bound = off
    if found:
        node = found[0]
        op, module, frame = node.op, node.module, node.frame
        given = f"on the values it was given, rounding explains {node.bound:.2g}"
        what = f"compiled, {side} is {node.local:.2g} off {given}"
    elif names[index].startswith("gradient"):
        op, module, frame = "backward", names[index].removeprefix("gradient of ").rpartition(".")[0], None
        what = f"compiled, the {names[index]} in {side} is {error:.2g} off, rounding explains {bound:.2g}; its forward is right"
    else:
        return None
    place = OpPlace(op=op, kernel="compiled", module=module, frame=frame, dtype="")
    return MismatchFinding(
        cause="kernel", op=op, module=module, frame=frame, what=what,
        a=place if side == "a" else None, b=place if side == "b" else None,
    )  # fmt: skip


def _gap(name: str, a: Tensor, b: Tensor) -> OutputGap:
    x, y = widened(a), widened(b.to(a.device))
    known = x.isfinite() & y.isfinite()
    gap = (x - y)[known].abs()
    p, q = (torch.log_softmax(t.reshape(-1, t.shape[-1]) if t.dim() else t.reshape(1, 1), -1) for t in (x, y))
    kl = (p.exp() * (p - q)).nan_to_num(0.0, float("inf")).sum(-1)
    return OutputGap(
        name=name,
        difference=relative_error(b.to(a.device), a),
        largest=float(gap.max()) if gap.numel() else 0.0,
        kl_mean=float(kl.mean()) if kl.numel() else 0.0,
        kl_max=float(kl.max()) if kl.numel() else 0.0,
        signal=float(sum(t.nan_to_num(math.nan, 0.0, 0.0).abs().sum() for t in (x, y))),
    )


def mismatch(a: Runnable, b: Runnable, batch: Any, loss_fn: LossFn | None = None) -> MismatchReport:
    """Run two things that should agree on one batch, op by op, and name the first op where they part.

    Beside each run fp64 values are carried from the inputs; rounding does not move them. Where both runs have the same,
    the difference is rounding, or a kernel that is further from fp64 than rounding explains. Where they have not, the first
    op is named that makes something else of the same values. Values are recognised whatever their layout, so that another
    arrangement or a fused op that gives the same is no finding. Both draw the same random numbers.

    For eager and compiled, before and after export, two policies, two checkpoints, two attention implementations, the
    logits of trainer and rollout. A compiled model is run as it is for its outputs; where these are off, its graph is
    compiled again with every result as an output, and each op is held against eager torch.

    Args:
        a: a model, what `torch.compile` or `torch.export.export` returned, or a function of the batch; run as it is: in
            its mode, and in the region and with the gradient mode the caller is in.
        b: likewise.
        batch: a tensor, a tuple of positional or a dict of named arguments of both.
        loss_fn: loss_fn(model, batch) returns a number. Then it and the gradients of the parameters are compared instead of the
            outputs, and the op may be one of backward; a and b are two models whose trainable parameters have the same names.

    Returns:
        The report: the op, why, and how far the outputs are from each other.

    Raises:
        ConfigError: something that cannot be called, outputs of different number or shape, or gradients without a model.

    Writes: nothing. Syncs: at every op.
    Source: fp64 as the oracle of finite-precision programs, as in CADNA and Herbgrind (Sanchez-Stern et al., 2018).

    >>> x, norm = torch.linspace(-0.1, 0.3, 8).reshape(2, 4), nn.LayerNorm(4)
    >>> report = mismatch(norm, nn.LayerNorm(4, eps=1e-3), x)
    >>> report.finding.op, report.finding.what
    ('layer_norm', 'eps is 1e-05 in a and 0.001 in b')
    """
    check_trial("mismatch", batch, loss_fn)
    one, two = _callable(a, "a"), _callable(b, "b")
    with random_state.kept():
        ours = _observe(one, batch, loss_fn, {})
        theirs = _observe(two, batch, loss_fn, ours.leaves)
        names = _names(one, two, loss_fn, len(ours.outputs))
        _check_shapes(ours, theirs)
        finding = first_divergence(ours, theirs)
        outputs = [list(ours.outputs), list(theirs.outputs)]
        for i, (run, observed, side) in enumerate(((one, ours, "a"), (two, theirs, "b"))):
            if is_compiled(run):
                with _preserved(run):
                    outputs[i] = [v.detach() for _, v in floating(_compared(run, batch, loss_fn)())]
                finding = finding or _compiled_finding(run, batch, loss_fn, observed, outputs[i], names, side)
    inexact = [op for op in (*ours.ops, *theirs.ops) if finding is None and op.local > 0]
    worst = max(inexact, key=lambda op: op.local, default=None)
    both = [(key[0], x, theirs.modules.get(key)) for key, x in ours.modules.items()]
    return MismatchReport(
        finding=finding,
        outputs=tuple(_gap(name, x, y) for name, x, y in zip(names, *outputs, strict=True)),
        worst=place_of(worst),
        worst_error=0.0 if worst is None else worst.local,
        growth=tuple((name, relative_error(y, x)) for name, x, y in both if y is not None and x.shape == y.shape),
        ops=(len(ours.ops), len(theirs.ops)),
    )
