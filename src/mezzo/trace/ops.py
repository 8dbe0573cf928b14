"""Ops: what a schema says an op reads and writes, one op as it ran, and how many floating-point operations it does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .._torch import OpOverload, has_no_memory, local_tensor, sparse_values, tree_map, unwrapped
from ..binding import named_tensors
from ..formats import widest

_RENAMED = {
    "to_copy": "to",
    "convolution_overrideable": "convolution",
    "safe_softmax": "softmax",
    "softmax_backward_data": "softmax_backward",
    "nll_loss_forward": "nll_loss",
    "nll_loss2d_forward": "nll_loss",
    "nll_loss2d": "nll_loss",
    "grid_sampler2d": "grid_sampler_2d",
    "grid_sampler3d": "grid_sampler_3d",
    "smooth_l1loss": "smooth_l1_loss",
}
_PREFIXES = ("foreach_", "native_", "cudnn_", "miopen_", "thnn_fused_")
_SUFFIXES = re.compile(r"(_legit(_no_training)?|_with_update|_for_cpu|_functional|_ex)$")
_ATTENTION = re.compile(r"^scaled_dot_product(_\w+)?_attention")
_GARBAGE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted", "resize"}
_OVERWRITES = {
    "copy", "fill", "zero", "normal", "uniform", "bernoulli", "random", "exponential", "cauchy", "geometric",
    "log_normal", "set",
}  # fmt: skip
_HIDDEN_WRITES = ("running_mean", "running_var")
CASTS = ("to", "bfloat16", "half", "type", "type_as", "tensor", "new_tensor")
"""Calls by which a program itself narrows a value."""
FACTORIZATIONS = frozenset({"linalg_cholesky", "linalg_inv", "linalg_lu_factor", "linalg_ldl_factor", "linalg_solve"})
"""Ops that say by a whole number, their last result, whether they could do what they were asked."""
SPECTRA = frozenset({"linalg_svd", "linalg_eigh", "linalg_eig", "linalg_qr"})  # their vectors have no sign to compare
SOFTMAX_LIKE = frozenset({"softmax", "log_softmax", "logsumexp", "scaled_dot_product_attention"})


@cache
def plain_name(name: str) -> str:
    """Return an op's name as a reader knows it: no namespace, overload, underscore or backend.

    >>> plain_name("aten._foreach_addcdiv_"), plain_name("_log_softmax"), plain_name("native_layer_norm")
    ('addcdiv', 'log_softmax', 'layer_norm')
    """
    name = name.rsplit(".", 1)[-1].strip("_")
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    name = _SUFFIXES.sub("", name)
    if _ATTENTION.match(name) and not name.endswith("backward"):
        return "scaled_dot_product_attention"
    return _RENAMED.get(name, name)


@cache
def node_op(node_name: str) -> str:
    """Return the plain name of the forward op an autograd node differentiates; a custom Function keeps its class name.

    >>> node_op("NativeLayerNormBackward0"), node_op("ClampedLogBackward"), node_op("MaxPool2DWithIndicesBackward0")
    ('layer_norm', 'ClampedLog', 'max_pool2d_with_indices')
    """
    name = node_name.rsplit("::", 1)[-1]
    builtin = re.fullmatch(r"(\w+)Backward\d+", name)
    if builtin is None:
        return name.removesuffix("Backward")
    name = re.sub(r"(?<=\d)[A-Z]", lambda letter: letter[0].lower(), builtin[1])
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return plain_name(snake)


def has_no_values(cls: type) -> bool:
    """Say whether a class of tensors stands for shapes alone, by which torch plans what it will run. Host only."""
    return cls.__name__ in ("FakeTensor", "FunctionalTensor")


@cache
def takes_itself_apart(cls: type) -> bool:
    """Say whether a class of tensors answers ops by other ops, as quantised and distributed tensors do. Host only."""
    own = getattr(cls, "__torch_dispatch__", None)
    return own is not None and own is not Tensor.__torch_dispatch__ and hasattr(cls, "__tensor_flatten__")


@dataclass(frozen=True, kw_only=True, slots=True)
class OpFacts:
    """What the collector must know before it runs an op.

    Attributes:
        kernel: torch's name without overload, as "aten.addmm".
        arguments: names in the order of the schema.
        makes_nothing: a view, or memory that holds no value yet; no result to judge.
        writes: names of arguments the op writes.
        overwrites: the old values of what it writes are not read.
        draws: its result depends on more than its arguments: random numbers, or what other ranks have.
    """

    name: str
    kernel: str
    arguments: tuple[str, ...]
    makes_nothing: bool
    writes: frozenset[str]
    overwrites: bool
    draws: bool

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call of the op, by their names in the schema. Host only."""
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}


def is_collective(kernel: str) -> bool:
    """Say whether an op waits for other ranks, so that running it again would wait for ever."""
    return "c10d" in kernel


@cache
def op_facts(func: OpOverload[Any, Any]) -> OpFacts:
    """Read an op's schema once."""
    schema = func._schema
    base = schema.name.split("::")[-1]
    name = plain_name(base)
    writes = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    outs = {a.name for a in schema.arguments if a.is_out}
    if "batch_norm" in base and "backward" not in base:
        writes |= {a.name for a in schema.arguments if a.name in _HIDDEN_WRITES}
    is_view = func.is_view or base in ("lift_fresh", "alias", "detach", "_unsafe_view")
    return OpFacts(
        name=name,
        kernel=schema.name.replace("::", "."),
        arguments=tuple(a.name for a in schema.arguments),
        makes_nothing=is_view or name in _GARBAGE or name == "set",
        writes=frozenset(writes),
        overwrites=bool(outs) or (name in _OVERWRITES and base.endswith("_")),
        draws=torch.Tag.nondeterministic_seeded in func.tags or is_collective(schema.name),
    )


