"""The ways of running one model that are measured against each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import util
from typing import Any, Literal

import torch

from ..errors import BenchError, did_you_mean
from ..formats import dtype_name

_MODULES = {
    "accelerate": "accelerate", "fabric": "lightning.fabric", "flashoptim": "flashoptim", "torchao": "torchao.optim",
}  # fmt: skip
"""What is imported of the libraries that are measured beside torch and mezzo."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way of running a model.

    Attributes:
        region: who casts the ops: nobody, torch.autocast or mezzo.autocast.
        scaler: whose GradScaler owns the optimizer step; nobody's without one.
        policy: of `mezzo.prepare`, which owns region and step; "{dtype}" stands for the 16-bit dtype. Empty without it.
        wrapper: a library that owns both instead.
        optimizer: whose optimizer steps; with another than torch's the weights are 16 bit.
        cache: how long mezzo.autocast keeps 16-bit copies of weights.
        pure: the whole model is converted to the 16-bit dtype, and nothing is kept in fp32.
        captured: `amp.capture` makes a graph of the whole step, which is replayed.
        keeps: the C library keeps what a step frees: by `mezzo.keep_memory()`, for others by the environment.
        enabled: False turns region and scaler into pass-throughs.
    """

    name: str
    summary: str = ""
    region: Literal["none", "torch", "mezzo"] = "none"
    scaler: Literal["none", "torch", "mezzo"] = "none"
    policy: Literal["", "{dtype}", "{dtype}-master"] = ""
    wrapper: Literal["none", "accelerate", "fabric"] = "none"
    optimizer: Literal["torch", "flashoptim", "torchao"] = "torch"
    cache: Literal["region", "persistent"] = "region"
    pure: bool = False
    tf32: bool = False
    compiled: bool = False
    captured: bool = False
    keeps: bool = False
    enabled: bool = True

    def number_format(self, dtype: torch.dtype) -> str:
        """Return the format the large products run in, given the 16-bit dtype of the benchmark."""
        is_low = self.region != "none" or self.wrapper != "none" or self.policy or self.pure
        if is_low and self.enabled:
            return dtype_name(dtype)
        return "tf32" if self.tf32 else "fp32"

    def plus(self, name: str, summary: str, **changes: bool) -> Variant:
        """Return this variant with something else turned on, which its name and summary end in."""
        changed: Any = {"name": f"{self.name}+{name}", "summary": f"{self.summary}, {summary}", **changes}
        return replace(self, **changed)

    @property
    def is_mezzo(self) -> bool:
        """Whether mezzo casts its ops or takes its steps."""
        return bool(self.policy) or "mezzo" in (self.region, self.scaler)

    @property
    def is_rival(self) -> bool:
        """Whether it is mixed precision by another library."""
        return not self.is_mezzo and (self.region != "none" or self.wrapper != "none")

    @property
    def imports(self) -> tuple[str, ...]:
        """Modules loaded before the memory of a process is watched."""
        return tuple(_MODULES[library] for library in (self.wrapper, self.optimizer) if library in _MODULES)

    def why_not_here(self, device: torch.device) -> str:
        """Return why this variant cannot run on a device here, or nothing if it can."""
        if self.tf32 and device.type != "cuda":
            return f"tf32 is a format of CUDA devices, and this one is {device.type}"
        if self.captured and device.type != "cuda":
            return f"a step is captured as a CUDA graph, and this device is {device.type}"
        if self.keeps and device.type != "cpu":
            return f"the memory of {device.type} has an allocator of its own, which keeps it anyway"
        if self.optimizer == "flashoptim" and device.type != "cuda":
            return f"flashoptim has kernels for CUDA devices alone, and this one is {device.type}"
        packages = (module.partition(".")[0] for module in self.imports)
        missing = next((package for package in packages if util.find_spec(package) is None), "")
        return f"{missing} is not installed; pip install {missing}" if missing else ""

    def why_no_training(self, optimizer: str) -> str:
        """Return why this variant cannot train with a kind of optimizer, or nothing if it can."""
        if self.pure:
            return (
                "it keeps nothing in fp32, so small updates would vanish and its losses compare with none; it is for "
                "`mezzo bench inference`. Write prepare-master for 16-bit weights that train"
            )
        if self.optimizer != "torch" and optimizer != "AdamW":
            return f"it has no {optimizer} here; leave it out"
        return ""

    @property
    def why_no_inference(self) -> str:
        """Why this variant cannot run forwards alone; nothing if it can."""
        if self.captured:
            return "it captures a whole training step; leave +capture out"
        if self.wrapper != "none" or self.optimizer != "torch":
            return "it is a way to train; for inference write torch-autocast"
        return ""


_EAGER = (
    Variant(name="fp32", summary="torch's default precision"),
    Variant(name="tf32", summary="fp32 weights, products in tf32", tf32=True),
    Variant(name="torch-autocast", summary="torch.autocast alone", region="torch"),
    Variant(name="torch-amp", summary="torch.autocast and torch.amp.GradScaler", region="torch", scaler="torch"),
    Variant(name="mezzo-autocast", summary="mezzo.autocast alone", region="mezzo"),
    Variant(name="mezzo-amp", summary="mezzo.autocast and mezzo.GradScaler", region="mezzo", scaler="mezzo"),
    Variant(
        name="mezzo-persistent",
        summary="mezzo.autocast that keeps its 16-bit weights",
        region="mezzo",
        cache="persistent",
    ),
    Variant(name="prepare", summary="mezzo.prepare with policy bf16 or fp16: fp32 weights", policy="{dtype}"),
    Variant(
        name="prepare-master",
        summary="mezzo.prepare with policy bf16-master or fp16-master: 16-bit weights and their remainders",
        policy="{dtype}-master",
    ),
    Variant(name="torch-16bit", summary="the model converted by .to(dtype), nothing kept in fp32", pure=True),
    Variant(name="accelerate", summary="accelerate's Accelerator", wrapper="accelerate"),
    Variant(name="fabric", summary="Lightning Fabric", wrapper="fabric"),
    Variant(
        name="flashoptim",
        summary="torch.autocast, weights cast and stepped by FlashOptim, which keeps 24 bits of them",
        region="torch",
        optimizer="flashoptim",
    ),
    Variant(
        name="torchao",
        summary="torch.autocast, 16-bit weights rounded stochastically by torchao's AdamW",
        region="torch",
        optimizer="torchao",
    ),
)
_CAPTURED = tuple(one.plus("capture", "the step a CUDA graph", captured=True) for one in _EAGER if one.policy)
_KEPT = tuple(one.plus("keep", "freed memory kept", keeps=True) for one in _EAGER)
VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for one in (*_EAGER, *_KEPT)
    for variant in (one, one.plus("compile", "compiled", compiled=True))
} | {one.name: one for one in _CAPTURED}


def find_variant(name: str, device: torch.device) -> Variant:
    """Return the variant of a name. Raises: BenchError: there is none, or it cannot run on this device."""
    if name not in VARIANTS:
        raise BenchError(f"unknown variant {name!r}.{did_you_mean(name, VARIANTS)}")
    reason = VARIANTS[name].why_not_here(device)
    if reason:
        raise BenchError(f"variant {name} cannot run here: {reason}.")
    return VARIANTS[name]


def those_that_run(names: tuple[str, ...], device: torch.device) -> tuple[str, ...]:
    """Return the names whose variants can run on a device here, in order."""
    return tuple(name for name in names if not VARIANTS[name].why_not_here(device))
