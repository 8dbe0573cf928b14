"""A workload says what to build and time, and the least work of that; its fields are its options. A plan says in which variants it runs."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from ..errors import BenchError, FormatError, did_you_mean
from ..formats import LOW_DTYPES, is_count, is_number, parse_dtype, why_not_here
from .roofline import Phase
from .variant import Variant, find_variant, those_that_run

if TYPE_CHECKING:
    from typing_extensions import Self

WORKLOADS = {
    "recipe": ("recipe.Recipe", "linear layers trained as in the published AMP recipe"),
    "text": ("bert.Text", "fine-tuning steps of a BERT classifier on real texts"),
    "bert": ("zoo.BertSteps", "training steps of a small BERT classifier"),
    "gpt2": ("zoo.Gpt2", "training steps of a small GPT-2"),
    "llama": ("zoo.Llama", "training steps of a small Llama with grouped key and value heads"),
    "vit": ("zoo.Vit", "training steps of a small vision transformer"),
    "resnet": ("zoo.Resnet", "training steps of a ResNet-18 on small pictures"),
    "lstm": ("zoo.Lstm", "training steps of a language model of LSTM layers"),
    "inference": ("inference.Inference", "forwards of a decoder layer or BERT of fp32 weights, by batch size"),
    "lora": ("recipe.Lora", "training low-rank adapters on frozen layers"),
    "step": ("step_alone.Step", "unscaling, clipping and AdamW alone, by number of parameters"),
    "overhead": ("bert.Overhead", "a model so small that only launching its ops costs time"),
    "scaling": ("recipe.Scaling", "how a step's cost grows with width, batch, depth and parameters"),
    "reviews": ("bert.Reviews", "a whole training of the text classifier, with its accuracy"),
}
REGION_TESTS = ("tests/casting/test_region.py", "tests/casting/test_cast_cache.py")
"""What must be green before a region is timed."""
TRAINING_TESTS = (*REGION_TESTS, "tests/loss_scale/test_scaler.py", "tests/step/test_stepper.py")
"""What must be green before a training step is timed."""
PEAK_RATES = "peak_rates"
"""Stands where a variant stands, for the process that measures the machine instead."""


def parse_device(name: str) -> torch.device:
    """Return the device a name stands for. Raises: BenchError: torch knows no such device, it is not here, or it computes nothing."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BenchError(f"--device {name} is not a torch device; write cpu or cuda.") from None
    if device.type == "cuda":  # not started: processes of their own measure on it
        if (device.index or 0) >= (count := torch.cuda.device_count()):
            seen, known = (f"{count} CUDA devices", "cpu or cuda:0") if count else ("no CUDA device", "cpu")
            raise BenchError(f"--device {name} was asked for, but this torch sees {seen}; write {known}.")
    elif why := why_not_here(device):
        raise BenchError(f"--device {name} cannot be used here: {why}; write cpu or cuda.")
    return device


