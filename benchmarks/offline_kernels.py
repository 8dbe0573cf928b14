"""Compile every variant of the Triton kernels without a GPU and print what each costs a thread.

    python benchmarks/offline_kernels.py [sm_80 sm_90 sm_100 gfx942] [--every]

Registers and spilled bytes are those that ptxas reports, or the vector registers and spills of AMD's code; vectors are
the loads and stores of several words at once among all that go to memory.
"""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mezzo.kernels.backends.triton import BLOCK, SCALARS, WARPS
from mezzo.kernels.backends.triton.tiles import BF16, FP16, FP32, KAHAN, MASTER, OWN, SPLIT, STOCHASTIC
from mezzo.kernels.ops.decision.triton import constants as decision_constants
from mezzo.kernels.ops.layer_norm.triton import LONGEST
from mezzo.kernels.ops.layer_norm.triton import constants as norm_constants

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# How weights are kept, and the formats of weights, gradients and moments.
STORED = (
    (OWN, FP32, FP32, FP32), (OWN, FP32, BF16, FP32),
    (SPLIT, BF16, BF16, FP32), (SPLIT, BF16, FP32, FP32), (SPLIT, BF16, BF16, BF16),
    (MASTER, BF16, BF16, FP32), (MASTER, FP16, FP16, FP32),
    (KAHAN, BF16, BF16, BF16), (KAHAN, FP16, FP16, BF16),
    (STOCHASTIC, BF16, BF16, BF16), (STOCHASTIC, FP16, FP16, BF16),
)  # fmt: skip
NAMES = {"mode": ("own", "split", "master", "kahan", "stochastic"), "format": ("fp32", "bf16", "fp16")}
KERNELS: dict[str, dict[str, Any]] = {
    "adamw": {"AMSGRAD": False, "L2": False, "NEAR": True},
    "sgd": {"DECAYS": True, "SUMS": True, "NESTEROV": False},
}
COMMON = {"MAXIMIZE": False, "SCALED": True, "GUARDED": True, "SIZE": BLOCK}
# The decision of a step: of one optimizer, and of two that decide each for itself; the loss scale after it; what AdamW's step reads.
DECISIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "decide one optimizer": ("decide", {**decision_constants(1), "TOGETHER": True, "CLIPS": True}),
    "decide two optimizers": ("decide", {**decision_constants(2), "TOGETHER": False, "CLIPS": True}),
    "move the loss scale": ("move_scale", {"LOSS": 5, "BUFFERS": 6, "DYNAMIC": True}),
    "numbers of adamw": ("adamw_scalars", {"SIZE": SCALARS}),
}
# Sizes of layer norms: of programs of two warps, of eight and of the most, with multiples of 16 and without.
NORMED = (768, 256, 4089, LONGEST, LONGEST - 7)
_INTEGERS = ("tensors", "count", "interval", "hysteresis", "rows", "size")
_TYPES = {
    "*fp32": ("p_scalars", "p_step", "p_factors", "p_found", "p_vector", "p_scale", "p_weight", "p_bias", "p_mean", "p_rstd", "p_sums"),
    "*i32": ("p_tracker", "p_row"),
    "*bf16": ("p_x", "p_out", "p_grad", "p_grad_x"),
    "i32": _INTEGERS,
}  # fmt: skip
_TYPE_OF = {name: kind for kind, names in _TYPES.items() for name in names}


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a compiled kernel takes.

    Attributes:
        registers: of a thread.
        spilled: bytes of a thread that did not fit.
        memory: instructions that load from or store to memory.
        vectors: those of several words at once.
    """

    registers: int
    spilled: int
    memory: int
    vectors: int


def variants(every: bool = True, target: str = "sm_90") -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield kernel, name and constants of each variant; those that are used most, or every one."""
    for kernel, options in KERNELS.items():
        for mode, value, grad, mean in STORED if every else STORED[:5]:
            for aligned in (True, False):
                formats = "/".join(NAMES["format"][f.value] for f in (value, grad, mean))
                name = f"{kernel} {NAMES['mode'][mode.value]} {formats}{'' if aligned else ' unaligned'}"
                stored = {"MODE": mode.value, "VALUE": value.value, "GRAD": grad.value, "MEAN": mean.value}
                yield kernel, name, {**options, **COMMON, **stored, "ALIGNED": aligned}
    for name, (kernel, given) in DECISIONS.items():
        yield kernel, name, given
    longest = LONGEST * 32 // TARGETS[target].warp_size  # AMD's threads are half as many
    for size in [size for size in NORMED if size <= longest][: None if every else 1]:
        for kind, is_centred in (("layer_norm", True), ("rms_norm", False)):
            given = {"FORMAT": BF16.value, "CENTRED": is_centred, "HAS_WEIGHT": True, **norm_constants(size)}
            yield "layer_norm", f"{kind} bf16 {size}", {**given, "HAS_BIAS": is_centred}
            yield "layer_norm_backward", f"{kind}_backward bf16 {size}", given


