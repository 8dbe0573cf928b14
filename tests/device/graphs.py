"""What must hold of captured steps, one function each; test_device.py runs them by name in one process.

A graph of the simulated device is its launches, written down with the addresses they were given. Capturing runs nothing; a
replay that finds an address freed is an error, and memory of the graph holds NaN before the first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.device import graph_refusals, sim
from tests.device.captured_runs import DATA, KINDS, SCALING, Run, capturable_adamw, model
from tests.device.checks import run_by_name
from tests.device.names import GRAPH_CHECKS
from tests.device.program import OPTIMIZERS
from torch import Tensor, nn

import mezzo
from mezzo.casting import weight_casts
from mezzo.errors import NonFiniteStep
from mezzo.kernels import constant


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


def sgd_step(net: nn.Module) -> tuple[Any, Callable[[Tensor], Tensor]]:
    """Return a model prepared with SGD, and its step on a batch: returns the loss."""
    amp = mezzo.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1, fused=True), "bf16, guard.check_every=0")

    def step(x: Tensor) -> Tensor:
        amp.zero_grad()
        loss = net(x).float().square().mean()
        amp.backward(loss)
        amp.step()
        return loss.detach()

    return amp, step


def norms_take_the_host_little_and_a_graph_the_device() -> None:
    """Of a training on an accelerator norms are torch's ops while the host launches them, and mezzo's kernel in steps that a graph will launch."""
    for norm in (nn.LayerNorm(2048), nn.RMSNorm(2048)):
        net = nn.Sequential(nn.Linear(8, 2048), norm, nn.Linear(2048, 8)).to("sim")
        amp, step = sgd_step(net)
        x, captured = torch.randn(9, 8).to("sim"), amp.capture(step)
        with sim.triton_kernels():
            for call, count in ((step, 0), (captured, 1), (step, 0), (captured, 1)):
                with sim.watching() as seen:
                    call(x)
                found = [seen.launches[f"triton::layer_norm{way}_kernel"] for way in ("", "_backward")]
                assert found == [count, count], (norm, seen.launches)
            with torch.no_grad():
                assert torch.equal(net.train()(x), net.eval()(x))  # a checkpoint's first run is its second's


class CastsItsScale(nn.Linear):
    """Casts a buffer of its own to what it computes in."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        self.scale = self.scale.to(h.dtype)
        return h * self.scale


def what_a_forward_casts_of_its_own_stays_where_a_graph_reads_it() -> None:
    losses = []
    for is_captured in (False, True):
        torch.manual_seed(0)
        net = CastsItsScale().to("sim")
        before = net.scale.clone()
        amp, step = sgd_step(net)
        call = amp.capture(step) if is_captured else step
        x, seen = torch.ones(9, 8).to("sim"), []
        for _ in range(3):
            seen.append(float(call(x)))
        scale = net.scale
        for _ in range(5):
            torch.full((8,), torch.nan, device="sim")  # where memory was freed
            seen.append(float(call(x)))
        assert torch.equal(net.scale, before) and net.scale.dtype is torch.float32
        assert not is_captured or net.scale.data_ptr() == scale.data_ptr()
        losses.append(seen)
    assert losses[0] == losses[1]


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
    with sim.triton_kernels():
        pass  # imported so, Triton's own functions can be interpreted
    run_by_name({**globals(), **vars(graph_refusals)}, GRAPH_CHECKS)


if __name__ == "__main__":
    main()
