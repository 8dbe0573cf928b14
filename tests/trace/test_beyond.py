"""What a trace does beside what is not its own: the program's modes, its compiled code, its threads, memory written past torch."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import mezzo.diagnose as diagnose
from mezzo.trace.frames import source_line

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("is_outside", [True, False])
def test_a_mode_of_the_programs_own_sees_its_ops_and_none_of_the_tools(is_outside: bool) -> None:
    """A counter of operations, around the trace or inside it, on a step whose loss is multiplied and divided by numbers and overflows."""
    from torch.utils.flop_counter import FlopCounterMode

    def step() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid())
        with torch.autocast("cpu", dtype=torch.float16):
            y = model(torch.full((2, 8), 0.5)) / 3.0
        (y.float().log().sum() * 4.0).backward(retain_graph=True)
        (torch.rsqrt(y * 0.0).sum() * 1024.0).backward()

    with FlopCounterMode(display=False) as counted:
        step()
    alone = counted.get_total_flops()
    with FlopCounterMode(display=False) if is_outside else nullcontext() as around, diagnose.trace() as t:
        with nullcontext() if is_outside else FlopCounterMode(display=False) as inside:
            step()
    assert (around or inside).get_total_flops() == alone
    assert t.report.answer == "faulty" and t.report.faults[0].op == "rsqrt"


@pytest.mark.parametrize("is_outside", [True, False])
def test_a_function_mode_of_the_programs_own_that_passes_an_op_on_did_not_call_it(is_outside: bool) -> None:
    class Passing(TorchFunctionMode):
        def __torch_function__(
            self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            return func(*args, **kwargs or {})

    with Passing() if is_outside else nullcontext(), diagnose.trace() as t:
        with nullcontext() if is_outside else Passing():
            x = torch.zeros(3, requires_grad=True)
            x.log().sum().backward()  # the sick line
    frame = t.report.faults[0].frame
    assert frame is not None and source_line(frame).endswith("# the sick line")


def test_a_function_mode_of_the_programs_own_sees_its_calls_and_none_of_the_tools() -> None:
    class Counting(TorchFunctionMode):
        def __torch_function__(
            self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            called.append(func)
            return func(*args, **kwargs or {})

    def step() -> list[Any]:
        called.clear()
        with Counting():
            y = model(torch.ones(2, 4)).square().sum()
            torch.autograd.backward(y)
            optimizer.step()
        return list(called)

    called: list[Any] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone = step()
    with diagnose.trace(model):
        step()
        assert step() == alone


COMPILED = """
import sys, torch, mezzo
from torch import nn
assert "torch._dynamo" not in sys.modules
x, compile, held = torch.zeros(3, requires_grad=True), torch.compile, nn.Linear(3, 3)
with mezzo.diagnose.trace() as t:
    by_name = torch.compile
    @torch.compile(backend="eager", fullgraph=True)
    def loss(x):
        return (held(x) - held.bias).log().sum()
    loss(x).backward()
assert torch.compile is compile and t.report.faults[0].op == "log" and t.report.faults[0].frame.line == 10, t.report
calls = []
def backend(graph, inputs):
    calls.append(graph)
    return graph.forward
by_name(torch.sin, backend=backend)(x)
assert len(calls) == 1, "a program is left running eagerly"
"""


def test_a_function_compiled_inside_a_trace_is_seen_op_by_op_and_compiled_after() -> None:
    """In an interpreter of its own, where the compiler is loaded by the program's first use of it."""
    done = subprocess.run([sys.executable, "-c", COMPILED], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def in_a_thread(run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run, name="worker")
    thread.start()
    thread.join()


def training(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(torch.zeros(2, 4)) - 1.0).log().sum().backward()
    optimizer.step()


def test_what_runs_in_a_thread_of_its_own_is_not_called_healthy() -> None:
    model = nn.Linear(4, 4)
    with diagnose.trace() as t:
        training(nn.Linear(4, 4))
        in_a_thread(lambda: training(model))
    assert t.report.answer == "faulty"
    with diagnose.trace() as t:
        nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
        in_a_thread(lambda: training(model))
    assert t.report.answer == "not enough seen"
    assert t.report.unseen == (
        "modules were trained in the thread worker, whose ops were not seen: write `with mezzo.diagnose.trace(model)` there"
    )


def test_a_thread_that_trains_nothing_hinders_no_answer() -> None:
    has_begun, is_done = threading.Event(), threading.Event()

    class Teacher(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            has_begun.set()
            assert is_done.wait(10)
            return super().forward(x)

    class Student(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=teacher, args=(x,))
            thread.start()
            assert has_begun.wait(10)
            y = super().forward(x).log()
            is_done.set()
            thread.join()
            return y

    teacher, student = Teacher(4, 4).requires_grad_(False), Student(4, 4)
    nn.init.ones_(student.weight)
    for bias, answer in ((1.0, "healthy"), (-9.0, "faulty")):
        nn.init.constant_(student.bias, bias)
        with diagnose.trace() as t:
            student(torch.ones(2, 4)).sum().backward()
        assert t.report.answer == answer


def test_a_trace_in_a_thread_sees_it() -> None:
    reports: list[str] = []

    def run() -> None:
        with diagnose.trace() as t:
            training(nn.Linear(4, 4))
        reports.append(t.report.answer)

    in_a_thread(run)
    assert reports == ["faulty"]


def test_weights_that_no_op_made_nan_are_not_called_healthy() -> None:
    """Written past torch, through the memory that numpy shares."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: model.weight.detach().numpy().fill(math.nan))
    with diagnose.trace() as t:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    assert t.report.answer == "not enough seen"
    assert t.report.unseen == "inf or NaN reached parameter weight from where no op was seen"
