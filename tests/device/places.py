"""Several devices, streams and threads in one process: nothing is read, written or launched where it does not belong."""

from __future__ import annotations

import copy
import functools
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tests.device import sim
from tests.device.program import model, run
from torch import Tensor, nn

import mezzo
from mezzo._torch import num_function_modes
from mezzo.casting.cast_cache import WeightCastCache
from mezzo.kernels import device_numbers, registry


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
            assert steps(two, kind(two.parameters(), lr=1e-2, backend="reference"), policy) == expected


def a_rate_on_another_device_is_not_read() -> None:
    for kind, backend in ((mezzo.optim.AdamW, "auto"), (mezzo.optim.SGD, "auto"), (mezzo.optim.AdamW, "reference")):
        found = []
        for lr in (2.0**-7, torch.tensor(2.0**-7, device="sim:0")):
            net = model().to("sim:1")
            optimizer = kind(net.parameters(), lr=lr, backend=backend)
            for x in torch.ones(2, 6, 8, device="sim:1"):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                with sim.watching() as seen:
                    optimizer.step()
            assert not seen.stops + seen.waits, seen.stops + seen.waits
            found.append([p.tolist() for p in net.parameters()])
        assert found[0] == found[1], (kind, backend)


def a_scale_is_not_used_on_the_host_before_it_is_there() -> None:
    """A loss and gradients on the CPU under a scale that lies on the device: it is waited for."""
    scaler = mezzo.GradScaler("sim", init_scale=8.0)
    scaler.scale(torch.ones((), device="sim"))
    assert scaler.scale(torch.full((), 3.0)).item() == 24.0
    net = Halves("cpu", "sim:0")
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    for _ in range(2):  # the second pass adds to gradients of the first, at another scale
        loss = net.second(net.first(torch.ones(2, 8)).to("sim:0")).square().mean()
        scaler.scale(loss).backward()
        scaler.update(4.0)
    scaler.unscale_(optimizer)
    grads = [p.grad.cpu() for p in net.parameters()]
    optimizer.zero_grad()
    (2 * net.second(net.first(torch.ones(2, 8)).to("sim:0")).square().mean()).backward()
    for grad, p in zip(grads, net.parameters(), strict=True):
        torch.testing.assert_close(grad, p.grad.cpu())


def losses_by_two_streams(*, waits: bool) -> list[list[float]]:
    """Train two models alike, each in a stream of its own; what is uploaded is there for the stream of the copy alone."""
    first = torch.accelerator.current_stream("sim:0")
    streams = [torch.Stream("sim:0"), torch.Stream("sim:0")] if waits else [first, first]
    nets = [model().to("sim"), model().to("sim")]
    amps = []
    for net, stream in zip(nets, streams, strict=True):
        with stream:
            optimizer = mezzo.optim.AdamW(net.parameters(), lr=2.0**-7, state_dtype=torch.bfloat16)
            amps.append(mezzo.prepare(net, optimizer, "fp16, state=bf16, guard.check_every=0, scaling.init_scale=256"))
    losses: list[list[Tensor]] = [[], []]
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)).to("sim")
    for batch in x:
        for net, amp, stream, found in zip(nets, amps, streams, losses, strict=True):
            with stream:
                amp.zero_grad()
                loss = net(batch).float().square().mean()
                amp.backward(loss)
                amp.step(max_norm=0.5)
                found.append(loss.detach())
    torch.accelerator.synchronize("sim:0")
    return [[loss.item() for loss in found] for found in losses]


def tables_are_not_lent_to_another_stream() -> None:
    """What one stream has uploaded is nothing to another that has not waited; a cache that knows no streams is found out."""
    expected = losses_by_two_streams(waits=False)
    with sim.late_uploads():
        assert losses_by_two_streams(waits=True) == expected
        own, device_numbers.stream_number = device_numbers.stream_number, lambda _: -1
        try:
            spoilt = losses_by_two_streams(waits=True)
        except Exception:
            spoilt = [[]]
        finally:
            device_numbers.stream_number = own
    assert spoilt != expected
    assert expected[0] == expected[1]


def a_table_in_use_is_not_written_when_a_cache_drops_it() -> None:
    """An optimizer whose steps alternate between streams, while the caches turn over: each launch finds its own table."""
    expected, found = [], []
    for losses, streams in (
        (expected, [torch.accelerator.current_stream("sim:0")]), (found, [torch.Stream("sim:0"), torch.Stream("sim:0")])
    ):  # fmt: skip
        net = model().to("sim")
        optimizer = mezzo.optim.AdamW(net.parameters(), lr=2.0**-7, state_dtype=torch.bfloat16)
        with sim.late_uploads():
            for index in range(6):
                stream = streams[index % len(streams)]
                stream.wait_stream(streams[(index - 1) % len(streams)])
                with stream:
                    optimizer.zero_grad()
                    loss = net(torch.ones(6, 8, device="sim")).square().mean()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.detach())
                    for number in range(70):
                        device_numbers.table((number,), torch.device("sim:0"))
        torch.accelerator.synchronize("sim:0")
    assert [loss.item() for loss in found] == [loss.item() for loss in expected]


