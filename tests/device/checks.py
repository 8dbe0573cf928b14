"""What must hold on an accelerator, one function each; test_device.py runs them by name in one process."""

from __future__ import annotations

import sys
import traceback
from typing import Any

import torch
from tests.device import sim
from tests.device.names import CHECKS
from tests.device.program import model, run
from torch import Tensor, nn

import mezzo
from mezzo import formats, random_state
from mezzo.step.replay import Replay
from mezzo.trace.diagnosis import preserve_state
from mezzo.train.batches import Batch
from mezzo.train.device import seed_rounding


def steps(net: nn.Module, optimizer: Any, policy: str = "bf16", count: int = 6, device: str = "sim") -> list[float]:
    """Take steps, none of whose copies to the host lands by itself, and return their losses."""
    amp = mezzo.prepare(net, optimizer, policy)
    data = torch.randn(count, 6, 8, generator=torch.Generator().manual_seed(1)).to(device)
    losses = []
    for x in data:
        amp.zero_grad()
        loss = net(x).float().square().mean()
        amp.backward(loss)
        amp.step()
        losses.append(loss.detach())
    assert amp.counters().applied == count
    return torch.stack(losses).tolist()


def flags_of_another_device_than_the_current_are_not_read_early() -> None:
    expected, _ = run("cpu", "bf16", "torch.AdamW", "plain")
    assert torch.accelerator.current_device_index() == 0
    found, seen = run("sim:1", "bf16", "torch.AdamW", "plain", lands=False)
    assert found == expected
    assert not seen.stops, seen.stops


def another_stream_than_the_default_works_alike() -> None:
    expected, _ = run("cpu", "bf16", "torch.AdamW", "plain")
    stream = torch.Stream(device="sim:0")
    torch.accelerator.set_stream(stream)
    try:
        found, seen = run("sim", "bf16", "torch.AdamW", "plain", lands=False)
    finally:
        torch.accelerator.set_stream(torch.Stream(stream_id=0, device_index=0, device_type=stream.device_type))
    assert found == expected
    assert not seen.stops, seen.stops


class Halves(nn.Module):
    """A model on two devices."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.first.to(first), self.second.to(second)
        self.devices = first, second

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu().to(self.devices[1], non_blocking=True)).to(self.devices[0])


def one_optimizer_steps_two_devices() -> None:
    for policy in ("bf16", "fp16"):
        for kind in (mezzo.optim.AdamW, mezzo.optim.SGD):
            one, two = Halves("cpu", "cpu"), Halves("sim:0", "sim:1")
            expected = steps(one, kind(one.parameters(), lr=1e-2, backend="reference"), policy, device="cpu")
            assert steps(two, kind(two.parameters(), lr=1e-2), policy) == expected


def a_rate_on_the_host_is_not_copied() -> None:
    for kind in (mezzo.optim.AdamW, mezzo.optim.SGD):
        net = model().to("sim")
        with sim.watching() as seen:
            lr = torch.tensor(0.01)
            amp = mezzo.prepare(net, kind(net.parameters(), lr=lr), "bf16, guard.check_every=0")
            amp.backward(net(torch.ones(6, 8, device="sim")).float().square().mean())
            seen.stops.clear()
            amp.step()
        assert not seen.stops, seen.stops


def a_batch_does_not_wait() -> None:
    batch = Batch(ids_BT=torch.ones(2, 8).long(), mask_BT=torch.ones(2, 8).long(), labels_B=torch.ones(2).long())
    with sim.watching() as seen:
        there = batch.to(torch.device("sim"))
    assert not seen.stops, seen.stops
    assert there.ids_BT.cpu().equal(batch.ids_BT)


def a_trace_does_not_look_at_what_has_not_landed() -> None:
    net = model().to("sim")
    with mezzo.diagnose.trace(net) as traced:
        steps(net, mezzo.optim.AdamW(net.parameters(), lr=1e-2))
    assert not traced.report.record.events, traced.report.record.events


def a_device_without_fp64_runs() -> None:
    sim.native.set_fp64(False)
    formats._WITHOUT_FP64.add("sim")
    try:
        net = model().to("sim")
        with mezzo.diagnose.trace(net):
            steps(net, mezzo.optim.AdamW(net.parameters(), lr=1e-2), "fp16, scaling.init_scale=1024")
    finally:
        sim.native.set_fp64(True)
        formats._WITHOUT_FP64.discard("sim")


def draws() -> list[Tensor]:
    return [torch.rand(4), *(torch.rand(4, device=device).cpu() for device in ("sim:0", "sim:1"))]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(a.equal(b) for a, b in zip(one, other, strict=True))


def random_state_of_every_device_is_given_back() -> None:
    net, state = nn.Linear(1, 1), random_state.get()
    first = draws()
    with preserve_state(net):
        draws()
    after = draws()
    random_state.set_(state)
    assert same(first, draws())
    assert same(after, draws())
    seed_rounding(1, 2)
    seeded = draws()
    seed_rounding(1, 2)
    assert same(seeded, draws())


def replay_knows_the_dropout_of_the_batch() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).to("sim")
    replay = Replay(net)
    replay.keep(net, (torch.ones(2, 4, device="sim"),), {})
    before = draws()
    random_state.set_(replay._now.calls[0].random)
    assert same(before, draws())


def a_checkpoint_goes_on_where_it_was() -> None:
    one, other = model().to("sim"), model().to("sim:1")
    amps = [
        mezzo.prepare(net, mezzo.optim.AdamW(net.parameters(), master="split"), "bf16-master") for net in (one, other)
    ]
    x = torch.randn(6, 8)

    def step(index: int) -> float:
        amp = amps[index]
        amp.zero_grad()
        loss = amp.model(x.to(next(amp.model.parameters()).device)).float().square().mean()
        amp.backward(loss)
        amp.step()
        return loss.item()

    step(0), step(0)
    amps[1].load_state_dict(amps[0].state_dict())
    assert [step(0), step(0)] == [step(1), step(1)]


def main() -> None:
    for name in CHECKS:
        try:
            globals()[name]()
            print(f"held {name}", flush=True)
        except Exception:
            print(f"failed {name}\n{traceback.format_exc()}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
