"""What looking at a run costs: the same steps plain, recorded, watched and traced, in turn, on one stepper.

Run: `python benchmarks/diagnosis_overhead.py [ROUNDS] > benchmarks/results/diagnosis_overhead.txt`. It prints a table and one line of JSON.
`record` and `watch` run an encoder of four layers in bf16, `trace` one step of GPT-2, 256 wide and 6 layers deep. One thread, and beside the wall's
time the processor's, which other programs on the machine disturb less; memory is kept, ratios are medians of rounds that alternate. Steps are recorded and not in turn
on one stepper, because two that are alike differ by a percent, as their memory lies; a round is a segment, with its snapshot, which a thread writes beside
recorded steps alone: the processor's time is that of all threads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

import mezzo
from mezzo.bench.hardware import describe_machine

STEPS, EVERY, TWICE, WATCHED = 20, 100, 10, 10
Seconds = tuple[float, float]
"""Of the wall and of the processor."""
Ratios = dict[str, dict[str, dict[str, float]]]
"""By way and clock: the median ratio to the first way, its quartiles, and milliseconds."""
FIRST = """
import json, resource, sys, time
import torch, mezzo
from torch import nn
model, x = nn.Linear(8, 8), torch.randn(4, 8)
model(x).sum().backward()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
before, start = peak(), time.perf_counter()
with mezzo.diagnose.trace(model):
    model(x).sum().backward()
print(json.dumps({"seconds": time.perf_counter() - start, "MB": peak() - before, "compiler": "torch._dynamo" in sys.modules}))
"""


def _now() -> Seconds:
    return time.perf_counter(), time.process_time()


def _since(start: Seconds, parts: float = 1.0) -> Seconds:
    wall, cpu = _now()
    return (wall - start[0]) / parts, (cpu - start[1]) / parts


def _encoder() -> tuple[mezzo.Stepper, Tensor]:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return mezzo.prepare(model, mezzo.optim.AdamW(model.parameters()), "bf16, output=fp32"), torch.randn(4, 64, 512)


def _loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def _seconds(amp: mezzo.Stepper, batches: Iterator[Tensor], *, is_plain: bool = False) -> Seconds:
    """Return what a step takes, its batch included; a plain one goes past a recorder of the stepper."""
    backward, step = (mezzo.Stepper.backward, mezzo.Stepper.step) if is_plain else (_backward, _step)
    start = _now()
    backward(amp, _loss(amp.model, next(batches)))
    step(amp)
    amp.zero_grad()
    return _since(start)


def _backward(amp: mezzo.Stepper, loss: Tensor) -> None:
    amp.backward(loss)


def _step(amp: mezzo.Stepper) -> None:
    amp.step()


def _recorded(rounds: int) -> Ratios:
    """Return what steps cost plain and recorded, in turn on one stepper, after the first two segments, whose files are new."""
    amp, x = _encoder()
    plain = itertools.repeat(x)
    times: dict[str, list[Seconds]] = {"plain": [], "record": []}
    with tempfile.TemporaryDirectory() as folder, mezzo.record(amp, Path(folder) / "run", every=EVERY) as recorder:
        recorded = recorder.batches(itertools.repeat(x))
        for _ in range(2 * EVERY):
            _seconds(amp, recorded)
        for _ in range(rounds):
            found: dict[str, list[Seconds]] = {"plain": [], "record": []}
            for name in _in_turn():
                given = plain if name == "plain" else recorded
                found[name].append(_seconds(amp, given, is_plain=name == "plain"))
            for name, seconds in found.items():
                times[name].append(_mean(seconds))
    return _compared(times)


def _in_turn() -> list[str]:
    """Return the ways of a round's steps in turn; plain ones stay away from the first recorded ones, beside which the snapshot is written."""
    pairs = (("plain", "record") if i % 2 else ("record", "plain") for i in range(EVERY - 4))
    return ["plain"] * 2 + ["record"] * 4 + ["plain"] * 2 + [name for pair in pairs for name in pair]


