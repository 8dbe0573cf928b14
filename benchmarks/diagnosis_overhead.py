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
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

import mezzo
from mezzo.bench.machine import describe_machine

STEPS, EVERY, TWICE = 10, 100, 10
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


def _steps(amp: mezzo.Stepper, batches: Iterable[Tensor]) -> Seconds:
    start = _now()
    for x in batches:
        amp.backward(_loss(amp.model, x))
        amp.step()
        amp.zero_grad()
    return _since(start, STEPS)


def _recorded(amp: mezzo.Stepper, x: Tensor, twice: int) -> Seconds:
    """Return the seconds of a step, with its share of the snapshot that is taken once in `EVERY` of them."""
    also = {"twice_every": twice, "loss_fn": _loss} if twice else {}
    with (
        tempfile.TemporaryDirectory() as folder,
        mezzo.record(amp, Path(folder) / "run", every=EVERY, **also) as recorder,
    ):
        start = _now()
        batches = recorder.batches([x] * STEPS)
        first = next(batches)
        snapshot = _since(start, EVERY)
        steps = _steps(amp, itertools.chain([first], batches))
        return snapshot[0] + steps[0], snapshot[1] + steps[1]


def _watched(amp: mezzo.Stepper, x: Tensor) -> Seconds:
    with mezzo.diagnose.watch(amp, every=STEPS):
        return _steps(amp, [x] * STEPS)


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


def main() -> None:
    """Measure, print what was found."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    torch.manual_seed(0)
    torch.set_num_threads(1)
    first = json.loads(subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True).stdout)
    amp, x = _encoder()
    fp32, bf16 = _gpt2(bf16=False), _gpt2(bf16=True)
    found = {
        "encoder, 4 layers, 512 wide": _ratios(
            {
                "plain": lambda: _steps(amp, [x] * STEPS),
                "record": lambda: _recorded(amp, x, 0),
                f"record, every {TWICE}th step twice": lambda: _recorded(amp, x, TWICE),
                f"watch, every {STEPS}th step": lambda: _watched(amp, x),
            },
            rounds,
        ),
        "GPT-2, 6 layers, 256 wide, fp32": _ratios(
            {"plain": fp32, "trace": lambda: _traced(fp32)}, max(3, rounds // 2)
        ),
        "the same in a bf16 region": _ratios({"plain": bf16, "trace": lambda: _traced(bf16)}, max(3, rounds // 2)),
    }
    for model, rows in found.items():
        print(model)
        for name, clocks in rows.items():
            cells = [f"{c:9} x{r['ratio']:.3f} ({r['low']:.3f} to {r['high']:.3f})" for c, r in clocks.items()]
            print(f"  {name:30} {clocks['wall']['ms']:9.1f} ms  {'  '.join(cells)}")
    print(
        f"the first trace of a process: {first['seconds']:.3f} s, {first['MB']:.1f} MB, compiler imported: {first['compiler']}"
    )
    machine = describe_machine(torch.device("cpu"))
    print(json.dumps({"rounds": rounds, "found": found, "first trace": first, "machine": machine}))


if __name__ == "__main__":
    main()
