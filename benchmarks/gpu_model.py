"""What a training step should take on a GPU, from its bytes, products and launches: to hold the first measured figure against.

Run: `python benchmarks/gpu_model.py [WORKLOAD ...] [--gpu H200] [--host-us 5] [--against RESULT.json ...]`. It prints a table.

Forward and backward are run on this CPU under each variant, at batches of 2 and 4, and every op is written down: operations of
products, bytes of its operands, views left out. Both grow in a straight line with the batch, so the batch of `mezzo bench
WORKLOAD --device cuda` follows without running it. The optimizer's pass is arithmetic: bytes a parameter, as `mezzo bench step` has
them. An op takes what the slower of its products and its bytes take at the GPU's published peak; the step takes what the slower of
device and host take, where the host needs the same time for each launch. It is a floor with an assumption about the host: fused kernels
of CUDA (attention, LSTM, cross entropy) launch less than the CPU's, no kernel reaches its peak, and the steps of an LSTM wait for
each other.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import mezzo
from mezzo.bench import find_workload, load
from mezzo.bench.workloads.zoo import ModelSteps


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Published peaks of a GPU, dense: products a second by bytes of an element, bytes a second of its memory."""

    flops: dict[int, float]
    bandwidth: float


# Source: NVIDIA's data sheets of A100 80GB SXM, H100 SXM and H200 SXM; 4 bytes are fp32 without TF32.
GPUS = {
    "A100": Gpu(flops={2: 312e12, 4: 19.5e12}, bandwidth=2.039e12),
    "H100": Gpu(flops={2: 989e12, 4: 67e12}, bandwidth=3.35e12),
    "H200": Gpu(flops={2: 989e12, 4: 67e12}, bandwidth=4.8e12),
}
WORKLOADS = ("gpt2", "llama", "vit", "resnet", "lstm", "bert")
BATCHES = (2, 4)
EARLY_STEPS = 3
"""A prepared step looks at more in these than in those that follow."""
FUSED_TENSORS, FUSED_ELEMENTS = 36, 320 * 65536
"""Of one launch of torch's fused optimizers (MultiTensorApply.cuh: 36 tensors in four lists, 320 chunks of 65,536)."""
STEP_LAUNCHES = {"torch-autocast": 0, "prepare": 7, "prepare-master": 7}
"""Beside the update: two for the pass over the norm, and five for the decision and the flags, as the simulated accelerator counts them."""
STEP_BYTES = {"torch-autocast": 28, "prepare": 4 + 28, "prepare-master": 2 + 26}
"""A parameter: gradient, weight and two moments read, three written; a prepared step reads the gradient once more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One launch: operations of its products, bytes it reads and writes, bytes of an element of its first operand."""

    name: str
    flops: float
    moved_bytes: float
    width: int

    def seconds(self, gpu: Gpu) -> float:
        """Return the least time on a GPU."""
        return max(self.flops / gpu.flops[2 if self.width == 2 else 4], self.moved_bytes / gpu.bandwidth)


