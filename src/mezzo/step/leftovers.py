"""What earlier steps left in gradients, what a backward pass may add to, and why there may be none."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._torch import STEPPED_IN_BACKWARD, own_modules, own_parameters
from ..errors import StepError, kind_of, listed
from ..formats import LOW_DTYPES, dtype_name
from ..kernels import move
from ..loss_scale import AccumulationState, host_decides
from ..optim import parameters, wrapped_optimizer
from ..stamp import Stamp
from .grad_passes import drop, has_own_zero_grad, multiply_

_log = logging.getLogger("mezzo.step")

NO_OPTIMIZER = (
    "was called on a model prepared without an optimizer, for inference. Write mezzo.prepare(model, optimizer, policy), or, "
    "for updates by hand, amp.grad(loss, list(model.parameters())), whose gradients carry no loss scale."
)


class Leftovers:
    """Tells gradients that wait for the step of their optimizer from those that a step has used up.

    Two networks with two optimizers, stepped in turn, add to each other's gradients in backward, and each drops its own
    before its own backward. So after `step(optimizer=...)` the others may be added to, as in torch, and it is at the step
    of an optimizer that its gradients must be whole.

    Attributes:
        is_stepped: whether a step was taken, or true gradients were shown, as an update by hand needs them.
        pending: the step of that loss, which goes on where each optimizer skips by itself.
        is_part: whether the last step was that of some optimizers and not of all.
        spent_by: the optimizers that ended the step of a loss for others too, in words; empty where there are none.
    """

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]) -> None:
        self._optimizers, self._names = optimizers, names
        self._num_begun, self.is_stepped = 0, False
        self.forget()

    def note_begun(self) -> None:
        """Say in the log, once, that losses go backward under a loss scale and nothing is stepped. Host only."""
        self._num_begun += 1
        if self._num_begun == 3 and not self.is_stepped:
            _log.warning(
                "three losses went backward without amp.step(), and their gradients are multiplied by the loss scale: an update by hand takes steps that are too "
                "large by it. Write amp.step(); for updates by hand amp.grad(loss, list(model.parameters())), or read .grad inside `with amp.unscaled_grads():`."
            )

    def forget(self) -> None:
        """Take note that every gradient was dropped."""
        self.spent_by, self.is_part = "", False
        self._waiting: list[Tensor] = []
        self.pending: AccumulationState | None = None

    def drop(self, last: AccumulationState | None) -> None:
        """Do as `forget` where optimizers dropped the gradients; a StepError where a `zero_grad` of the caller's own kept some under a loss scale. Syncs: there."""
        self.forget()
        if last is not None and last.scale is not None:
            own = [one for one in self._optimizers if has_own_zero_grad(wrapped_optimizer(one))]
            self._refuse_kept(
                [p for one in own for p in parameters(one)], "kept by a zero_grad() of the optimizer's own"
            )

    def close(self, stepped: Sequence[Optimizer], pending: AccumulationState) -> None:
        """Take note of a step that some optimizers took or skipped; the gradients of the others carry its scale. Syncs: no."""
        before = {id(p) for p in self._waiting} if pending is self.pending else None
        self.forget()
        taken = {id(p) for one in stepped for p in parameters(one)}
        others = [one for one in self._optimizers if all(one is not known for known in stepped)]
        waiting = [p for one in others for p in parameters(one) if p.grad is not None and id(p) not in taken]
        self._waiting = waiting if before is None else [p for p in waiting if id(p) in before]
        self.is_part = bool(others) and (before is None or bool(self._waiting))
        if self._waiting:
            self.spent_by = " and ".join(type(one).__name__ for one in stepped)
            self.pending = replace(pending, broken="", scale=None if pending.scale is None else pending.scale.clone())

    def open(self, pending: AccumulationState, params: Iterable[Tensor], stamps: Mapping[int, Stamp]) -> None:
        """Look at the gradients, by their stamps as they were left, that the first backward pass of a step will be added to.

        Those that wait for their own step go on at the new scale. A gradient that was written since is taken for one that
        was set to zero, of which the CPU is asked. The step takes the gradients that an earlier one has used up.

        Raises:
            StepError: gradients that somebody else made or, under a loss scale, wrote; or those of the last step, where every optimizer took it.

        Writes: gradients that wait, where the scale has moved. Syncs: where somebody else made a gradient, which may be zeros.
        """
        waiting = {id(p) for p in self._waiting}
        stale, foreign, written = {}, [], []
        for p in params:
            if (grad := p.grad) is None:
                continue
            stamp = stamps.get(id(p))
            if stamp is None or not stamp.is_of(grad):
                foreign.append(p)
            elif id(p) not in waiting and stamp.is_current(grad):
                stale[p] = stamp
            elif id(p) not in waiting and stamp.version >= 0:
                written.append(p)
        if stale and not self.is_part:
            raise StepError(
                f"backward(loss) would add to the gradients of the last step, which {self._listed(stale)} still have. "
                "Call amp.zero_grad() between step() and the next backward(loss)."
            )
        if foreign := [p for p in foreign if not is_zero(p)]:
            raise StepError(
                f"{self._listed(foreign)} have gradients that amp.backward did not make, so they carry no loss scale. "
                "Write amp.backward(loss) for every loss.backward(), and amp.zero_grad() to drop what is there."
            )
        if pending.scale is not None and host_decides(pending.device):
            self._refuse_kept(written, "written since the last step, and not to 0")
        pending.stale = stale
        grads = [p.grad for p in self._waiting if p.grad is not None]
        scale = None if self.pending is None else self.pending.scale
        if grads and scale is not None and pending.scale is not None:
            multiply_(grads, pending.scale / move(scale, pending.scale.device))
        self.forget()

    def refuse_stale(self, pending: AccumulationState, params: Iterable[Tensor]) -> None:
        """Refuse, by a StepError, to step with gradients that an earlier step has used up. Host only."""
        stale = [p for p in params if is_stale(pending, p)]
        if stale:
            raise StepError(
                f"step() would apply what the last step left in the gradients of {self._listed(stale)} once more. Call zero_grad() of "
                "their optimizer before the backward(loss) of its step, or write amp.step(optimizer=...) for the one whose "
                "step this is."
            )

    def _refuse_kept(self, params: Iterable[Tensor], how: str) -> None:
        if kept := [p for p in params if p.grad is not None and not is_zero(p)]:
            raise StepError(
                f"{self._listed(kept)} have gradients that were {how}: they carry no loss scale, or another than the next loss. Drop them "
                "between step() and the next backward(loss), or write a policy without loss scale, as policy='bf16'."
            )

    def _listed(self, params: Iterable[Tensor]) -> str:
        return listed([self._names[p] for p in params])


