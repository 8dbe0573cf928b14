"""What must hold on an accelerator, one function each; test_device.py runs them by name in one process."""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.device import places, sim, torch_kernels, undone_steps
from tests.device.names import CHECKS, LOOKED_AT, PRESETS
from tests.device.places import steps
from tests.device.program import OPTIMIZERS, declared, model, run
from torch import Tensor, nn

import mezzo
from mezzo import formats, random_state
from mezzo.casting import weight_casts
from mezzo.diagnose.explain import _seconds
from mezzo.diagnose.watch import _is_taken
from mezzo.errors import ConfigError, StepError
from mezzo.kernels import registry
from mezzo.kernels.ops import gradients as reference
from mezzo.kernels.ops import layer_norm
from mezzo.step.replay import Replay
from mezzo.trace.diagnosis import preserve_state
from mezzo.train.evaluate import Batch, seed_dropout


def a_step_that_is_looked_at_reads_once() -> None:
    """The first ones, whose invariants are checked: one read of all that was counted, behind one wait for the flags."""
    for policy, optimizer in itertools.product(
        ("bf16", "fp16", "bf16-master"), ("torch.AdamW", "mezzo.AdamW", "torch.SGD")
    ):
        net = model().to("sim")
        amp = mezzo.prepare(net, OPTIMIZERS[optimizer](net.parameters(), policy), declared(policy, optimizer))
        for x in torch.randn(LOOKED_AT, 6, 8).to("sim"):
            with sim.watching() as seen:
                amp.zero_grad()
                amp.backward(net(x).float().square().mean())
                amp.step(max_norm=0.5)
            assert (len(seen.stops), len(seen.waits)) == (1, 1), (policy, optimizer, seen.stops)


def whether_a_step_was_taken_is_asked_without_waiting() -> None:
    optimizer = torch.optim.SGD(model().to("sim").parameters(), lr=torch.tensor(0.1, device="sim"))
    for found, taken in ((0.0, True), (1.0, False)):
        optimizer.found_inf = torch.tensor(found, device="sim")
        with sim.watching() as seen:
            is_moving = _is_taken(optimizer)
        assert not seen.stops + seen.waits and bool(is_moving) is taken, seen.stops


def what_is_timed_has_run() -> None:
    x, landed = torch.ones(4, device="sim"), torch.zeros(4).pin_memory()
    _seconds(lambda: [landed.copy_(x, non_blocking=True)].clear(), torch.device("sim:0"), 0.0)
    assert landed.tolist() == [1.0] * 4


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


def runs_are_compared_on_a_device_without_fp64() -> None:
    sim.native.set_fp64(False)
    formats._WITHOUT_FP64.add("sim")
    try:
        one, other = model().to("sim"), model().to("sim")
        found = mezzo.diagnose.mismatch(one, mezzo.prepare(other, [], "bf16").model, torch.ones(6, 8, device="sim"))
    finally:
        sim.native.set_fp64(True)
        formats._WITHOUT_FP64.discard("sim")
    assert found.outputs[0].difference > 0.0


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
    seed_dropout(torch.device("sim"), 1, 2)
    seeded = draws()
    seed_dropout(torch.device("sim"), 1, 2)
    assert same(seeded, draws())


def a_graph_of_others_makes_its_own_casts() -> None:
    """Those that are kept are not read by it, since no replay would make them anew, and its own are nobody else's."""
    net, x = model().to("sim"), torch.randn(6, 8).to("sim")
    mezzo.prepare(net, None, "bf16, ops=mezzo", cache="persistent")
    with torch.no_grad():
        found = net(x)
        kept = [cast for _, cast in weight_casts.copies() if cast.device.type == "sim"]
        assert kept
        for cast in kept:
            cast.fill_(torch.nan)
        torch.sim.capturing = 0
        try:
            assert torch.equal(net(x), found)
        finally:
            torch.sim.capturing = None
        assert len([cast for _, cast in weight_casts.copies() if cast.device.type == "sim"]) == len(kept)
        assert net(x).isnan().any()
    weight_casts.clear()


