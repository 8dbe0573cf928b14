"""An optimizer whose weights may be 16 bit: what AdamW and SGD share."""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from operator import is_
from types import ModuleType
from typing import Any, overload

import torch
from torch import Tensor

from .._torch import global_post_hooks, global_pre_hooks, local_tensor, profiled_step, profiler_enabled, step_hooks
from ..errors import OperandError
from ..formats import describe, dtype_name
from ..kernels import (
    AUX_STATE,
    PLAIN,
    Operands,
    ScaledGradients,
    any_dtensor,
    check_apart,
    like_dtensor,
    local,
    registry,
    store_master,
)
from ..kernels.operands import operands
from ..loss_scale import ask_watchers, num_watchers, parameters
from .checks import can_be_kept, check_bools, check_closure, check_dense, check_masters, check_options, taking_params
from .optimizer_state import OWN_OPTIONS, HasMasters, KeepsMasters, mode_of, mode_of_state, moment_dtype
from .param_batches import Active, GroupStep, ParamBatch, aligned, batches_of

_log = logging.getLogger("mezzo.optim")
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


def hook_steps(kind: type[torch.optim.Optimizer]) -> None:
    """Have an optimizer's class run hooks as torch does; torch's own wrapper, long as a small step, runs for profiles and others' hooks."""
    step: Any = kind.step
    if hasattr(step, "hooked"):
        return
    in_full = profiled_step(step)

    @functools.wraps(step)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or profiler_enabled() or is_hooked(self):
            return in_full(self, *args, **kwargs)
        for hook in step_hooks(self)[0].values():
            hook(self, (self, *args), kwargs)
        return step(self, *args, **kwargs)

    hooked.hooked = True  # type: ignore[attr-defined]  # what torch looks for
    kind.step = hooked  # type: ignore[method-assign]


