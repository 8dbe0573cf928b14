"""What a benchmark run measures: the variants, the rounds and the setting."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import BenchError
from ..formats import LOW_DTYPES, parse_dtype
from .variant import find_variant
from .workload import Setting

PEAK_RATES = "peak_rates"
"""Stands where a variant stands, for the process that measures the machine instead."""


def parse_device(name: str) -> torch.device:
    """Return the device a name stands for.

    Raises:
        BenchError: torch knows no such device, or it is a CUDA device and there is none.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BenchError(f"--device {name} is not a torch device; write cpu or cuda.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BenchError(f"--device {name} was asked for, but this torch sees no CUDA device; write cpu.")
    return device


def default_device() -> str:
    """Return cuda where there is a CUDA device, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a benchmark run measures, beside the workload's own numbers.

    Attributes:
        variants: names of the ways to run, in the order in which each round takes them.
        rounds: how often each variant is timed.
        device: torch device.
        dtype: 16-bit dtype of the variants that have one: bf16 or fp16.
        threads: CPU threads torch computes with; 0 leaves torch's own choice.
        seed: of weights and data.
        peak_rates_s: seconds a round spends on measuring the machine's limits.

    Raises:
        BenchError: nothing to measure, an unknown variant, or one that cannot run on the device.
        FormatError: unknown dtype.
    """

    variants: tuple[str, ...]
    rounds: int = 3
    device: str = "cpu"
    dtype: str = "bf16"
    threads: int = 0
    seed: int = 0
    peak_rates_s: float = 1.0

    def __post_init__(self) -> None:
        """Refuse what cannot be measured, before any process is started."""
        if self.rounds < 1:
            raise BenchError(f"--rounds {self.rounds} measures nothing; write 1 or more.")
        if not self.variants:
            raise BenchError("no variant was named; write --variants fp32 torch-amp, or leave the option out.")
        if parse_dtype(self.dtype) not in LOW_DTYPES:
            raise BenchError(f"--dtype {self.dtype} is not a 16-bit dtype; write bf16 or fp16.")
        device = parse_device(self.device)
        for name in self.variants:
            find_variant(name, device)

    @property
    def setting(self) -> Setting:
        """Device, dtype and seed as values."""
        return Setting(device=torch.device(self.device), dtype=parse_dtype(self.dtype), seed=self.seed)

    @property
    def number_formats(self) -> tuple[str, ...]:
        """The formats in which large products run in this plan, each once, in order."""
        setting = self.setting
        found = (find_variant(name, setting.device).number_format(setting.dtype) for name in self.variants)
        return tuple(dict.fromkeys(found))
