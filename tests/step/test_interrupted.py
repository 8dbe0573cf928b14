"""What an interrupt, or an error of somebody else's, leaves of prepare and of loading: all as it was."""

from __future__ import annotations

import copy
import logging
import operator
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.step.step_models import Net, assert_same, batch, everything, mse
from tests.step.test_all_or_nothing import assert_unchanged, facts
from torch import Tensor, nn
from torch.autograd import grad_mode

import mezzo
from mezzo.distributed import rank_consistency
from mezzo.errors import StepError

SRC = str(Path(mezzo.__file__).parent)


def reached(call: Callable[[], object], at: int, inside: str, act: Callable[[], object]) -> bool:
    """Run a call, and act at the start of one of its lines in files below a path, counted from 0; return whether it came there."""
    left = [at]

    def on_line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            left[0] -= 1
            if left[0] == -1:
                sys.settrace(None)
                act()
        return on_line

    def on_call(frame: FrameType, *_: object) -> Any:
        return on_line if left[0] >= 0 and frame.f_code.co_filename.startswith(inside) else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        call()
    finally:
        sys.settrace(before)
    return left[0] < 0


def interrupted(
    call: Callable[[], object], at: int, inside: str = SRC, by: type[BaseException] = KeyboardInterrupt
) -> bool:
    """Run a call and raise an error at the start of one of the lines of mezzo, or of other files, counted from 0; return whether it came out."""

    def interrupt() -> None:
        raise by("at a line")

    try:
        reached(call, at, inside, interrupt)
    except by:
        return True
    return False


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    kinds = {"AdamW": torch.optim.AdamW, "RMSprop": torch.optim.RMSprop, "mezzo": mezzo.optim.AdamW}
    return kinds[name](model.parameters(), lr=0.01)


def attributes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer and a root module have beside what `facts` tells."""
    hooks = {f"{n} of {type(one).__name__}": len(h) for one in (model, optimizer) for n, h in vars(one).items() if n.endswith("hooks")}  # fmt: skip
    return {"attributes": sorted(vars(optimizer)), "state": str(optimizer.state_dict()), **hooks}


@pytest.mark.parametrize(("name", "policy"), [("AdamW", "bf16-master"), ("RMSprop", "fp16-master"), ("mezzo", "bf16")])
def test_a_prepare_that_is_interrupted_leaves_no_trace(name: str, policy: str) -> None:
    model = Net()
    optimizer = optimizer_of(name, model)
    model(batch()[0]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before, also, count = facts(model, optimizer), attributes(model, optimizer), 0
    while interrupted(lambda: mezzo.prepare(model, optimizer, policy), 41 + 97 * count):
        assert attributes(model, optimizer) == also, count
        assert_unchanged(model, optimizer, before)
        count += 1
    assert count > 10


def test_a_prepare_that_is_interrupted_in_its_last_lines_leaves_no_trace() -> None:
    def is_interrupted(at: int) -> bool:
        model = Net()
        optimizer = optimizer_of("AdamW", model)
        also = attributes(model, optimizer)
        is_hit = interrupted(lambda: mezzo.prepare(model, optimizer, "bf16-master"), at)
        assert (attributes(model, optimizer) == also) is is_hit, at
        return is_hit

    assert not is_interrupted(1 << 20)  # nothing is made for the first time after this
    low, high = 0, 1 << 15
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if is_interrupted(middle) else (low, middle)
    assert sum(map(is_interrupted, range(low - 100, low))) > 4  # a run has a few lines less than the one before


@pytest.mark.parametrize("policy", ["bf16-master", "fp16-master"])
def test_a_log_that_fails_leaves_the_model_unprepared(policy: str) -> None:
    class Full(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("no space left on device")

    log, full, model = logging.getLogger("mezzo.step"), Full(), Net()
    optimizer = optimizer_of("AdamW", model)
    before, also, level = facts(model, optimizer), attributes(model, optimizer), log.level
    log.addHandler(full)
    log.setLevel(logging.INFO)
    try:
        with pytest.raises(OSError, match="no space"):
            mezzo.prepare(model, optimizer, policy)
    finally:
        log.removeHandler(full)
        log.setLevel(level)
    assert_unchanged(model, optimizer, before)
    assert attributes(model, optimizer) == also


def prepared(name: str, policy: str, net: type[nn.Module] = Net) -> mezzo.Stepper:
    torch.manual_seed(0)
    model = net()
    return mezzo.prepare(model, optimizer_of(name, model), policy)


def train(amp: mezzo.Stepper, steps: int) -> None:
    x, y = batch()
    for _ in range(steps):
        amp.zero_grad()
        amp.backward(mse(amp.model(x), y))
        assert amp.step()


@pytest.mark.parametrize(("name", "policy"), [("AdamW", "bf16-master"), ("RMSprop", "bf16-master"), ("AdamW", "bf16")])
def test_weights_and_optimizers_are_loaded_both_or_not_at_all(name: str, policy: str) -> None:
    amp = prepared(name, policy)
    train(amp, 1)
    saved, count = copy.deepcopy(amp.state_dict()), 0
    train(amp, 2)
    before = everything(amp)
    while interrupted(lambda: amp.load_state_dict(saved), 31 + 97 * count):
        assert_same(everything(amp), before)
        count += 1
    assert count > 10
    train(amp, 1)


class Versioned(nn.Module):
    """Refuses what another version of it saved."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(2)

    def set_extra_state(self, state: torch.Tensor) -> None:
        if state != 2:
            raise ValueError("another version")


