"""What was declared beside what is: dtypes of everything a run keeps, and its bytes per parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch import sparse_indices, sparse_values
from ..binding import storage_targets
from ..casting import weight_casts
from ..distributed import comm_stats_around, is_summed_apart, reduced_dtypes
from ..errors import InvariantError
from ..formats import LOW_DTYPES, dtype_name
from ..kernels import AUX_STATE
from ..optim import MasterWeights, parameters
from ..policy import Policy

_COLUMNS = ("", "declared", "observed", "bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRow:
    """One kind of tensor; "reductions" are the sums of gradients over ranks.

    Attributes:
        what: "weights that feed low ops", "moments", ...
        declared: dtype or mode that the policy gives it; "as loaded" where it gives none.
        observed: dtype or mode, and how many tensors have it; of reductions, how many were sent, or how many sharded
            modules send, in it.
        nbytes: that they hold together.
        differing: names of tensors that are not what was declared.
    """

    what: str
    declared: str
    observed: tuple[tuple[str, int], ...]
    nbytes: int = 0
    differing: tuple[str, ...] = ()

    @property
    def is_as_declared(self) -> bool:
        """Whether every tensor is what was declared."""
        return not self.differing


@dataclass(frozen=True, kw_only=True, slots=True)
class StateReport:
    """What a run keeps, row by row; readable when printed.

    Attributes:
        policy: its text.
        rows: one for each kind of tensor there is.
        num_parameters: elements of all parameters.
        bytes_per_parameter: bytes of weights, gradients as they are or will be, moments and masters, by that number.
    """

    policy: str
    rows: tuple[StateRow, ...]
    num_parameters: int
    bytes_per_parameter: float

    @property
    def differing(self) -> tuple[StateRow, ...]:
        """The rows that are not as declared."""
        return tuple(row for row in self.rows if not row.is_as_declared)

    @property
    def _total(self) -> str:
        return f"{self.bytes_per_parameter:.2f} bytes for each of {self.num_parameters} parameters"

    def _cells(self) -> Iterator[tuple[str, str, str, str]]:
        for row in self.rows:
            observed = ", ".join(f"{name} x{count}" for name, count in row.observed) or "none yet"
            mark = "" if row.is_as_declared else f"  differs: {', '.join(row.differing[:3])}"
            yield row.what, row.declared, observed + mark, str(row.nbytes) if row.nbytes else ""

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self._cells())
        return f"<table><caption>{escape(f'{self.policy}: {self._total}')}</caption><tr>{head}</tr>{body}</table>"

    def __str__(self) -> str:
        from ..report import table_text

        table = table_text(_COLUMNS, list(self._cells()), right=())
        return "\n".join([f"policy: {self.policy}", table, self._total])


Found = tuple[str, Tensor, torch.dtype | None]
"""Name, tensor, and the dtype declared for it; None where the policy declares none."""
Dtypes = Mapping[Tensor, torch.dtype]


def make_report(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    policy: Policy,
    names: Mapping[Tensor, str],
    buffers: Mapping[str, torch.dtype],
    loaded: Dtypes,
) -> StateReport:
    """Look at everything a run keeps: `loaded` are the dtypes of parameters before they were prepared, or 16 bit where the policy stored them so, `buffers` those that floating ones had then, or that a forward gave them. Syncs: no."""
    moments, kept = _state(optimizers, names, policy.state)
    rows = [
        *_weight_rows(model, optimizers, policy, names, loaded),
        *_row("gradients", list(_gradients(optimizers, names, policy))),
        *_row("moments", moments),
        *_master_row(optimizers, policy, kept),
    ]
    total, count = sum(row.nbytes for row in rows), sum(p.numel() for p in names)
    floating = [(name, b, buffers.get(name)) for name, b in model.named_buffers() if b.is_floating_point()]
    kept_casts: list[Found] = [(names[p], cast, None) for p, cast in weight_casts.copies() if p in names]
    return StateReport(
        policy=str(policy),
        rows=(*rows, *_row("buffers", floating), *_row("kept casts", kept_casts), *_reduction_row(model, policy)),
        num_parameters=count,
        bytes_per_parameter=total / max(count, 1),
    )


def _weight_rows(
    model: nn.Module, optimizers: Sequence[Optimizer], policy: Policy, names: Mapping[Tensor, str], loaded: Dtypes
) -> list[StateRow]:
    targets, in_model = storage_targets(model, policy, optimizers), set(model.parameters())
    stored: list[Found] = []
    others: list[Found] = []
    frozen: list[Found] = []
    for p, name in names.items():
        if p in targets:
            stored.append((name, p, targets[p]))
        elif p.is_floating_point() and p.requires_grad:
            others.append((name, p, _declared(p, loaded.get(p, p.dtype), policy) if p in in_model else None))
        elif p.is_floating_point():
            frozen.append((name, p, None))
    what = "other weights" if stored else "weights"
    return [*_row("weights of low ops", stored), *_row(what, others), *_row("frozen weights", frozen)]


def _declared(p: Tensor, loaded: torch.dtype, policy: Policy) -> torch.dtype | None:
    """Return what a weight must be that no rule stores: fp32, or what it was, in fp64 or where weights are 16 bit; None if it is wider there."""
    if loaded in LOW_DTYPES and policy.params is torch.float32:
        return torch.float32
    return None if loaded in LOW_DTYPES and _is_wider(p, loaded) else loaded


def _gradients(optimizers: Sequence[Optimizer], names: Mapping[Tensor, str], policy: Policy) -> Iterator[Found]:
    """Yield gradients; where there is none yet, a stand-in without memory in the dtype autograd would give it."""
    for p in {p: None for optimizer in optimizers for p in parameters(optimizer) if p.requires_grad}:
        grad = torch.empty_like(p, dtype=p.grad_dtype or p.dtype, device="meta") if p.grad is None else p.grad
        declared = p.dtype if policy.grads is None or is_summed_apart(p) else policy.grads
        yield names[p], grad, None if policy.grads is None and _is_wider(grad, declared) else declared


def _is_wider(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a tensor loses nothing beside a dtype, because it has more bits."""
    return not tensor.is_complex() and torch.finfo(tensor.dtype).bits > torch.finfo(dtype).bits