def function_of(kernel: str) -> Any:
    """Return a kernel by the name that `variants` gives it."""
    op = {
        "decide": "decision",
        "move_scale": "decision",
        "layer_norm_backward": "layer_norm",
        "adamw_scalars": "adamw",
    }.get(kernel, kernel)
    suffix = "_step" if kernel in KERNELS else ""
    return getattr(importlib.import_module(f"mezzo.kernels.ops.{op}.triton"), f"{kernel}{suffix}_kernel")


def build(kernel: str, constants: dict[str, Any], target: str) -> Any:
    """Compile a variant for a target."""
    function, gpu = function_of(kernel), TARGETS[target]
    names = function.arg_names
    known = {name: value for name, value in constants.items() if name in names}
    source = ASTSource(
        fn=function,
        signature={name: _type_of(name, constants) for name in names},
        constexprs={(names.index(name),): value for name, value in known.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.startswith("p_")},
    )
    warps = constants.get("num_warps", WARPS if "SIZE" in constants else 1)
    if "num_warps" in constants:
        warps = max(1, warps * 32 // gpu.warp_size)
    return triton.compile(source, target=gpu, options={"enable_fp_fusion": False, "num_warps": warps})


def _type_of(name: str, constants: dict[str, Any]) -> str:
    if name in constants:
        return "constexpr"
    return _TYPE_OF.get(name, "*i64" if name.startswith("p_") else "fp32")


def cost(compiled: Any) -> Cost:
    """Return what a compiled kernel takes."""
    return _cost_on_nvidia(compiled) if "ptx" in compiled.asm else _cost_on_amd(compiled.asm["amdgcn"])


def _cost_on_nvidia(compiled: Any) -> Cost:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    (registers,) = re.findall(r"REG:(\d+)", usage.stdout)[-1:]
    (spilled,) = re.findall(r"LOCAL:(\d+)", usage.stdout)[-1:]
    return Cost(registers=int(registers), spilled=int(spilled), **_memory(compiled.asm["ptx"], r"(?:ld|st)\.global\S*"))


def _cost_on_amd(code: str) -> Cost:
    numbers = {
        key: int(n)
        for key, n in re.findall(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", code)
    }
    return Cost(
        registers=numbers["vgpr_count"],
        spilled=4 * numbers["vgpr_spill_count"],
        **_memory(code, r"(?:buffer|global)_(?:load|store)\S*"),
    )


def _memory(code: str, pattern: str) -> dict[str, int]:
    found = re.findall(pattern, code)
    return {"memory": len(found), "vectors": sum(bool(re.search(r"\.v\d|dwordx\d", one)) for one in found)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help=", ".join(TARGETS))
    parser.add_argument("--every", action="store_true", help="every way weights are kept, not the usual ones alone")
    given = parser.parse_args()
    print(f"{'target':8} {'variant':44} registers  spilled  memory  vectors")
    for target in given.targets:
        for kernel, name, constants in variants(given.every, target):
            it = cost(build(kernel, constants, target))
            print(f"{target:8} {name:44} {it.registers:9} {it.spilled:8} {it.memory:7} {it.vectors:8}", flush=True)


if __name__ == "__main__":
    main()
