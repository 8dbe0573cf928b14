"""What looking at a run costs: the same steps plain, recorded, watched and traced, in turn, on one stepper.

Run: `python benchmarks/diagnosis_overhead.py [ROUNDS] > benchmarks/results/diagnosis_overhead.txt`. It prints a table and one line of JSON.
`record` and `watch` run an encoder of four layers in bf16, `trace` one step of GPT-2, 256 wide and 6 layers deep. One thread, and beside the wall's
time the processor's, which other programs on the machine disturb less; ratios are medians of rounds that alternate.
"""

from __future__ import annotations

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
from mezzo.bench.machine import describe_machine

STEPS, EVERY, TWICE, WATCHED, WARM_UP = 20, 100, 10, 10, 2
Seconds = tuple[float, float]
"""Of the wall and of the processor."""
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


def _step(amp: mezzo.Stepper, batches: Iterator[Tensor]) -> tuple[Seconds, Seconds]:
    """Return the seconds in which a batch is handed out, and those of its step."""
    start = _now()
    x = next(batches)
    handed, start = _since(start), _now()
    amp.backward(_loss(amp.model, x))
    amp.step()
    amp.zero_grad()
    return handed, _since(start)


def _paired(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return what a step costs plain, recorded and watched: each way has a stepper of its own, and each step is taken in all ways in turn.

    A record takes its snapshot with the first batch of each round; `1 / EVERY` of it counts for a step, as in a record as it is by default.
    """
    with ExitStack() as open_:
        folder = open_.enter_context(tempfile.TemporaryDirectory())
        ways: dict[str, tuple[mezzo.Stepper, Iterator[Tensor]]] = {}
        for name, twice in (("plain", 0), ("record", 0), (f"record, every {TWICE}th step twice", TWICE)):
            amp, x = _encoder()
            batches: Iterator[Tensor] = itertools.repeat(x)
            if name != "plain":
                also = {"twice_every": twice, "loss_fn": _loss} if twice else {}
                recorder = open_.enter_context(mezzo.record(amp, Path(folder) / str(twice), every=STEPS, **also))
                batches = recorder.batches(batches)
            ways[name] = amp, batches
        amp, x = _encoder()
        open_.enter_context(mezzo.diagnose.watch(amp, every=WATCHED))
        ways[f"watch, every {WATCHED}th step"] = amp, itertools.repeat(x)
        times: dict[str, list[list[tuple[Seconds, Seconds]]]] = {name: [[] for _ in range(STEPS)] for name in ways}
        for i in range(WARM_UP + rounds):
            for step in range(STEPS):
                for name in list(ways) if (i + step) % 2 else reversed(ways):
                    times[name][step].append(_step(*ways[name]))
    per_step = {name: tuple(_mean(found, clock) for clock in (0, 1)) for name, found in times.items()}
    plain = per_step["plain"]
    return {
        name: {clock: {"ratio": t[c] / plain[c], "ms": 1e3 * t[c]} for c, clock in enumerate(("wall", "processor"))}
        for name, t in per_step.items()
    }


def _mean(times: list[list[tuple[Seconds, Seconds]]], clock: int) -> float:
    """Return the seconds of a step by one clock: those of each place in a round, trimmed, and of the first batch its share."""
    handed, steps = ([_trimmed([t[what][clock] for t in place[WARM_UP:]]) for place in times] for what in (0, 1))
    return statistics.fmean(steps) + statistics.fmean(handed[1:]) + (handed[0] - handed[1]) / EVERY


def _trimmed(times: list[float]) -> float:
    """Return the mean without the smallest and the largest fifth."""
    cut = len(times) // 5
    return statistics.fmean(sorted(times)[cut : len(times) - cut])


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


def _ratios(ways: dict[str, Callable[[], Seconds]], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return each way's median ratio to the first, and its quartiles; the first round is not counted."""
    times: dict[str, list[Seconds]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            times[name].append(way())
    plain = next(iter(times.values()))[1:]
    return {
        name: {
            clock: _middle([s[i] for s in found[1:]], [p[i] for p in plain])
            for i, clock in enumerate(("wall", "processor"))
        }
        for name, found in times.items()
    }


def _spread(row: dict[str, float]) -> str:
    return f" ({row['low']:.3f} to {row['high']:.3f})" if "low" in row else ""


def main() -> None:
    """Measure, print what was found."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    torch.manual_seed(0)
    torch.set_num_threads(1)
    first = json.loads(subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True).stdout)
    fp32, bf16 = _gpt2(bf16=False), _gpt2(bf16=True)
    found = {
        "encoder, 4 layers, 512 wide": _paired(rounds),
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
