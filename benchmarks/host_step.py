"""What the host takes for a step of many small parameters, clipping included, beside torch's clip and fused AdamW.

    python benchmarks/host_step.py [--parameters 300] [--rounds 200]

Tensors are so small that what a step computes does not count. Variants run in turn; a row says the median of a step and its ratio to
torch's of the same kind of parameters. DTensors are those of one rank.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import mezzo

Step = Callable[[], float]
KINDS = ("plain", "channels_last", "DTensor")


class Many(nn.Module):
    """Many small parameters, and a loss that gives each a gradient."""

    def __init__(self, kind: str, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (1,)) if kind == "DTensor" else None
        shape = (4, 4, 2, 2) if kind == "channels_last" else (8, 8)
        layout = torch.channels_last if kind == "channels_last" else torch.contiguous_format
        made = [torch.randn(shape).to(memory_format=layout) for _ in range(count)]
        self.each = nn.ParameterList(made if mesh is None else [distribute_tensor(p, mesh, [Shard(0)]) for p in made])

    def forward(self) -> Tensor:
        """Return the sum of squares."""
        whole = torch.stack([p.square().sum() for p in self.each]).sum()
        return whole.full_tensor() if hasattr(whole, "full_tensor") else whole


def torchs(kind: str, count: int) -> Step:
    """Return a step of torch alone: returns what it took, in seconds."""
    model = Many(kind, count)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> float:
        optimizer.zero_grad()
        model().backward()
        started = time.perf_counter()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return time.perf_counter() - started

    return step


def mezzos(kind: str, count: int, make: Callable[[nn.Module], torch.optim.Optimizer], policy: str) -> Step:
    """Return a prepared step."""
    model = Many(kind, count)
    amp = mezzo.prepare(model, make(model), f"{policy}, guard.check_every=0")

    def step() -> float:
        amp.zero_grad()
        amp.backward(model())
        started = time.perf_counter()
        amp.step(max_norm=1.0)
        return time.perf_counter() - started

    return step


MADE: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "bf16, torch's fused AdamW": (lambda model: torch.optim.AdamW(model.parameters(), fused=True), "bf16"),
    "bf16, mezzo.optim.AdamW": (lambda model: mezzo.optim.AdamW(model.parameters()), "bf16"),
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    store = f"file://{tempfile.mkdtemp()}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    steps: dict[tuple[str, str], Step] = {}
    for kind in KINDS:
        steps[kind, "torch's clip and fused AdamW"] = torchs(kind, args.parameters)
        steps |= {(kind, name): mezzos(kind, args.parameters, *how) for name, how in MADE.items()}
    took: dict[tuple[str, str], list[float]] = {name: [] for name in steps}
    for round_ in range(args.rounds + 5):
        for name, step in steps.items():
            seconds = step()
            if round_ >= 5:
                took[name].append(seconds)
    medians = {name: statistics.median(every) for name, every in took.items()}
    print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {args.parameters} parameters, median of {args.rounds}"
    )
    for (kind, name), seconds in medians.items():
        ratio = seconds / medians[kind, "torch's clip and fused AdamW"]
        print(f"{kind:14} {name:30} {seconds * 1e6:8.0f} us  {ratio:5.2f} of torch's")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
