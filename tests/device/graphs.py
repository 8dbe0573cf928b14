"""What must hold of captured steps, one function each; test_device.py runs them by name in one process.

A graph of the simulated device is its launches, written down with the addresses they were given. Capturing runs nothing; a
replay that finds an address freed is an error, and memory of the graph holds NaN before the first.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.device import sim
from tests.device.checks import run_by_name
from tests.device.names import GRAPH_CHECKS
from tests.device.program import OPTIMIZERS, declared
from tests.device.undone_steps import Whitening
from torch import Tensor, nn

import mezzo
from mezzo.casting import weight_casts
from mezzo.errors import NonFiniteStep, StepError
from mezzo.step.accumulation import constant

DATA = torch.randn(14, 2, 6, 8, generator=torch.Generator().manual_seed(1))
SCALING = ", scaling.init_scale=1024, scaling.growth_interval=2"


def capturable_adamw(params: Any, policy: str) -> Any:
    inner = torch.optim.AdamW(params, lr=1e-2, fused=True, capturable=True)
    return mezzo.optim.MasterWeights(inner) if policy.endswith("master") else inner


def capturable_adam(params: Any, policy: str) -> Any:
    """One that cannot leave out a step by itself."""
    inner = torch.optim.Adam(params, lr=1e-2, foreach=True, capturable=True)
    return mezzo.optim.MasterWeights(inner) if policy.endswith("master") else inner


KINDS: dict[str, Callable[[Any, str], Any]] = {
    "torch.AdamW": capturable_adamw,
    "torch.Adam": capturable_adam,
    "mezzo.AdamW": OPTIMIZERS["mezzo.AdamW"],
    "mezzo.SGD": OPTIMIZERS["mezzo.SGD"],
    "torch.SGD": OPTIMIZERS["torch.SGD"],
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(),
        nn.Linear(16, 4),
    )  # fmt: skip


class Run:
    """A prepared model and the function that takes its step."""

    def __init__(self, policy: str, kind: str, way: str = "plain", net: nn.Module | None = None, device: str = "sim"):
        self.net = (model() if net is None else net).to(device)
        scaling = SCALING if policy.startswith("fp16") else ""
        words = declared(policy, kind) if kind == "torch.AdamW" else policy
        if policy == "bf16-master" and kind in ("torch.SGD", "torch.Adam"):
            words = "bf16-master, master=fp32"
        self.optimizer = KINDS[kind](self.net.parameters(), policy)
        self.amp = mezzo.prepare(self.net, self.optimizer, words + scaling)
        self.way = way

    def step(self, x: Tensor, factor: Tensor) -> tuple[Tensor, mezzo.StepResult]:
        self.amp.zero_grad()
        for part in x.unbind() if self.way == "accumulation" else x[:1].unbind():
            loss = self.net(part).float().square().mean() * factor
            self.amp.backward(loss)
        return loss.detach(), self.amp.step(max_norm=0.5 if self.way == "clip" else None)

    def state(self) -> list[Any]:
        counters, scale = self.amp.counters(), self.amp.scale
        tensors = [*self.net.parameters(), *self.net.buffers()]
        tensors += [v for entry in self.optimizer.state.values() for v in entry.values() if isinstance(v, Tensor)]
        return [counters, scale, *(tensor.float().tolist() for tensor in tensors)]


def factors(*bad: int) -> list[float]:
    return [math.inf if index in bad else 1.0 for index in range(len(DATA))]


def steps(run: Run, call: Callable[..., Any], values: list[float]) -> list[Any]:
    """Return losses and results of steps."""
    torch.manual_seed(3)
    x, given = DATA.to("sim"), torch.tensor(values).to("sim")
    done = [call(x[index], given[index]) for index in range(len(values))]
    return [(loss.tolist(), r.applied, r.scale, r.grad_norm, r.skipped_in_a_row, dict(r.nonfinite)) for loss, r in done]


def same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)  # NaN is NaN


FEW = [("fp16", "mezzo.AdamW", "clip"), ("bf16", "torch.Adam", "plain"), ("bf16-master", "mezzo.AdamW", "accumulation")]
MANY = [
    *itertools.product(("bf16", "fp16"), KINDS, ("plain",)),
    *itertools.product(("fp32", "bf16-master", "fp16-master"), ("torch.AdamW", "mezzo.AdamW"), ("plain",)),
    *itertools.product(("fp16", "bf16-master"), ("torch.AdamW", "mezzo.AdamW"), ("clip", "accumulation")),
]


def many_replays_are_eager_steps() -> None:
    replays_are_eager_steps(MANY)


def replays_are_eager_steps(runs: Sequence[tuple[str, str, str]] = FEW) -> None:
    """Bit for bit: losses, results, weights, buffers, state, counters, scale; bad steps and growing scales among them."""
    for policy, kind, way in runs:
        eager, graphed = Run(policy, kind, way), Run(policy, kind, way)
        captured = graphed.amp.capture(graphed.step)
        expected = steps(eager, eager.step, factors(8))
        found = steps(graphed, captured, factors(8))
        named = [(*e[:5], e[5].keys()) for e in expected], [(*f[:5], f[5].keys()) for f in found]
        assert same(*named), (policy, kind, way, *(pair for pair in zip(*named, strict=True) if not same(*pair)))
        assert same(eager.state(), graphed.state()), (policy, kind, way)
        assert captured.num_replayed >= 6, (policy, kind, way, captured.num_replayed)
        assert found[8][1] is False and found[9][1] is True


def a_replay_is_one_launch_and_stops_for_nothing() -> None:
    """Beside copies: of the arguments, of what the function returns, of norms and flags."""
    run = Run("fp16", "mezzo.AdamW", "clip")
    captured = run.amp.capture(run.step)
    x, factor = DATA.to("sim"), torch.ones((), device="sim")
    for index in range(4):
        captured(x[index], factor)
        sim.land()
    assert captured.num_replayed == 1
    with sim.watching() as seen:
        captured(x[5], factor)
    assert not seen.stops + seen.waits, seen.stops + seen.waits
    assert seen.launches.pop("graph") == 1 and set(seen.launches) <= {"aten::copy_", "aten::clone"}, seen.launches
    with sim.watching() as late:  # nothing has landed since: the host waits for the step before the last, once
        captured(x[6], factor)
    with sim.watching() as late:
        captured(x[7], factor)
    assert len(late.waits) == 1 and not late.stops, late
    assert captured.num_replayed == 4 and run.amp.counters().seen == 7


def tables_of_a_graph_live_as_long_as_it() -> None:
    """Triton's kernels read addresses that the host fills; meanwhile the caches of tables turn over, and memory is freed."""
    for policy, kind in (("bf16-master", "mezzo.AdamW by Triton"), ("fp16", "torch.AdamW")):
        make = {**OPTIMIZERS, **KINDS}[kind]
        losses = []
        with sim.triton_kernels():
            for is_captured in (False, True):
                net = model().to("sim")
                amp = mezzo.prepare(net, make(net.parameters(), policy), policy + (SCALING if policy == "fp16" else ""))

                def step(x: Tensor, amp: Any = amp, net: nn.Module = net) -> Tensor:
                    amp.zero_grad()
                    loss = net(x).float().square().mean()
                    amp.backward(loss)
                    amp.step(max_norm=0.5)
                    return loss.detach()

                call = amp.capture(step) if is_captured else step
                torch.manual_seed(3)
                found = []
                for index, x in enumerate(DATA[:8, 0].to("sim")):
                    found.append(call(x).item())
                    for number in range(70 if index > 3 else 0):
                        constant(float(number), torch.device("sim:0"))
                losses.append(found)
                assert not is_captured or call.num_replayed == 5
        assert losses[0] == losses[1], (policy, kind, losses)