def products(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the operations of an op's products, as torch counts them; it does not count the CPU's recurrent layers."""
    if func.__name__.startswith("mkldnn_rnn_layer"):
        rows, passes = args[0].shape[0] * args[0].shape[1], 2 if "backward" in func.__name__ else 1
        return float(passes * 2 * rows * (args[1].numel() + args[2].numel()))
    count = flop_registry.get(func.overloadpacket)
    return float(count(*args, **kwargs, out_val=out)) if count else 0.0


class Recorder(TorchDispatchMode):
    """Writes down every op that computes something: its output has memory that none of its operands had, or it writes one."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op and record it."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        held = {x.untyped_storage().data_ptr() for x in operands}
        is_view = results and all(x.untyped_storage().data_ptr() in held for x in results)
        if (results and not is_view and operands) or func.__name__.split(".")[0].endswith("_"):
            moved = {(x.data_ptr(), x.nbytes) for x in (*operands, *results)}
            self.ops.append(
                Op(
                    name=func.__name__,
                    flops=products(func, args, kwargs, out),
                    moved_bytes=float(sum(nbytes for _, nbytes in moved)),
                    width=operands[0].element_size() if operands else 4,
                )
            )
        return out


def trace(workload: ModelSteps, variant: str, batches: Sequence[int]) -> list[list[Op]]:
    """Return the ops of forward and backward of one step in bf16 at each batch, as they run on the CPU."""
    torch.manual_seed(0)
    model = workload.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    policy = {"torch-autocast": None, "prepare": "bf16", "prepare-master": "bf16-master"}[variant]
    amp = mezzo.prepare(model, optimizer, policy) if policy else None
    found = []
    early = [1] * (EARLY_STEPS if amp else 0)
    for batch_size in (*early, *batches):
        batch = replace(workload, batch_size=batch_size).make_batch()
        with Recorder() as recorder:
            if amp is None:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = workload.loss(model, batch)
                loss.backward()
            else:
                amp.backward(workload.loss(model, batch))
        found.append(recorder.ops)
        if amp is None:
            optimizer.zero_grad()
        else:
            amp.step()
            amp.zero_grad()
    return found[len(early) :]


def at_batch(first: Sequence[Op], second: Sequence[Op], batches: tuple[int, int], batch: int) -> list[Op]:
    """Return the ops at another batch, on the straight line through two.

    Raises:
        ValueError: the two are not the same ops.
    """
    if [op.name for op in first] != [op.name for op in second]:
        raise ValueError("other ops at another batch; nothing can be said of a third.")
    low, high = batches
    share = (batch - low) / (high - low)
    return [
        replace(
            a,
            flops=a.flops + share * (b.flops - a.flops),
            moved_bytes=a.moved_bytes + share * (b.moved_bytes - a.moved_bytes),
        )
        for a, b in zip(first, second, strict=True)
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a step needs: launches, bytes, operations; seconds of the device and of the host."""

    launches: int
    moved_bytes: float
    flops: float
    device_s: float
    host_s: float

    @property
    def step_s(self) -> float:
        """The slower of the two, which run beside each other."""
        return max(self.device_s, self.host_s)


def predict(ops: Sequence[Op], model: nn.Module, variant: str, gpu: Gpu, launch_s: float) -> Prediction:
    """Return what a step of these ops and an AdamW update of the model needs."""
    sizes = [p.numel() for p in model.parameters()]
    moved = float(STEP_BYTES[variant] * sum(sizes))
    fused = max(math.ceil(len(sizes) / FUSED_TENSORS), math.ceil(sum(sizes) / FUSED_ELEMENTS))
    launches = len(ops) + fused + STEP_LAUNCHES[variant]
    return Prediction(
        launches=launches,
        moved_bytes=moved + sum(op.moved_bytes for op in ops),
        flops=sum(op.flops for op in ops),
        device_s=moved / gpu.bandwidth + sum(op.seconds(gpu) for op in ops),
        host_s=launches * launch_s,
    )


def predictions(name: str, gpu: Gpu, launch_s: float) -> tuple[str, dict[str, Prediction]]:
    """Return the label of a workload's size on CUDA, and the prediction of each variant."""
    workload: Any = find_workload(name).for_device(torch.device("cuda"))
    with torch.device("meta"):
        model = workload.make_model()
    found = {}
    for variant in STEP_BYTES:
        low, high = trace(workload, variant, BATCHES)
        found[variant] = predict(at_batch(low, high, BATCHES, workload.batch_size), model, variant, gpu, launch_s)
    return workload.label, found


def measured(paths: Sequence[Path]) -> dict[tuple[str, str, str], float]:
    """Return the seconds a step that stored results have, by workload, size and variant."""
    return {
        (result.workload, m.point, m.variant): m.median / m.units
        for result in map(load, paths)
        for m in result.measurements
    }


def main() -> None:
    """Print the table of predictions, and beside it what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=WORKLOADS, help=", ".join(WORKLOADS))
    parser.add_argument("--gpu", choices=GPUS, default="H200")
    parser.add_argument("--host-us", type=float, default=5.0, help="microseconds of the host a launch")
    parser.add_argument("--against", nargs="*", type=Path, default=[], help="stored results to hold against it")
    asked = parser.parse_args()
    seen = measured(asked.against)
    print(f"{asked.gpu}, {asked.host_us:g} us of the host a launch, bf16, AdamW")
    print(
        f"{'workload':34} {'variant':16} {'launches':>8} {'GB':>7} {'TFLOP':>7} {'device ms':>9} {'host ms':>8} {'measured':>9}"
    )
    for name in asked.workloads:
        size, found = predictions(name, GPUS[asked.gpu], asked.host_us * 1e-6)
        for variant, p in found.items():
            real = seen.get((name, size, variant))
            beside = f"{1e3 * real:.2f} ms, {real / p.step_s:.2f}x" if real else "-"
            print(
                f"{name + ' ' + size:34} {variant:16} {p.launches:8} {p.moved_bytes / 1e9:7.2f} {p.flops / 1e12:7.2f} "
                f"{1e3 * p.device_s:9.2f} {1e3 * p.host_s:8.2f} {beside:>9}"
            )


if __name__ == "__main__":
    main()