class VersionedNet(Net):
    """Refuses it when its weights are loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.version = Versioned()


@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_a_model_that_refuses_its_own_state_is_left_as_it_was(name: str) -> None:
    amp = prepared(name, "bf16-master", VersionedNet)
    train(amp, 1)
    saved = copy.deepcopy(amp.state_dict())
    saved["model"]["version._extra_state"] = torch.tensor(1)
    train(amp, 1)
    before = everything(amp)
    with pytest.raises(ValueError, match="another version"):
        amp.load_state_dict(saved)
    assert_same(everything(amp), before)
    train(amp, 1)


@pytest.mark.parametrize(
    "options",
    [{"retain_graph": "x"}, {"create_graph": None}, {"inputs": 3}, {"inputs": []}, {"inputs": ["w"]}, {"inputs": iter([None])}],
)  # fmt: skip
def test_a_backward_that_is_refused_leaves_the_step_open(options: dict[str, Any]) -> None:
    amp = prepared("AdamW", "bf16")
    x, y = batch()
    loss = mse(amp.model(x), y)
    with pytest.raises(StepError, match=r"amp\.backward\(loss\) was given"):
        amp.backward(loss, **options)
    amp.backward(loss, inputs=iter(amp.model.parameters()))  # type: ignore[arg-type]  # torch takes no iterator
    assert amp.step()


@pytest.mark.parametrize("flags", [{}, {"retain_graph": True}, {"create_graph": True}])
def test_a_loss_that_is_none_is_told_so_whatever_the_flags(flags: dict[str, bool]) -> None:
    amp = prepared("AdamW", "bf16")
    with pytest.raises(StepError, match=r"backward\(loss\) takes one floating number with its graph, not float"):
        amp.backward(3.0, **flags)  # type: ignore[arg-type]


def test_a_second_thread_is_refused_while_one_is_in_a_backward() -> None:
    amp, said = prepared("AdamW", "bf16"), []

    def tell(call: Callable[[], object]) -> None:
        with pytest.raises(StepError) as refused:
            call()
        said.append("another thread is inside" in str(refused.value))

    def meddle(_: torch.Tensor) -> None:
        for call in (lambda: train(amp, 1), amp.zero_grad, amp.step):
            thread = threading.Thread(target=tell, args=(call,))
            thread.start()
            thread.join()

    handle = next(amp.model.parameters()).register_hook(meddle)
    x, y = batch()
    amp.backward(mse(amp.model(x), y))
    handle.remove()
    assert amp.step()
    assert said == [True] * 3
    train(amp, 1)
    taken = amp.counters().applied
    later = threading.Thread(target=train, args=(amp, 1))
    later.start()
    later.join()
    assert amp.counters().applied == taken + 1


@pytest.mark.parametrize("mode", ["split", "fp32", "kahan"])
def test_an_interrupt_before_the_update_of_wrapped_masters_leaves_them_where_they_were(mode: Any) -> None:
    """The optimizer still holds the model's parameters then, and their masters have lost nothing."""
    at, begun = 0, [False]
    while not begun[0]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(3).bfloat16()) for _ in range(2)]
        one = mezzo.optim.MasterWeights(torch.optim.RMSprop(params, lr=0.1), mode)
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            one.step()
        masters = [one.master(p).clone() for p in params]
        one.inner.register_step_pre_hook(lambda *_: begun.__setitem__(0, True))
        if not interrupted(one.step, at):
            break
        if not begun[0]:
            assert all(map(operator.is_, one.param_groups[0]["params"], params)), at
            assert all(map(torch.equal, map(one.master, params), masters)), at
        at += 2
    assert at > 20


