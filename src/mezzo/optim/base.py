"""An optimizer whose weights may be 16 bit: what AdamW and SGD share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from ..errors import ConfigError, MasterError
from ..formats import describe
from ..kernels import registry
from ..kernels.gradients import ScaledGradients
from ..kernels.rounding import mix
from ..kernels.shards import any_spread, first_place, local, spread_like
from ..kernels.weights import KEPT, Weights, give_master_, read_master, store_master
from ..policy import Master
from .checks import check_dense, check_masters
from .layout import Order, aligned, memory_orders
from .state import Exact, mode_of, moment_dtype, report, seal_loaded, share_counts, take_master_

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Parameters of one step that a kernel takes together: one step count, device, and set of dtypes.

    Attributes:
        states: of each parameter, its state.
        orders: of each, the order of dimensions that walks its memory; None if that is the order it has.
        weights: the parameters as a kernel sees them.
        grads: their gradients and how to read them.
        step: shape (), fp32: steps taken, this one included.
    """

    states: list[dict[str, Tensor]]
    orders: list[Order]
    weights: Weights
    grads: ScaledGradients
    step: Tensor

    def moments(self, name: str) -> Sequence[Tensor]:
        """Return one running mean of each parameter, laid out as the weights are."""
        return aligned([state[name] for state in self.states], self.orders)


@dataclass(slots=True, eq=False)
class _Active:
    """A parameter with a gradient, and its number among all parameters."""

    place: int
    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]


def _seed(rounding_seed: int, place: int) -> int:
    """Return the seed of one parameter's noise."""
    return mix((mix(rounding_seed) + place) & 0xFFFFFFFF)