def memory_that_a_graph_reads_is_missed_when_freed() -> None:
    """That the simulated graph would see it, which the checks above rest on."""
    x, out = torch.ones(4, device="sim"), torch.zeros(4, device="sim")
    graph = torch.accelerator.Graph()
    graph.capture_begin()
    out.copy_(x * 2)
    graph.capture_end()
    assert out.tolist() == [0.0] * 4
    graph.replay()
    x.fill_(3.0)
    graph.replay()
    assert out.tolist() == [6.0] * 4
    del x
    with pytest.raises(RuntimeError, match="memory that was freed"):
        graph.replay()


def kept_casts_are_made_inside_the_graph() -> None:
    """A forward before the capture leaves casts of the weights as they are then, which no replay may read."""
    losses: list[list[float]] = []
    for is_captured in (False, True):
        net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).to("sim")
        for p in net.parameters():
            nn.init.constant_(p, 0.1)
        amp = mezzo.prepare(net, capturable_adamw(net.parameters(), ""), "bf16, ops=mezzo", cache="persistent")

        def forward(x: Tensor, net: nn.Module = net) -> Tensor:
            return net(x).float().square().mean()

        def step(x: Tensor, amp: Any = amp, forward: Callable[[Tensor], Tensor] = forward) -> Tensor:
            amp.zero_grad()
            loss = forward(x)
            amp.backward(loss)
            amp.step()
            return loss.detach()

        call = amp.capture(step) if is_captured else step
        found = []
        for index, x in enumerate(DATA[:8, 0].to("sim")):
            found.append(call(x).item())
            if index in (2, 6):  # just before the capture, and between replays
                with torch.no_grad():
                    found.append(forward(x).item())
                assert weight_casts.nbytes() > 0
        losses.append(found)
    assert losses[0] == losses[1], losses


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


def a_rate_on_the_device_is_scheduled_between_replays() -> None:
    for kind in ("torch", "mezzo"):
        found = []
        for is_captured in (False, True):
            net = model().to("sim")
            rate = torch.tensor(1e-2, device="sim")
            optimizer = (
                torch.optim.AdamW(net.parameters(), lr=rate, fused=True, capturable=True)
                if kind == "torch"
                else mezzo.optim.AdamW(net.parameters(), lr=rate, backend="reference")
            )
            amp = mezzo.prepare(net, optimizer, "bf16")
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

            def step(x: Tensor, amp: Any = amp, net: nn.Module = net) -> Tensor:
                amp.zero_grad()
                loss = net(x).float().square().mean()
                amp.backward(loss)
                amp.step()
                return loss.detach()

            call = amp.capture(step) if is_captured else step
            torch.manual_seed(3)
            losses = []
            for x in DATA[:8, 0].to("sim"):
                losses.append(call(x).item())
                scheduler.step()
            found.append(losses)
        assert found[0] == found[1], (kind, found)


def a_run_that_cannot_go_on_stops_while_it_is_replayed() -> None:
    """After guard.patience skipped steps, with the names of the gradients; nothing was harmed meanwhile."""
    run = Run("bf16, guard.patience=4", "torch.AdamW")
    call = run.amp.capture(run.step)
    x, good, bad = DATA[0].to("sim"), torch.ones((), device="sim"), torch.full((), math.inf, device="sim")
    for _ in range(6):
        call(x, good)
    before = [p.tolist() for p in run.net.parameters()]
    with pytest.raises(NonFiniteStep, match="4 steps in a row were skipped") as stopped:
        for _ in range(8):
            call(x, bad)
    assert [p.tolist() for p in run.net.parameters()] == before
    assert run.amp.counters().skipped == 4, stopped.value


def main() -> None:
    run_by_name(globals(), GRAPH_CHECKS)


if __name__ == "__main__":
    main()