@pytest.mark.parametrize("inside", [SRC, grad_mode.__file__], ids=["mezzo", "torch"])
@pytest.mark.parametrize("kind", ["split", "kahan", "fp32", "own"])
def test_a_step_that_is_interrupted_anywhere_gives_back_what_it_took(kind: Any, inside: str) -> None:
    params = [nn.Parameter(torch.randn(3).bfloat16()), nn.Parameter(torch.randn(3))]
    if kind == "own":
        one: Any = mezzo.optim.AdamW(params, lr=0.1, master="split")
    else:
        one = mezzo.optim.MasterWeights(torch.optim.AdamW(params, lr=0.1, fused=True), kind)
    at = 0

    def step() -> None:
        for p in params:
            p.grad = torch.ones_like(p)
        one.step()

    step()
    keys = [sorted(one.state[p]) for p in params]
    one.found_inf, one.grad_scale = torch.zeros(()), torch.tensor(2.0)
    while interrupted(step, at, inside):
        assert torch.is_grad_enabled(), at
        assert all(map(operator.is_, one.param_groups[0]["params"], params)), at
        assert len(one.state) == 2 and [sorted(one.state[p]) for p in params] == keys, at
        assert not {"found_inf", "grad_scale"} & vars(getattr(one, "inner", nn.Module())).keys(), at
        at += 1
    assert at > 5


@pytest.mark.parametrize("policy", ["bf16", "bf16-master"])
def test_a_look_that_finds_no_memory_costs_no_step(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """The checksums of both looks at a step, before and after its update, find none; a healthy run goes on, and says so."""
    found: set[str] = set()
    at = 0
    while True:
        amp, twin = prepared("AdamW", policy), prepared("AdamW", policy)
        x, y = batch()
        for one in (amp, twin):
            one.backward(mse(one.model(x), y))
        twin.step()
        caplog.clear()
        assert not interrupted(amp.step, at, rank_consistency.__file__, torch.OutOfMemoryError), at
        assert_same(everything(amp), everything(twin))
        if not caplog.messages:
            break
        found.update(caplog.messages)
        at += 2
    assert at > 10 and found == {
        "memory ran out in the look at step 0, which is left out: at a line. The step itself lacks nothing."
    }


@pytest.mark.parametrize("policy", ["bf16", pytest.param("fp16-master, scaling=1024", marks=pytest.mark.slow)])
@pytest.mark.parametrize("by_closure", [False, True])
def test_a_step_that_finds_no_memory_for_buffers_is_not_taken(policy: str, *, by_closure: bool) -> None:
    """None for copies of the buffers: the weights are as before, and the same call takes the step."""

    def computed(amp: mezzo.Stepper) -> Tensor:
        amp.zero_grad()
        loss = mse(amp.model(x), y)
        amp.backward(loss)
        return loss

    def trained(amp: mezzo.Stepper) -> dict[str, Tensor]:  # a closure that runs again moves the statistics again
        return {
            name: value
            for name, value in everything(amp).items()
            if not (by_closure and name.startswith("model.stats."))
        }

    (x, y), count = batch(), 0
    for place in ("buffers.py", "undo.py"):
        at = 0
        while True:
            amp, twin = prepared("AdamW", policy), prepared("AdamW", policy)
            before = [p.detach().clone() for p in amp.model.parameters()]
            steps = []
            for one in (amp, twin):
                if not by_closure:
                    computed(one)
                steps.append(partial(one.step, partial(computed, one)) if by_closure else one.step)
            if not interrupted(steps[0], at, str(Path(SRC) / "step" / place), torch.OutOfMemoryError):
                break
            assert all(map(torch.equal, before, amp.model.parameters())), (place, at)
            if by_closure:
                amp.zero_grad()
            for step in steps:
                step()
            assert_same(trained(amp), trained(twin))
            at += 1
        count += at
    assert count > 20


SHOWN = torch.linspace(-1, 1, 8).reshape(2, 4)


def with_gradients(optimizer: Callable[..., torch.optim.Optimizer], policy: str) -> tuple[nn.Linear, mezzo.Stepper]:
    """Return a layer behind the backward pass of one loss of `SHOWN`, the same at each call."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    amp = mezzo.prepare(model, optimizer(model.parameters(), lr=0.1), policy)
    amp.backward(model(SHOWN).float().square().mean())
    return model, amp


def show(amp: mezzo.Stepper) -> None:
    with amp.unscaled_grads():
        pass


@pytest.mark.parametrize("policy", ["fp16, scaling.init_scale=1024", "fp16-master, scaling.init_scale=1024"])
def test_gradients_that_were_interrupted_while_they_are_shown_are_not_stepped(policy: str) -> None:
    """On the way in or out some carry the loss scale and others do not: the step is the right one, or refused until zero_grad."""
    model, amp = with_gradients(mezzo.optim.SGD, policy)
    amp.step()
    want, refused = amp.export_weights(), 0
    for at in range(0, 400, 3):
        model, amp = with_gradients(mezzo.optim.SGD, policy)
        came = interrupted(partial(show, amp), at, inside=SRC + "/step/grad_passes.py")
        try:
            amp.step()
        except StepError as error:
            assert "amp.unscaled_grads():` that was interrupted" in str(error)
            refused += 1
            amp.zero_grad()
            amp.backward(model(SHOWN).float().square().mean())
            amp.step()
        torch.testing.assert_close(amp.export_weights(), want, rtol=0, atol=0)
        if not came:
            break
    assert not came and refused
