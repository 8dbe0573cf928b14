"""A step run a second time before it is taken: hardware that computed something else once is noticed in that step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import random_state
from ..errors import ConfigError, InvariantError, listed
from ..kernels import local
from ..loss_scale import grads_by_id, stamps_of
from ..random_state import RandomState
from ..stamp import Stamp
from ..step import Stepper
from .trial import LossFn

Backward = Callable[[Tensor], None]
_Outcome = dict[str, Tensor]
"""What forward and backward of a step came to, by name: losses, gradients, buffers."""


def _differing(one: _Outcome, other: _Outcome) -> list[str]:
    """Return the names of what is not bit for bit the same in both. Syncs: yes."""
    both = one.keys() & other.keys()
    return [name for name in {**one, **other} if name not in both or not same_bits(one[name], other[name])]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Say whether two tensors hold the same in the same shape and dtype, NaN and -0.0 told from others. Syncs: yes."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_sparse:
        a, b = one.coalesce(), other.coalesce()
        return same_bits(a.indices(), b.indices()) and same_bits(a.values(), b.values())
    a, b = local(one), local(other)
    copies = (t.detach().clone(memory_format=torch.contiguous_format) for t in (a, b))  # of any stride, read as it is
    return torch.equal(*(t.view(-1).view(torch.uint8) for t in copies))


class SecondRun:
    """Runs forward and backward of a step again, on the same batches and draws, and compares them bit for bit.

    `backward` is the stepper's, as it was before anybody recorded it; `loss_fn` computes what is given to it from the model and a batch.
    """

    def __init__(self, amp: Stepper, backward: Backward, loss_fn: LossFn) -> None:
        self._amp, self._backward, self._loss_fn = amp, backward, loss_fn
        self._batches: list[tuple[Any, RandomState]] = []
        self._buffers: dict[str, Tensor] = {}
        self._stamps: dict[int, Stamp] = {}

    def note(self, batch: Any, random: RandomState) -> None:
        """Keep a batch of the step and the random state it meets, before its forward; with the first the buffers. Syncs: no."""
        if not self._batches:
            self._buffers = {name: b.detach().clone() for name, b in self._amp.model.named_buffers()}
        self._batches.append((batch, random))

    def after_backward(self) -> None:
        """Take note of gradients as a backward left them. Syncs: no."""
        self._stamps = stamps_of(grads_by_id(self._amp.model.parameters()))

    def compare(self, step: int, losses: Sequence[Tensor]) -> None:
        """Run the step's forward and backward again; whatever comes of it, the last run's gradients stay.

        What was kept of the step is dropped where the runs agree.

        Raises:
            InvariantError: two runs agree, and the other differs: hardware, or a loss_fn that is not what the loop computes.
            ConfigError: no two runs agree, no batch was noted, or gradients were edited since backward.

        Writes: gradients; buffers and random state come out as the step left them. Syncs: yes.
        """
        if not self._batches:
            raise ConfigError(
                f"record was asked to run step {step} twice, and no batch of it was noted. Write "
                "`for batch in recorder.batches(loader)`, or recorder.note(batch) before each forward."
            )
        now = dict(grads_by_id(self._amp.model.parameters()))
        if any(not self._stamps[key].is_current(grad) for key, grad in now.items() if key in self._stamps):
            raise ConfigError(
                f"record was asked to run step {step} twice, and gradients were edited after backward, which the second run would "
                "lose. Edit them in a hook of the parameter, or leave twice_every out."
            )
        first = self._outcome(losses)
        second = self._again()
        wrong = _differing(first, second)
        if not wrong:
            self._batches = []
            return
        third = self._again()
        if _differing(second, third) and _differing(first, third):
            raise ConfigError(
                f"record was asked to run step {step} twice, and three runs of it gave three results; {listed(wrong)} differ. The "
                "step is not deterministic: draw random numbers from torch alone and write torch.use_deterministic_algorithms(True), or leave twice_every out."
            )
        raise InvariantError(_sentence(step, wrong, is_first=not _differing(second, third)))

    def _outcome(self, losses: Sequence[Tensor]) -> _Outcome:
        model = self._amp.model
        grads = {f"the gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
        buffers = {f"buffer {n}": b.detach().clone() for n, b in model.named_buffers()}
        return {**{f"loss {i}": loss for i, loss in enumerate(losses)}, **grads, **buffers}

    def _again(self) -> _Outcome:
        self._amp.zero_grad()
        with torch.no_grad():
            for name, buffer in self._amp.model.named_buffers():
                buffer.copy_(self._buffers[name])
        losses = []
        with random_state.kept():
            for batch, random in self._batches:
                random_state.set_(random)
                loss = self._loss_fn(self._amp.model, batch)
                self._backward(loss)
                losses.append(loss.detach())
        self.after_backward()
        return self._outcome(losses)


def _sentence(step: int, wrong: Sequence[str], *, is_first: bool) -> str:
    wrong_one, right_one, other = ("second", "first", "")
    if is_first:
        wrong_one, right_one = "first", "second"
        other = " If this comes again in the same step of a new run, loss_fn computes something else than the loop gives to amp.backward."
    return (
        f"step {step} was run twice on the same batches and random numbers, and came out differently: {listed(wrong)}. A third run "
        f"agrees with the {right_one}: hardware computed something wrong in the {wrong_one}. The gradients now are those of the "
        f"third run, so that amp.step() takes them; replace this device.{other}"
    )