def kept_casts_belong_to_a_stream() -> None:
    """Nobody waits for the stream that made one, so another makes its own; and neither writes over what the other reads."""
    weight, cache = nn.Parameter(torch.ones(4, device="sim")), WeightCastCache()
    streams = [torch.Stream("sim:0"), torch.Stream("sim:0")]

    def casts() -> list[Tensor]:
        found = []
        for stream in streams:
            with stream, torch.no_grad():
                found.append(cache.cast(weight, torch.bfloat16))
        return found

    one, other = casts()
    assert one.data_ptr() != other.data_ptr()
    assert [cast.data_ptr() for cast in casts()] == [one.data_ptr(), other.data_ptr()]
    with torch.no_grad():
        weight.fill_(2.0)
        with streams[1]:
            cache.cast(weight, torch.bfloat16)
    assert one.tolist() == [1.0] * 4 and other.tolist() == [2.0] * 4


@contextmanager
def sentences(logger: str) -> Iterator[list[str]]:
    """What a logger says inside the block."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    yield said
    logging.getLogger(logger).removeHandler(handler)


def an_optimizer_that_torch_could_fuse_is_named() -> None:
    """Its steps are copied, to be undone; one that is fused, mezzo's, and one that torch cannot fuse say nothing."""
    logging.getLogger("mezzo.step").setLevel(logging.INFO)
    for policy, make, expected in (
        ("bf16", torch.optim.AdamW, 1),
        ("bf16", functools.partial(torch.optim.AdamW, fused=True), 0),
        ("bf16-master", torch.optim.AdamW, 0),
        ("bf16", mezzo.optim.AdamW, 0),
        ("bf16", torch.optim.Rprop, 0),
    ):
        net = model().to("sim")
        with sentences("mezzo.step") as said:
            mezzo.prepare(net, make(net.parameters()), policy)
        found = [one for one in said if "write torch.optim.AdamW(..., fused=True)" in one]
        assert len(found) == expected, (policy, make, said)


def a_device_on_which_triton_fails_is_told_from_others() -> None:
    """As an old GPU beside a new one: the new one keeps its kernels."""
    with sim.triton_kernels(RuntimeError("too old"), on=1):
        chosen = [registry.choose("decision", torch.device("sim", index), torch.float32).backend for index in (0, 1)]
    assert chosen == ["triton", "reference"]


class _Matrix(nn.Module):
    """Multiplies by a parameter of its own, and notes how many function modes see that."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.modes = nn.Parameter(torch.randn(8, 8)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.modes = num_function_modes()
        return x @ self.matrix


class _Look(nn.Module):
    """Notes how many function modes see its ops."""

    def forward(self, x: Tensor) -> Tensor:
        self.modes = num_function_modes()
        return x


def modules_take_kept_casts_by_themselves() -> None:
    """Of linear layers and convolutions no mode sees the ops; the results are those without kept casts, and a changed weight is cast anew."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(6, 6, 1), nn.Linear(8, 8), nn.ReLU(), _Look(), _Matrix(), nn.Linear(8, 4)).to("sim")
    nets = {"region": copy.deepcopy(net), "persistent": net}
    amps = {
        cache: mezzo.prepare(one, torch.optim.SGD(one.parameters(), lr=0.5, fused=True), "bf16", cache=cache)
        for cache, one in nets.items()
    }
    x = torch.randn(5, 6, 8).to("sim")

    def launches(cache: str) -> Counter[str]:
        with sim.watching() as seen, torch.no_grad():
            nets[cache](x)
        return seen.launches

    def same() -> bool:
        return torch.equal(nets["region"](x), nets["persistent"](x))

    assert same()
    assert (net[3].modes, net[4].modes) == (0, 1)
    assert launches("region") - launches("persistent") == {"aten::copy_": 7}
    for change in (
        lambda one: one[1].weight.mul_(2.0),
        lambda one: one[4].matrix.add_(1.0),
        lambda one: one[0].bias.zero_(),
    ):
        with torch.no_grad():
            for one in nets.values():
                change(one)
            assert same()
    for _ in range(3):  # a fused step moves no version
        for cache, amp in amps.items():
            amp.zero_grad()
            amp.backward(nets[cache](x).square().mean())
            amp.step()
        assert same()
        assert all(torch.equal(p, q) for p, q in zip(*(one.parameters() for one in nets.values()), strict=True))
    alone = mezzo.prepare(nn.Sequential(nn.Linear(8, 8)).to("sim"), None, "bf16", cache="persistent").model
    for number in range(20):  # the new weight may come to lie where the old one lay
        del alone[0].weight
        alone[0].weight = nn.Parameter(torch.full((8, 8), float(number), device="sim"))
        with torch.no_grad(), torch.autocast("sim", torch.bfloat16):
            assert torch.equal(alone(x).float(), nn.functional.linear(x, alone[0].weight, alone[0].bias).float())
