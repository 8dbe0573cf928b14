"""Gradients as backward passes left them: at which scale, of which losses, and what became of each since.

Shared by the scaler and the step.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from .._torch import autograd_engine, functorch_level, num_dispatch_modes, num_function_modes, tracing_state, version
from .._torch import global_pre_hooks as pre_hooks
from ..errors import StepError, kind_of
from ..formats import dtype_name
from ..kernels import move, sum_of_bits
from ..stamp import Stamp
from .unscale import real_values

Flag = Tensor | bool
"""A finding: known to the host, or shape (), not 0 (NaN, for one) if so, on a device that the host does not wait for.

On accelerators it is fp32 from the start, so that packing a step's findings casts nothing."""
_FIRST_STEPS = 3
_BACKWARD = Tensor.backward, torch.autograd.backward  # torch's, whatever somebody puts in their place later
_graph_log = logging.getLogger(torch.autograd.graph.__name__)  # where torch names each node of a pass
_new, _ref = tuple.__new__, weakref.ref


class GradSums:
    """Sums over the values of gradients: they tell a write that changed nothing from an edit.

    Who writes a gradient without changing it, as clipping to an infinite norm does, does no harm; its version moves all
    the same. Sums are taken in the first steps, and from then on in a run that had such a write.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._steps_left: float = _FIRST_STEPS

    def note(self, grads: Iterable[tuple[int, Tensor]]) -> None:
        """Write down what gradients hold, by the ids of their parameters. Syncs: no."""
        if self._steps_left > 0:
            self._sums.update((key, sum_of_bits(real_values(grad))) for key, grad in grads)

    def clear(self, *, is_step_over: bool = False) -> None:
        """Forget all gradients, because they hold zeros now or their step is over."""
        self._sums.clear()
        self._steps_left -= is_step_over

    def is_harmless(self, param: Tensor) -> bool:
        """Whether a gradient that was written or replaced since it was noted may be taken as the one noted.

        It may if it has the values it had; and if it is inf or NaN, since its step is skipped either way. Syncs: yes.
        """
        noted, grad = self._sums.get(id(param)), param.grad
        if grad is None:
            return True
        is_same = noted is not None and bool(noted == sum_of_bits(real_values(grad)))
        if is_same or not bool(real_values(grad).isfinite().all()):
            self._steps_left = math.inf
            return True
        return False


class GradVersions:
    """Identity and version of each gradient, as it was last left, in `stamps` by the parameters' ids; and what it held, as `GradSums` has it.

    What is handed out of `stamps` stays as it is when gradients are noted anew.
    """

    def __init__(self) -> None:
        self.stamps: Mapping[int, Stamp] = {}
        self._sums = GradSums()

    def note(self, params: Iterable[Tensor]) -> None:
        """Write down the gradients as they are now, instead of those before. Syncs: no."""
        grads = grads_by_id(params)
        self.stamps = stamps_of(grads)
        self._sums.note(grads)

    def note_zeros(self, params: Iterable[Tensor]) -> None:
        """Write down that what gradients there are hold zeros, and may be added to. Syncs: no."""
        grads = grads_by_id(params)
        self.stamps = {key: stamp._replace(version=-1) for key, stamp in stamps_of(grads).items()} if grads else {}
        self._sums.clear()

    def close(self, params: Sequence[Tensor]) -> None:
        """Write down the gradients as a step leaves them. Syncs: no."""
        self._sums.clear(is_step_over=True)
        if self.changed(params):
            self.note(params)

    def changed(self, params: Sequence[Tensor], count: Callable[[Tensor], int | None] = version) -> list[Tensor]:
        """Return the parameters whose gradient is not the one noted, or keeps no `count` of writes. A dropped one is no change. Syncs: no."""
        stamps = self.stamps
        try:
            return [
                p
                for p in params
                if (g := p.grad) is not None
                and ((stamp := stamps.get(id(p))) is None or stamp[0]() is not g or stamp[1] != count(g))
            ]
        except RuntimeError:  # one was made in inference mode
            return self.changed(params, lambda g: None if g.is_inference() else version(g))

    def edited(self, params: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters whose gradient has other values than the one noted, or may have.

        Writes that change no value are forgiven: the gradients count as noted. Syncs: only if any was written.
        """
        changed = self.changed(params)
        edited = [p for p in changed if not self._sums.is_harmless(p)]
        if changed and not edited:
            self.note(params)
        return edited


