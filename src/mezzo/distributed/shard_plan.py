"""Which modules share a sharding group, and in which dtype their weights and gradients are reduced: derived from a policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..errors import PolicyError, check_given, kind_of, listed
from ..formats import LOW_DTYPES, dtype_name
from ..policy import FP32_RULES, Policy, Rule, is_cast_at_use, is_matmul_like, names_around

_LOW_OPS = ("linear", "addmm", "matmul", "mm", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
            "conv_transpose3d")  # fmt: skip
"""Ops that take the weights of modules in `CAST_AT_USE`; a policy that edits one has these weights gathered as stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamDtypes:
    """In which dtypes weights are stored and gathered.

    Attributes:
        stored: dtype of the shards, in which the optimizer holds them.
        unsharded: dtype in which whole weights are put together for forward and backward.
        compute: dtype of low ops in the module; None if it has none.
    """

    stored: torch.dtype
    unsharded: torch.dtype
    compute: torch.dtype | None = field(default=None, compare=False)

    @property
    def may_gather(self) -> tuple[torch.dtype, ...]:
        """Dtypes in which the weights may be gathered without contradicting the policy."""
        return tuple(dict.fromkeys(d for d in (self.stored, self.unsharded, self.compute) if d is not None))

    @property
    def as_stored(self) -> ParamDtypes:
        """The same weights, gathered as they are stored."""
        return replace(self, unsharded=self.stored)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardGroup:
    """Modules whose weights, `num_parameters` elements, are gathered in one go.

    They are named, the root by ""; a unit stands for all of its weights that no other group took.
    """

    modules: tuple[str, ...]
    param_dtypes: ParamDtypes
    num_parameters: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlan:
    """Groups in the order in which they must be sharded, inner ones first.

    Attributes:
        groups: in that order.
        reduce: dtype in which gradients are reduced.
    """

    groups: tuple[ShardGroup, ...]
    reduce: torch.dtype

    def __str__(self) -> str:
        lines = [f"gradients are reduced in {dtype_name(self.reduce)}"]
        for group in self.groups:
            names = listed([name or "the root" for name in group.modules], 4)
            stored, unsharded = dtype_name(group.param_dtypes.stored), dtype_name(group.param_dtypes.unsharded)
            lines.append(f"{group.num_parameters} weights stored in {stored}, gathered in {unsharded}: {names}")
        return "\n".join(lines)


def class_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's class and of those above it, as patterns of a policy see them. Host only."""
    classes = type(module).__mro__
    return tuple(cls.__name__ for cls in classes if issubclass(cls, nn.Module) and "_mezzo_class" not in vars(cls))


def precision_of(policy: Policy, fqn: str, modules: Mapping[str, nn.Module]) -> Rule | torch.dtype | None:
    """Return the rule that a module is under: its own or that of the nearest module above it; None without one."""
    rules = (policy.module_rule(name, class_names(modules[name])) for name in (fqn, *names_around(fqn)))
    return next((rule.precision for rule in rules if rule is not None), None)


def param_dtypes(policy: Policy, precision: Rule | torch.dtype | None, module: nn.Module, param: Tensor) -> ParamDtypes:
    """Say how a weight that a module holds should be gathered under a policy whose compute dtype is decided. Host only.

    Weights that only low ops take are gathered in the dtype of those ops: the cast is the same before the gathering as
    after it. Everything else is gathered as it is stored.
    """
    names, stored = class_names(module), param.dtype
    if precision in FP32_RULES or not policy.is_low:
        is_widened = precision is Rule.FP32 and stored in LOW_DTYPES
        dtype = torch.float32 if is_widened else stored
        return ParamDtypes(stored=dtype, unsharded=dtype)
    if policy.params in LOW_DTYPES and param.requires_grad and is_matmul_like(names):
        stored = policy.params
    low = precision if isinstance(precision, torch.dtype) else policy.compute
    edits_low_ops = any(op in _LOW_OPS and rule is not Rule.LOW for op, rule in policy.op_rules.edits)
    is_cast = stored is torch.float32 and is_cast_at_use(names) and not edits_low_ops
    return ParamDtypes(stored=stored, unsharded=low if is_cast and low is not None else stored, compute=low)


def plan_shards(model: nn.Module, policy: Policy, units: Iterable[nn.Module] = ()) -> ShardPlan:
    """Divide a model into groups that are gathered and reduced together. Host only.

    Each unit, and what is left of the root, is one group for each way in which its weights are gathered. One of them is the
    unit itself, gathered when its forward begins; the others are lists of its modules.

    Args:
        model: the root.
        policy: with its compute dtype decided.
        units: modules to gather as a whole, such as the layers of a transformer; none inside another.

    Raises:
        PolicyError: a unit that is no module of the model; weights that cannot be told apart by module would have to be gathered differently, or units share one.
    """
    check_given("plan_shards", "model", model, nn.Module, "a model", PolicyError)
    modules = dict(model.named_modules())
    fqns = {module: fqn for fqn, module in modules.items()}
    given = list(units) if isinstance(units, Iterable) else [units]
    if strangers := [unit for unit in given if not isinstance(unit, nn.Module) or unit not in fqns]:
        raise PolicyError(
            f"units has {kind_of(strangers[0])}, which is no module of this model; give some of model.modules()."
        )
    names = [fqns[unit] for unit in given]
    homes: dict[str, list[_OwningModule]] = {name: [] for name in (*names, "")}
    owners = _owners(policy, modules)
    for owner in owners:
        homes[_home(owner.name, names)].append(owner)
        apart = {_home(name, names) for name in owner.shares_with}
        if len(apart) > 1:
            units_named = " and ".join(repr(name) for name in sorted(apart))
            raise PolicyError(
                f"'{owner.name}' shares a weight between the units {units_named}, which are gathered at different times. "
                "Leave the modules that share it out of the units, or make one unit of both."
            )
    groups = [group for name, members in homes.items() if members for group in _groups(name, members)]
    return ShardPlan(groups=tuple(groups), reduce=policy.reduce)