def default_device() -> str:
    """Return cuda where there is a CUDA device, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Where and in what a variant runs: its device, the 16-bit dtype of those that have one, the seed of weights and data."""

    device: torch.device
    dtype: torch.dtype
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """A built variant, ready to be timed.

    Attributes:
        warm_up: called once, untimed; does the first steps, so that memory is allocated and kernels are chosen.
        run: the timed unit; returns the last loss, shape (), without reading it.
        units: how many steps or forwards one `run` does.
        data_bytes: bytes of the batches kept on the device.
        own_seconds: what counts of the last `run`, where not all of it does.
        measures: called once after all rounds of timing; what else there is to report, by name.
    """

    warm_up: Callable[[], object]
    run: Callable[[], Tensor]
    units: int = 1
    data_bytes: int = 0
    own_seconds: Callable[[], float] | None = None
    measures: Callable[[], dict[str, float]] = field(default=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A workload at one size; `axis` is what is varied along the points, empty where nothing is, and `value` where this one lies on it."""

    label: str
    workload: Workload
    axis: str = ""
    value: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload(abc.ABC):
    """Base of the workloads. The fields of a subclass are its numbers, each an option of `mezzo bench`."""

    unit: ClassVar[str] = "step"
    """What one of `Session.units` is."""
    imports: ClassVar[tuple[str, ...]] = ()
    """Modules loaded before the memory of a variant is watched."""
    talks: ClassVar[bool] = False
    """Whether its processes show their own progress on standard error."""
    tests: ClassVar[tuple[str, ...]] = TRAINING_TESTS
    """Test paths that must be green before the workload is timed."""
    on_cuda: ClassVar[Mapping[str, object]] = MappingProxyType({})
    """The numbers that differ on CUDA."""
    on_cpu: ClassVar[Mapping[str, object]] = MappingProxyType({})
    """The numbers that differ elsewhere."""
    when_quick: ClassVar[Mapping[str, object]] = MappingProxyType({})
    """The numbers of `--quick`: every line of the workload runs, and no figure of it means anything."""
    variants: ClassVar[tuple[str, ...]] = ()
    """Measured when none are named, where they run."""
    variants_kept: ClassVar[tuple[str, ...]] = ()
    """Likewise, each without and with kept memory."""
    optimizer: ClassVar[Literal["AdamW", "SGD"]] = "AdamW"
    """Whose steps are timed where it trains."""
    multiples: ClassVar[Mapping[str, int]] = MappingProxyType({})
    """The widths of a head, by the number that is a multiple of it."""
    label_format: ClassVar[str] = ""
    """What the one point of a workload of one size is called, with its numbers by name."""

    @classmethod
    def for_device(cls, device: torch.device) -> Self:
        """Return the workload at the size that suits a device."""
        return cls(**(cls.on_cuda if device.type == "cuda" else cls.on_cpu))

    def quick(self) -> Self:
        """Return the workload at a size that takes no time, to see that it runs."""
        return dataclasses.replace(self, **self.when_quick)

    @classmethod
    def default_variants(cls, device: torch.device) -> tuple[str, ...]:
        """Return the names of the variants measured when none are named."""
        kept = (f"{name}+keep" for name in cls.variants_kept)
        return those_that_run((*cls.variants, *cls.variants_kept, *kept), device)

    @classmethod
    def from_fields(cls, fields: Mapping[str, object]) -> Workload:
        """Return the workload whose fields went through JSON, which knows lists but no tuples."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})

    def check(self) -> None:
        """Refuse, by a BenchError, numbers that leave nothing to measure: a count or size below 1, a list of them that is empty or names one twice, a rate that is none, or a width that heads do not divide."""
        for spec in dataclasses.fields(self):
            value = getattr(self, spec.name)
            numbers = value if isinstance(value, tuple) else (value,)
            option = f"--{spec.name.replace('_', '-')}"
            if not numbers:
                raise BenchError(f"{option} was given without a value: write at least one, or leave it out.")
            check_once(option, numbers)
            if any(isinstance(n, int) and n < 1 for n in numbers):
                raise BenchError(f"{option} {' '.join(map(str, numbers))}: sizes and counts start at 1.")
            if isinstance(value, float) and not is_number(value, 0):
                raise BenchError(f"{option} {value}: write a number from 0 on.")
            if spec.name in self.multiples:
                check_multiple(option, value, self.multiples[spec.name])

    @property
    def label(self) -> str:
        """What the one point of a workload of one size is called."""
        return self.label_format.format_map(dataclasses.asdict(self))

    def at(self, label: str, axis: str = "", value: float = 0.0, **numbers: object) -> Point:
        """Return the point of this workload at which some of its numbers are others."""
        return Point(label=label, workload=dataclasses.replace(self, **numbers), axis=axis, value=value)

    def points(self) -> tuple[Point, ...]:
        """Return the sizes at which this workload is measured: one, unless a subclass has more."""
        return (Point(label=self.label, workload=self),)

    def why_not(self, variant: Variant) -> str:
        """Return why this workload, at one of its points, has no such variant, or nothing if it has; most train."""
        return variant.why_no_training(self.optimizer)

    def is_resident(self, device: torch.device) -> bool:
        """Whether every variant may stay in the memory of a device while another is timed. Host only."""
        return True

    def load(self) -> None:  # noqa: B027  # most have none
        """Read the data that every variant shares, before the memory of a variant is watched."""

    @abc.abstractmethod
    def build(self, variant: Variant, setting: Setting) -> Session:
        """Return one variant of this workload at this size, seeded. Writes: torch's random state."""

    @abc.abstractmethod
    def roofline(self, number_format: str) -> tuple[Phase, ...]:
        """Return the least work of one unit when large products run in a format; nothing where none is stated."""


def check_multiple(option: str, number: int, divisor: int, said: str = "") -> None:
    """Refuse with a `BenchError` a number that is no multiple of the width of a head, or of what is said to be its divisor."""
    if number % divisor:
        raise BenchError(f"{option} {number} is not a multiple of {said or f'{divisor}, the width of a head'}.")


def check_once(option: str, names: Sequence[object]) -> None:
    """Refuse with a `BenchError` a list that names something twice, which would be measured twice."""
    if twice := [name for name in names if list(names).count(name) > 1]:
        raise BenchError(f"{option} names {twice[0]} twice; write it once.")


def check_known(option: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Refuse with a `BenchError` the first name that is not a known one; the nearest is named."""
    for name in names:
        if name not in known:
            raise BenchError(f"{option} {name} does not exist.{did_you_mean(name, known)}")


def find_workload(name: str, others: Iterable[str] = ()) -> type[Workload]:
    """Return the class of the workload of a name. Raises: BenchError: there is none; it names those there are, and others that may be written there."""
    if name not in WORKLOADS:
        raise BenchError(f"unknown workload {name!r}.{did_you_mean(name, [*WORKLOADS, *others])}")
    module, _, cls = WORKLOADS[name][0].partition(".")
    found: type[Workload] = getattr(import_module(f".workloads.{module}", __package__), cls)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a benchmark run measures, beside the workload's own numbers.

    Attributes:
        variants: ways to run, timed in this order in each round; a name with "+compile" goes through torch.compile.
        rounds: how often each variant is timed.
        device: cpu or cuda.
        dtype: bf16 or fp16, for the variants that run in 16 bit.
        threads: CPU threads; 0 leaves torch's own choice.
        seed: of weights and data.
        peak_rates_s: seconds a round spends on measuring the machine's limits.

    Raises:
        BenchError: nothing to measure, no 16-bit dtype, an unknown variant, one named twice, or one that cannot run on the device.
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
        if not is_count(self.threads, bits=15):
            raise BenchError(f"--threads {self.threads} are none; write 1 or more, or 0 for torch's own choice.")
        if not is_count(self.seed):
            raise BenchError(f"--seed {self.seed} is none; write a whole number from 0 on, below 2^63.")
        if not (is_number(self.peak_rates_s, 0) and self.peak_rates_s > 0):
            raise BenchError(f"--peak-rates-s {self.peak_rates_s} measures nothing; write a number of seconds above 0.")
        if not self.variants:
            raise BenchError("no variant was named; write --variants fp32 torch-amp, or leave the option out.")
        try:
            is_low = parse_dtype(self.dtype) in LOW_DTYPES
        except FormatError:
            is_low = False
        if not is_low:
            raise BenchError(f"--dtype {self.dtype} is not a 16-bit dtype; write bf16 or fp16.")
        device = parse_device(self.device)
        check_once("--variants", self.variants)
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
