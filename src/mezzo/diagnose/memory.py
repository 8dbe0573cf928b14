"""`memory`: what a model, its optimizer and a policy will occupy, before training starts."""

from __future__ import annotations

import copy
import inspect
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch import storage_id
from ..binding import check_optimizers, convert_
from ..binding.bind import bind
from ..distributed import class_names
from ..errors import ConfigError
from ..formats import LOW_DTYPES, dtype_name
from ..optim import MasterWeights, adopt, parameters, wrapped_optimizer
from ..policy import Policy, PolicyLike, as_policy, is_cast_at_use
from ..report import Chart, Document, Note, Pairs, Report, Series, Table
from ..step.prepare import optimizers_of
from .trial import LossFn, bind_copy, check_trial, copied, device_of, loss_of

Kind = Literal["weights", "buffers", "gradients", "optimizer state", "weight casts", "activations"]
_Bytes = dict[Kind, Counter[torch.dtype]]
_PROBE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryShare:
    """Bytes of one kind, and of each dtype in it by its short name, largest first."""

    kind: Kind
    bytes: int
    dtypes: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport(Report):
    """What training will occupy; activations are among it if a batch was given to measure them on, `has_batch`."""

    model: str
    optimizers: tuple[str, ...]
    policy: str
    parameters: int
    trainable: int
    shares: tuple[MemoryShare, ...]
    has_batch: bool

    def bytes_of(self, kind: Kind) -> int:
        """Return the bytes of one kind."""
        return sum(s.bytes for s in self.shares if s.kind == kind)

    @property
    def held_bytes(self) -> int:
        """Bytes held between steps: weights, buffers, gradients, optimizer state."""
        return sum(s.bytes for s in self.shares if s.kind not in ("weight casts", "activations"))

    @property
    def peak_bytes(self) -> int:
        """Bytes at the end of forward, when activations and casts are held too; gradients counted as held."""
        return sum(s.bytes for s in self.shares)

    @property
    def per_parameter(self) -> float:
        """Held bytes, buffers left out, for each trainable parameter."""
        return (self.held_bytes - self.bytes_of("buffers")) / max(1, self.trainable)

    def document(self) -> Document:
        """Return the layout."""
        rows = tuple(
            (s.kind, s.bytes, s.bytes / max(1, self.parameters), ", ".join(f"{n} {size(b)}" for n, b in s.dtypes))
            for s in self.shares
        )
        held = f"{size(self.held_bytes)}, {self.per_parameter:.1f} bytes a trainable parameter"
        pairs = (
            ("parameters", f"{self.parameters:,}, {self.trainable:,} of them trainable"),
            ("optimizer", ", ".join(self.optimizers) or "none: inference"),
            ("held between steps", held),
            ("peak", f"{size(self.peak_bytes)}{'' if self.has_batch else ' and the activations'}"),
        )
        table = Table(title="", columns=("kind", "bytes", "bytes a parameter", "formats"), rows=rows)
        chart = Chart(
            title="Bytes by kind",
            kind="bars",
            labels=tuple(s.kind for s in self.shares),
            series=(Series(name="MiB", values=tuple(s.bytes / 2**20 for s in self.shares)),),
            unit="MiB",
        )
        hint = () if self.has_batch else (Note(text="Give a batch to have the activations measured too."),)
        return Document(
            title=f"mezzo memory of {self.model} under {self.policy}",
            verdict=f"{size(self.peak_bytes)} at the peak.",
            is_good=True,
            blocks=(Pairs(pairs=pairs), table, chart, *hint),
        )