def floating(value: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the floating values of the tensors in nested data, with a name for each. Syncs: no."""
    return ((inner, values) for inner, tensor in named_tensors(value, name) if (values := plain(tensor)) is not None)


def plain(tensor: Tensor) -> Tensor | None:
    """Return the floating values of a tensor as a strided one; None where there are none. Syncs: no.

    Complex tensors come as their real view, sparse and nested ones as their values, distributed ones as their local part.
    """
    tensor = unwrapped(local_tensor(tensor))
    if tensor.is_meta or has_no_memory(tensor) or has_no_values(type(tensor)):
        return None
    if tensor.layout is torch.sparse_coo:
        tensor = sparse_values(tensor)
    elif tensor.is_nested and tensor.layout is torch.strided:
        tensor = tensor.values()
    if tensor.is_complex() and tensor.layout is torch.strided:
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor if tensor.is_floating_point() and tensor.layout is torch.strided else None


def is_plain(tensor: Tensor) -> bool:
    """Say whether a tensor is strided memory of its own class, and no wrapper of a transform. Host only."""
    is_memory = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return is_memory and not tensor.is_meta and not has_no_memory(tensor) and unwrapped(tensor) is tensor


def results(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Tensor]:
    """Return the floating tensors an op produced: what it returned and what it wrote, each once. Syncs: no."""
    written = (a for name, a in facts.named(args, kwargs).items() if name in facts.writes)
    found = {id(t): t for v in (out, *written) for _, t in floating(v)}
    return list(found.values())


def lands_later(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an op only sets out to copy from a device to the host, which has nothing to look at yet."""
    named = facts.named(args, kwargs)
    if not named.get("non_blocking"):
        return False
    target = named.get("device") or named["self"].device  # of _to_copy; else of copy_
    source = named.get("src", named["self"])
    return bool(torch.device(target).type == "cpu" != source.device.type)


Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of an op."""


class Call:
    """One op as it ran.

    Attributes:
        args, kwargs: copies stand in for what the op wrote.
        named: all of them, by their names in the schema.
        inputs: the floating tensors it read, by name, values before.
        out: the floating tensors it returned or wrote.
        returned: what it returned.
    """

    __slots__ = ("_originals", "args", "facts", "func", "inputs", "kwargs", "named", "out", "returned")

    def __init__(
        self, func: OpOverload[Any, Any], facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.func, self.facts = func, facts
        self._originals: dict[int, Tensor] = {}
        self.args = tuple(self._kept(n, a) for n, a in zip(facts.arguments, args, strict=False))
        self.kwargs = {n: self._kept(n, a) for n, a in kwargs.items()}
        self.named = facts.named(self.args, self.kwargs)
        read = ((n, a) for n, a in self.named.items() if not (facts.overwrites and n in facts.writes))
        self.inputs = [pair for name, value in read for pair in floating(value, name)]
        self.out: list[Tensor] = []
        self.returned: Any = None

    @property
    def given(self) -> Given:
        """Positional and named arguments. Host only."""
        return self.args, self.kwargs

    @property
    def whole(self) -> list[tuple[str, Tensor]]:
        """The tensors of whole numbers that it was given, by name. Syncs: no."""
        tensors = ((n, t) for n, t in self.named.items() if isinstance(t, Tensor))
        return [(n, t) for n, t in tensors if not t.is_floating_point() and not t.is_complex()]

    @property
    def wide_dtype(self) -> torch.dtype:
        """The widest dtype of the device that its results are on."""
        return widest(self.out[0].device) if self.out else torch.float64

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
        self.returned = out = self.func(*args, **kwargs)
        self.out = [] if lands_later(self.facts, args, kwargs) else results(self.facts, args, kwargs, out)
        return out

    def given_with(self, values: Mapping[int, Any]) -> Given:
        """Return its arguments with others in the place of some, by their ids. Host only."""
        given: Given = tree_map(lambda v: values.get(id(v), v), self.given)
        return given

    def original(self, tensor: Tensor) -> Tensor:
        """Return the program's tensor that a copied argument stands for. Syncs: no."""
        return self._originals.get(id(tensor), tensor)

    @property
    def originals(self) -> list[Tensor]:
        """The program's tensors that `inputs` are the values of. Host only."""
        return [self.original(t) for _, t in self.inputs]

    @property
    def is_tracked(self) -> bool:
        """Whether gradients will go through it to something it read. Host only."""
        return torch.is_grad_enabled() and any(t.requires_grad for t in self.originals)


Formula = Callable[..., int]


@cache
def formulas() -> Mapping[Any, Formula]:
    """Return torch's formulas by op, and those that torch leaves out: of products with vectors, and of the CPU's fused attention."""
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

    aten = torch.ops.aten

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, out_val: Any = None, **__: Any) -> int:
        return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]  # torch's own

    def attention_backward(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, out_val: Any = None, **__: Any
    ) -> int:
        return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]  # torch's own

    def vector(first: Tensor, second: Tensor, *more: Any, out_val: Any = None, **__: Any) -> int:
        return 2 * max(t.numel() for t in (first, second, *more) if isinstance(t, Tensor))

    return {
        **flop_registry,
        **dict.fromkeys((aten.mv, aten.addmv, aten.dot, aten.vdot), vector),
        aten._scaled_dot_product_flash_attention_for_cpu: attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
    }


def is_product(func: OpOverload[Any, Any]) -> bool:
    """Say whether an op is made of products, which a region runs in 16 bit."""
    return func.overloadpacket in formulas()


def flops_of(func: OpOverload[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the floating-point operations of one call, given its result; 0 for ops that are not made of products. Syncs: no."""
    formula = formulas().get(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