def a_step_in_a_captured_graph_is_refused() -> None:
    """By name, with nothing done; a GradScaler's loss may be captured, and reads the scale where it lies."""
    net = model().to("sim")
    amp = mezzo.prepare(net, mezzo.optim.AdamW(net.parameters()), "bf16")
    loss = net(torch.randn(6, 8).to("sim")).square().mean()
    scaler = mezzo.GradScaler("sim")
    torch.sim.capturing = 0
    try:
        x = torch.randn(6, 8).to("sim")
        with torch.no_grad():
            net(x)
        trained = (lambda: net(x), lambda: net[0](x))
        for call in (*trained, lambda: amp.backward(loss), amp.step, lambda: amp.external_backward().__enter__()):
            with pytest.raises(StepError, match=r"while a graph is captured on sim:0: .* step = amp.capture"):
                call()
        scaled = scaler.scale(loss.detach())
        scaler._scale.fill_(2.0)
        with torch.accelerator.device_index(1), pytest.raises(StepError, match="while a graph is captured on sim:0"):
            amp.step()
    finally:
        torch.sim.capturing = None
    optimizer = mezzo.optim.AdamW(net.parameters())
    net(torch.randn(6, 8).to("sim")).square().mean().backward()
    before = [p.tolist() for p in net.parameters()]
    with sim.triton_kernels():
        torch.sim.capturing = 0
        try:
            with pytest.raises(
                ConfigError, match="was stepped while a graph is captured on sim:0: its kernel reads tables"
            ):
                optimizer.step()
        finally:
            torch.sim.capturing = None
        assert [p.tolist() for p in net.parameters()] == before
    net.zero_grad()
    assert scaled.item() == 65536 * loss.item() and scaler.get_scale() == 2.0
    assert all(p.grad is None for p in net.parameters())
    amp.backward(loss)
    assert amp.step()


MOST_LAUNCHES = {"fp32": 12, "bf16": 12, "bf16-master": 12, "fp16": 24, "fp16-master": 24}
"""Of a healthy step that clips, beside its update and its norm pass; a loss scale that moves takes the rest."""
MOST_WITH_TRITON = {"fp32": 5, "bf16": 5, "bf16-master": 5, "fp16": 10, "fp16-master": 10}
"""The same where Triton compiles the decision."""


def a_healthy_step_decides_in_few_launches() -> None:
    for policy, optimizer in itertools.product(PRESETS, ("torch.AdamW", "mezzo.AdamW")):
        own = launches_of_a_decision(policy, optimizer)
        assert 0 < len(own) <= MOST_LAUNCHES[policy], (policy, optimizer, own)


def a_decision_by_triton_is_one_launch() -> None:
    with sim.triton_kernels():
        for policy, optimizer in itertools.product(PRESETS, ("torch.AdamW", "mezzo.AdamW")):
            own = launches_of_a_decision(policy, optimizer)
            assert own.count("triton::decide_kernel") == 1, own
            assert own.count("triton::move_scale_kernel") == policy.startswith("fp16"), own
            assert len(own) <= MOST_WITH_TRITON[policy], (policy, optimizer, own)


def launches_of_a_decision(policy: str, optimizer: str) -> list[str]:
    """Return what mezzo launches in a healthy step that clips, beside its update and its norm pass."""
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to("sim")
    amp = mezzo.prepare(net, OPTIMIZERS[optimizer](net.parameters(), policy), declared(policy, optimizer))
    own: list[str] = []
    for _ in range(LOOKED_AT + 2):
        amp.zero_grad()
        own.clear()
        loss = net(torch.ones(6, 8, device="sim")).float().square().mean()
        sim.observe(functools.partial(note_own, own))
        amp.backward(loss)
        amp.step(max_norm=0.5)
        sim.observe(None)
        sim.land()
    return own


def steps_by_triton_are_those_of_torchs_ops() -> None:
    """Bit for bit where the decision alone is Triton's, on the device that is not the current one too; no wait."""
    for device, policy, optimizer in (
        ("sim", "bf16-master", "torch.AdamW"), ("sim", "fp16", "torch.Muon"), ("sim:1", "fp16", "torch.AdamW")
    ):  # fmt: skip
        expected, _ = run("sim", policy, optimizer, "clip")
        with sim.triton_kernels():
            found, seen = run(device, policy, optimizer, "clip")
        assert found == expected, (device, policy, optimizer)
        assert seen.launches["triton::decide_kernel"] and not seen.stops, seen.stops
    for policy in ("bf16-master", "fp16"):
        expected, _ = run("sim", policy, "mezzo.AdamW", "clip")
        with sim.triton_kernels():
            found, seen = run("sim", policy, "mezzo.AdamW by Triton", "clip")
        assert found == pytest.approx(expected, rel=2.0**-18), policy  # torch's square root is not the nearest
        assert seen.launches["triton::adamw_step_kernel"] and not seen.stops + seen.waits, seen.stops + seen.waits


def a_layer_norm_with_fp32_weights_is_three_launches() -> None:
    """One forward, two backward, of layer and RMS norms, on the device that is not the current one too: copies less, and no wait."""
    for norm, copies in (nn.LayerNorm(2048), 5), (nn.RMSNorm(2048), 4):
        _check_launches(nn.Sequential(nn.Linear(8, 2048), norm, nn.Linear(2048, 8)), copies)