def is_hooked(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anybody has hooks on the steps of an optimizer, or on those of all, beside the stepper that prepared it. Host only."""
    pre, post = step_hooks(optimizer)
    for hook in pre.values():
        if not hook.__module__.startswith("mezzo."):  # may hand other arguments on
            return True
    if post or global_post_hooks:
        return True
    is_its_own = bool(pre) and num_watchers() < 2  # the one that is asked is who steps it
    return any([not (is_its_own and hook is ask_watchers) for hook in global_pre_hooks.values()])


def say_dropped(optimizer: HasMasters, before: Mapping[Tensor, torch.Size]) -> None:
    """Say in the log which of the parameters that kept something of a shape `before` the last step have it no more: somebody emptied the state. Host only."""
    held = {*parameters(optimizer)}
    kept = {p: optimizer.aux_state(p) for p, shape in before.items() if p in held and p.shape == shape}
    lost = [p for p, (mode, aux) in kept.items() if mode != "none" and aux is None]
    if lost:
        _log.warning(
            "the state of %s was emptied since its last step, and with it the masters of %d weights, which begin anew at their %s values. To have moments "
            "alone begin anew, write masters = {p: optimizer.master(p).clone() for p in optimizer.state}, optimizer.state.clear(), "
            "and optimizer.set_masters_(masters)", type(optimizer).__name__, len(lost), dtype_name(lost[0].dtype),
        )  # fmt: skip


class KeptBatches:
    """The batches of the parameters of a group that have a gradient, and what they were made of."""

    def __init__(self, batches: Sequence[ParamBatch], step: GroupStep, active: Sequence[Active]) -> None:
        self.batches = batches
        params = [one.param for one in active]
        self._options, self._states = step.options, [one.state for one in active]
        self._has_grad = [grad is not None for grad in step.grads]
        self._is_sharded = any_dtensor(params)
        self._tensors = self._all(params)
        self._can_last = all(type(t) in PLAIN for t in self._tensors)
        if self._can_last:
            # State that is held stays in memory, so that nothing else comes to lie where it lies.
            self._held = [t.detach() for t in self._tensors[len(params) :]]
            self._addresses = list(map(Tensor.data_ptr, self._tensors))
            self._kinds = [(t.nbytes, t.dtype) for t in self._tensors[: len(params)]]
            self._strides = [t.stride() for t in self._tensors[: len(params)] if not t.is_contiguous()]

    def _all(self, params: Sequence[Tensor]) -> list[Any]:
        tensors: list[Any] = [*params, *chain.from_iterable(map(dict.values, self._states))]
        return [local_tensor(t) for t in tensors] if self._is_sharded else tensors

    def fits(self, step: GroupStep) -> bool:
        """Whether the batches are what they would be if they were made anew.

        Parameters and states must lie where they did: somebody may have loaded, moved or replaced them. Plain loops over
        methods of tensors, since this runs in every step. Syncs: no.
        """
        if not self._can_last or step.options != self._options or [g is not None for g in step.grads] != self._has_grad:
            return False
        given = [grad for grad in step.grads if grad is not None]
        if not self._is_sharded and not all([type(grad) is Tensor and grad.layout is torch.strided for grad in given]):
            return False
        active = [p for p, grad in zip(step.params, step.grads, strict=True) if grad is not None]
        tensors = self._all(active)
        return (
            len(tensors) == len(self._tensors)
            and all(map(is_, tensors, self._tensors))
            and list(map(Tensor.data_ptr, tensors)) == self._addresses
            and [(t.nbytes, t.dtype) for t in tensors[: len(active)]] == self._kinds
            and [t.stride() for t in tensors[: len(active)] if not t.is_contiguous()] == self._strides
        )


class MasterOptimizer(KeepsMasters):
    """Base of the optimizers whose weights may be 16 bit and whose updates are fp32.

    A guard may set three attributes before `step` and must delete them after it. All are tensors that the host
    never reads: `grad_scale`, shape () or (1,), divides the gradients (a power of two); `clip_coef` multiplies them
    after that; `found_inf`, if not 0, leaves every bit of weights and state as it is. `grad_scale` and `found_inf` are
    the protocol of torch's fused optimizers, so torch.amp.GradScaler drives these too.
    """

    op: str
    """Name of the step's arithmetic in the kernel registry."""
    definition: ModuleType
    """What defines it; torch.compile makes a kernel of that itself."""
    _step_supports_amp_scaling = True
    counts_moments: bool = False
    """Whether a step count is that of the moments, and begins when they do."""
    moves_versions = True
    """Each kernel gives the weights it wrote a new version, as caches of casts need it; torch's fused ones do not."""

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        self._forget()
        hook_steps(type(self))
        with taking_params(self):
            super().__init__(params, defaults)

    def _forget(self) -> None:
        self._kept_batches: dict[int, KeptBatches] = {}
        self._options: dict[int, tuple[list[Any], tuple[Any, ...]]] = {}
        self._entries: dict[Tensor, dict[str, Any]] = {}
        self._aux: dict[Tensor, torch.Size] = {}
        self._group_indices = {}
        self.set_at = {}

    @abstractmethod
    def rule(self, group: Mapping[str, Any]) -> Any:
        """Return the numbers of a group, as its kernels take them."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch's optimizers do.

        Raises:
            MasterError: 16-bit trainable parameters without a master mode that exists for them.
            ConfigError: an option that does not exist.
        """
        with taking_params(self):
            super().add_param_group(param_group)
            check_bools(self, self.param_groups[-1])
            check_masters(self.param_groups[-1])

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        Args:
            closure: computes the loss and its gradients again; called once, with gradients enabled.

        Returns:
            What the closure returned.

        Raises:
            MasterError: a 16-bit parameter became trainable and has no master mode.
            ConfigError: a sparse gradient, or an option that is no finite number.
            OperandError: a gradient, or something in the state, that does not fit its parameter. Nothing was changed.

        Writes: weights and state; nothing if `found_inf` is set. Syncs: no.
        """
        loss = None
        if closure is not None:
            check_closure(self, closure)
            with torch.enable_grad():
                loss = closure()
        grad_mode = torch.is_grad_enabled()
        try:  # Ctrl-C between the lines of a context manager of torch's would leave gradients off
            torch.set_grad_enabled(False)
            batches = [(step, batch) for step, batches in self._param_batches() for batch in batches]
            held = [self._operands(step, batch) for step, batch in batches]
            found = getattr(self, "found_inf", None)
            taken = 1 if found is None else found.reshape(()) == 0
            for (step, batch), given in zip(batches, held, strict=True):
                if (counts := batch.counts) is None or isinstance(taken, Tensor):
                    batch.step.add_(taken.to(batch.step.device) if isinstance(taken, Tensor) else taken)
                else:
                    counts += taken
                self._update(step, given, batch.step)
            torch.set_grad_enabled(grad_mode)
        except BaseException:
            torch.set_grad_enabled(grad_mode)
            raise
        return loss

    def _update(self, group_step: GroupStep, operands: Operands, step: Tensor) -> None:
        rule, dtype, compiling = group_step.rule, operands.weights.values[0].dtype, torch.compiler.is_compiling()
        chosen = None if compiling else registry.choose(self.op, step.device, dtype, group_step.group["backend"])
        kernel = self.definition if chosen is None else chosen.module
        makes_scalars = chosen is not None and chosen.backend == "fused"  # out of the rule itself
        wide = torch.promote_types(dtype, torch.float32)
        maker = kernel if hasattr(kernel, "scalars") else self.definition
        scalars = None if makes_scalars else maker.scalars(step, rule, wide)
        kernel.step_(operands, rule, scalars, step)

    def why(self) -> list[str]:
        """Return one line for each kind of parameter: which kernel takes its step, and what decided."""
        kinds = dict.fromkeys((p.device, p.dtype, one["backend"]) for one in self.param_groups for p in one["params"])
        return [registry.why(self.op, *kind) for kind in kinds]

    def _param_batches(self) -> list[tuple[GroupStep, Sequence[ParamBatch]]]:
        """Return the batches of each group: those of the last step where nothing has moved.

        Everything that is there is looked at before anything is made or written.
        """
        is_compiling = torch.compiler.is_compiling()
        steps = self._group_steps(is_compiling)
        if is_compiling:
            return [(step, self._made(step, self._checked(step))) for step in steps]
        if len(self.state) != len(self._entries) or not all(map(is_, self.state.values(), self._entries.values())):
            # The state of a parameter is another object than in the last step.
            self._kept_batches, self._entries = {}, dict(self.state)
        known = self._kept_batches
        kept = {k: known[k] for k, step in enumerate(steps) if k in known and known[k].fits(step)}
        stale = {number: self._checked(step) for number, step in enumerate(steps) if number not in kept}
        if stale and self._aux:
            say_dropped(self, self._aux)
        for number, active in stale.items():
            kept[number] = KeptBatches(self._made(steps[number], active), steps[number], active)
        if stale:
            check_apart([batch.layout for one in kept.values() for batch in one.batches if batch.layout is not None])
            self._entries = dict(self.state)
            self._aux = {p: e[AUX_STATE[m]].shape for p, e in self._entries.items() if (m := mode_of_state(e))}
        self._kept_batches = kept
        return [(step, kept[number].batches) for number, step in enumerate(steps)]

    def _group_steps(self, is_compiling: bool) -> list[GroupStep]:
        """Return the groups as a step meets them; a kernel is called once for neighbours whose options agree."""
        steps: list[GroupStep] = []
        offset, last = 0, None
        for group in self.param_groups:
            params, (names, rule, shared) = group["params"], self._read_options(group, is_compiling)
            if shared is None or shared != last:
                own = offset, names, *map(group.__getitem__, OWN_OPTIONS)
                steps.append(GroupStep(group=group, options=own, names=names, rule=rule, offset=offset))
            step, last = steps[-1], shared
            step.groups.append(group)
            step.params.extend(params)
            step.grads.extend([p.grad for p in params])
            offset += len(params)
        return steps

    def _read_options(self, group: dict[str, Any], is_compiling: bool) -> tuple[Any, ...]:
        """Return names of a group's moments, its rule, and what neighbours that are stepped with it share: as they were while nobody sets an option."""
        if is_compiling:
            return self.moment_names(group), self.rule(group), None
        values, kept = list(group.values()), self._options.get(id(group))
        if kept is not None and len(values) == len(kept[0]) and all(map(is_, values, kept[0])):
            return kept[1]
        check_options(self, group)
        names, rule = self.moment_names(group), self.rule(group)
        if not can_be_kept(group):
            return names, rule, None
        is_read_late = isinstance(group["lr"], Tensor)  # on its device
        shared = None if is_read_late else (names, rule, group["maximize"], *map(group.__getitem__, OWN_OPTIONS))
        self._options[id(group)] = values, (names, rule, shared)
        return names, rule, shared

    def _checked(self, step: GroupStep) -> list[Active]:
        active = step.active(self.state)
        for one in active:
            check_dense(self, one.param, one.grad)
            one.check(() if self.counts_moments else step.names)
        return active

    def _made(self, step: GroupStep, active: list[Active]) -> Sequence[ParamBatch]:
        if any(self._begins(step.names, self.state.get(one.param, {})) for one in active):
            for group in step.groups:
                check_masters(group)
        for one in active:
            one.state = self.state[one.param]
            self.init_state(step.group, one.param, one.state)
        return batches_of(step, active)

    def _operands(self, step: GroupStep, batch: ParamBatch) -> Operands:
        device = batch.step.device
        scale, clip, found = (self._guarded_by(name, device) for name in ("grad_scale", "clip_coef", "found_inf"))
        given: Any = [step.grads[index] for index in batch.indices]
        if batch.needs_views:
            given = aligned([grad.resolve_conj() for grad in given], batch.orders)
        grads = ScaledGradients(
            values=given,
            inv_scale=None if scale is None else scale.to(device, torch.float32).reciprocal(),
            clip_coef=None if clip is None else clip.to(device, torch.float32),
            found_inf=None if found is None else found.to(device),
            maximize=bool(step.group["maximize"]),
        )
        if batch.layout is None:
            return Operands(weights=batch.weights, moments=batch.moments, grads=grads)
        return operands(batch.weights, batch.moments, grads, batch.layout)

    def _guarded_by(self, name: str, device: torch.device) -> Tensor | None:
        """Return what a guard has set for a step; an OperandError if it is no tensor of one real number. Host only."""
        value = getattr(self, name, None)
        is_one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        if value is not None and (not is_one or value.is_meta is not (device.type == "meta")):
            raise OperandError(
                f"{type(self).__name__}.{name} is {describe(value)}, and guards a step as a tensor of one number. Set "
                "torch.tensor(...), or delete it. Nothing was changed."
            )
        return value

    def _begins(self, names: Iterable[str], state: Mapping[str, Any]) -> bool:
        return "step" not in state or (self.counts_moments and any(name not in state for name in names))

    def init_state(self, group: Mapping[str, Any], param: Tensor, state: dict[str, Any]) -> None:
        """Add to the state of a parameter what its first step begins with and is not there: a count of 0, moments of 0, aux state. Syncs: no."""
        names = self.moment_names(group)
        if self._begins(names, state):
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        for name in names:
            if name not in state:
                dtype = moment_dtype(param, group)
                state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        mode = mode_of(param, group)
        if mode in AUX_STATE and AUX_STATE[mode] not in state:
            aux = store_master(mode, local(param.detach()).to(torch.float32), param.dtype, None)[1]
            assert aux is not None
            state[AUX_STATE[mode]] = like_dtensor(aux, param)
