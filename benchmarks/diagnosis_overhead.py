"""What looking at a run costs: the same steps plain, recorded, watched and traced, in turn, on one stepper.

Run: `python benchmarks/diagnosis_overhead.py [ROUNDS]`. It prints a table and one line of JSON. `record` and `watch` are
ratios of wall time on an encoder of four layers in bf16; `trace` is that of one step of GPT-2, 256 wide and 6 layers deep.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import nn

import mezzo
from mezzo.bench.machine import describe_machine

STEPS, EVERY = 10, 100


def _encoder() -> tuple[mezzo.Stepper, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return mezzo.prepare(model, mezzo.optim.AdamW(model.parameters()), "bf16, output=fp32"), torch.randn(8, 64, 512)


def _steps(amp: mezzo.Stepper, batches: Iterable[torch.Tensor]) -> float:
    start = time.perf_counter()
    for x in batches:
        amp.backward(amp.model(x).square().mean())
        amp.step()
        amp.zero_grad()
    return (time.perf_counter() - start) / STEPS


def _recorded(amp: mezzo.Stepper, x: torch.Tensor) -> float:
    """Return the seconds of a step, with its share of the snapshot that is taken once in `EVERY` of them."""
    with tempfile.TemporaryDirectory() as folder, mezzo.record(amp, Path(folder) / "run", every=EVERY) as recorder:
        start = time.perf_counter()
        batches = recorder.batches([x] * STEPS)
        first = next(batches)
        snapshot = time.perf_counter() - start
        return snapshot / EVERY + _steps(amp, itertools.chain([first], batches))


def _watched(amp: mezzo.Stepper, x: torch.Tensor) -> float:
    with mezzo.diagnose.watch(amp):
        return _steps(amp, [x] * STEPS)


def _gpt2(*, bf16: bool) -> Callable[[], float]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_positions=128, n_embd=256, n_layer=6, n_head=4))
    optimizer, ids = torch.optim.AdamW(model.parameters()), torch.randint(1000, (4, 128))

    def step() -> float:
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return step


def _traced(step: Callable[[], float]) -> float:
    with mezzo.diagnose.trace():
        return step()


def _ratios(ways: dict[str, Callable[[], float]], rounds: int) -> dict[str, dict[str, float]]:
    """Return each way's median ratio to the first, and its quartiles; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            times[name].append(way())
    plain = next(iter(times.values()))[1:]
    found = {}
    for name, seconds in times.items():
        low, middle, high = statistics.quantiles([s / p for s, p in zip(seconds[1:], plain, strict=True)], n=4)
        found[name] = {"ratio": middle, "low": low, "high": high, "ms": 1e3 * statistics.median(seconds[1:])}
    return found


def main() -> None:
    """Measure, print what was found."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 11
    torch.manual_seed(0)
    amp, x = _encoder()
    fp32, bf16 = _gpt2(bf16=False), _gpt2(bf16=True)
    found = {
        "encoder, 4 layers, 512 wide": _ratios(
            {
                "plain": lambda: _steps(amp, [x] * STEPS),
                "record": lambda: _recorded(amp, x),
                "watch": lambda: _watched(amp, x),
            },
            rounds,
        ),
        "GPT-2, 6 layers, 256 wide, fp32": _ratios(
            {"plain": fp32, "trace": lambda: _traced(fp32)}, max(3, rounds // 2)
        ),
        "the same in a bf16 region": _ratios({"plain": bf16, "trace": lambda: _traced(bf16)}, max(3, rounds // 2)),
    }
    for model, rows in found.items():
        for name, row in rows.items():
            print(
                f"{model:30} {name:8} {row['ms']:9.1f} ms  x{row['ratio']:.3f}  ({row['low']:.3f} to {row['high']:.3f})"
            )
    print(json.dumps({"rounds": rounds, "found": found, "machine": describe_machine(torch.device("cpu"))}))


if __name__ == "__main__":
    main()
