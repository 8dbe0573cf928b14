"""Tools that are off cost nothing: no hook, no mode, no allocation, and not one op more."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import torch
from tests.step.test_interrupted import interrupted
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import mezzo
import mezzo.diagnose as diagnose

TOOLS = Path(diagnose.__file__).parent


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).relu())


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def prepared() -> mezzo.Stepper:
    model = Net()
    optimizer = mezzo.optim.AdamW(model.parameters())
    return mezzo.prepare(model, optimizer, "bf16, output=fp32, guard.check_every=0")


def step(amp: mezzo.Stepper, x: Tensor) -> None:
    amp.zero_grad()
    amp.backward(amp.model(x).square().mean())
    amp.step()


def ops(amp: mezzo.Stepper, x: Tensor) -> list[str]:
    with Ops() as mode:
        step(amp, x)
    return mode.seen


def use_every_tool(amp: mezzo.Stepper, x: Tensor) -> None:
    with diagnose.trace(amp.model):
        step(amp, x)
    with diagnose.watch(amp, every=1):
        step(amp, x)
    with diagnose.watch(Net()):
        pass
    diagnose.lint(Net(), x, policy="bf16")
    diagnose.compare(Net(), x, None, "bf16", tries=0)
    diagnose.explain(Net(), x, "bf16", budget_s=0.001)


def test_nothing_is_left_on() -> None:
    amp, x = prepared(), torch.randn(6, 8)
    hooks = (
        module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks, module_hooks._global_backward_hooks,
        optimizer_hooks._global_optimizer_pre_hooks, optimizer_hooks._global_optimizer_post_hooks,
    )  # fmt: skip
    for _ in range(3):
        step(amp, x)  # the first steps do more: they learn what the next ones reuse
    before, wanted = [len(h) for h in hooks], ops(amp, x)
    use_every_tool(amp, x)
    assert [len(h) for h in hooks] == before
    assert not _get_current_dispatch_mode_stack() and not _get_current_function_mode_stack()
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in amp.model.modules())
    assert not any(p._post_accumulate_grad_hooks or p._backward_hooks for p in amp.model.parameters())
    assert ops(amp, x) == wanted


def test_a_healthy_step_allocates_nothing_for_them() -> None:
    amp, x = prepared(), torch.randn(6, 8)
    use_every_tool(amp, x)
    step(amp, x)
    tracemalloc.start(1)
    try:
        for _ in range(3):
            step(amp, x)
        taken = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    files = {trace.traceback[0].filename for trace in taken.traces}
    assert any("mezzo/step" in file for file in files), "the snapshot sees the step"
    assert [file for file in files if file.startswith(str(TOOLS)) or file.endswith("step/replay.py")] == []


def test_a_watch_that_is_interrupted_as_it_begins_leaves_nothing_on() -> None:
    def on() -> list[int]:
        of_steps = optimizer_hooks._global_optimizer_pre_hooks, optimizer_hooks._global_optimizer_post_hooks
        of_weights = [p._post_accumulate_grad_hooks or () for p in model.parameters()]  # type: ignore[attr-defined]
        return [*map(len, (*of_steps, *of_weights, *(m._forward_hooks for m in model.modules())))]

    model, at, made, left = Net(), 0, list[diagnose.Watch](), list[int]()
    before = on()
    while interrupted(lambda: made.append(diagnose.watch(model)), at):
        left += [at] if on() != before else []
        at += 1
        assert len(left) < 2, left  # it is made, and handed over by the last line
    assert left in ([], [at - 1]) and at > 50 and on() != before
    made[0].close()
