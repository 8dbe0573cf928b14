"""Optimizers of mezzo's where torch's own kernels take their step: as few launches, their bits or the reference's."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from tests.device import sim
from tests.device.program import model
from torch import Tensor, nn

import mezzo

RIVALS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "AdamW": (mezzo.optim.AdamW, torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True}),
    "Adam": (mezzo.optim.Adam, torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
    "SGD": (mezzo.optim.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "plain SGD": (mezzo.optim.SGD, torch.optim.SGD, {}),
}


def a_device_that_mezzo_has_no_kernel_for_takes_torchs_fused_one() -> None:
    """The bits of torch's optimizer with fused=True, in as few launches; rates on the host, on the device and as numbers."""
    for (name, (ours, theirs, options)), lr in itertools.product(
        RIVALS.items(), (2.0**-7, torch.tensor(2.0**-7), torch.tensor(2.0**-7).to("sim"))
    ):
        found, launches = [], []
        for kind, more in ((ours, {}), (theirs, {"fused": True})):
            net = model().to("sim")
            optimizer = kind(net.parameters(), lr=lr if kind is ours else 2.0**-7, **options, **more)
            for x in torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(1)).to("sim"):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                versions = [p._version for p in net.parameters()]
                with sim.watching() as seen:
                    optimizer.step()
                assert not seen.stops + seen.waits, seen.stops + seen.waits
                if kind is ours:
                    assert all(p._version > was for p, was in zip(net.parameters(), versions, strict=True))
            launches.append(seen.launches.total())
            found.append([p.tolist() for p in net.parameters()])
        assert found[0] == found[1], name
        assert launches[0] <= launches[1] + 2, (name, launches)
    assert "fused, not cpu: it is for CPU; not triton" in ours(net.parameters()).why()[0]


def masters_of_16_bit_weights_are_stepped_by_torchs_fused_kernel() -> None:
    """Close to the reference's way, in fewer launches; a bad step leaves every bit."""
    for mode, policy in (("split", "bf16-master"), ("kahan", "bf16-master, master=kahan"), ("fp32", "fp16-master")):
        for kind in (mezzo.optim.AdamW, mezzo.optim.SGD):
            masters, launches = [], []
            for backend in ("auto", "reference"):
                net = model().to("sim")
                optimizer = kind(net.parameters(), lr=1e-2, master=mode, backend=backend)
                amp = mezzo.prepare(net, optimizer, f"{policy}, guard.check_every=0, scaling=none")
                for x in (1.0, 1.0, math.inf, 1.0):
                    amp.zero_grad()
                    before = [p.float().tolist() for p in net.parameters()]
                    amp.backward(net(torch.ones(6, 8, device="sim") * 0.1).float().square().mean() * x)
                    with sim.watching() as seen:
                        amp.step(max_norm=0.1)
                    assert ([p.float().tolist() for p in net.parameters()] == before) is (x == math.inf)
                masters.append(torch.cat([optimizer.master(p).flatten().cpu() for p in net.parameters()]))
                launches.append(seen.launches.total())
            torch.testing.assert_close(*masters, rtol=2.0**-20, atol=2.0**-20)
            assert launches[0] < (0.6 if kind is mezzo.optim.AdamW else 1.0) * launches[1], (mode, kind, launches)


def dampened_sgd_is_stepped_end_to_end() -> None:
    """Close to torch's, in half of the reference's launches for six weights; a bad first step leaves every bit, and is not the first."""
    options = {"lr": 0.05, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}
    for maximize in (False, True):
        found, launches = [], []
        for backend in ("auto", "reference", "torch"):
            net = model().to("sim")
            optimizer = (
                torch.optim.SGD(net.parameters(), maximize=maximize, **options)
                if backend == "torch"
                else mezzo.optim.SGD(net.parameters(), maximize=maximize, backend=backend, **options)
            )
            amp = mezzo.prepare(net, optimizer, "fp32, guard.check_every=0")
            for factor in (math.inf, 1.0, 1.0, 1.0):
                amp.zero_grad()
                amp.backward(net(torch.ones(6, 8, device="sim")).square().mean() * factor)
                with sim.watching() as seen:
                    amp.step()
                sim.land()
            launches.append(seen.launches.total())
            found.append(torch.cat([p.flatten().cpu() for p in net.parameters()]))
        assert amp.counters().skipped == 1
        for other in found[1:]:
            torch.testing.assert_close(found[0], other, rtol=2.0**-20, atol=2.0**-22)
        assert launches[0] < 0.5 * launches[1], launches


MODES = (
    ("none", torch.float32),
    ("split", torch.bfloat16),
    ("fp32", torch.float16),
    ("kahan", torch.bfloat16),
    ("stochastic", torch.bfloat16),
)
STEPPED: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW, bf16 moments": (mezzo.optim.AdamW, {"state_dtype": torch.bfloat16, "amsgrad": True}),
    "Adam, bf16 moments": (mezzo.optim.Adam, {"state_dtype": torch.bfloat16, "weight_decay": 0.1, "maximize": True}),
    "SGD, bf16 sums": (mezzo.optim.SGD, {"state_dtype": torch.bfloat16, "momentum": 0.9, "nesterov": True}),
    "SGD, dampened": (mezzo.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "AdamW": (mezzo.optim.AdamW, {}),
    "SGD": (mezzo.optim.SGD, {"momentum": 0.9}),
}


def stepped(name: str, mode: Any, dtype: torch.dtype, backend: Any, count: int) -> tuple[list[Tensor], int]:
    """Take four steps with many weights, the second bad, one weight without a gradient in the third; return weights and state."""
    kind, options = STEPPED[name]
    generator = torch.Generator().manual_seed(2)
    params = [nn.Parameter(torch.randn(3, 5 + index, generator=generator).to("sim", dtype)) for index in range(count)]
    optimizer = kind(params, lr=2.0**-7, master=mode, backend=backend, **options)
    for number in range(4):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to("sim", dtype)
        if number == 2:
            params[1].grad = None
        optimizer.found_inf = torch.full((), float(number == 1)).to("sim")
        with sim.watching() as seen:
            optimizer.step()
        assert not seen.stops + seen.waits, seen.stops + seen.waits
    held = [v for p in params for v in (p.detach(), *optimizer.state[p].values())]
    return [tensor.float().cpu() for tensor in held], seen.launches.total()


def many_weights_are_stepped_in_the_launches_of_few() -> None:
    """By torch's own kernels, whatever keeps weights and moments; where no kernel of torch's computes, with the reference's bits."""
    for name, (mode, dtype) in itertools.product(STEPPED, MODES):
        found, launches = stepped(name, mode, dtype, "auto", 10)
        assert launches == stepped(name, mode, dtype, "auto", 4)[1] <= 180, (name, mode, launches)
        expected, one_by_one = stepped(name, mode, dtype, "reference", 10)
        assert launches < one_by_one / 2, (name, mode, launches, one_by_one)
        if name in ("AdamW", "SGD"):  # torch's fused kernels round elsewhere than its other ones
            continue
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert one.equal(other), (name, mode, index, one - other)


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