def grads_by_id(params: Iterable[Tensor]) -> list[tuple[int, Tensor]]:
    """Return the gradients that parameters have, by the ids of these. Host only."""
    return [(id(p), g) for p in params if (g := p.grad) is not None]


def stamps_of(tensors: Sequence[tuple[int, Tensor]]) -> dict[int, Stamp]:
    """Return the stamps of many tensors by their keys, without their memory; no Python call for each. Syncs: no."""
    try:
        return {key: _new(Stamp, (_ref(t), version(t), None)) for key, t in tensors}
    except RuntimeError:  # one of them was made in inference mode
        return {key: Stamp.of(t) for key, t in tensors}


def host_decides(device: torch.device) -> bool:
    """Whether the host may read what it finds on a device, since nothing has to be waited for."""
    return device.type == "cpu"


@dataclass(slots=True, eq=False)
class AccumulationState:
    """The gradients of one step, all of which carry the scale that the first backward pass captured.

    Attributes:
        scale: shape (), fp32; None without scaling.
        device: where the flags lie that the host does not know.
        loss_bad: a loss was inf or NaN before scaling.
        gradients_bad: by optimizer, inf or NaN were seen in its gradients before somebody edited them, or another one took its step alone.
        penalty_bad: inf or NaN were in what `grad` returned, so that a loss made of it is no witness.
        flushed: shape (), fp32: share of the gradients' elements that 16 bit flushed to zero; None: not measured.
        is_scaled: a loss was multiplied by the scale.
        lacks_scale: somebody else ran backward, and no loss here was multiplied by the scale.
        broken: what failed halfway, so that the gradients are no longer those of the loss; else empty.
        stale: parameters whose gradients were used up by an earlier step when this one began, with their stamps.
    """

    scale: Tensor | None
    device: torch.device
    loss_bad: Flag = False
    gradients_bad: dict[int, Flag] = field(default_factory=dict)
    penalty_bad: Flag = False
    flushed: Tensor | None = None
    is_scaled: bool = False
    lacks_scale: bool = False
    broken: str = ""
    stale: dict[Tensor, Stamp] = field(default_factory=dict)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return a loss times the scale, and remember whether it was finite. Syncs: no."""
        self.loss_bad, self.is_scaled = either(self.loss_bad, is_bad(loss, self.device)), True
        if self.scale is None:
            return loss
        with torch.enable_grad():  # backward runs where gradients are off too, as in torch
            return loss * move(self.scale, loss.device)

    @staticmethod
    def run_backward(
        loss: Tensor, retain_graph: bool | None, create_graph: bool, inputs: Sequence[Tensor] | None
    ) -> None:
        """Do what `loss.backward` does, without torch's Python around it where nobody sees that: it takes as long as a small layer.

        Writes: gradients. Syncs: no.
        """
        is_theirs = (Tensor.backward, torch.autograd.backward) == _BACKWARD and type(loss) is Tensor
        is_traced = tracing_state() is not None or functorch_level() is not None
        is_seen = num_function_modes() or num_dispatch_modes() or is_traced
        if inputs is not None or not is_theirs or is_seen or is_compiling() or _graph_log.isEnabledFor(logging.DEBUG):
            loss.backward(retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)  # type: ignore[no-untyped-call]  # torch's own
            return
        keeps, seeds = create_graph if retain_graph is None else retain_graph, (torch.ones_like(loss),)
        options = {"allow_unreachable": True, "accumulate_grad": True}
        autograd_engine.run_backward((loss,), seeds, keeps, create_graph, (), **options)


def is_bad(number: Tensor, device: torch.device) -> Flag:
    """Return whether a tensor of one element is inf or NaN: on a device NaN if so, else 0. Syncs: only where the host decides."""
    if host_decides(device):
        return not math.isfinite(number.item())
    flag = number.detach() * 0  # NaN of inf and of NaN
    is_there = flag.dim() == 0 and flag.dtype is torch.float32 and flag.device == device
    return flag if is_there else move(flag, device).reshape(()).to(torch.float32)


def either(*flags: Flag) -> Flag:
    """Return whether any of several flags is set: a bool where the host knows all of them. Syncs: no."""
    found: Flag = False
    for flag in flags:
        if found is False:
            found = flag
        elif isinstance(found, Tensor) and isinstance(flag, Tensor):
            found = torch.maximum(found, flag)
        elif flag is not False:
            found = True  # one of the two is known to be
    return found


def without(flag: Flag, other: Flag) -> Flag:
    """Return whether a flag is set and another is not. Syncs: no."""
    if not isinstance(other, Tensor):
        return False if other else flag
    if isinstance(flag, Tensor):
        return torch.where(other != 0, torch.zeros_like(flag), flag)
    return flag and other == 0


def _instead(loss: object, call: str) -> str:
    if hasattr(loss, "loss"):
        return "Hand over output.loss."
    if isinstance(loss, Mapping):
        return "Hand over the loss in it, as in output['loss'], or the sum of losses."
    if isinstance(loss, tuple | list):
        return "Hand over the loss among them, as in output[0], or the sum of losses."
    if not isinstance(loss, Tensor):
        return "Hand over the tensor that the loss function returned, before .item(), float() or .numpy()."
    if not loss.dtype.is_floating_point:
        return "Counts and other whole or complex numbers have no gradient: write a loss of real numbers."
    return "Write loss.mean()." if "loss" in call else "Write outputs.sum(), or (outputs * grad_outputs).sum()."


_ORDER = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_loss(loss: Tensor, wanted: torch.dtype, call: str = "backward(loss)") -> None:
    """Refuse, by a StepError that names the call, a loss that gives no true gradients: not one number, without graph, or of a narrower dtype than is `wanted`. Host only."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.dtype.is_floating_point:
        what = f"{dtype_name(loss.dtype)}{list(loss.shape)}" if isinstance(loss, Tensor) else kind_of(loss)
        raise StepError(f"{call} takes one floating number with its graph, not {what}. {_instead(loss, call)}")
    if loss.is_meta:
        raise StepError(
            f"{call} was given a loss on the meta device, where nothing has values: the model was moved there after "
            "mezzo.prepare. Move it before, or amp.release() it, move it, and prepare it again where it has values."
        )
    if not loss.requires_grad:
        raise StepError(
            f"{call} was given a loss that no parameter leads to: it was detached, made anew with torch.tensor, "
            "computed under torch.no_grad(), or every parameter is frozen. Hand over the loss as the model made it."
        )
    if loss.dtype is not wanted and _ORDER.index(loss.dtype) < _ORDER.index(wanted):
        raise StepError(
            f"{call} was given a {dtype_name(loss.dtype)} loss, and the policy declares loss={dtype_name(wanted)}: "
            f"its scaled gradient may overflow {dtype_name(loss.dtype)}. Compute it from outputs in "
            f"{dtype_name(wanted)}, as in loss_fn(output.float(), target), or write policy 'loss={dtype_name(loss.dtype)}'."
        )


class _StepWatcher(Protocol):
    """Who is asked before any optimizer of the process steps, and may raise."""

    def before_step(self, optimizer: Optimizer, /) -> None: ...


_asked: weakref.WeakSet[_StepWatcher] = weakref.WeakSet()
"""Living scalers' trackers that have seen a scaled gradient, and prepared models that have a loss scale or 16-bit weights."""


def ask_before_steps(watcher: _StepWatcher) -> None:
    """Have somebody asked before any optimizer steps, for as long as it lives.

    An optimizer that nobody was told of can be met only in torch's global hook. It is registered once in a process and
    then stays: the end of a scaler may come in the middle of a step, while torch iterates over its hooks.
    """
    if watcher in _asked:
        return
    if ask_watchers not in pre_hooks.values():
        register_optimizer_step_pre_hook(ask_watchers)
    _asked.add(watcher)


def ask_watchers(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Ask those who are to be asked before an optimizer steps, as a hook of torch's. Raises: what they do."""
    if not is_compiling():
        for watcher in list(_asked):
            watcher.before_step(optimizer)


def num_watchers() -> int:
    """Return how many live that are asked before any optimizer steps. Host only."""
    return len(_asked)