def _paired(rounds: int) -> Ratios:
    """Return what steps cost plain, run twice and watched: each way has a stepper of its own, and the steps of each round are taken in turn."""
    with ExitStack() as open_:
        folder = open_.enter_context(tempfile.TemporaryDirectory())
        ways = {
            name: _encoder()
            for name in ("plain", f"record, every {TWICE}th step twice", f"watch, every {WATCHED}th step")
        }
        given = {name: itertools.repeat(x) for name, (_, x) in ways.items()}
        _, twice, watched = ways
        recorder = mezzo.record(ways[twice][0], Path(folder) / "run", twice_every=TWICE, loss_fn=_loss)
        given[twice] = open_.enter_context(recorder).batches(given[twice])
        open_.enter_context(mezzo.diagnose.watch(ways[watched][0], every=WATCHED))
        times: dict[str, list[Seconds]] = {name: [] for name in ways}
        for _ in range(rounds + 1):
            found: dict[str, list[Seconds]] = {name: [] for name in ways}
            for step in range(STEPS):
                for name in list(ways) if step % 2 else reversed(ways):
                    found[name].append(_seconds(ways[name][0], given[name]))
            for name, seconds in found.items():
                times[name].append(_mean(seconds))
    return _compared({name: found[1:] for name, found in times.items()})


def _mean(seconds: list[Seconds]) -> Seconds:
    wall, cpu = zip(*seconds, strict=True)
    return statistics.fmean(wall), statistics.fmean(cpu)


def _gpt2(*, bf16: bool) -> Callable[[], Seconds]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=128, n_embd=256, n_layer=6, n_head=4))
    optimizer, ids = torch.optim.AdamW(model.parameters()), torch.randint(1000, (4, 128))

    def step() -> Seconds:
        start = _now()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return _since(start)

    return step


def _traced(step: Callable[[], Seconds]) -> Seconds:
    with mezzo.diagnose.trace():
        return step()


def _middle(times: list[float], plain: list[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles([s / p for s, p in zip(times, plain, strict=True)], n=4)
    return {"ratio": middle, "low": low, "high": high, "ms": 1e3 * statistics.median(times)}


def _ratios(ways: dict[str, Callable[[], Seconds]], rounds: int) -> Ratios:
    """Return each way's median ratio to the first, and its quartiles; the first round is not counted."""
    times: dict[str, list[Seconds]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            times[name].append(way())
    return _compared({name: found[1:] for name, found in times.items()})


def _compared(times: dict[str, list[Seconds]]) -> Ratios:
    plain = next(iter(times.values()))
    return {
        name: {
            clock: _middle([s[i] for s in found], [p[i] for p in plain])
            for i, clock in enumerate(("wall", "processor"))
        }
        for name, found in times.items()
    }


def _spread(row: dict[str, float]) -> str:
    return f" ({row['low']:.3f} to {row['high']:.3f})"


def main() -> None:
    """Measure, print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.manual_seed(0)
    torch.set_num_threads(1)
    mezzo.keep_memory()  # else the C library gives memory back and takes it again in most steps, which is the noise of a tenth
    first = json.loads(subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True).stdout)
    fp32, bf16 = _gpt2(bf16=False), _gpt2(bf16=True)
    found = {
        "encoder, 4 layers, 512 wide": _recorded(rounds),
        "the same, a stepper for each way": _paired(rounds),
        "GPT-2, 6 layers, 256 wide, fp32": _ratios(
            {"plain": fp32, "trace": lambda: _traced(fp32)}, max(3, rounds // 2)
        ),
        "the same in a bf16 region": _ratios({"plain": bf16, "trace": lambda: _traced(bf16)}, max(3, rounds // 2)),
    }
    for model, rows in found.items():
        print(model)
        for name, clocks in rows.items():
            cells = [f"{c:9} x{r['ratio']:.3f}{_spread(r)}" for c, r in clocks.items()]
            print(f"  {name:30} {clocks['wall']['ms']:9.1f} ms  {'  '.join(cells)}")
    print(
        f"the first trace of a process: {first['seconds']:.3f} s, {first['MB']:.1f} MB, compiler imported: {first['compiler']}"
    )
    machine = describe_machine(torch.device("cpu"))
    print(json.dumps({"rounds": rounds, "found": found, "first trace": first, "machine": machine}))


if __name__ == "__main__":
    main()