def is_stale(pending: AccumulationState, param: Tensor) -> bool:
    """Whether a parameter has, in its gradient, what a step before this one has used up. Host only."""
    stamp = pending.stale.get(param)
    return stamp is not None and param.grad is not None and stamp.is_of(param.grad)


def is_zero(param: Tensor) -> bool:
    """Whether a parameter has a gradient of nothing but zeros. Syncs: yes."""
    return param.grad is not None and not bool(param.grad.any())


def nonzero(optimizers: Iterable[Optimizer], edited: Sequence[Tensor]) -> list[Tensor]:
    """Return the parameters whose gradients somebody did not set to zeros; those of an optimizer too that were all multiplied by 0.

    So does a clip whose norm overflowed, and leaves zeros of both signs. Syncs: yes.
    """
    if found := [p for p in edited if not is_zero(p)]:
        return found
    signed = [p for p in edited if (g := p.grad) is not None and g.layout is torch.strided and not g.is_complex()]
    for own in [[p for p in parameters(one) if p.grad is not None] for one in optimizers]:
        if {*own} <= {*signed} and any(bool(p.grad.signbit().any()) for p in own if p.grad is not None):
            found += own
    return found


def forget_zeros_(pending: AccumulationState, params: Iterable[Tensor]) -> None:
    """Take used-up gradients that were set to zero in place for dropped. Syncs: yes, where used-up gradients were written."""
    for p in params:
        if is_stale(pending, p) and is_zero(p):
            del pending.stale[p]


