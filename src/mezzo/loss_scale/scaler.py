"""The loss scaler for a training loop of your own: takes the place of torch.amp.GradScaler."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from .._torch import ScalerStage, is_capturing, is_fused, new_optimizer_state, tree_map
from ..errors import LossScaleExhausted, MasterError, PolicyError, ScalerArgumentError, ScalerError, as_flag
from ..formats import as_device
from ..policy import ScalingConfig
from . import messages
from .fused import StepScaling, parameters, step_scaled
from .grad_tracker import GradTracker, Mark, gradients
from .saved import Saved, checked, floor_under, given_scale, pack, unpack
from .state import AsyncFlag, LastStep, LossScale, ScaleState, next_state
from .torch_names import TorchNames
from .unscale import divide_, has_nonfinite, is_unusable

_T = TypeVar("_T")


class GradScaler(TorchNames):
    """Scales the loss so that small fp16 gradients survive, and skips the steps whose gradients overflowed.

    Takes the place of `torch.amp.GradScaler`: the same calls, the same numbers, and an instance of it. Beyond it:
    a floor and a ceiling for the scale, an error when no scale can help, `last_step`, and an error where torch
    would divide or apply gradients that are not what the loss left. What is divided by is the scale the loss
    was multiplied by, also if `update` moved it since.

    Args:
        device: "cuda" warns and disables the scaler where there is no CUDA, as torch does; None never does. The
            scale lives where the first scaled loss lives.
        init_scale: first scale.
        growth_factor: multiplier after `growth_interval` clean steps in a row; 1 never grows.
        backoff_factor: multiplier after a non-finite step; in (0, 1).
        growth_interval: clean steps before the scale grows.
        enabled: False passes everything through.
        min_scale: floor of the scale; a non-finite step at the floor is an error. 1.0 gives way to a smaller scale that
            is asked for.
        max_scale: ceiling of growth; None: as far as fp32 goes.
        hysteresis: non-finite steps in a row before the scale backs off.
        patience: non-finite steps in a row that are an error; None: any number is borne.
        dynamic: False keeps the scale at `init_scale`; non-finite steps are skipped all the same.

    Raises:
        PolicyError: a value outside its range.

    Source: Micikevicius et al. 2018, section 3.2.
    """

    def __init__(
        self,
        device: str | None = "cuda",
        init_scale: float = 65536.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 1.0,
        max_scale: float | None = None,
        hysteresis: int = 1,
        patience: int | None = 25,
        dynamic: bool = True,
    ) -> None:
        enabled = as_flag("GradScaler", "enabled", enabled, ScalerArgumentError)
        if isinstance(device, int | float):
            raise ScalerArgumentError(f"GradScaler({device}): a device stands first. torch.cuda.amp's order is mezzo.cuda.amp.GradScaler's.")  # fmt: skip
        if as_device("cpu" if device is None else device).type == "cuda" and enabled and not torch.cuda.is_available():
            warnings.warn(
                'GradScaler("cuda") found no CUDA device and is disabled: losses and gradients pass through unscaled. '
                'Write GradScaler("cpu") to scale losses on the CPU.',
                stacklevel=2,
            )
            enabled = False
        try:
            config = ScalingConfig(
                init_scale=init_scale, growth_factor=growth_factor, backoff_factor=backoff_factor,
                growth_interval=growth_interval, min_scale=floor_under(init_scale, min_scale), max_scale=max_scale,
                hysteresis=hysteresis, dynamic=dynamic,
            )  # fmt: skip
            saved = checked(config, patience, LossScale.start(config))
        except PolicyError as refusal:
            raise ScalerArgumentError(str(refusal)) from None
        self._start(device, enabled, saved)

    def _start(self, device: str | None, enabled: bool, saved: Saved) -> None:
        self._device = cast(str, device)
        self._enabled = enabled
        self._config, self._patience, state = saved
        self._live = ScaleState(state)
        self._init_growth_tracker = int(state.growth_tracker)
        self._tracker = GradTracker()
        self._exhausted_flag = AsyncFlag()
        self._last_step = LastStep(enabled, None)
        self._per_optimizer_states: dict[int, dict[str, Any]] = defaultdict(new_optimizer_state)

    def get_scale(self) -> float:
        """Return the current scale; 1.0 if disabled. Syncs: yes, if the scale is on an accelerator."""
        return float(self._live.state.scale) if self._enabled else 1.0

    @property
    def last_step(self) -> LastStep:
        """What the last `step` did: `applied`, and the `scale` its gradients carried. Syncs: each of the two, when it is read."""
        return self._last_step

    @property
    def skipped_in_a_row(self) -> int:
        """Non-finite steps in a row, as of the last `update`. Syncs: yes, if the scale is on an accelerator."""
        return int(self._live.state.skipped_in_a_row)

    def scale(self, outputs: _T) -> _T:
        """Return losses times the loss scale.

        Args:
            outputs: a tensor, or any nesting of lists, tuples, named tuples, dicts and other iterables of tensors.

        Returns:
            The same structure; the argument itself if the scaler is disabled.

        Raises:
            ScalerError: something that is neither a tensor nor an iterable of tensors.

        Syncs: no.
        """
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return cast(_T, self._multiply(outputs))
        return cast(_T, tree_map(self._multiply, outputs))

    def _multiply(self, output: object) -> object:
        if not isinstance(output, Tensor):
            if isinstance(output, Iterable) and not isinstance(output, str | bytes) and not hasattr(output, "ndim"):
                return map(self.scale, output)
            raise ScalerError(messages.NO_LOSS.format(kind=type(output).__name__))
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(output.device)
        if is_capturing(output.device):
            self._tracker.is_off = True  # replays change gradients unseen, and must read the scale of their own time
            return self._live.state.multiply(output)
        captured = self._live.captured()
        scaled = LossScale(scale=captured).multiply(output)
        self._tracker.watch(scaled, captured)
        return scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the gradients of an optimizer by the loss scale, before you clip or inspect them.

        Optional: `step` does it if you did not.

        Args:
            optimizer: whose gradients to divide; all its backward passes of this iteration must be over.

        Raises:
            ScalerError: called twice or after `step`; or gradients that are not what scaled losses left.
            MasterError: gradients in fp16.

        Writes: the gradients.
        Syncs: no.
        """
        if not self._enabled:
            return
        state = self._state_of(optimizer, "unscale_")
        if state["stage"] is ScalerStage.UNSCALED:
            raise ScalerError(messages.UNSCALED_TWICE.format(optimizer=type(optimizer).__name__))
        if state["stage"] is ScalerStage.STEPPED:
            raise ScalerError(messages.UNSCALED_LATE.format(optimizer=type(optimizer).__name__))
        captured = self._check(optimizer)
        try:
            found = self._unscale_grads_(optimizer, captured.reciprocal(), is_unusable(captured), False)
        except MasterError:
            raise MasterError(messages.half_gradients(optimizer)) from None
        if self._config.min_scale < 1.0:  # dividing by less than one can overflow
            late = has_nonfinite(gradients(optimizer))
            found = {device: torch.maximum(flag, late.to(device)) for device, flag in found.items()}
        self._tracker.write(optimizer, Mark.UNSCALED)
        state["stage"], state["captured"], state["passes"] = ScalerStage.UNSCALED, captured, self._tracker.passes
        state["found_inf_per_device"] = found

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Divide gradients: the part of `unscale_` that torch lets a subclass replace.

        With `allow_fp16` duplicate rows of sparse fp16 gradients are summed first, as torch does: who applies them in fp16
        sums them there.
        """
        for param in parameters(optimizer) if allow_fp16 else ():
            if (grad := param.grad) is not None and grad.is_sparse and grad.dtype is torch.float16:
                param.grad = grad.coalesce()
        grads = gradients(optimizer)
        found = divide_(grads, inv_scale, found_inf, allow_fp16=allow_fp16)
        return {found.device: found} if grads else {}

    def _check(self, optimizer: Optimizer) -> Tensor:
        """Refuse gradients that are not what scaled losses left, and return the scale they carry."""
        is_scaled = self._tracker.before_unscale(optimizer)
        if is_scaled and not self._tracker.knows(optimizer):
            messages.say_hooked(optimizer)
        captured = self._tracker.captured if is_scaled else None
        return self._live.captured() if captured is None else captured

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        """Note whether gradients that stay scaled are non-finite; optimizers of the older protocol call this too."""
        scale = cast(Tensor, self._scale)
        flags: dict[torch.device, Tensor] = {}
        if type(self)._unscale_grads_ is not GradScaler._unscale_grads_:
            flags = self._unscale_grads_(optimizer, torch.ones_like(scale), is_unusable(scale), True)
        elif grads := gradients(optimizer):
            found = torch.maximum(is_unusable(scale), has_nonfinite(grads).to(scale.device))
            flags = {found.device: found}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = flags
        return flags

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:  # noqa: D417
        """Divide the gradients if `unscale_` did not, and step the optimizer unless they hold inf or NaN.

        An optimizer that takes the finding itself (torch's fused ones) is always called on an accelerator, and
        skips there. `last_step.applied` says what came of it.

        Args:
            optimizer: whose gradients to apply; further arguments go to its step.

        Returns:
            What the optimizer's step returns; None if it was not called.

        Raises:
            ScalerError: called twice, with a closure, or before any gradient; or gradients that are not what
                scaled losses left.
            MasterError: gradients in fp16, for an optimizer that leaves dividing to the scaler.

        Writes: the gradients, the parameters, the optimizer's state.
        Syncs: one read; none for an optimizer that takes the finding itself.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if callable(kwargs.get("closure", args[0] if args else None)):
            raise ScalerError(messages.CLOSURE)
        state = self._state_of(optimizer, "step")
        if state["stage"] is ScalerStage.STEPPED:
            raise ScalerError(messages.STEPPED_TWICE.format(optimizer=type(optimizer).__name__))
        self._tracker.is_stepping = True
        try:
            return self._apply(optimizer, state, args, kwargs)
        finally:
            self._tracker.is_stepping = False

    def _apply(self, optimizer: Optimizer, state: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        was_unscaled, divides = state["stage"] is ScalerStage.UNSCALED, is_fused(optimizer)
        if was_unscaled:
            if state.get("passes", self._tracker.passes) != self._tracker.passes:
                self._tracker.check_unscaled(optimizer)
        elif divides:
            state["captured"] = self._check(optimizer)
            self._check_inf_per_device(optimizer)
        else:
            self.unscale_(optimizer)
        is_foreign = "captured" not in state  # a subclass divides in an `unscale_` of its own
        found = self._found(state)
        if found is None:
            raise ScalerError(messages.no_gradients(optimizer, self._tracker.passes, self._tracker.is_blind))
        if divides:
            grad_scale = None if was_unscaled else state["captured"]
            scaling = StepScaling(grad_scale=grad_scale, found_inf=found)
            result, is_skipped = step_scaled(optimizer, self, scaling, args, kwargs)
        else:
            state["is_skipped"] = None
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
            is_skipped = bool(found) if state["is_skipped"] is None else state["is_skipped"]
        if divides or was_unscaled or is_foreign:  # the gradients changed after they were last written down
            self._tracker.write(optimizer, Mark.UNSCALED)
        state["stage"], state["is_skipped"] = ScalerStage.STEPPED, is_skipped
        captured = self._live.captured() if is_foreign else state["captured"]
        self._last_step = LastStep(found if is_skipped is None else is_skipped, captured)
        return result

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Step unless inf or NaN was found: the part of `step` that torch lets a subclass replace. Syncs: one read."""
        is_skipped = optimizer_state["is_skipped"] = bool(self._found(optimizer_state))
        return None if is_skipped else optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the loss scale by what the steps of this iteration found, and start the next iteration.

        Args:
            new_scale: the scale to take instead; a tensor of one element is copied.

        Raises:
            LossScaleExhausted: inf or NaN at the floor, or `patience` skipped steps in a row. The weights are
                those of the last applied step. With optimizers that skip on an accelerator it comes a few steps late.
            ScalerError: no step was taken; or a new scale that is no positive number within floor and ceiling.

        Syncs: no, unless a step was seen to be skipped.
        """
        if not self._enabled:
            return
        self._require_scale("update")
        states = list(self._per_optimizer_states.values())
        if new_scale is not None:
            scale, self._config = given_scale(new_scale, self._config)
            self._live.move(replace(self._live.state, scale=scale))
            self._next_iteration()
            return
        found = self._found(*states)
        if found is None:
            raise ScalerError("update() was called before step(): no gradient was looked at in this iteration.")
        is_free = found.device.type == "cpu"  # reading costs no waiting, and numbers move as fast as torch's kernel
        before = self._live.state.numbers() if is_free else self._live.state
        finding = bool(found) if is_free else found
        after = next_state(before, finding, self._config)
        skips = [state.get("is_skipped") for state in states]
        is_exhausted = skips.count(False) < len(skips) and self._reads(
            before.is_exhausted(finding, self._config, self._patience), any(skips)
        )
        self._live.move(after)
        self._next_iteration()
        if is_exhausted and self.skipped_in_a_row:
            optimizers = [state["optimizer"] for state in states]
            raise LossScaleExhausted(messages.exhausted(after.numbers(), self._config, self._patience, optimizers))

    def _reads(self, verdict: bool | Tensor, at_once: bool) -> bool:
        """Read a verdict: at once if a step was seen to be skipped, else when it has arrived."""
        return self._exhausted_flag.ask(verdict) if isinstance(verdict, Tensor) and not at_once else bool(verdict)

    def _next_iteration(self) -> None:
        self._per_optimizer_states = defaultdict(new_optimizer_state)
        self._tracker.next_iteration()

    def mark_scaled(self, optimizer: Optimizer) -> None:
        """Declare that the gradients of an optimizer, as they are now, are those of the loss times the loss scale.

        For gradients the scaler did not see come about: a loss multiplied by `get_scale()` by hand, a division or
        an all-reduce between `backward` and `unscale_`. Without it these are refused as edited.

        Args:
            optimizer: whose gradients are meant.

        Syncs: no.
        """
        if self._enabled:
            self._live.to(parameters(optimizer)[0].device)
            self._tracker.accept(optimizer, self._live.captured())

    def state_dict(self) -> dict[str, Any]:
        """Return the state in plain numbers: torch's five entries and this class's own; {} if disabled. Syncs: yes, if the scale is on an accelerator."""
        return pack(self._saved()) if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state_dict of this class or of torch's scaler. A disabled scaler ignores it.

        Raises:
            CheckpointError: empty (saved with scaling disabled), incomplete, a scale below the floor, or numbers that no scaler may have.
        """
        if self._enabled:
            self._config, self._patience, state = unpack(state_dict, self._saved())
            self._first_tracker = int(state.growth_tracker)
            self._live.move(state)

    def __getstate__(self) -> dict[str, Any]:
        if self._per_optimizer_states:
            raise ScalerError("a GradScaler cannot be pickled or copied between unscale_() and update(): do it after.")
        return {"device": self._device, "enabled": self._enabled, "saved": self._saved()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._start(**state)

    def _saved(self) -> Saved:
        return Saved(self._config, self._patience, self._live.state.numbers())

    def _state_of(self, optimizer: Optimizer, call: str) -> dict[str, Any]:
        if not hasattr(optimizer, "param_groups"):
            raise ScalerError(
                f"{call}() takes an optimizer, and got {type(optimizer).__name__}. Call it for one after the other."
            )
        self._require_scale(call)
        state = self._per_optimizer_states[id(optimizer)]
        state["optimizer"] = optimizer
        return state

    def _found(self, *states: dict[str, Any]) -> Tensor | None:
        scale = cast(Tensor, self._scale)
        found = [flag.to(scale.device) for state in states for flag in state["found_inf_per_device"].values()]
        return found[0] if len(found) == 1 else torch.stack(found).amax() if found else None
