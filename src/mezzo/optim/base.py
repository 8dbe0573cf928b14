"""An optimizer whose weights may be 16 bit: what AdamW and SGD share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, overload

import torch
from torch import Tensor

from ..errors import ConfigError, MasterError
from ..formats import describe
from ..kernels import registry
from ..kernels.dtensor import like_dtensor, local
from ..kernels.ops.gradients import ScaledGradients
from ..kernels.weights import AUX_STATE, Weights, give_master_, read_master, store_master
from ..policy import Master
from .checks import check_dense, check_masters
from .layout import aligned
from .optimizer_state import Exact, mode_of, moment_dtype, report, seal_loaded, share_counts, take_master_
from .param_batches import Active, ParamBatch, Plan, param_batches_of

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """Parameters of one step that a kernel takes together: one step count, device, and set of dtypes.

    Attributes:
        weights: the parameters as a kernel sees them.
        means: the running means of each by name, laid out as the weights are.
        grads: their gradients and how to read them.
        scalars: shape (3,): the numbers of this step, from `MasterOptimizer.scalars`.
        step: shape (), fp32: steps taken, this one included.
    """

    weights: Weights
    means: Mapping[str, Sequence[Tensor]]
    grads: ScaledGradients
    scalars: Tensor
    step: Tensor


class MasterOptimizer(torch.optim.Optimizer):
    """Base of the optimizers whose weights may be 16 bit and whose updates are fp32.

    A guard may set three attributes before `step` and must delete them after it. All are tensors that the host
    never reads: `grad_scale`, shape () or (1,), divides the gradients (a power of two); `clip_coef` multiplies them
    after that; `found_inf`, if not 0, leaves every bit of weights and state as it is. `grad_scale` and `found_inf` are
    the protocol of torch's fused optimizers, so torch.amp.GradScaler drives these too.
    """

    _step_supports_amp_scaling = True
    moves_versions = True
    """Each kernel gives the weights it wrote a new version, as caches of casts need it; torch's fused ones do not."""

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        self._forget()
        super().__init__(params, defaults)

    def _forget(self) -> None:
        self._plans: dict[int, Plan] = {}
        self._entries: list[dict[str, Any]] = []

    @property
    @abstractmethod
    def op(self) -> str:
        """Name of the step's arithmetic in the kernel registry."""

    @abstractmethod
    def moment_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the running means that a parameter of this group has in its state."""

    @abstractmethod
    def scalars(self, group: Mapping[str, Any], step: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers of one step.

        Args:
            group: with its options.
            step: shape (), fp32: steps taken, this one included.
            dtype: that of the computation.

        Returns:
            Shape (3,), `dtype`, the device of `step`. Syncs: no.
        """

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
        found = getattr(self, "found_inf", None)
        taken = None if found is None else found.reshape(()) == 0
        self._drop_stale_plans()
        offset = 0
        for number, group in enumerate(self.param_groups):
            for batch in self._batches(group, number, offset, inv_scale, taken):
                self.update_(group, batch)
            offset += len(group["params"])
        return loss

    def _drop_stale_plans(self) -> None:
        """Forget what was planned if the state of any parameter is another object than in the last step."""
        if torch.compiler.is_compiling():
            return
        entries = list(self.state.values())
        if len(entries) != len(self._entries) or not all(map(is_, entries, self._entries)):
            self._plans.clear()
            self._entries = entries

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, as torch's optimizers do. Writes: gradients. Syncs: no."""
        if not set_to_none:
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def master(self, param: Tensor) -> Tensor:
        """Return the fp32 value that a parameter stands for.

        Args:
            param: a parameter of this optimizer.

        Returns:
            Its shape; fp32, or fp64 for an fp64 parameter. Before the first step, and for stochastic masters, the
            weight itself in fp32. Not a copy where the parameter is its own master.

        Syncs: no.
        """
        mode, aux = self.aux_state(param)
        part = read_master(mode, local(param.detach()), None if aux is None else local(aux))
        return like_dtensor(part, param)

    @torch.no_grad()
    def set_masters_(self, masters: Mapping[Tensor, Tensor]) -> None:
        """Give parameters the fp32 values they stand for: those they had before they were made 16 bit.

        Args:
            masters: for each parameter of this optimizer that is named, its value; same shape, fp32.

        Raises:
            ConfigError: not a parameter of this optimizer.

        Writes: the parameters, and their aux state. Syncs: no.
        """
        for param, master in masters.items():
            mode = mode_of(param, self._group_of(param))
            aux = give_master_(mode, local(param), local(master.to(param.device)))
            if aux is not None:
                self.state[param][AUX_STATE[mode]] = like_dtensor(aux, param)

    def aux_state(self, param: Tensor) -> tuple[Master, Tensor | None]:
        """Return how a parameter keeps small updates, and its aux state now; None if nothing does."""
        mode = mode_of(param, self._group_of(param))
        return mode, self.state[param].get(AUX_STATE.get(mode, "")) if param in self.state else None

    def _group_of(self, param: Tensor) -> dict[str, Any]:
        for group in self.param_groups:
            if any(param is p for p in group["params"]):
                return group
        raise ConfigError(f"{describe(param)} is not a parameter of this {type(self).__name__}.")

    def why(self) -> list[str]:
        """Return one line for each kind of parameter: which kernel takes its step, and what decided."""
        kinds = {(p.device, p.dtype, group["backend"]): None for group in self.param_groups for p in group["params"]}
        return [registry.why(self.op, *kind) for kind in kinds]

    def _batches(
        self, group: dict[str, Any], number: int, offset: int, inv_scale: Tensor | None, taken: Tensor | None
    ) -> Iterator[Batch]:
        grads = [p.grad for p in group["params"]]
        kinds = self._kinds(group, number, offset, grads)
        for count in {id(kind.step): kind.step for kind in kinds}.values():
            count.add_(1 if taken is None else taken.to(count.device))
        scalars: dict[tuple[int, torch.dtype], Tensor] = {}
        for kind in kinds:
            dtype = torch.promote_types(kind.weights.values[0].dtype, torch.float32)
            key = id(kind.step), dtype
            if key not in scalars:
                scalars[key] = self.scalars(group, kind.step, dtype)
            yield self._batch(group, kind, grads, scalars[key], inv_scale)

    def _kinds(
        self, group: dict[str, Any], number: int, offset: int, grads: list[Tensor | None]
    ) -> Sequence[ParamBatch]:
        """Return the kinds of a group: those of the last step, if everything is where it was."""
        names, is_eager = self.moment_names(group), not torch.compiler.is_compiling()
        options = (offset, names, group["master"], group["state_dtype"], group["rounding_seed"])
        plan = self._plans.get(number) if is_eager else None
        if plan is not None and plan.fits(options, group["params"], grads):
            return plan.kinds
        active = [
            Active(index, p, grad, self.state[p])
            for index, (p, grad) in enumerate(zip(group["params"], grads, strict=True))
            if grad is not None
        ]
        self._init_states(group, names, active)
        self._leave_behind(group, {id(one.state["step"]) for one in active})
        kinds = param_batches_of(group, names, offset, active)
        if is_eager:
            self._plans[number] = Plan(kinds, options, grads, active)
        return kinds

    def _batch(
        self,
        group: Mapping[str, Any],
        kind: ParamBatch,
        grads: Sequence[Tensor | None],
        scalars: Tensor,
        inv_scale: Tensor | None,
    ) -> Batch:
        home = kind.step.device
        clip, found = getattr(self, "clip_coef", None), getattr(self, "found_inf", None)
        given: Any = [grads[index] for index in kind.indices]
        return Batch(
            weights=kind.weights,
            means=kind.means,
            grads=ScaledGradients(
                values=aligned(given, kind.orders),
                inv_scale=None if inv_scale is None else inv_scale.to(home),
                clip_coef=None if clip is None else clip.to(home, torch.float32),
                found_inf=None if found is None else found.to(home),
                maximize=group["maximize"],
            ),
            scalars=scalars,
            step=kind.step,
        )

    def _init_states(self, group: Mapping[str, Any], names: Sequence[str], active: list[Active]) -> None:
        counts: dict[torch.device, Tensor] = {}
        wanted = {
            mode: {"step", *names, *([AUX_STATE[mode]] if mode in AUX_STATE else [])}
            for mode in (group["master"], "none")
        }
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
            if mode in AUX_STATE and AUX_STATE[mode] not in state:
                aux = store_master(mode, local(p.detach()).to(torch.float32), p.dtype, None)[1]
                assert aux is not None
                state[AUX_STATE[mode]] = like_dtensor(aux, p)

    def _leave_behind(self, group: Mapping[str, Any], counts: set[int]) -> None:
        """Give parameters without a gradient a step count of their own, where they shared one that now moves on."""
        left: dict[int, Tensor] = {}
        for p in group["params"]:
            if (
                p.grad is None
                and p in self.state
                and (count := self.state[p].get("step")) is not None
                and id(count) in counts
            ):
                self.state[p]["step"] = left.setdefault(id(count), count.clone())

    def state_dict(self) -> dict[str, Any]:
        """Return state and options as torch's optimizers do; `torch.load(weights_only=True)` reads them back.

        Returns:
            The form of `torch.optim.Optimizer.state_dict`; each parameter has a step count of its own in it. Tensors are
            not copied, except for those counts.

        Syncs: no.
        """
        state_dict = super().state_dict()
        state = {
            index: {**entry, "step": entry["step"].clone()} if "step" in entry else entry
            for index, entry in state_dict["state"].items()
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
        self._forget()
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
        aux, clause = take_master_(param, entry, mode_of(param, group))
        moments = {name: entry[name] for name in self.moment_names(group) if name in entry}
        # torch.optim.SGD counts no steps; that its sum exists says that the first one is over.
        count = entry.get("step", torch.tensor(float(bool(moments))))
        self.state[param] = {
            "step": count.to(param.device, torch.float32).clone(),
            **{name: item.to(param.device, moment_dtype(param, group)).clone() for name, item in moments.items()},
            **aux,
        }
        return clause
