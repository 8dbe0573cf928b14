"""The numbers of a run for TensorBoard or Weights & Biases, through their own libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from ..errors import ConfigError


class Tracker(Protocol):
    """Gets the numbers of updates and evaluations."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of one update, by their names."""

    def close(self) -> None:
        """Write what is left."""


class NoTracker:
    """Takes numbers and keeps none."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Forget the numbers."""

    def close(self) -> None:
        """Do nothing."""


class TensorBoard:
    """Writes event files into a folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            raise ConfigError("--tracker tensorboard needs the tensorboard package; pip install tensorboard.") from None
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of one update. Writes: event files, now and then."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left. Writes: event files."""
        self._writer.close()


class WeightsAndBiases:
    """Makes a run of the wandb library, where its own settings send it; WANDB_MODE=offline keeps it in the folder."""

    def __init__(self, folder: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError("--tracker wandb needs the wandb package; pip install wandb.") from None
        self._run = wandb.init(project="mezzo", name=folder.name, dir=str(folder))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of one update. Writes: files of wandb."""
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """End the run. Writes: files of wandb."""
        self._run.finish()


_KINDS: dict[str, Callable[[Path], Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases}


def open_tracker(name: str, folder: Path) -> Tracker:
    """Return the tracker of a name, "none" among them.

    Raises:
        ConfigError: its library is not installed.

    Writes: a folder for its files.
    """
    return NoTracker() if name == "none" else _KINDS[name](folder)