def refuse_no_params(optimizers: Iterable[Optimizer]) -> None:
    """Refuse, by a StepError, a group whose "params" became something else than tensors to be walked again and again. Host only."""
    groups = [(one, index, group["params"]) for one in optimizers for index, group in enumerate(one.param_groups)]
    for one, index, held in groups:
        is_walkable = isinstance(held, list | tuple | set)
        wrong = [p for p in held if not isinstance(p, Tensor)] if is_walkable else [held]
        if wrong:
            raise StepError(
                f"{type(one).__name__}.param_groups[{index}]['params'] {'holds' if is_walkable else 'is'} {kind_of(wrong[0])} since the last step, "
                "and must be a list of parameters. Write group['params'] = list(module.parameters()), or "
                "optimizer.add_param_group({'params': [...]})."
            )


def drop_all(optimizers: Iterable[Optimizer], set_to_none: bool) -> None:
    """Drop the gradients of optimizers; a StepError where a group holds something else than parameters. Writes: gradients."""
    try:
        for optimizer in optimizers:
            drop(optimizer, set_to_none)
    except (AttributeError, TypeError):
        refuse_no_params(optimizers)
        raise


def refuse_repeated(model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Refuse, by a StepError, a parameter that stands more than once in the groups of one optimizer. Host only."""
    for one in optimizers:
        if len(params := parameters(one)) > len(set(params)):
            names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
            counts = Counter(params)
            repeated = [names.get(p, "a parameter") for p, count in counts.items() if count > 1]
            raise StepError(
                f"{type(one).__name__} has {listed(repeated)} more than once in its groups, and would step it as often with one gradient. "
                "Write each parameter once, as in list(dict.fromkeys(params)). Nothing was changed."
            )


def refuse_strangers(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuse, by a StepError, optimizers that hold parameters of something else alone, where a model has some to train. Host only."""
    held = [p for one in optimizers for p in parameters(one) if p.requires_grad]
    if not all(isinstance(p, nn.Parameter) for p in held):  # an image, that is trained through the model
        return
    if any(p.requires_grad for p in model.parameters()) and (strangers := _strangers(model, held)):
        raise StepError(
            f"mezzo.prepare(model, optimizer, policy): {strangers} Where something else is trained through the model, freeze "
            "the model: model.requires_grad_(False)."
        )


def _strangers(model: nn.Module, trainable: Sequence[Tensor]) -> str:
    """Return a sentence where none of what optimizers train is a parameter of the model, else nothing. Host only."""
    if not trainable or not {*model.parameters()}.isdisjoint(trainable):
        return ""
    return (
        f"none of the optimizer's {len(trainable)} trainable parameters belongs to the prepared model; the model was copied or "
        "replaced after the optimizer was made. Make the optimizer from model.parameters() of the prepared model."
    )


class WeightLayouts:
    """Shapes and dtypes of what optimizers step, as they were noted: `p.data = ...` changes them, and what is kept of a weight does not follow."""

    def __init__(self, optimizers: Sequence[Optimizer], names: Mapping[Tensor, str]) -> None:
        self._optimizers, self._names = optimizers, names
        self.note()

    def note(self) -> None:
        """Take the weights as they are now. Host only."""
        params = dict.fromkeys(p for one in self._optimizers for p in parameters(one) if p.layout is torch.strided)
        self.noted = {p: (p.shape, p.dtype) for p in params}
        self.num_bytes = [p.nbytes for p in params]

    def refuse_changed(self, *, has_grads: bool = False) -> None:
        """Refuse, by a StepError, weights of another dtype, but for fp32 values between steps, which are stored as the policy says, or of a shape that what their optimizer keeps, or their gradient, does not have. Host only."""
        for optimizer in self._optimizers:
            for p in parameters(optimizer):
                shape, dtype = self.noted.get(p, (p.shape, p.dtype))
                kept = {} if p.shape == shape else {"gradient": p.grad} if has_grads else optimizer.state.get(p, {})
                held = [name for name, value in kept.items() if isinstance(value, Tensor) and value.shape == shape]
                is_given = not has_grads and p.dtype is torch.float32 and dtype in LOW_DTYPES
                if (dtype is p.dtype or is_given) and not held:
                    continue
                was, now = _layout(dtype, shape), _layout(p.dtype, p.shape)
                advice = "the policy decides in which dtype weights are stored. Write it there, as in mezzo.prepare(model, optimizer, 'bf16-master'), and leave .data as it is."
                if held and has_grads:
                    advice = "its gradient has the old shape. Call amp.zero_grad() and compute the loss again."
                elif held:
                    advice = (
                        f"what {type(optimizer).__name__} keeps of it ({listed(held)}) has the old shape. Write optimizer.state.pop(weight) after the assignment, which lets it "
                        "begin anew, or put a new nn.Parameter into the module and give it to optimizer.add_param_group."
                    )
                raise StepError(
                    f"{self._names[p]} was {was} in the last forward and is {now} now, since its .data was assigned: {advice}"
                )


def _layout(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{dtype_name(dtype)}[{','.join(map(str, shape))}]"


_REPARAMETRIZED = re.compile(r"\bparametrizations\.([^.]+)\.original\d*$|_(?:g|v|orig)$")
"""What torch's weight norm, spectral norm and parametrizations make of the name of a parameter."""


class Registered:
    """Which modules and parameters stand in the modules of a model. Host only."""

    def __init__(self, model: nn.Module) -> None:
        self.registries = [own for m in model.modules() for own in (own_parameters(m), own_modules(m)) if own]
        # Alive, so that no other gets an id of theirs.
        self._held = [one for own in self.registries for one in own.values()]
        self.ids = [*map(id, self._held)]


def refuse_replaced(model: nn.Module, had: Mapping[Tensor, str]) -> None:
    """Refuse, by a StepError, to leave untrained what took the place of a parameter that was stepped, where either has a gradient. Host only."""
    now, plain = dict(model.named_parameters()), partial(_REPARAMETRIZED.sub, r"\1")
    gone = {plain(name): p for p, name in had.items() if now.get(name) is not p}
    new = [(name, p) for name, p in now.items() if p not in had and plain(name) in gone]
    lost = [name for name, p in new if p.grad is not None]
    if left := lost or [name for name, _ in new if gone[plain(name)].grad is not None]:
        of_old = "the gradients are those of the old one, which the model no longer has: replace parameters after amp.step(), not before it"
        what = "has gradients that no optimizer steps" if lost else of_old
        raise StepError(
            f"{listed(left)} {'is' if len(left) == 1 else 'are'} not what the optimizer was given: since then another nn.Parameter took the "
            f"place, and {what}. Give it to optimizer.add_param_group({{'params': [...]}}), put weight norm and the like on or "
            "off before mezzo.prepare, or write the values into the old one by copy_() under torch.no_grad(), as load_state_dict does without assign=True. Nothing was changed."
        )


def why_no_gradients(
    model: nn.Module, optimizers: Sequence[Optimizer], names: Mapping[Tensor, str], *, was_reached: bool
) -> str:
    """Return the sentence that says which of the causes it is: nothing trainable, strangers, or out of reach. Host only."""
    params = [p for optimizer in optimizers for p in parameters(optimizer)]
    trainable = [p for p in params if p.requires_grad]
    if not trainable:
        frozen = f"all {len(params)} parameters of the optimizer are frozen (requires_grad=False). Unfreeze some, or give the optimizer the trainable ones."
        none = "the optimizer has no parameters any more, in no group. Write optimizer.add_param_group(...)."
        return f"step() found no gradients: {frozen if params else none}"
    if strangers := _strangers(model, trainable):
        return f"step() found no gradients: {strangers}"
    reached = [p for p in model.parameters() if p.grad is not None]
    if reached:
        return (
            f"step() found no gradients: the loss reaches {len(reached)} parameters of the model, but none of the "
            f"optimizer's {len(trainable)} ({listed([names[p] for p in trainable])}). "
            "Step the optimizer whose parameters this loss trains, or check where the graph is cut."
        )
    if any(hasattr(p, STEPPED_IN_BACKWARD) for p in trainable):
        return (
            "step() found no gradients: _apply_optimizer_in_backward of torch has optimizers of its own step in the backward pass, and drops "
            "what they stepped with. Leave it out, and amp.step() steps those that were prepared."
        )
    if not was_reached:
        return (
            f"step() found no gradients: backward(loss) reached none of the optimizer's {len(trainable)} trainable parameters: "
            "the loss was made by another model, or behind a detach(). Hand over a loss that this model made."
        )
    return (
        f"step() found no gradients: those that backward(loss) left on the optimizer's {len(trainable)} parameters were "
        "dropped before step(). Call amp.zero_grad() after step(), or before the first backward(loss)."
    )
