"""Masters around any torch optimizer: it steps fp32 copies, the model keeps 16-bit weights."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args, overload

import torch
from torch import Tensor

from .._torch import has_hooks, is_fused
from ..errors import ConfigError, StepError, check_given, did_you_mean, first_line, is_out_of_memory, shown
from ..formats import describe, is_one_of
from ..kernels import AUX_STATE, ScaledGradients
from ..loss_scale import StepScaling, assign_grad_, handing, parameters
from ..policy import Master
from .base import MasterOptimizer, say_dropped
from .checks import HOW, check_closure, check_seed, taking_params
from .master_store import Masters, Mode
from .optimizer_state import OWN_OPTIONS, HasMasters, and_inside, check_shapes, keep_masters, take_masters_
from .saved_state import check_saved, each_entry, refuse, torchs_entries

_STATE_HOOKS = [f"register_{what}state_dict_{when}_hook" for what in ("", "load_") for when in ("pre", "post")]
"""What is registered on the inner optimizer, whose state dict it is."""

_log = logging.getLogger("mezzo.optim")


@dataclass(slots=True, eq=False)
class _MasterStep:
    """Parameters that are stepped, indices of all, and the masters of those of 16 bit; and what to put back: grad mode, aux state, gradients of wide ones."""

    params: list[Tensor]
    indices: dict[Tensor, int]
    fp32_params: dict[Tensor, torch.nn.Parameter]
    grad_mode: bool
    aux: dict[Tensor, Tensor | None] = field(default_factory=dict)
    raw: dict[Tensor, Tensor] = field(default_factory=dict)


class MasterWeights(HasMasters):
    """Any torch optimizer, stepping fp32 masters of the 16-bit parameters it was given.

    Its groups go on holding the model's parameters, and this wrapper shows the same groups: schedulers, clipping and
    `torch.amp.GradScaler` work on either. Only while it steps do the groups hold fp32 masters. Parameters that
    are fp32, or have no gradient, are left to the inner optimizer. Step, save and load through the wrapper.

    A guard may set `grad_scale`, `clip_coef` and `found_inf` as on `mezzo.optim.AdamW`. With one of torch's fused
    optimizers inside nothing is read by the host; any other is not stepped if `found_inf`, which is then read, is set.

    Args:
        inner: any optimizer of torch or in its manner; state it has already is taken over in fp32.
        mode: "fp32" keeps masters (4 bytes a parameter, exact). "split" keeps their lower 16 bits (2 bytes, exact, bf16
            only), "kahan" the 16-bit rounding of each weight's error (2 bytes), "stochastic" nothing; these have fp32
            masters during a step only.
        rounding_seed: of the random bits in "stochastic"; equal on all ranks of a data-parallel run.

    Raises:
        ConfigError: an unknown mode, or an inner optimizer that has masters of its own or none of torch's hooks.
        MasterError: split masters for an fp16 parameter, or masters for a sharded one.
    """

    _step_supports_amp_scaling = True

    def __init__(self, inner: torch.optim.Optimizer, mode: Mode = "fp32", *, rounding_seed: int = 0) -> None:
        if not is_one_of(mode, get_args(Mode)):
            raise ConfigError(f"unknown master mode {shown(mode)}.{did_you_mean(mode, get_args(Mode))}")
        check_seed(rounding_seed)
        if isinstance(inner, (MasterOptimizer, MasterWeights)):
            raise ConfigError(
                f"MasterWeights was given a {type(inner).__name__}, which keeps masters itself; use it alone."
            )
        self.__setstate__({"inner": _checked_hooks(inner), "masters": Masters(mode=mode, seed=rounding_seed)})
        for p in self._indices():
            if self.masters.mode_of(p) != "none" and p in inner.state:
                inner.state[p] = {
                    name: item.to(torch.float32) if isinstance(item, Tensor) and item.dtype is p.dtype else item
                    for name, item in inner.state[p].items()
                }

    inner: torch.optim.Optimizer
    masters: Masters
    _aux: dict[Tensor, torch.Size]
    """The shape of what the steps since state was loaded left beside each weight."""

    def __getstate__(self) -> dict[str, Any]:
        return {"inner": self.inner, "masters": self.masters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _stepping=False, set_at={}, _aux={})
        # The base class's __init__ would build groups of its own; its __setstate__ gives hooks without them.
        super().__setstate__({})
        self._guard = self.inner.register_step_pre_hook(self._refuse_a_step_alone)
        self.inner.load_state_dict = self.load_state_dict  # type: ignore[method-assign]  # who holds the inner one loads masters too
        for name in _STATE_HOOKS:
            setattr(self, name, getattr(self.inner, name))

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # an attribute in the base class
        """The groups of the inner optimizer, which hold the model's parameters."""
        return self.inner.param_groups

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # an attribute in the base class
        """The default options of the inner optimizer."""
        return self.inner.defaults

    @property
    def state(self) -> defaultdict[Tensor, Any]:  # type: ignore[override]  # an attribute in the base class
        """State by the model's parameters: the inner optimizer's own, with the aux state of each weight in it. Host only."""
        return self.inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters to the inner optimizer.

        Raises:
            MasterError: split masters for an fp16 parameter.
        """
        with taking_params(self.inner):
            self.inner.add_param_group(param_group)
            for p in self.param_groups[-1]["params"]:
                self.masters.mode_of(p)

    def unwrap(self) -> torch.optim.Optimizer:
        """Return the inner optimizer to be stepped alone, without masters; this wrapper is of no use any more.

        Writes: the inner optimizer's state, from which aux state is dropped.
        """
        self._guard.remove()
        del self.inner.load_state_dict
        self.drop_masters()
        return self.inner

    def drop_masters(self) -> None:
        """Give moments to the parameters themselves, which are fp32 again. Writes: the inner optimizer's state."""
        self._aux = {}
        for p in self._indices():
            self._take_aux(p)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the model's parameters. Writes: gradients. Syncs: no."""
        self.inner.zero_grad(set_to_none)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Let the inner optimizer step the masters, and give the model their 16-bit weights.

        Args:
            closure: computes the loss and the model's gradients again; may be called several times, each time on
                weights that stand for the masters as they are then.

        Returns:
            What the inner optimizer returned; None if it was not stepped.

        Raises:
            OperandError: a gradient, or aux state, that does not fit its parameter. Nothing was changed.

        Writes: weights, masters, state; nothing if `found_inf` is set.
        Syncs: as the inner optimizer does; one read of `found_inf`, if that is set and the inner one is not fused.
        """
        check_closure(self, closure)
        found = getattr(self, "found_inf", None)
        if found is not None and not is_fused(self.inner):
            if bool(found):
                return None
            found = None
        params = [p for p in self._indices() if p.grad is not None or (closure is not None and p.requires_grad)]
        check_shapes(self, params)
        return self._step_masters(params, found, closure)

    def aux_state(self, param: Tensor) -> tuple[Master, Tensor | None]:
        """Return how a parameter keeps small updates, and its aux state now; None if nothing does. Host only."""
        if (held := self.state.get(param)) is None:  # what it has state of is its own
            if param not in self._indices():
                raise ConfigError(f"{describe(param)} is not a parameter of this {type(self.inner).__name__}.")
        mode = self.masters.mode_of(param)
        return mode, None if held is None else held.get(AUX_STATE.get(mode, ""))

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state with aux state of each weight, in the form of one torch optimizer. Syncs: no."""
        inner = self.inner.state_dict()
        state = each_entry(inner, dict)
        if self.masters.count is not None:
            for p, index in self._indices().items():
                if self.masters.mode_of(p) != "none":
                    state.setdefault(index, {})["rounding_step"] = self.masters.count.clone()
        options = {"master": self.masters.mode, "rounding_seed": self.masters.seed}
        return {**inner, "state": state, "param_groups": [{**group, **options} for group in inner["param_groups"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, also that of another mode, of mezzo.optim or of the inner optimizer alone.

        Masters of the same mode are taken bit for bit, others converted as exactly as the mode allows, which is logged. Weights come first.

        Args:
            state_dict: from `state_dict` here, of mezzo's optimizer or of torch's optimizer of the same name.

        Raises:
            CheckpointError: no state of such an optimizer; nothing was changed then.

        Writes: state, options of the groups; the weights, where a conversion rounds their masters anew.
        Syncs: as the inner optimizer does.
        """
        if self.put_back(state_dict):
            _log.warning(
                "the state that was loaded has masters and nothing else: %s begins anew. If its run had taken steps, as torch.distributed.checkpoint "
                "leaves unread what an optimizer that has not stepped yet does not have, save and load amp.state_dict() instead",
                type(self.inner).__name__,
            )

    def put_back(self, state_dict: dict[str, Any]) -> bool:
        """Load a state as `load_state_dict` does; return whether it has masters and lacks what the inner optimizer would have after a step."""
        check_saved(f"state of {type(self).__name__}", state_dict, self)
        state_dict = keep_masters(self, state_dict)
        saved: dict[Any, Any] = state_dict["state"]
        rest = torchs_entries(state_dict)
        saved_groups, left = state_dict["param_groups"], (*OWN_OPTIONS, *HOW)
        kept = [{k: v for k, v in group.items() if k not in left} for group in saved_groups]
        groups = [{**now, **group} for now, group in zip(self.inner.param_groups, kept, strict=True)]
        params = {p: saved[index] for p, index in self._indices().items() if index in saved}
        for p in [p for p in params if self.masters.mode_of(p) != "none"]:
            self.masters.fp32_param(p)
        rest = {i: e for i, e in rest.items() if e or not isinstance(i, int)}
        hooked = self.inner.register_load_state_dict_post_hook  # those of others see the model's parameters
        kept_own = {k: v for k, v in vars(self.inner).items() if k in ("state", "param_groups")}
        seed, count = self.masters.seed, self.masters.count
        try:
            with ExitStack() as inside, hooked(lambda _: inside.close(), prepend=True):
                inside.enter_context(self._masters_inside())
                type(self.inner).load_state_dict(self.inner, {**state_dict, "state": rest, "param_groups": groups})
            self._rekey({fp32_param: p for p, fp32_param in self.masters.fp32_params.items()})
            self.masters.seed = saved_groups[0].get("rounding_seed", seed)
            for p in [p for p in params if self.masters.mode == "stochastic" and "rounding_step" in params[p]]:
                self.masters.count = params[p]["rounding_step"].to(p.device).clone()
            take_masters_(self, params)
            self._aux = {}
        except BaseException as error:  # torch has put both in place when it looks into them
            vars(self.inner).update(kept_own)
            self.masters.seed, self.masters.count = seed, count
            if not isinstance(error, Exception) or is_out_of_memory(error):
                raise
            what = f"is refused by {type(self.inner).__name__}: {first_line(error)}"
            refuse(f"state of {type(self).__name__}", what)
        has_moments = any(group.get("momentum", 1.0) != 0 for group in saved_groups)  # plain SGD has none
        return bool(params) and has_moments and not any(isinstance(index, int) for index in rest)

    def _indices(self) -> dict[Tensor, int]:
        return {p: index for index, p in enumerate(parameters(self))}

    def _take_aux(self, param: Tensor) -> Tensor | None:
        """Take the aux state of a parameter out of its state, which goes with it if nothing is left."""
        if param not in self.state:
            return None
        aux: Tensor | None = self.state[param].pop(AUX_STATE.get(self.masters.mode, ""), None)
        if not self.state[param]:
            del self.state[param]
        return aux

    def _rekey(self, keys: Mapping[Tensor, Tensor]) -> None:
        """Let the inner optimizer's state, and that of those inside of it, belong to other tensors."""
        for state in [one.state for one in and_inside(self.inner)]:
            for old in [old for old in keys if old in state]:
                state[keys[old]] = state[old]
                del state[old]

    def _refuse_a_step_alone(self, inner: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._stepping:
            raise StepError(
                f"step() was called on the {type(inner).__name__} inside MasterWeights: it would step the 16-bit weights "
                "and not their masters. Call step() of the MasterWeights."
            )

    @contextmanager
    def _masters_inside(self, inside: bool = True) -> Iterator[None]:
        """Let the groups hold masters instead of the model's parameters; the other way round inside such a block."""
        pairs = self.masters.fp32_params.items()
        there: dict[Tensor, Tensor] = {p: m for p, m in pairs} if inside else {m: p for p, m in pairs}
        back = {new: old for old, new in there.items()}
        try:
            self._replace(there)
            yield
            self._replace(back)
        except BaseException:  # Ctrl-C may have ended either halfway
            self._replace(back)
            raise

    def _replace(self, replacements: Mapping[Tensor, Tensor]) -> None:
        for group in (group for one in and_inside(self.inner) for group in one.param_groups):
            params = [replacements.get(p, p) for p in group["params"]]
            if isinstance(group["params"], list):
                group["params"][:] = params  # itself, which LBFGS holds on to
            else:
                group["params"] = params

    def _step_masters(
        self, params: list[Tensor], found: Tensor | None, closure: Callable[[], float] | None
    ) -> float | None:
        """Swap masters with true gradients in, and step the inner optimizer; afterwards the model gets their weights."""
        name = AUX_STATE.get(self.masters.mode, "")
        if any(name not in self.state.get(p, ()) for p in self._aux):
            say_dropped(self, self._aux)
            self._aux = {}
        fp32_params = {p: self.masters.fp32_param(p) for p in params if self.masters.mode_of(p) != "none"}
        step = _MasterStep(params, self._indices(), fp32_params, torch.is_grad_enabled())
        skip = None if found is None else found.reshape(()) != 0
        scaling = StepScaling(found_inf=None if found is None else found.reshape(()).to(torch.float32))
        self._stepping = True
        try:
            torch.set_grad_enabled(False)
            for p in fp32_params:
                step.aux[p] = self.state.get(p, {}).get(name)
                self._take_aux(p)
                self.masters.open(p, step.aux[p])
            if fp32_params:
                self.masters.advance(next(iter(fp32_params)).device, skip)
            self._rekey(fp32_params)
            self._hand_gradients(step)  # SAM reads those that are there before it calls the closure
            with self._masters_inside(), handing(self.inner, scaling) if found is not None else nullcontext():
                evaluate = () if closure is None else (partial(self._evaluate, step, closure),)
                loss: float | None = self.inner.step(*evaluate)
            self._write_weights(step, skip)
            self._put_back(step)
            self._aux.update((p, held.shape) for p, held in step.aux.items() if held is not None)
        except BaseException:  # Ctrl-C may have ended putting back, too
            self._put_back(step)
            raise
        return loss

    def _evaluate(self, step: _MasterStep, closure: Callable[[], float]) -> float:
        """Compute the loss on weights that stand for the masters as they are now, as the inner optimizer asks for it."""
        with torch.no_grad():
            self._write_weights(step, None)
        for p in [p for p, fp32_param in step.fp32_params.items() if fp32_param.grad is None]:
            p.grad = None  # dropped by the inner optimizer
        with self._masters_inside(False), torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            self._hand_gradients(step)
        return loss

    def _write_weights(self, step: _MasterStep, skip: Tensor | None) -> None:
        for p in step.fp32_params:
            blocked = None if skip is None else skip.to(p.device)
            step.aux[p] = self.masters.write_(p, step.indices[p], step.aux[p], blocked)

    def _put_back(self, step: _MasterStep) -> None:
        torch.set_grad_enabled(step.grad_mode)
        self._stepping = False
        self._replace({fp32_param: p for p, fp32_param in self.masters.fp32_params.items()})
        for p, grad in step.raw.items():
            assign_grad_(p, grad, grad.dtype)
        self._rekey({fp32_param: p for p, fp32_param in step.fp32_params.items()})
        for p, held in step.aux.items():
            if held is not None:
                self.state[p][AUX_STATE[self.masters.mode]] = held
            self.masters.close(p)

    def _hand_gradients(self, step: _MasterStep) -> None:
        """Give masters and wide parameters their true gradients; the step keeps what the wide ones had."""
        scale, clip = getattr(self, "grad_scale", None), getattr(self, "clip_coef", None)
        for p in step.params:
            target = self.masters.fp32_params.get(p, p)
            if p.grad is None:
                target.grad = None
                continue
            if target is p and scale is None and clip is None:
                continue
            inv_scale = None if scale is None else scale.to(p.device, torch.float32).reciprocal()
            clip_coef = None if clip is None else clip.to(p.device, torch.float32)
            grads = ScaledGradients(values=[p.grad], inv_scale=inv_scale, clip_coef=clip_coef)
            if target is p:
                step.raw[p] = p.grad
            grad = grads.read(0, target.dtype)
            # torch's fused kernels walk memory and take for granted that a gradient lies as its weight does
            other_way = target is not p and grad.layout is torch.strided and grad.stride() != target.stride()
            assign_grad_(target, torch.empty_like(target).copy_(grad) if other_way else grad, target.dtype)


def _checked_hooks(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer that has torch's hooks on loading: without them masters could not follow its state; else a ConfigError."""
    if not hasattr(inner, "param_groups"):
        check_given("MasterWeights", "inner", inner, torch.optim.Optimizer, "an optimizer that was made")
    if not has_hooks(inner, "load_state_dict"):
        raise ConfigError(
            f"MasterWeights was given a {type(inner).__name__}, whose __init__ does not call super().__init__(params, defaults), "
            "so it has no hooks of torch.optim.Optimizer by which masters follow its state. Add that call, hand over the "
            "optimizer that it wraps, or keep weights in fp32, as policy='bf16' does."
        )
    return inner
