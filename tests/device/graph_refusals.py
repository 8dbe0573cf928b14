"""What cannot be captured, and what a graph cannot go on with: each is refused by name, with nothing done; graphs.py runs these."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.device.captured_runs import DATA, Run, capturable_adamw, model
from tests.device.undone_steps import Whitening
from torch import Tensor

import mezzo
from mezzo.errors import StepError


def refusal(make: Callable[[], Any]) -> str:
    with pytest.raises(StepError) as caught:
        call = make()
        for _ in range(4):
            call(DATA[0].to("sim"), torch.ones((), device="sim"))
    return str(caught.value)


def what_cannot_be_captured_is_refused_by_name() -> None:
    """At the latest when it is captured, with nothing done: the function itself goes on."""

    def reads(run: Run) -> Callable[..., Any]:
        def step(x: Tensor, factor: Tensor) -> float:
            loss, _ = run.step(x, factor)
            return loss.item()

        return step

    def reads_result(run: Run) -> Callable[..., Any]:
        return lambda x, factor: bool(run.step(x, factor)[1])

    def twice(run: Run) -> Callable[..., Any]:
        return lambda x, factor: [run.step(x, factor), run.step(x, factor)]

    def schedules(run: Run) -> Callable[..., Any]:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(run.optimizer, 0.9)

        def step(x: Tensor, factor: Tensor) -> None:
            run.step(x, factor)
            scheduler.step()

        return step

    def with_closure(run: Run) -> Callable[..., Any]:
        def step(x: Tensor, factor: Tensor) -> None:
            def closure() -> Tensor:
                run.amp.zero_grad()
                loss = run.net(x[0]).float().square().mean()
                run.amp.backward(loss)
                return loss

            run.amp.step(closure)

        return step

    for function, said in (
        (reads, "could not be captured, and nothing was done: .*item\\(\\)"),
        (reads_result, "the result of a step was read while the step is captured"),
        (twice, "took 2 steps"),
        (schedules, "learning rate, changed in it"),
        (with_closure, "amp.step\\(\\) has closure= in a function that is captured"),
    ):
        run = Run("bf16", "torch.AdamW")
        step = function(run)
        sentence = refusal(lambda step=step, run=run: run.amp.capture(step))
        assert re.search(said, sentence), (said, sentence)
        before = run.state()
        run.step(DATA[1].to("sim"), torch.ones((), device="sim"))
        assert run.amp.counters().applied == before[0].applied + 1


def optimizers_and_policies_that_need_the_host_are_refused() -> None:
    def run(policy: str, make: Callable[[Any], Any]) -> Callable[[], Any]:
        def captured() -> Any:
            net = model().to("sim")
            amp = mezzo.prepare(net, make(net.parameters()), policy)

            def step(x: Tensor, factor: Tensor) -> None:
                amp.zero_grad()
                amp.backward(net(x[0]).float().square().mean())
                amp.step()

            return amp.capture(step)

        return captured

    assert "AdamW(..., capturable=True)" in refusal(run("bf16", lambda p: torch.optim.AdamW(p, fused=True)))
    assert "which cannot be left out or undone" in refusal(run("bf16", lambda p: Whitening(p, lr=0.1)))
    assert "guard.on_overflow=demote" in refusal(run("bf16, guard.on_overflow=demote", capturable_adamw_alone))
    assert "guard.patience=1" in refusal(run("bf16, guard.patience=1", capturable_adamw_alone))
    cpu = Run("bf16", "mezzo.AdamW", device="cpu")
    with pytest.raises(StepError, match="a model on cpu: a graph is one accelerator's"):
        cpu.amp.capture(cpu.step)


def capturable_adamw_alone(params: Any) -> Any:
    return capturable_adamw(params, "bf16")


def what_changed_since_is_refused_by_name() -> None:
    x, one = DATA[0].to("sim"), torch.ones((), device="sim")

    def captured(kind: str = "torch.AdamW") -> tuple[Run, Any]:
        run = Run("bf16", kind)
        call = run.amp.capture(run.step)
        for _ in range(5):
            call(x, one)
        assert call.num_replayed == 2
        return run, call

    def lr(run: Run) -> None:
        run.optimizer.param_groups[0]["lr"] = 0.5

    def load(run: Run) -> None:
        run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))

    def register(run: Run) -> None:
        run.amp.on_applied(lambda: None)

    for change, said in (
        (lr, "its learning rate, changed"), (lambda run: run.net.eval(), "training mode of a module changed"),
        (load, "place of weights, optimizer state or loss scale changed"), (register, "on_applied function registered since"),
        (lambda run: run.net[0].weight.requires_grad_(False), "requires_grad of a parameter changed"),
    ):  # fmt: skip
        run, call = captured()
        change(run)
        with pytest.raises(StepError, match=said):
            call(x, one)
    run, call = captured()
    with pytest.raises(StepError, match=r"called with fp32\[2,3,8\] sim:0, and was captured with fp32\[2,6,8\] sim:0"):
        call(x[:, :3], one)
    with pytest.raises(StepError, match="nested otherwise"):
        call(x, factor=one)
    run.step(x[:, :3], one)  # the function itself takes the batch
    call(x, one)
    run.amp.zero_grad()
    run.amp.backward(run.net(x[0]).float().square().mean())
    with pytest.raises(StepError, match="called after backward"):
        call(x, one)


def other_threads_pin_memory_while_a_step_is_captured() -> None:
    """As a loader's do for the next batch: it is no part of the step, and does not end the capture."""
    run, pinned = Run("bf16", "torch.AdamW"), []

    def step(x: Tensor, factor: Tensor) -> None:
        thread = threading.Thread(target=lambda: pinned.append(torch.ones(2).pin_memory()))
        thread.start()
        thread.join()
        run.step(x, factor)

    call = run.amp.capture(step)
    for _ in range(5):
        call(DATA[0].to("sim"), torch.ones((), device="sim"))
    assert len(pinned) == 4 and call.num_replayed == 2