def _home(fqn: str, units: Sequence[str]) -> str:
    return next((unit for unit in units if fqn == unit or fqn.startswith(f"{unit}.")), "")


@dataclass(frozen=True, slots=True)
class _OwningModule:
    """A module that holds weights of its own, by its `name`, and the `param_dtypes` of these.

    Attributes:
        num_parameters: their elements, those of a shared weight in the first module that holds it.
        is_pinned: they cannot be gathered by the module's own forward, but only by that of its unit.
        is_product: the module multiplies by them.
        shares_with: names of all modules that hold any of them.
    """

    name: str
    param_dtypes: ParamDtypes
    num_parameters: int
    is_pinned: bool
    is_product: bool
    shares_with: frozenset[str]


def _owners(policy: Policy, modules: Mapping[str, nn.Module]) -> list[_OwningModule]:
    holders: dict[Tensor, list[str]] = {}
    for fqn, module in modules.items():
        for param in module.parameters(recurse=False):
            holders.setdefault(param, []).append(fqn)
    rules = {fqn: precision_of(policy, fqn, modules) for fqn in modules}
    owners = []
    for fqn, module in modules.items():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        shared = frozenset(holder for param in own for holder in holders[param])
        wanted = {param_dtypes(policy, rules[name], modules[name], p) for p in own for name in holders[p]}
        has_inner_weights = len(list(module.parameters())) > len(own)
        # Attention reads the weights of its projection without calling it.
        is_read = "MultiheadAttention" in class_names(modules[fqn.rpartition(".")[0]])
        owners.append(
            _OwningModule(
                name=fqn,
                param_dtypes=_common(fqn, wanted),
                num_parameters=sum(param.numel() for param in own if holders[param][0] == fqn),
                is_pinned=len(shared) > 1 or has_inner_weights or is_read,
                is_product=is_cast_at_use(class_names(module)),
                shares_with=shared,
            )
        )
    return owners


def _common(what: str, wanted: Iterable[ParamDtypes]) -> ParamDtypes:
    """Return the dtypes in which weights can be gathered together: where they differ in gathering, as they are stored."""
    found = list(wanted)
    stored = {dtypes.stored for dtypes in found}
    if len(stored) > 1:
        spelled = " and ".join(sorted(map(dtype_name, stored)))
        raise PolicyError(
            f"weights of '{what or 'the root'}' would be stored in {spelled}, and what is gathered together has one "
            "dtype. Give them one dtype, or make a module of its own of the part that differs."
        )
    return found[0] if len({dtypes.unsharded for dtypes in found}) == 1 else found[0].as_stored


def _groups(unit: str, owners: Sequence[_OwningModule]) -> list[ShardGroup]:
    own = _dtypes_of_unit(unit, owners)
    apart: dict[ParamDtypes, list[_OwningModule]] = {}
    for owner in owners:
        dtypes = owner.param_dtypes
        if not (owner.is_pinned or dtypes == own or (owner.is_product and dtypes.as_stored == own)):
            apart.setdefault(dtypes, []).append(owner)
    groups = []
    for dtypes, members in apart.items():
        names, size = tuple(owner.name for owner in members), sum(owner.num_parameters for owner in members)
        groups.append(ShardGroup(modules=names, param_dtypes=dtypes, num_parameters=size))
    left = sum(owner.num_parameters for owner in owners) - sum(group.num_parameters for group in groups)
    return [*groups, ShardGroup(modules=(unit,), param_dtypes=own, num_parameters=left)]


def _dtypes_of_unit(unit: str, owners: Sequence[_OwningModule]) -> ParamDtypes:
    """Choose in which dtypes the weights are gathered that the unit itself gathers.

    Those that have to be gathered by the unit come first. Then products: their output is a view, which torch does not
    like to see come out of a sharded module.
    """
    pinned = [owner.param_dtypes for owner in owners if owner.is_pinned]
    if pinned:
        return _common(unit, pinned)
    sizes: dict[ParamDtypes, int] = {}
    for owner in [owner for owner in owners if owner.is_product] or owners:
        sizes[owner.param_dtypes] = sizes.get(owner.param_dtypes, 0) + owner.num_parameters
    return max(sizes, key=sizes.__getitem__)