def size(count: float) -> str:
    """Write a number of bytes.

    >>> size(1536), size(3 * 2**30)
    ('1.5 KiB', '3.0 GiB')
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def _outline(model: nn.Module, policy: Policy, is_trained: bool) -> nn.Module:
    """Return a copy of a model without memory, its weights stored as `prepare` would store them."""
    memo: dict[int, Any] = {id(b): torch.empty_like(b, device="meta") for b in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    outline = copied(model, memo)
    bind(outline, policy, "region")
    trained = [p for p in outline.parameters() if p.requires_grad]
    convert_(outline, [torch.optim.SGD(trained, lr=0.0)] if is_trained and trained else [], policy)
    return outline


def _state_of_element(
    optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype, policy: Policy
) -> Counter[torch.dtype]:
    """Return the bytes by dtype that an optimizer keeps for one element, found by stepping a small parameter."""
    inner = wrapped_optimizer(optimizer)
    known = inspect.signature(type(inner).__init__).parameters
    options = {name: value for name, value in group.items() if name in known and name != "params"}
    probe = nn.Parameter(torch.ones(_PROBE))
    try:
        small: Optimizer = type(inner)([probe], **options)
        if isinstance(optimizer, MasterWeights):
            small = MasterWeights(small, optimizer.masters.mode)
        small = adopt(small, policy)
        probe.data = probe.data.to(dtype)
        probe.grad = torch.ones_like(probe)
        small.step()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{type(inner).__name__} was to be tried on a small parameter to learn its state, and {error}. "
            "Write the optimizer so that its constructor takes the options of its groups."
        ) from error
    found = Counter[torch.dtype]()
    for value in small.state[probe].values():
        if isinstance(value, Tensor) and value.numel() >= _PROBE:
            found[value.dtype] += value.nbytes // _PROBE
    return found


def _saved_bytes(model: nn.Module, batch: Any, loss_fn: LossFn | None, policy: Policy) -> Counter[torch.dtype]:
    """Return the bytes by dtype that forward saves for backward, weights left out, each memory once."""
    found: dict[int, tuple[Tensor, torch.dtype]] = {}

    def pack(tensor: Tensor) -> Tensor:
        found.setdefault(storage_id(tensor), (tensor, tensor.dtype))
        return tensor

    with bind_copy(model, policy) as runnable:
        weights = {storage_id(t) for t in (*runnable.parameters(), *runnable.buffers())}
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(runnable, batch, loss_fn)
        sizes = Counter[torch.dtype]()
        for key, (tensor, dtype) in found.items():
            if key not in weights:
                sizes[dtype] += tensor.untyped_storage().nbytes()
        del loss
    return sizes


def memory(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    policy: PolicyLike = "auto",
    *,
    batch: Any = None,
    loss_fn: LossFn | None = None,
) -> MemoryReport:
    """Say what training will occupy, before `mezzo.prepare` changes anything.

    Weights and gradients are counted in the formats the policy would store them in; optimizer state is learned by
    stepping a parameter of a thousand elements; activations are measured, if there is a batch, as what forward saves for
    backward, casts of weights among them.

    Args:
        model: not prepared yet; is left as it was.
        optimizer: the optimizers, made but not stepped; None for inference.
        policy: a policy or its text.
        batch: as in `mezzo.diagnose.lint`; None leaves the activations out and counts casts of weights as two bytes each.
        loss_fn: computes the loss from (model, batch).

    Raises:
        PolicyError, MasterError, StepError: as `mezzo.prepare` would.
        ConfigError: an optimizer that cannot be tried on a small parameter, or no batch or loss.

    Writes: nothing. Syncs: no.

    >>> model = nn.Linear(1000, 1000, bias=False)
    >>> memory(model, torch.optim.AdamW(model.parameters()), "fp32").per_parameter
    16.0
    """
    optimizers = optimizers_of("memory", model, optimizer)
    check_trial("memory", batch, loss_fn)
    chosen = as_policy(policy).resolve(device_of(model))
    outline = _outline(model, chosen, bool(optimizers))  # which refuses a sharded model
    _check_fit(model, optimizers, chosen)
    stored = dict(zip(model.parameters(), outline.parameters(), strict=True))
    tally: _Bytes = defaultdict(Counter)
    for p in outline.parameters():
        tally["weights"][p.dtype] += p.numel() * p.itemsize
    for b in outline.buffers():
        tally["buffers"][b.dtype] += b.numel() * b.itemsize
    for one in optimizers:
        _count_optimizer(tally, one, stored, chosen)
    if batch is not None:
        tally["activations"] = _saved_bytes(model, batch, loss_fn, chosen)
    elif chosen.is_low and chosen.compute is not None:
        # a region casts at each use the fp32 weights of layers that multiply matrices
        layers = [module for module in outline.modules() if is_cast_at_use(class_names(module))]
        cast = [p for layer in layers for p in layer.parameters(recurse=False) if p.dtype not in LOW_DTYPES]
        tally["weight casts"][chosen.compute] = sum(p.numel() for p in cast) * chosen.compute.itemsize
    return MemoryReport(
        model=type(model).__name__,
        optimizers=tuple(type(o).__name__ for o in optimizers),
        policy=str(chosen),
        parameters=sum(p.numel() for p in model.parameters()),
        trainable=sum(p.numel() for p in model.parameters() if p.requires_grad),
        shares=tuple(_share(kind, counts) for kind, counts in tally.items() if counts.total()),
        has_batch=batch is not None,
    )


def _check_fit(model: nn.Module, optimizers: Sequence[Optimizer], policy: Policy) -> None:
    """Refuse optimizers of another model, by a ConfigError, and those that `mezzo.prepare` would refuse."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
    held = [p for one in optimizers for p in parameters(one)]
    if held and not any(p in names for p in held):
        raise ConfigError(
            f"memory was given {type(optimizers[0]).__name__}, none of whose {len(held)} parameters belongs to the {type(model).__name__}. Make the "
            "optimizer from model.parameters() of this model."
        )
    # a copy stands for each: what `prepare` would step, while the given one stays as it was
    copies = [adopt(copy.deepcopy(one, {id(p): p for p in names}), policy) for one in optimizers]
    check_optimizers(copies, policy, names)


def _count_optimizer(
    tally: _Bytes, optimizer: Optimizer, stored: dict[nn.Parameter, nn.Parameter], policy: Policy
) -> None:
    learned: dict[tuple[int, torch.dtype], Counter[torch.dtype]] = {}
    for i, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if not p.requires_grad:
                continue
            dtype = stored[p].dtype if p in stored else p.dtype
            grads = policy.grads or dtype
            tally["gradients"][grads] += p.numel() * grads.itemsize
            if (i, dtype) not in learned:
                learned[i, dtype] = _state_of_element(optimizer, group, dtype, policy)
            for kept, count in learned[i, dtype].items():
                tally["optimizer state"][kept] += p.numel() * count


def _share(kind: Kind, counts: Counter[torch.dtype]) -> MemoryShare:
    dtypes = tuple((dtype_name(dtype), count) for dtype, count in counts.most_common())
    return MemoryShare(kind=kind, bytes=counts.total(), dtypes=dtypes)