class MasterOptimizer(torch.optim.Optimizer):
    """Base of the optimizers whose weights may be 16 bit and whose updates are fp32.

    A guard may set three attributes before `step` and must delete them after it. All are tensors that the host
    never reads: `grad_scale`, shape () or (1,), divides the gradients (a power of two); `clip_coef` multiplies them
    after that; `found_inf`, if not 0, leaves every bit of weights and state as it is. `grad_scale` and `found_inf` are
    the protocol of torch's fused optimizers, so torch.amp.GradScaler drives these too.
    """

    _step_supports_amp_scaling = True

    @property
    @abstractmethod
    def op(self) -> str:
        """Name of the step's arithmetic in the kernel registry."""

    @abstractmethod
    def moment_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the running means that a parameter of this group has in its state."""

    @abstractmethod
    def update_(self, group: Mapping[str, Any], batch: Batch) -> None:
        """Take the step of one batch. Writes: weights and state, unless the step is blocked. Syncs: no."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch's optimizers do.

        Raises:
            MasterError: 16-bit trainable parameters without a master mode that exists for them.
            ConfigError: an option that does not exist.
        """
        super().add_param_group(param_group)
        try:
            check_masters(self.param_groups[-1])
        except (MasterError, ConfigError):
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        Args:
            closure: computes the loss and its gradients again; called once, with gradients enabled.

        Returns:
            What the closure returned.

        Raises:
            MasterError: a 16-bit parameter became trainable and has no master mode.
            ConfigError: a sparse gradient.

        Writes: weights and state; nothing if `found_inf` is set. Syncs: no.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = getattr(self, "grad_scale", None)
        inv_scale = None if scale is None else scale.to(torch.float32).reciprocal()
        seed = 0
        for group in self.param_groups:
            for batch in self._batches(group, seed, inv_scale):
                self.update_(group, batch)
            seed += len(group["params"])
        return loss

    def master(self, param: Tensor) -> Tensor:
        """Return the fp32 value that a parameter stands for.

        Args:
            param: a parameter of this optimizer.

        Returns:
            Its shape; fp32, or fp64 for an fp64 parameter. Before the first step, and for stochastic masters, the
            weight itself in fp32. Not a copy where the parameter is its own master.

        Syncs: no.
        """
        mode, kept = self.beside(param)
        part = read_master(mode, local(param.detach()), None if kept is None else local(kept))
        return spread_like(part, param)

    @torch.no_grad()
    def set_masters_(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Give parameters the fp32 values they stand for: those they had before they were made 16 bit.

        Args:
            masters: for each parameter of this optimizer that is named, its value; same shape, fp32.

        Raises:
            ConfigError: not a parameter of this optimizer.

        Writes: the parameters, and what is kept beside them. Syncs: no.
        """
        for param, master in masters.items():
            mode = mode_of(param, self._group_of(param))
            kept = give_master_(mode, local(param), local(master.to(param.device)))
            if kept is not None:
                self.state[param][KEPT[mode]] = spread_like(kept, param)

    def beside(self, param: Tensor) -> tuple[Master, Tensor | None]:
        """Return how a parameter keeps small updates, and what lies beside it now; None if nothing does."""
        mode = mode_of(param, self._group_of(param))
        return mode, self.state[param].get(KEPT.get(mode, "")) if param in self.state else None

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        for group in self.param_groups:
            if any(param is p for p in group["params"]):
                return group
        raise ConfigError(f"{describe(param)} is not a parameter of this {type(self).__name__}.")

    def why(self) -> list[str]:
        """Return one line for each kind of parameter: which kernel takes its step, and what decided."""
        kinds = {(p.device, p.dtype, group["backend"]): None for group in self.param_groups for p in group["params"]}
        return [registry.why(self.op, *kind) for kind in kinds]

    def _batches(self, group: dict[str, Any], first: int, inv_scale: Tensor | None) -> Iterator[Batch]:
        active = [
            _Active(place, p, p.grad, self.state[p])
            for place, p in enumerate(group["params"], first)
            if p.grad is not None
        ]
        self._init_states(group, active)
        kinds: dict[tuple[int, torch.dtype, torch.dtype], list[_Active]] = {}
        for one in active:
            kinds.setdefault((id(one.state["step"]), one.param.dtype, one.grad.dtype), []).append(one)
        self._advance(group, {id(one.state["step"]): one.state["step"] for one in active})
        for kind in kinds.values():
            yield self._batch(group, kind, inv_scale)

    def _batch(self, group: Mapping[str, Any], active: list[_Active], inv_scale: Tensor | None) -> Batch:
        states, params = [one.state for one in active], [one.param for one in active]
        orders = memory_orders(params)
        mode = mode_of(params[0], group)
        step = states[0]["step"]
        chance = mode == "stochastic" or moment_dtype(params[0], group) is torch.bfloat16
        clip, found = getattr(self, "clip_coef", None), getattr(self, "found_inf", None)
        return Batch(
            states=states,
            orders=orders,
            weights=Weights(
                mode=mode,
                values=aligned(params, orders),
                kept=aligned([state[KEPT[mode]] for state in states], orders) if mode in KEPT else [],
                seeds=[_seed(group["rounding_seed"], one.place) if chance else 0 for one in active],
                firsts=[first_place(p) for p in params] if chance and any_spread(params) else [],
            ),
            grads=ScaledGradients(
                values=aligned([one.grad for one in active], orders),
                inv_scale=None if inv_scale is None else inv_scale.to(step.device),
                clip_coef=None if clip is None else clip.to(step.device, torch.float32),
                found_inf=None if found is None else found.to(step.device),
                maximize=group["maximize"],
            ),
            step=step,
        )

    def _init_states(self, group: Mapping[str, Any], active: list[_Active]) -> None:
        names = self.moment_names(group)
        counts: dict[torch.device, Tensor] = {}
        wanted = {mode: {"step", *names, *([KEPT[mode]] if mode in KEPT else [])} for mode in (group["master"], "none")}
        for one in active:
            if one.grad.layout is not torch.strided:
                check_dense(self, one.param, one.grad)
            p, state, mode = one.param, one.state, mode_of(one.param, group)
            if wanted[mode] <= state.keys():
                continue
            if "step" not in state:
                check_masters(group)
                state["step"] = counts.setdefault(p.device, torch.zeros((), dtype=torch.float32, device=p.device))
            for name in names:
                if name not in state:
                    state[name] = torch.zeros_like(p, dtype=moment_dtype(p, group), memory_format=torch.preserve_format)
            if mode in KEPT and KEPT[mode] not in state:
                kept = store_master(mode, local(p.detach()).to(torch.float32), p.dtype, None)[1]
                assert kept is not None
                state[KEPT[mode]] = spread_like(kept, p)

    def _advance(self, group: Mapping[str, Any], counts: Mapping[int, Tensor]) -> None:
        """Count the step; a parameter without a gradient leaves the count that it shared with others."""
        left: dict[int, Tensor] = {}
        for p in group["params"]:
            if (
                p.grad is None
                and p in self.state
                and (count := self.state[p].get("step")) is not None
                and id(count) in counts
            ):
                self.state[p]["step"] = left.setdefault(id(count), count.clone())
        found = getattr(self, "found_inf", None)
        for count in counts.values():
            count.add_(1 if found is None else (found.reshape(()) == 0).to(count.device))

    def state_dict(self) -> dict[str, Any]:
        """Return state and options as torch's optimizers do; `torch.load(weights_only=True)` reads them back.

        Returns:
            The form of `torch.optim.Optimizer.state_dict`; each parameter has a step count of its own in it. Tensors are
            not copied, except for those counts.

        Syncs: no.
        """
        state_dict = super().state_dict()
        state = {
            place: {**entry, "step": entry["step"].clone()} if "step" in entry else entry
            for place, entry in state_dict["state"].items()
        }
        return {**state_dict, "state": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, also that of another master mode or of torch's own optimizer.

        State of the same master mode and moment dtype is taken bit for bit. State of another is converted, as exactly
        as the new mode allows, and each kind of conversion is logged. Load the weights first: a remainder
        or compensation is part of a master only beside its weight.

        Args:
            state_dict: from `state_dict` of this class, or of the torch optimizer of the same name.

        Raises:
            ValueError: other numbers of groups or parameters; raised by torch.

        Writes: state, options of the groups; the weights, where a conversion rounds their masters anew.
        Syncs: yes.
        """
        keep = self.register_load_state_dict_pre_hook(seal_loaded)
        try:
            super().load_state_dict(state_dict)
        finally:
            keep.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over pickled state, or what `load_state_dict` read."""
        super().__setstate__(state)
        clauses = [
            self._unseal(p, group)
            for group in self.param_groups
            for p in group["params"]
            if any(isinstance(item, Exact) for item in self.state.get(p, {}).values())
        ]
        report(clauses)
        for group in self.param_groups:
            share_counts(self.state[p] for p in group["params"] if "step" in self.state.get(p, {}))

    def _unseal(self, param: Tensor, group: Mapping[str, Any]) -> str:
        entry = {name: item.tensor for name, item in self.state[param].items() if isinstance(item, Exact)}
        kept, clause = take_master_(param, entry, mode_of(param, group))
        moments = {name: entry[name] for name in self.moment_names(group) if name in entry}
        # torch.optim.SGD counts no steps; that its sum exists says that the first one is over.
        count = entry.get("step", torch.tensor(float(bool(moments))))
        self.state[param] = {
            "step": count.to(param.device, torch.float32).clone(),
            **{name: item.to(param.device, moment_dtype(param, group)).clone() for name, item in moments.items()},
            **kept,
        }
        return clause
