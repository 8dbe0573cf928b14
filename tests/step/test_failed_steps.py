"""Steps that fail while an optimizer makes its state: nothing of it stays half made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from tests.saved import through_a_file
from tests.step.step_models import assert_same, everything
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import mezzo
from mezzo.errors import StepError

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "mezzo": lambda params: mezzo.optim.AdamW(params, lr=0.01),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.9),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}


class NoMemory(TorchDispatchMode):
    """Memory that runs out at one of the allocations, counted from 0."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, op: Any, kinds: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        if any(word in str(op) for word in ("zeros", "empty", "clone", "full")):
            self.left -= 1
            if self.left == -1:
                raise torch.OutOfMemoryError("planted")
        return op(*args, **(kwargs or {}))


def prepared(kind: str, policy: str) -> mezzo.Stepper:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    return mezzo.prepare(model, KINDS[kind](model.parameters()), f"{policy}, guard.check_every=0")


def backward(amp: mezzo.Stepper, x: Tensor) -> None:
    amp.zero_grad()
    amp.backward(amp.model(x).float().square().mean())


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16-master, scaling=128"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_first_step_that_finds_no_memory_leaves_no_state_half_made(kind: str, policy: str) -> None:
    x, twin, at = torch.randn(4, 8), prepared(kind, policy), 0
    backward(twin, x)
    twin.step()
    while True:
        amp, other, no_memory = prepared(kind, policy), prepared(kind, policy), NoMemory(at)
        backward(amp, x)
        before = [p.detach().clone() for p in amp.model.parameters()]
        with no_memory:
            try:
                amp.step()
            except torch.OutOfMemoryError:
                pass
        if no_memory.left >= 0:
            break
        is_halfway = not all(map(torch.equal, before, amp.model.parameters()))
        other.load_state_dict(through_a_file(amp.state_dict()))
        if is_halfway:
            with pytest.raises(StepError, match=r"failed, when .* or weights written"):
                amp.step()
        for one in (amp, other):
            backward(one, x)
            one.step()
            if not is_halfway:
                assert_same(everything(one), everything(twin))
        at += 1
    assert at > 3


@pytest.mark.parametrize("policy", ["bf16-master", "fp16-master, scaling=128"])
@pytest.mark.parametrize("kind", ["AdamW", "mezzo", "RMSprop"])
def test_a_release_that_finds_no_memory_is_asked_for_again(kind: str, policy: str) -> None:
    """The hooks that have masters follow weights which are loaded were gone after the first."""
    x, at = torch.randn(4, 8), 0
    while True:
        amp, twin, no_memory = prepared(kind, policy), prepared(kind, policy), NoMemory(at)
        for one in (amp, twin):
            backward(one, x)
            one.step()
        with no_memory, suppress(torch.OutOfMemoryError):
            amp.release()
        if no_memory.left >= 0:
            break
        if next(amp.model.parameters()).dtype is not torch.float32:
            for one in (amp, twin):
                one.model.load_state_dict({k: v.float() + 1 / 3 for k, v in one.model.state_dict().items()})
        amp.release()
        twin.release()
        assert all(map(torch.equal, amp.model.parameters(), twin.model.parameters()))
        for one, other in zip(*(run.optimizers[0].state.values() for run in (amp, twin)), strict=True):
            assert_same(
                {k: torch.as_tensor(v) for k, v in one.items()}, {k: torch.as_tensor(v) for k, v in other.items()}
            )
        at += 1
    assert at > 3


@pytest.mark.parametrize("policy", ["bf16", "bf16-master", "fp16-master, scaling=128"])
@pytest.mark.parametrize("kind", ["AdamW", "mezzo", "RMSprop"])
def test_a_load_that_finds_no_memory_does_not_blame_the_checkpoint(kind: str, policy: str) -> None:
    x, other, at = torch.randn(4, 8), prepared(kind, policy), 0
    backward(other, x)
    other.step()
    saved = copy.deepcopy(other.state_dict())
    amp = prepared(kind, policy)
    backward(amp, -x)
    amp.step()
    before = everything(amp)
    while True:
        with NoMemory(at) as no_memory, suppress(torch.OutOfMemoryError):
            amp.load_state_dict(saved)
        if no_memory.left >= 0:
            break
        assert_same(everything(amp), before)
        at += 1
    assert at > 3
    assert_same(everything(amp), everything(other))


class Ends(TorchDispatchMode):
    """Raises at the first count of what is not finite."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error: BaseException | None = error

    def __torch_dispatch__(self, op: Any, kinds: Iterable[type], args: Any = (), kwargs: Any = None) -> Any:
        if self.error is not None and str(op) in ("aten.bitwise_not.default", "aten.ne.Tensor", "aten.sum.default"):
            self.error, error = None, self.error
            raise error
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("planted"), KeyboardInterrupt()])
def test_a_skip_is_counted_though_the_look_at_its_cause_ends_early(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """What was found left the list of what is to be read before it was counted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    amp = mezzo.prepare(model, torch.optim.AdamW(model.parameters(), fused=True), "bf16, guard.check_every=0")
    backward(amp, torch.full((4, 8), float("nan")))
    amp.step()
    with (
        Ends(error) as ends,
        pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else nullcontext(),
    ):
        amp.counters()
    assert ends.error is None
    counters = amp.counters()
    assert (counters.seen, counters.skipped, counters.skipped_in_a_row) == (1, 1, 1)
    said = [m for m in caplog.messages if m.startswith("memory ran out in the look at step 0, which is left out")]
    assert len(said) == isinstance(error, torch.OutOfMemoryError)
    backward(amp, torch.randn(4, 8))
    assert amp.step().applied and amp.counters().skipped_in_a_row == 0
