"""What `mezzo.diagnose.watch` costs: the same run with and without it, ten steps each in turn, on one stepper.

Run: `python benchmarks/watch_overhead.py [ROUNDS]`. It prints a table and one line of JSON. One thread and the processor
time of the process are taken, which other programs on the machine disturb little; on an idle one they are the wall's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import nullcontext

import torch
from torch import nn

import mezzo
from mezzo.bench.hardware import describe_machine

STEPS = 10
"""As many as `watch` lets pass from one sampled step to the next, by default."""
SIZES = {
    "12 layers, 64 wide, batch 1x8": (12, 64, 1, 8),
    "4 layers, 256 wide, batch 8x64": (4, 256, 8, 64),
    "4 layers, 512 wide, batch 8x64": (4, 512, 8, 64),
}
WAYS = {"off": None, "every 10th step": 10, "every step": 1}


def _prepared(layers: int, width: int) -> mezzo.Stepper:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return mezzo.prepare(model, mezzo.optim.AdamW(model.parameters()), "bf16, output=fp32, guard.check_every=0")


def _seconds_a_step(amp: mezzo.Stepper, x: torch.Tensor, every: int | None) -> float:
    with nullcontext() if every is None else mezzo.diagnose.watch(amp, every=every):
        start = time.process_time()
        for _ in range(STEPS):
            amp.zero_grad()
            amp.backward(amp.model(x).square().mean())
            amp.step()
        return (time.process_time() - start) / STEPS


def _measure(size: tuple[int, int, int, int], rounds: int) -> dict[str, object]:
    layers, width, batch, tokens = size
    torch.manual_seed(0)
    torch.set_num_threads(1)
    amp, x = _prepared(layers, width), torch.randn(batch, tokens, width)
    for every in WAYS.values():
        _seconds_a_step(amp, x, every)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, every in WAYS.items():
            times[name].append(_seconds_a_step(amp, x, every))
    ratios = {name: [t / off for t, off in zip(found, times["off"], strict=True)] for name, found in times.items()}
    return {
        "ms_off": 1e3 * statistics.median(times["off"]),
        **{name: statistics.median(found) for name, found in ratios.items() if name != "off"},
        "quartiles every 10th step": statistics.quantiles(ratios["every 10th step"], n=4)[::2],
    }


def main() -> None:
    """Measure every size, print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", nargs="?", type=int, default=31)
    rounds = parser.parse_args().rounds
    found = {name: _measure(size, rounds) for name, size in SIZES.items()}
    for name, row in found.items():
        print(
            f"{name:45} {row['ms_off']:8.1f} ms  every 10th x{row['every 10th step']:.3f}  every x{row['every step']:.3f}"
        )
    print(
        json.dumps(
            {
                "unit": "ratio of step times",
                "rounds": rounds,
                "found": found,
                "machine": describe_machine(torch.device("cpu")),
            }
        )
    )


if __name__ == "__main__":
    main()