def _state(
    optimizers: Sequence[Optimizer], names: Mapping[Tensor, str], declared: torch.dtype
) -> tuple[list[Found], list[Tensor]]:
    """Return the moments by name, with the dtype that they must have, and what lies beside weights."""
    moments: list[Found] = []
    kept = []
    for optimizer in optimizers:
        for p, entry in optimizer.state.items():
            for key, value in entry.items() if isinstance(entry, dict) else ():
                if not isinstance(value, Tensor) or key in ("step", "rounding_step"):
                    continue
                if key in AUX_STATE.values():
                    kept.append(value)
                elif value.is_floating_point():
                    name = f"{names[p]}.{key}"
                    moments.append((name, value, None if _is_wider(value, declared) else declared))
    return moments, kept


def _master_row(optimizers: Sequence[Optimizer], policy: Policy, kept: Sequence[Tensor]) -> list[StateRow]:
    modes: Counter[str] = Counter()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            mode = optimizer.masters.mode if isinstance(optimizer, MasterWeights) else group.get("master", "none")
            modes[mode] += sum(p.requires_grad and p.dtype in LOW_DTYPES for p in group["params"])
    observed = tuple((mode, count) for mode, count in modes.items() if count)
    if not observed and policy.master == "none":
        return []
    differing = tuple(f"master={mode}" for mode, _ in observed if mode != policy.master)
    nbytes = sum(tensor.nbytes for tensor in kept)
    return [StateRow(what="masters", declared=policy.master, observed=observed, nbytes=nbytes, differing=differing)]


def _reduction_row(model: nn.Module, policy: Policy) -> list[StateRow]:
    sent, sharded = comm_stats_around(model), reduced_dtypes(model)
    if sent is None and not sharded:
        return []
    observed = Counter(sharded.values()) if sent is None else sent.num_by_dtype
    # fp64 gradients are reduced as they are, and 16-bit ones where that loses nothing.
    as_they_are = (torch.float64,) if sent is None else (torch.float64, *sent.unrounded)
    others = [dtype for dtype in observed if dtype not in (policy.reduce, *as_they_are)]
    named = [name for name, dtype in sharded.items() if dtype in others]
    differing = tuple(named or (f"{observed[dtype]} in {dtype_name(dtype)}" for dtype in others))
    counts = tuple((dtype_name(dtype), count) for dtype, count in observed.items())
    return [StateRow(what="reductions", declared=dtype_name(policy.reduce), observed=counts, differing=differing)]


def _row(what: str, found: Sequence[Found]) -> list[StateRow]:
    if not found:
        return []
    declared = sorted({dtype_name(dtype) for _, _, dtype in found if dtype is not None})
    words = " or ".join(declared) or "as loaded"
    counts = tuple(Counter(dtype_name(tensor.dtype) for _, tensor, _ in found).items())
    nbytes = sum(_nbytes(tensor) for _, tensor, _ in found)
    differing = tuple(name for name, tensor, dtype in found if dtype is not None and tensor.dtype is not dtype)
    return [StateRow(what=what, declared=words, observed=counts, nbytes=nbytes, differing=differing)]


def _nbytes(tensor: Tensor) -> int:
    parts = [tensor]
    if tensor.is_sparse:
        parts = [sparse_values(tensor), sparse_indices(tensor)]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
    return sum(part.nbytes for part in parts)


def refuse_differing(report: StateReport) -> None:
    """Refuse a run in which something is not what was declared: an InvariantError names each kind and the first tensors."""
    if report.differing:
        what = "; ".join(
            f"{row.what} are declared {row.declared}, and {len(row.differing)} are not ({', '.join(row.differing[:3])})"
            for row in report.differing
        )
        raise InvariantError(
            f"what is stored is not what the policy declares: {what}. Prepare the model after it was loaded and cast, "
            "or declare what is there; print(amp.report()) shows all of it."
        )


class ParameterNames(dict[Tensor, str]):
    """The parameters of a model and its optimizers, each with its name; those that the model does not have get numbers."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model, self._optimizers = model, optimizers
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