def _check_launches(net: nn.Module, copies: int) -> None:
    layer_norm.SMALL = dict.fromkeys(layer_norm.SMALL, 0)  # so that none is torch's
    x = torch.randn(9, 8)

    def run_on(device: str) -> tuple[list[Tensor], sim.Seen]:
        own = copy.deepcopy(net).to(device)
        mezzo.prepare(own, None, "bf16")
        with sim.watching() as seen:
            own(x.to(device)).float().square().mean().backward()
        assert not seen.waits, seen.waits
        return [p.grad.cpu() for p in own.parameters()], seen

    expected, plain = run_on("sim")
    for device in ("sim:0", "sim:1"):
        with sim.triton_kernels():
            grads, seen = run_on(device)
        assert [seen.launches[f"triton::layer_norm{way}_kernel"] for way in ("", "_backward")] == [1, 1]
        assert seen.launches["aten::copy_"] == plain.launches["aten::copy_"] - copies, (seen.launches, plain.launches)
        for grad, want in zip(grads, expected, strict=True):
            assert (grad - want).abs().max() <= 2.0**-7 * want.abs().max()


def a_layer_norm_by_triton_is_seen_by_a_trace() -> None:
    """A healthy one is healthy, repeated in fp64; one that overflows is named."""
    layer_norm.SMALL = dict.fromkeys(layer_norm.SMALL, 0)  # so that none is torch's
    norms = (nn.LayerNorm(2048), "layer_norm"), (nn.RMSNorm(2048), "rms_norm")
    for (size, events), (norm, name) in itertools.product(((1.0, 0), (1e6, 1)), norms):
        net = nn.Sequential(nn.Linear(8, 2048), copy.deepcopy(norm), nn.Linear(2048, 8)).to("sim")
        nn.init.constant_(net[1].weight, size)
        mezzo.prepare(net, None, "fp16")
        with sim.triton_kernels(), mezzo.diagnose.trace(net) as traced:
            net(torch.randn(9, 8, device="sim")).float().square().mean().backward()
        found = traced.report.record.events
        assert (len(found) > 0) == events and [one.site.op for one in found[:1]] == [name] * events, found


def kernels_that_cannot_be_compiled_are_replaced_with_one_sentence() -> None:
    expected, _ = run("sim", "fp16", "torch.AdamW", "clip")
    failure = RuntimeError("Failed to find C compiler.\nSet CC.")
    with places.sentences("mezzo.kernels") as said, sim.triton_kernels(failure):
        found, seen = run("sim", "fp16", "torch.AdamW", "clip")
        optimizer = mezzo.optim.AdamW(model().to("sim").parameters())
        assert "fused, not cpu: it is for CPU; not triton: Triton fails here with RuntimeError" in optimizer.why()[0]
        with pytest.raises(ConfigError, match="Failed to find C compiler"):
            registry.choose("adamw", torch.device("sim"), torch.float32, "triton")
    assert found == expected and not seen.stops + seen.waits
    (sentence,) = said
    assert "Failed to find C compiler. Install a C compiler" in sentence.replace("..", "."), sentence


def the_norm_pass_launches_alike_for_any_size() -> None:
    """Where torch has no kernel for many tensors at once: chunks of 65,536 elements are rows of one."""
    launches = []
    for count in (200_000, 2_000_000):
        grad = torch.randn(count)
        with sim.watching() as seen:
            found = reference.tensor_norms([grad.to("sim")]).item()
        launches.append(seen.launches["aten::linalg_vector_norm"])
        assert found == pytest.approx(grad.double().norm().item(), rel=2.0**-20)
    assert launches[0] == launches[1] == 3, launches


LIBRARY = Path(mezzo.__file__).parent


@functools.cache
def folder_of(file: str) -> tuple[str, str]:
    """Return the name of a file's folder, and "mezzo" if the file is of the library; asked of each frame of each launch."""
    return Path(file).parent.name, "mezzo" if Path(file).is_relative_to(LIBRARY) else ""


def note_own(own: list[str], what: str, name: str, device: int) -> None:
    """Note a launch if it is mezzo's, and neither of an optimizer's step nor of the norm pass."""
    frame, names = sys._getframe(), set()
    while frame is not None:
        folder, library = folder_of(frame.f_code.co_filename)
        names |= {(folder, frame.f_code.co_name), ("", library)}
        frame = frame.f_back
    others = {("gradients", "tensor_norms"), ("optim", "step"), ("loss_scale", "run_backward")}
    if what == "launch" and name != "aten::linalg_vector_norm" and ("", "mezzo") in names and not names & others:
        own.append(name)


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
    with sim.triton_kernels():
        pass  # imported so, Triton's own functions can be interpreted; a trace imports it otherwise
    run_by_name({**globals(), **vars(places), **vars(torch_kernels), **vars(undone_steps)}, CHECKS)


def run_by_name(functions: dict[str, Any], names: Sequence[str]) -> None:
    """Run the functions that the command line names, or all, and print a line for each."""
    for name in sys.argv[1:] or names:
        try:
            functions[name]()
            print(f"held {name}", flush=True)
        except Exception:
            print(f"failed {name}\n{traceback.format_exc()}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
