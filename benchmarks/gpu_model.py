"""What a training step should take on a GPU, from its bytes, products and launches: to hold the first measured figure against.

Run: `python benchmarks/gpu_model.py [WORKLOAD ...] [--gpu H200] [--host-us 5] [--against RESULT.json ...]`. It prints a table.

Forward and backward run on tensors of a GPU without memory (`fake_gpu.py`), at the batch of `mezzo bench WORKLOAD --device cuda`, and
every op is written down: operations of products, bytes of its operands, views left out. The optimizer's pass is arithmetic: bytes a
parameter, as `mezzo bench step` has them. An op takes what the slower of its products and its bytes take at the GPU's published peak; the
step takes what the slower of device and host take, where the host needs the same time for each launch. It is a floor with an
assumption about the host: no kernel reaches its peak, and the steps of an LSTM wait for each other.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fake_gpu  # before torch
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
FUSED_TENSORS, FUSED_ELEMENTS = 36, 320 * 65536
"""Of one launch of torch's fused optimizers (MultiTensorApply.cuh: 36 tensors in four lists, 320 chunks of 65,536)."""
STEP_LAUNCHES = {"torch-autocast": 0, "prepare": 7, "prepare-master": 7}
"""Beside backward and the update: two for the pass over the norm, and five for the loss, the decision and the flags, as the simulated
accelerator counts them."""
STEP_BYTES = {"torch-autocast": 28, "prepare": 4 + 28, "prepare-master": 2 + 26}
"""A parameter: gradient, weight and two moments read, three written; a prepared step reads the gradient once more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One launch: operations of its products, bytes it reads and writes, bytes of an element of its first operand, where its operands lie."""

    name: str
    flops: float
    moved_bytes: float
    width: int
    devices: frozenset[str]

    def seconds(self, gpu: Gpu) -> float:
        """Return the least time on a GPU."""
        return max(self.flops / gpu.flops[2 if self.width == 2 else 4], self.moved_bytes / gpu.bandwidth)


def products(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the operations of an op's products, as torch counts them; it does not count cuDNN's recurrent layers."""
    if func.__name__.startswith("_cudnn_rnn"):
        rows, passes = args[0].shape[0] * args[0].shape[1], 2 if "backward" in func.__name__ else 1
        return float(passes * 2 * rows * sum(weight.numel() for weight in args[1] if weight.dim() == 2))
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
        held = {storage(x) for x in operands}
        is_view = results and all(storage(x) in held for x in results)
        if (results and not is_view and operands) or func.__name__.split(".")[0].endswith("_"):
            moved = {(storage(x), x.storage_offset(), x.nbytes) for x in (*operands, *results)}
            self.ops.append(
                Op(
                    name=func.__name__,
                    flops=products(func, args, kwargs, out),
                    moved_bytes=float(sum(nbytes for _, _, nbytes in moved)),
                    width=operands[0].element_size() if operands else 4,
                    devices=frozenset(x.device.type for x in operands),
                )
            )
        return out


def storage(tensor: Tensor) -> int:
    """Return what tells a tensor's memory from others', also where it has none."""
    return tensor.untyped_storage()._cdata


def trace(workload: ModelSteps, variant: str) -> list[Op]:
    """Return the ops of forward and backward of one step in bf16 on a GPU; what a prepared one adds to them is `STEP_LAUNCHES`."""
    with torch.device("meta"):
        model = workload.make_model()
    policy = {"torch-autocast": None, "prepare": "bf16", "prepare-master": "bf16-master"}[variant]
    with fake_gpu.entered():
        fake_gpu.placed(model)
        if policy:
            mezzo.prepare(model, torch.optim.AdamW(model.parameters(), fused=True), policy)
        inputs, targets = map(fake_gpu.on_gpu, workload.make_batch())
        with Recorder() as recorder:
            with torch.autocast("cuda", dtype=torch.bfloat16, enabled=policy is None):
                loss = workload.loss(model, (inputs, targets))
            loss.backward()
    return recorder.ops


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
    found = {variant: predict(trace(workload, variant), model, variant, gpu, launch_s) for variant in STEP_BYTES}
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
